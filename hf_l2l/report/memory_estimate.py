"""Memory before the run, from shapes: what the host and the device will have to hold.

The host's need is compared with what is available before training allocates anything, so that a model that cannot be
trained says so in a second and not after an hour in the swap.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import psutil
import torch
from torch import nn

from hf_l2l.config import L2LConfig, Mode, MomentDtype, update_mode
from hf_l2l.model.precision import Precision, computing_dtype
from hf_l2l.model.stacks import find_stacks, shell_modules
from hf_l2l.optim.bf16_state import is_rounded
from hf_l2l.optim.layerwise_check import state_after_one_step
from hf_l2l.optim.layerwise_step import unwrapped
from hf_l2l.runtime import stream
from hf_l2l.runtime.flat_memory import Layout
from hf_l2l.runtime.tensors import on_meta, size_text, tensor_bytes

SKIP_VARIABLE = "HF_L2L_SKIP_MEMORY_CHECK"
"""Environment variable that, set to 1, lets training start although the host memory does not seem to suffice."""

MOMENTS_ASSUMED = 2
"""Moments per parameter where an optimizer's state cannot be found out from shapes: those of Adam."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by kind. On the device, what depends on the batch comes on top: activations of one ubatch inside one
    layer, two layer outputs of the device batch, and the stash where it is kept there."""

    masters: int
    """Host: the parameters of the model."""
    gradients: int
    """Host: one gradient per trainable parameter."""
    moments: int
    """Host: the optimizer's state."""
    shell: int
    """Device: weights, gradients and buffers of what is not in a layer."""
    slots: int
    """Device: the weights of two layers, one of which computes while the other travels, and the gradients of as many
    as `gradient_slots` says, all as large as the largest layer."""
    copies: int = 0
    """Host: the 16-bit copies that travel in the place of masters, where they are kept."""

    @property
    def host_bytes(self) -> int:
        """All that the host holds."""
        return self.masters + self.gradients + self.moments + self.copies

    @property
    def device_bytes(self) -> int:
        """What the device holds whatever the batch."""
        return self.shell + self.slots


def estimate(
    model: nn.Module, config: L2LConfig | None = None, optimizer: torch.optim.Optimizer | None = None
) -> MemoryEstimate:
    """The memory that training `model` layer to layer takes, from shapes alone; nothing is allocated.

    Args:
        model: the model; it may lie on the meta device.
        config: the options; None for the defaults.
        optimizer: the optimizer that will update the model, or Accelerate's wrapper of it; neither it nor its state
            changes. None assumes two moments per trainable parameter.
    """
    config = config or L2LConfig()
    layers = [layer for stack in find_stacks(model, config.layer_classes) for layer in stack.layers]
    shell = list(shell_modules(model, layers))
    shell_parameters = {p for m in shell for p in m._parameters.values() if p is not None}
    shell_buffers = {b for m in shell for b in m._buffers.values() if b is not None}
    dtype = computing_dtype(config.cmp, stream.execution_device(config.device))
    precision = Precision(model, dtype, gradients=config.grad_dtype, keeps_copies=config.host_copies == "kept")
    masters = {p: _master(p, precision) for p in model.parameters()}
    trainable = [masters[p] for p in masters if p.requires_grad]
    sent = {p: on_meta(p, precision.of(p)) for p in masters}
    short = [like for p, like in sent.items() if like.dtype != masters[p].dtype and precision.keeps_copies]
    moments = MOMENTS_ASSUMED * tensor_bytes(trainable)
    if config.moment_dtype == "bf16":
        moments //= 2
    weights = [Layout(sent[p] for p in layer.parameters()).num_bytes for layer in layers]
    gradients = [Layout(masters[p] for p in layer.parameters() if p.requires_grad).num_bytes for layer in layers]
    return MemoryEstimate(
        masters=tensor_bytes(masters.values()),
        gradients=sum(p.numel() * precision.of_gradient(p).itemsize for p in trainable),
        moments=moments if optimizer is None else moment_bytes(optimizer, config.moment_dtype),
        shell=tensor_bytes(sent[p] for p in shell_parameters)
        + tensor_bytes(sent[p] for p in shell_parameters if p.requires_grad)
        + tensor_bytes(shell_buffers),
        slots=2 * max(weights, default=0) + config.gradient_slots * max(gradients, default=0),
        copies=tensor_bytes(short),
    )


def _master(parameter: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Shape and dtype of the master that `parameter` is or, with `cmp`, is made."""
    short = parameter.requires_grad and parameter.is_floating_point() and parameter.itemsize < 4
    return on_meta(parameter, torch.float32 if short and precision.is_mixed else parameter.dtype)


def moment_bytes(optimizer: torch.optim.Optimizer, dtype: MomentDtype = "fp32") -> int:
    """Bytes of the optimizer's state, kept in `dtype`, once every parameter has been updated, from shapes.

    A copy of the optimizer takes one step on the meta device, for one parameter of each shape. Where that raises
    before there is a state, it is taken to be as large as Adam's.
    """
    optimizer = unwrapped(optimizer)
    total = 0
    for group in optimizer.param_groups:
        per_shape: dict[tuple[torch.Size, torch.dtype], int] = {}
        for p in group["params"]:
            if not p.requires_grad:
                continue
            key = p.shape, p.dtype
            if key not in per_shape:
                per_shape[key] = _state_bytes(optimizer, group, p, dtype)
            total += per_shape[key]
    return total


def _state_bytes(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor, dtype: MomentDtype
) -> int:
    state, is_whole = state_after_one_step(optimizer, group, parameter)
    if not (state or is_whole):  # one that failed later has made its state by then
        return MOMENTS_ASSUMED * parameter.numel() * (2 if dtype == "bf16" else parameter.element_size())
    made = [v for v in state.values() if isinstance(v, torch.Tensor)]
    rounded = [v for v in made if dtype == "bf16" and is_rounded(v)]
    return tensor_bytes(made) - tensor_bytes(rounded) // 2


def available_host_bytes() -> int:
    """Host memory that can still be taken: what the system has available, within the limits of the control groups."""
    available = [int(psutil.virtual_memory().available)]
    for folder, limit, usage in _control_groups():
        left = _left_in_group(folder / limit, folder / usage)
        if left is not None:
            available.append(left)
    return min(available)


def _control_groups(
    membership: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> Iterator[tuple[Path, str, str]]:
    """The folders that may limit this process's memory, from its own group up, with the names of limit and usage."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, usage = mounted, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, usage = mounted / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for folder in (group, *group.parents):
            yield root / folder, limit, usage


def _left_in_group(limit: Path, usage: Path) -> int | None:
    try:
        text, used = limit.read_text().strip(), int(usage.read_text())
    except (OSError, ValueError):
        return None
    if not text.isdigit():  # "max": no limit
        return None
    # Pages of files that were read are counted as used, and given back when memory is needed.
    try:
        stat = dict(line.split() for line in (usage.parent / "memory.stat").read_text().splitlines())
        cached = int(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        cached = 0
    return int(text) - used + cached


def check_host_memory(need: MemoryEstimate) -> None:
    """Raise MemoryError if training needs more host memory than is available.

    The masters are counted as paid for as far as this process already holds memory of its own; those still read from a
    mapped file are not.
    """
    if os.environ.get(SKIP_VARIABLE) == "1":
        return
    paid = min(need.masters, _own_bytes())
    have = available_host_bytes() + paid
    if need.host_bytes <= have:
        return
    raise MemoryError(
        f"training needs {size_text(need.host_bytes)} of host memory ({_kinds(need, ', ')}), and {size_text(have)} "
        "can be had; keep less (l2l_grad_dtype='16bit', l2l_moment_dtype='bf16'), use an optimizer with less state "
        f"(optim='sgd' or 'adafactor'), freeze parameters, or try anyway with {SKIP_VARIABLE}=1"
    )


def _kinds(need: MemoryEstimate, joined_by: str) -> str:
    kinds = ("masters", "gradients", "moments", "copies")
    return joined_by.join(f"{k} {size_text(getattr(need, k))}" for k in kinds if k != "copies" or need.copies)


def _own_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Bytes of memory that this process holds for itself, mapped files not counted; page-locked pages are shared
    memory, which others could map."""
    try:
        lines = [line.split() for line in status.read_text().splitlines()]
    except OSError:  # not Linux
        memory = psutil.Process().memory_info()
        return int(memory.rss - getattr(memory, "shared", 0))
    return sum(int(line[1]) * 1024 for line in lines if line[0] in ("RssAnon:", "RssShmem:"))


def summary(model: nn.Module, config: L2LConfig, need: MemoryEstimate) -> str:
    """What will be run, where and why: the block that training starts with."""
    device = stream.execution_device(config.device)
    mode = update_mode(config.eps_update, device)
    stacks = find_stacks(model, config.layer_classes)
    lines = [f"***** Layer-to-layer execution of {type(model).__name__} *****"]
    for stack in stacks:
        sizes = stack.layer_bytes
        lines.append(
            f"  Layers = {len(sizes)} x {'/'.join(stack.class_names)} at {stack.path or 'the model'} "
            f"({size_text(sum(sizes))}, largest {size_text(max(sizes))})"
        )
    layers = [layer for stack in stacks for layer in stack.layers]
    shell = {p for m in shell_modules(model, layers) for p in m._parameters.values() if p is not None}
    places: dict[torch.Tensor, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        places.setdefault(p, []).append(name)
    ties = [" = ".join(names) for names in places.values() if len(names) > 1]
    frozen = [p for p in places if not p.requires_grad]
    lines += [
        f"  Shell = {len(shell)} parameters outside the layers ({size_text(tensor_bytes(shell))})",
        f"  Tied = {'; '.join(ties) or 'none'}",
        f"  Frozen = {len(frozen)} of {len(places)} parameters ({size_text(tensor_bytes(frozen))})",
        f"  Device = {device}",
        f"  Micro-batches = {_ubatch_text(config)}",
        f"  Stash = {'on the device: it grows with depth' if config.stash == 'device' else 'in host memory'}",
        f"  Update = {_UPDATES[mode]}",
        f"  Precision = {_precision_text(config, device)}",
        f"  Host memory = {_kinds(need, ' + ')} ({need.host_bytes / sum(p.numel() for p in places):.1f} bytes per "
        "parameter)",
        f"  Device memory = {_device_text(config, device, need)}",
        f"  Link = {_link_text(model, config, device, layers, need)}",
        f"  Bound by = what l2l_bound says in the logs: {_BOUNDS[mode]}",
    ]
    return "\n".join(lines)


_UPDATES: dict[Mode, str] = {
    "serial": "serial: the optimizer updates all layers on the host, in step()",
    "deferred": "deferred: the host updates layer by layer in the background, under the next forward",
    "eager": "eager: the host updates layer by layer in the background, during the backward",
}


_BOUNDS: dict[Mode, str] = {
    "serial": "nothing hides the update",
    "deferred": "the next forward hides the update as far as it lasts, but for the shell and the first layer",
    "eager": "the backward hides the update, but for the shell and the first layer",
}
"""What is known before the run of what it will wait for."""


def _device_text(config: L2LConfig, device: torch.device, need: MemoryEstimate) -> str:
    if not stream.shares_host_memory(device):
        return (
            f"shell {size_text(need.shell)} + slots {size_text(need.slots)} (weights of 2 layers, gradients of "
            f"{config.gradient_slots}), and activations"
        )
    weights = "masters" if computing_dtype(config.cmp, device) is None else "16-bit copies"
    return f"the host's, where layers compute with the {weights}: activations come on top"


def _link_text(
    model: nn.Module, config: L2LConfig, device: torch.device, layers: list[nn.Module], need: MemoryEstimate
) -> str:
    if stream.shares_host_memory(device):
        return "none: host and device are one, nothing travels"
    precision = Precision(model, computing_dtype(config.cmp, device))
    weights = tensor_bytes(on_meta(p, precision.of(p)) for layer in layers for p in layer.parameters())
    return (
        f"up to {size_text(weights)} of weights of layers in each forward and again in each backward, "
        f"{size_text(need.gradients)} of gradients back"
    )


def _precision_text(config: L2LConfig, device: torch.device) -> str:
    dtype = computing_dtype(config.cmp, device)
    computes = "as the masters are, or as autocast says" if dtype is None else f"{dtype}, over fp32 masters"
    kept = f"; gradients wait in {config.grad_dtype}, moments in {config.moment_dtype}"
    return f"{computes}{kept if dtype is not None or '16' in config.grad_dtype + config.moment_dtype else ''}"


def _ubatch_text(config: L2LConfig) -> str:
    if config.ubatch_size is None:
        return "the whole device batch at once (ubatch_size=None)"
    return f"{config.ubatch_size} rows at a time (ubatch_size={config.ubatch_size})"
