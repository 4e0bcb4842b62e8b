"""A long run holds at its end what it held at its beginning: memory, threads, descriptors, streams."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any, NamedTuple

import pytest
import torch

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.report.host_tensors import host_tensors
from hf_l2l.runtime.tensors import tensor_bytes
from hf_l2l.testing import page_locked_bytes, sim_race
from models import batch_for
from training import tiny_bert


class Held(NamedTuple):
    """What the process holds, in bytes or in pieces."""

    device_bytes: int
    page_locked_bytes: int
    host_bytes: int
    tensors: int
    threads: int
    descriptors: int
    streams: int


def held(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Held:
    gc.collect()
    return Held(
        device_bytes=torch.sim.memory_allocated(),
        page_locked_bytes=page_locked_bytes(),
        host_bytes=sum(tensor_bytes(tensors) for tensors in host_tensors(model, [optimizer]).values()),
        tensors=sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()),
        # The thread that says where a first step is ends by itself some seconds later.
        threads=sum(thread.name != "hf_l2l stall log" for thread in threading.enumerate()),
        descriptors=len(os.listdir("/proc/self/fd")),
        streams=len(sim_race.ORDER.issued),
    )


@pytest.mark.at_most(2)
@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"stash": "host", "ubatch_size": 3, "gradient_slots": 1}, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("count", [18, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are counted in /proc")
def test_a_long_run_is_flat(count, options):
    model = tiny_bert(layers=2, width=32)
    eps = attach_l2l(model, L2LConfig(device="sim", **options))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    batches: list[dict[str, Any]] = [batch_for(model, seed=seed, rows=rows) for seed, rows in ((1, 8), (2, 8), (3, 5))]
    found = []
    model.train()
    for step in range(count + 6):
        model(**batches[step % 3]).loss.backward()
        if step % 2:  # accumulation over two batches
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if step % 10 == 0:
            with torch.no_grad():
                model.eval()(**batches[0])
                model.train()
            model(**batches[1])  # a forward without its backward
        if step in (5, count // 2 + 5 - (count // 2) % 6, count + 5 - count % 6):  # at the same place of the pattern
            eps.synchronize()
            found.append(held(model, optimizer))
    assert len(found) == 3 and found[0] == found[1] == found[2]
