"""The same step by torch's FSDP2 on one rank, with parameters, gradients and optimizer state in host memory.

`fully_shard` for each layer and for the rest, `CPUOffloadPolicy` with page-locked memory, activation checkpointing,
bf16 computation over fp32 weights, gradients reduced in fp32, fused AdamW on the host, clipping. Micro-batches are
those of the other rows; gradients stay on the device until the last of a step, which is what makes it fastest.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from benchmarks import environment
from benchmarks.throughput_models import RandomTokens, row_of, ubatch_of
from hf_l2l.memory.host_limits import peak_process_bytes
from hf_l2l.model.stacks import find_stacks


@contextmanager
def one_rank(device_type: str) -> Iterator[None]:
    """Inside, this process is a process group. gloo sums its host tensors: norms of gradients, for clipping."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")  # the machine may have no other network
    store = distributed.HashStore()
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def sharded(model: nn.Module, device_type: str) -> Any:
    """`model`, each layer checkpointed and sharded, then the rest."""
    mesh = init_device_mesh(device_type, (1,))
    is_cuda = device_type == "cuda"
    policy: dict[str, Any] = {"mesh": mesh}
    if is_cuda:  # on the CPU, there is nothing to offload to
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=True)
    policy["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if is_cuda else MixedPrecisionPolicy()
    for stack in find_stacks(model):
        container: Any = model.get_submodule(stack.path)
        for number, layer in enumerate(container):
            container[number] = fully_shard(checkpoint_wrapper(layer), **policy)
    return fully_shard(model, **policy)


def step(model: Any, optimizer: torch.optim.Optimizer, batches: list[dict[str, torch.Tensor]]) -> None:
    """One optimizer step over some micro-batches."""
    for number, batch in enumerate(batches):
        model.set_requires_gradient_sync(number == len(batches) - 1)
        (model(**batch).loss / len(batches)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def run_fsdp(
    model: Any, name: str, mode: str, tokens: Sequence[int], options: Namespace, setting: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Train as `Trainer` does, once for each number of tokens; yields figures of each row."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    length = row_of(name, options)
    data = RandomTokens(model, max(tokens) // length, length)
    with one_rank(device_type):
        start = time.perf_counter()
        model = sharded(model.train(), device_type)
        attach_s = time.perf_counter() - start
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
        for each in tokens:
            rows = each // length
            micro_batches = rows // ubatch_of(name, options)
            loaded = torch.utils.data.default_collate([data[index] for index in range(rows)])
            batches = [
                {key: tensor.chunk(micro_batches)[number].to(device_type) for key, tensor in loaded.items()}
                for number in range(micro_batches)
            ]
            environment.forget_host_peak()
            if device_type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds, least = [], psutil.virtual_memory().available
            for number in range(options.warmup + options.steps + 1):
                if number == options.warmup + options.steps:
                    asked = environment.asked_for_clocks()
                start = time.perf_counter()
                step(model, optimizer, batches)
                if device_type == "cuda":
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - start)
                least = min(least, psutil.virtual_memory().available)
            measured = seconds[options.warmup : -1]
            yield {
                **{"mean_s": sum(measured) / len(measured), "fastest_s": min(measured), "slowest_s": max(measured)},
                **dict.fromkeys(("upload_s", "download_s", "eps_s", "bound")),
                "device_bytes": torch.cuda.max_memory_allocated() if device_type == "cuda" else None,
                **{"host_bytes": peak_process_bytes(), "least_available_host_bytes": least},
                **{"clocks": environment.clocks(asked), "attach_s": attach_s},
            }
