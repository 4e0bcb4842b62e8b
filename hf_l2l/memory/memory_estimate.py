"""Memory estimate from shapes, before the run: what the host and the device will have to hold.

The need of the host is compared with the available memory before training allocates anything, so that training that
does not fit fails within a second and not after an hour of swapping.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from hf_l2l.config import L2LConfig, MomentDtype, update_mode
from hf_l2l.devices import execution_device
from hf_l2l.memory import host_limits
from hf_l2l.memory.state_traffic import StatePart, StateTraffic, state_parts, state_traffic, updated_together
from hf_l2l.model.precision import Precision, computing_dtype
from hf_l2l.model.residency import moves_shell, parameters_to_move, places_of
from hf_l2l.model.stacks import find_stacks, shell_modules
from hf_l2l.optim.layer_optimizers import unwrapped
from hf_l2l.optim.layerwise_check import state_after_one_step
from hf_l2l.optim.one_pass import OnePass
from hf_l2l.optim.rounded_state import is_rounded, kept_bytes
from hf_l2l.runtime import stream
from hf_l2l.runtime.flat_memory import Layout
from hf_l2l.runtime.tensors import is_quantized, on_meta, parts_of, size_text, tensor_bytes

SKIP_VARIABLE = "HF_L2L_SKIP_MEMORY_CHECK"
"""Environment variable; if set to 1, training starts even if host memory seems insufficient."""

MOMENTS_ASSUMED = 2
"""Moments per parameter if an optimizer's state cannot be derived from shapes: those of Adam."""

MomentSizes = dict[tuple[int, torch.Size, torch.dtype, MomentDtype], int]
"""Bytes of the state of a parameter of one optimizer, by its group's number, shape, dtype, and the moments' dtype."""

SAVED_LAYERS = 2
"""How many layers are copied at most while a checkpoint is written in the background."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by kind. Device memory that depends on the batch comes on top: activations of one ubatch inside one layer,
    a chunk of logits, what passes between layers unless it is on the host (`boundary`), and the stash if it is on the
    device."""

    masters: int
    """Host: the parameters of the model, except resident ones."""
    gradients: int
    """Host: one gradient per trainable parameter."""
    moments: int
    """Host: the optimizer's state."""
    shell: int
    """Device: weights, gradients and buffers of non-layer modules (the shell); the state of resident ones, too."""
    slots: int
    """Device: slots for the weights of two layers (one computes while the other is uploaded) and for the gradients of
    `gradient_slots` layers, each as large as the largest layer."""
    copies: int = 0
    """Host: the 16-bit copies that are uploaded instead of the masters, if they are kept."""
    resident: int = 0
    """Device: weights, gradients and state of resident layers, or, if these are updated on the host, their copies."""
    kept_weights: int = 0
    """Device: weights that layers keep from their forward to their backward."""
    on_disk: int = 0
    """Disk: those of the masters and moments that are there (`state_tier="disk"`)."""
    state_traffic: StateTraffic = StateTraffic()
    """Disk: what a step reads of these and writes, and the window of host memory through which they pass."""

    layers_being_saved: int = 0
    """Host: copies of layers, at most, while a checkpoint is written in the background. No part of `host_bytes`."""
    widened: int = 0
    """Host: gradients and moments in fp32 beside those that are kept in fewer bits, as long as updates run, at most.
    Updates in one pass over memory make none. No part of `host_bytes`."""

    @property
    def state_window(self) -> int:
        """Host: the window through which masters and moments on disk pass."""
        return self.state_traffic.window

    @property
    def host_bytes(self) -> int:
        """Total host memory."""
        state = self.masters + self.moments - self.on_disk + self.state_window
        return state + self.gradients + self.copies

    def of_one_host(self, hosts: int) -> MemoryEstimate:
        """That of each of several hosts: all have all masters and copies, and the gradients and moments of the
        parameters that their own ranks update."""
        return replace(self, gradients=-(-self.gradients // hosts), moments=-(-self.moments // hosts))

    @property
    def device_bytes(self) -> int:
        """Device memory that does not depend on the batch."""
        return self.shell + self.resident + self.slots + self.kept_weights


def estimate(
    model: nn.Module,
    config: L2LConfig | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | None = None,
) -> MemoryEstimate:
    """Estimate the memory for training `model` layer to layer, from shapes alone; nothing is allocated.

    Args:
        model: the model; it may be on the meta device.
        config: the options; None for the defaults.
        optimizer: the optimizer that will update the model, or Accelerate's wrapper of it; it is not changed. None
            assumes two moments per trainable parameter.
        device: the device that will train it, which this machine need not have; None takes that of `config`.
    """
    config = config or L2LConfig()
    device = device or execution_device(config.device)
    layers = [layer for stack in find_stacks(model, config.layer_classes) for layer in stack.layers]
    shell_parameters, shell_buffers = _shell(model, layers)
    dtype = computing_dtype(config.cmp, device)
    places = places_of(layers, config, device)
    moving = parameters_to_move(model, places, shell=moves_shell(config, device))
    resident, in_layers = set(moving.names), {p for p in moving.names if p in moving.of_layers}
    shell_parameters -= in_layers
    precision = Precision(model, dtype, gradients=config.grad_dtype, keeps_copies=config.host_copies == "kept")
    # A quantized weight, which is frozen, has its parts and nothing else.
    packed = {p: parts_of(p) for p in model.parameters() if is_quantized(p)}
    masters = {p: _master(p, precision) for p in model.parameters() if p not in packed}
    on_host = {p: master for p, master in masters.items() if p not in resident}
    sent = {p: on_meta(p, precision.of(p)) for p in masters}
    short = [sent[p] for p in on_host if sent[p].dtype != masters[p].dtype and precision.keeps_copies]
    travel = {p: packed[p] if p in packed else [sent[p]] for p in model.parameters()}
    streamed = [layer for layer, place in places.items() if not place.is_resident]
    weights = {layer: Layout(p for each in layer.parameters() for p in travel[each]).num_bytes for layer in streamed}
    copied = [size for layer, size in weights.items() if places[layer].keeps_copy]
    in_turn = [size for layer, size in weights.items() if not places[layer].keeps_weights]
    gradients = [Layout(masters[p] for p in layer.parameters() if p.requires_grad).num_bytes for layer in streamed]
    moments = partial(_moments, masters, optimizer=optimizer, known={})
    state = partial(moments, dtype=config.moment_dtype)
    parts = state_parts(model, on_host, layers, state)
    traffic = _traffic(config, device, precision, parts)
    # Where nothing is rounded, what layers compute with is the master itself, and its gradient that of the master.
    rounded = [p for p in resident - in_layers if sent[p].dtype != masters[p].dtype]
    return MemoryEstimate(
        masters=tensor_bytes([*on_host.values(), *packed]),
        gradients=sum(m.numel() * precision.of_gradient(m).itemsize for p, m in on_host.items() if p.requires_grad),
        moments=state(on_host),
        shell=tensor_bytes(part for p in shell_parameters for part in travel[p])
        + tensor_bytes(sent[p] for p in shell_parameters if p.requires_grad)
        + tensor_bytes(shell_buffers)
        + _with_gradients(masters, rounded)
        + moments(resident - in_layers),
        resident=_with_gradients(masters, in_layers) + moments(in_layers) + sum(copied),
        slots=2 * max(in_turn, default=0) + config.gradient_slots * max(gradients, default=0),
        copies=tensor_bytes(short),
        on_disk=tensor_bytes([*on_host.values(), *packed]) + state(on_host) if traffic.window else 0,
        state_traffic=traffic,
        layers_being_saved=SAVED_LAYERS * max([part.num_bytes for part in parts if part.in_layer], default=0),
        kept_weights=sum(weights.values()) - sum(in_turn) - sum(copied),
        widened=_widened(updated_together(model, on_host, layers), config, precision, optimizer, moments),
    )


def _widened(
    parts: Sequence[tuple[float, Mapping[torch.Tensor, torch.Tensor]]],
    config: L2LConfig,
    precision: Precision,
    optimizer: torch.optim.Optimizer | None,
    moments: Callable[[set[torch.Tensor]], int],
) -> int:
    """Bytes in fp32 that updates of these parts make at once, at most: of two that follow each other."""
    trained = [p for _, part in parts for p in part if p.requires_grad]
    if not trained or (config.moment_dtype == "fp32" and config.grad_dtype == "fp32"):
        return 0
    stepping = torch.optim.AdamW(trained) if optimizer is None else unwrapped(optimizer)
    one_pass = OnePass.of(stepping, config.moment_dtype)
    covered = [g["params"] for g in stepping.param_groups if one_pass is not None and one_pass.covers(g)]
    in_one_pass = {p for group in covered for p in group if p.is_contiguous()}
    sizes = []
    for _, part in parts:
        others = {p: m for p, m in part.items() if p.requires_grad and p not in in_one_pass}
        wide = {p: m for p, m in others.items() if m.dtype == torch.float32}
        of_gradients = tensor_bytes(m for m in wide.values() if precision.of_gradient(m) != m.dtype)
        sizes.append(of_gradients + (0 if config.moment_dtype == "fp32" else moments(set(wide))))
    return max(sum(pair) for pair in pairwise([*sizes, 0]))


def _with_gradients(masters: Mapping[Any, torch.Tensor], of: Collection[torch.Tensor]) -> int:
    """Bytes of some masters, and of the gradients of those that are trained."""
    return tensor_bytes(masters[p] for p in of) + tensor_bytes(masters[p] for p in of if p.requires_grad)


def _traffic(
    config: L2LConfig, device: torch.device, precision: Precision, parts: Sequence[StatePart]
) -> StateTraffic:
    """What a step reads from the disk and writes; on a device, the last two layers of the forward stay there."""
    if config.state_tier == "host":
        return StateTraffic()
    stays = 0 if stream.shares_host_memory(device) else 2
    reads = not (precision.is_mixed and precision.keeps_copies)
    updates = update_mode(config.eps_update, device)
    return state_traffic(parts, config.state_window, reads_masters=reads, stays=stays, updates=updates)


def _shell(model: nn.Module, layers: Sequence[nn.Module]) -> tuple[set[nn.Parameter], set[torch.Tensor]]:
    """The parameters and buffers of the modules outside the layers."""
    modules = list(shell_modules(model, layers))
    parameters = {p for m in modules for p in m._parameters.values() if p is not None}
    return parameters, {b for m in modules for b in m._buffers.values() if b is not None}


def _moments(
    masters: Mapping[Any, torch.Tensor],
    of: Collection[torch.Tensor],
    optimizer: torch.optim.Optimizer | None,
    dtype: MomentDtype = "fp32",
    known: MomentSizes | None = None,
) -> int:
    """Bytes of the optimizer's state `of` these parameters; without one, of two moments per trainable parameter."""
    if optimizer is not None:
        return moment_bytes(optimizer, dtype, of, known)
    assumed = MOMENTS_ASSUMED * tensor_bytes(master for p, master in masters.items() if p in of and p.requires_grad)
    return kept_bytes(assumed, dtype)


def _master(parameter: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Shape and dtype of the master of `parameter`; with `cmp`, 16-bit parameters are converted to float32."""
    short = parameter.requires_grad and parameter.is_floating_point() and parameter.itemsize < 4
    return on_meta(parameter, torch.float32 if short and precision.is_mixed else parameter.dtype)


def moment_bytes(
    optimizer: torch.optim.Optimizer,
    dtype: MomentDtype = "fp32",
    of: Container[torch.Tensor] | None = None,
    known: MomentSizes | None = None,
) -> int:
    """Bytes of the optimizer's state `of` these parameters (None: all), kept in `dtype`, once all have been updated.

    A copy of the optimizer takes one step on the meta device, for one parameter of each shape. If that raises before
    there is a state, that is assumed which the optimizer has, and if it has none, the size of Adam's. Calls for the
    same optimizer share what is `known`.
    """
    optimizer = unwrapped(optimizer)
    known = {} if known is None else known
    total = 0
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if not p.requires_grad or (of is not None and p not in of):
                continue
            key = number, p.shape, p.dtype, dtype
            if key not in known:
                known[key] = _state_bytes(optimizer, group, p, dtype)
            total += known[key]
    return total


def _state_bytes(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor, dtype: MomentDtype
) -> int:
    state, is_whole = state_after_one_step(optimizer, group, parameter)
    if not (state or is_whole):  # Adagrad of torch 2.11 makes its state when it is made, and no other
        state = optimizer.state.get(parameter, {})
    if not (state or is_whole):  # a step that fails later has made its state before
        return MOMENTS_ASSUMED * kept_bytes(parameter.numel() * parameter.element_size(), dtype)
    made = [v for v in state.values() if isinstance(v, torch.Tensor)]
    return sum(kept_bytes(v.nbytes, dtype) if is_rounded(v) else tensor_bytes([v]) for v in made)


def check_host_memory(
    need: MemoryEstimate, advice: Callable[[int], str] | None = None, *, is_shared: bool = False
) -> None:
    """Raise MemoryError if training needs more host memory than is available.

    Called after the model was attached. Memory that this process already holds is counted towards the masters and
    their copies; masters still in a mapped file are not. Ranks have them in memory that all of them share, of
    which a rank holds by itself only what it has read or written.

    Args:
        need: what the host will hold.
        advice: is given the bytes that are there for training, and returns the end of the error (`host_advice`).
        is_shared: whether masters and copies are in memory that the ranks of this host share.
    """
    if os.environ.get(SKIP_VARIABLE) == "1":
        return
    there = need.copies + (0 if need.on_disk else need.masters)
    held = there if is_shared else min(there, host_limits.own_bytes())
    have = host_limits.available_host_bytes() + held
    if need.host_bytes <= have:
        return
    raise MemoryError(
        f"training needs {size_text(need.host_bytes)} of host memory ({kinds_text(need, ', ')}), and "
        f"{size_text(have)} is available; use an optimizer with less state (optim='sgd' or 'adafactor'), freeze "
        f"parameters, or try anyway with {SKIP_VARIABLE}=1{'' if advice is None else f'; {advice(have)}'}"
    )


def kinds_text(need: MemoryEstimate, joined_by: str) -> str:
    """The host memory of `need` by kind, as text."""
    kinds = {name: getattr(need, name) for name in ("masters", "gradients", "moments", "copies")}
    if need.on_disk:
        kinds = {"gradients": need.gradients, "window of state on disk": need.state_window, "copies": need.copies}
    return joined_by.join(f"{k} {size_text(size)}" for k, size in kinds.items() if k != "copies" or size)
