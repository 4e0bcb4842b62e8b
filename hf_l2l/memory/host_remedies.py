"""What training would need of host memory otherwise, for the error of a host that is too small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_l2l.config import L2LConfig
from hf_l2l.memory.memory_estimate import check_host_memory, estimate
from hf_l2l.optim.layer_optimizers import unwrapped
from hf_l2l.optim.layerwise_check import why_not_layer_local
from hf_l2l.optim.one_pass import OnePass
from hf_l2l.option_names import option
from hf_l2l.own_command import with_options
from hf_l2l.ranks.team import Team
from hf_l2l.runtime.tensors import is_quantized, parts_of, size_text, tensor_bytes

ADAPTERS = 0.01
"""The share of the parameters that adapters have, assumed for LoRA."""
_BYTES_TRAINED = 16
"""Of an adapter's parameter: master, gradient, and two moments in fp32."""


@dataclass(frozen=True)
class Remedy:
    """Options with which training needs less."""

    changes: dict[str, Any]
    """Of `L2LConfig`."""
    host_bytes: int

    def __str__(self) -> str:
        return " and ".join(f"{option(name)}={value!r}" for name, value in self.changes.items())


def check_training_fits(
    model: nn.Module, config: L2LConfig, optimizer: torch.optim.Optimizer, team: Team | None = None
) -> None:
    """Raise MemoryError, with what to do, if this host has not enough memory to train `model`, which is attached.

    `team` are the ranks that train it together; None for one process.
    """
    hosts = 1 if team is None else len(team.hosts)
    need = estimate(model, config, optimizer).of_one_host(hosts)
    advice = partial(host_advice, model, config, optimizer, hosts=hosts, has_ranks=team is not None)
    check_host_memory(need, advice, is_shared=team is not None)


def host_advice(
    model: nn.Module,
    config: L2LConfig,
    optimizer: torch.optim.Optimizer,
    have: int,
    *,
    hosts: int = 1,
    has_ranks: bool = False,
) -> str:
    """What to do on a host that has `have` bytes for training: the bytes with each remedy, which of them fit, and at
    last what to type for the first one that fits. So many `hosts` train together; a process that `has_ranks` beside it
    has its state in memory."""
    found = list(remedies(model, config, optimizer, hosts))
    found += [] if has_ranks else disk_remedies(model, config, optimizer)
    lora = lora_bytes(model)

    def told(size: int) -> str:
        return f"{size_text(size)} ({'fits' if size <= have else 'does not fit'})"

    texts = [f"{told(each.host_bytes)} with {each}" for each in found]
    texts.append(
        f"about {told(lora)} for LoRA over a 16-bit base (load the model with dtype=torch.bfloat16, and let peft "
        f"train adapters, here of {ADAPTERS:.0%} of the parameters)"
    )
    first = next((each for each in found if each.host_bytes <= have), None)
    if first is not None:
        end = f"this fits: {with_options(first.changes)}"
    elif lora <= have:
        end = "no options fit, and LoRA does"
    else:
        end = "none of these fits: use a machine with more memory"
    return f"it would need {', '.join(texts)}; {end}"


def remedies(
    model: nn.Module, config: L2LConfig, optimizer: torch.optim.Optimizer, hosts: int = 1
) -> Iterator[Remedy]:
    """The options with which each of the hosts holds less, one by one, then all of them, and at last with moments in
    8 bits, which are rounded most."""

    def with_changes(changes: dict[str, Any]) -> Remedy:
        need = estimate(model, replace(config, **changes), optimizer)
        return Remedy(changes, need.of_one_host(hosts).host_bytes)

    if why_not_layer_local(optimizer) is not None:  # the engine refuses them
        return
    options: dict[str, Any] = {"grad_dtype": "16bit", "moment_dtype": "bf16"}
    if config.cmp is not None:
        options["host_copies"] = "per_sweep"
    helpful: dict[str, Any] = {}
    needed = with_changes({}).host_bytes
    for name, value in options.items():
        changed = with_changes({name: value})
        if changed.host_bytes < needed:
            helpful |= changed.changes
            yield changed
    before = with_changes(helpful)
    if len(helpful) > 1:
        yield before
    if not keeps_8_bits(optimizer):
        return
    last = with_changes({**helpful, "moment_dtype": "8bit"})
    if last.host_bytes < before.host_bytes:
        yield last


def keeps_8_bits(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the moments of `optimizer`, or of the one that Accelerate has wrapped, may be kept in 8 bits."""
    inner = unwrapped(optimizer)
    one_pass = OnePass.of(inner, "8bit")
    return one_pass is not None and all(map(one_pass.covers, inner.param_groups))


def disk_remedies(model: nn.Module, config: L2LConfig, optimizer: torch.optim.Optimizer) -> Iterator[Remedy]:
    """State on disk, which is slower: alone, and with all other options with which the host holds less."""
    if config.state_tier == "disk" or why_not_layer_local(optimizer) is not None:
        return
    needed = estimate(model, config, optimizer).host_bytes
    *_, most = [{}, *(each.changes for each in remedies(model, config, optimizer))]
    for more in [{}, most] if most else [{}]:
        changes = {**more, "state_tier": "disk"}
        found = Remedy(changes, estimate(model, replace(config, **changes), optimizer).host_bytes)
        if found.host_bytes < needed:  # else its window holds all there is
            yield found


def lora_bytes(model: nn.Module) -> int:
    """About what the host would hold for LoRA: all of `model` frozen, in 16 bits where it has more, and adapters."""
    base, count = 0, 0
    for p in model.parameters():
        count += p.numel()
        if is_quantized(p):
            base += tensor_bytes(parts_of(p))
        else:
            base += p.numel() * (min(2, p.itemsize) if p.is_floating_point() else p.itemsize)
    return base + int(ADAPTERS * count) * _BYTES_TRAINED
