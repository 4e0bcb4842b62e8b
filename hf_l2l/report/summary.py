"""The summary that training logs at its start: layers, shell, device, updates and memory."""

from __future__ import annotations

import os
import sys
import tempfile

import torch
from torch import nn

from hf_l2l.config import BoundaryPlace, L2LConfig, Mode, update_mode
from hf_l2l.devices import execution_devices
from hf_l2l.memory.memory_estimate import MemoryEstimate, kinds_text
from hf_l2l.model.precision import Precision, computing_dtype
from hf_l2l.model.residency import places_of
from hf_l2l.model.stacks import find_stacks, shell_modules
from hf_l2l.runtime import stream
from hf_l2l.runtime.tensors import size_text, tensor_bytes


def summary(model: nn.Module, config: L2LConfig, need: MemoryEstimate, ranks: str | None = None) -> str:
    """The text of the summary: what will run, where and why; `ranks` is what is told of several processes."""
    devices = execution_devices(config.device)
    device = devices[0]
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
        *([] if ranks is None else [f"  Ranks = {ranks}"]),
        f"  Device = {_devices_text(devices)}",
        f"  Micro-batches = {_ubatch_text(config, len(devices))}",
        f"  Stash = {_stash_text(config, device)}",
        *([f"  State = {size_text(need.on_disk)} on disk in {_state_dir(config)}"] if need.on_disk else []),
        f"  Update = {_update_text(config, mode)}",
        f"  Precision = {_precision_text(config, device)}",
        f"  Host memory = {kinds_text(need, ' + ')} ({need.host_bytes / sum(p.numel() for p in places):.1f} bytes per "
        "parameter)",
        f"  Device memory = {_device_text(config, devices, need)}",
        f"  Link = {_link_text(model, config, device, layers, need)}{_in_parts(devices)}",
    ]
    return "\n".join(lines)


def first_line(model: nn.Module, config: L2LConfig, need: MemoryEstimate, planned: int | None) -> str:
    """What a training begins with, in one line: where layers run, with which options, and the memory that it takes.

    `planned` is the device's peak according to a plan; without one, the line has what does not depend on the batch.
    """
    devices = execution_devices(config.device)
    if stream.shares_host_memory(devices[0]):
        is_there = torch.accelerator.current_accelerator(check_available=True) is not None
        return f"{'' if is_there else 'no accelerator: '}trains on the CPU, as Trainer would"
    count = sum(len(stack.layers) for stack in find_stacks(model, config.layer_classes))
    where = ", ".join(map(str, devices))
    stays = {
        "{} resident": config.resident_layers,
        "weights of {} kept": config.kept_weights,
        "graphs of {} kept": config.kept_graphs,
    }
    parts = [
        "micro-batch = batch" if config.ubatch_size is None else f"micro-batch {config.ubatch_size}",
        {"auto": "stash where there is room", "disk": "stash on disk"}.get(
            config.stash, f"stash on the {config.stash}"
        ),
        *(what.format(_layers_text(number)) for what, number in stays.items() if number),
    ]
    streamed = f"all {count} layers stay on" if config.resident == "all" else f"{count} layers streamed to"
    total = stream.least_memory(devices)
    of_card = "" if total is None or total >= sys.maxsize else f" of {size_text(total)}"
    least = f"{size_text(need.device_bytes)}{of_card} and activations"
    device = least if planned is None else f"{size_text(planned)}{of_card}"
    return f"{streamed} {where}; {', '.join(parts)}; {device}, host {size_text(need.host_bytes)}"


def _layers_text(count: int) -> str:
    return f"{count} layer{'s' * (count != 1)}"


def _state_dir(config: L2LConfig) -> str | os.PathLike[str]:
    return config.state_dir or tempfile.gettempdir()


_UPDATES: dict[Mode, str] = {
    "serial": "serial: the optimizer updates all layers on the host, in step()",
    "deferred": "deferred: the host updates layer by layer during the next forward, and {first} before it",
    "eager": "eager: the host updates layer by layer during the backward, and {first} after it",
}


def _update_text(config: L2LConfig, mode: Mode) -> str:
    on_host = config.resident == "none" or config.resident_update == "host"
    return _UPDATES[mode].format(first="the shell and the first layer" if on_host else "the first layer")


def _in_parts(devices: list[torch.device]) -> str:
    return f", over {len(devices)} links together" if len(devices) > 1 else ""


def _device_text(config: L2LConfig, devices: list[torch.device], need: MemoryEstimate) -> str:
    device = devices[0]
    if not stream.shares_host_memory(device):
        on_device = config.resident_update == "device"
        stays = " (stays there, with its optimizer state)" if on_device else " (stays there, its state on the host)"
        stays = stays if config.resident != "none" else ""
        count = "all" if config.resident == "all" else f"the first {config.resident_layers}"
        what = "layers with their state" if on_device else "layers without their state"
        layers = f" + {count} {what} {size_text(need.resident)}" if need.resident else ""
        layers += f" + kept weights {size_text(need.kept_weights)}" if need.kept_weights else ""
        layers += f" + graphs of {_layers_text(config.kept_graphs)}" if config.kept_graphs else ""
        slots = f"slots {size_text(need.slots)} (weights of 2 layers, gradients of {config.gradient_slots})"
        if len(devices) == 1:
            return f"shell {size_text(need.shell)}{stays}{layers} + {slots}, and activations"
        layers = f"; on all devices together{layers.replace(' +', '', 1)}" if layers else ""
        return f"shell {size_text(need.shell)}{stays} on {device}; {slots} and activations on each device{layers}"
    weights = "masters" if computing_dtype(config.cmp, device) is None else "16-bit copies"
    return f"the host's, where layers compute with the {weights}: activations come on top"


def _link_text(
    model: nn.Module, config: L2LConfig, device: torch.device, layers: list[nn.Module], need: MemoryEstimate
) -> str:
    if stream.shares_host_memory(device):
        return "none: host and device are one, nothing travels"
    precision = Precision(model, computing_dtype(config.cmp, device))
    weights = sum(
        part.numel() * dtype.itemsize
        for layer, place in places_of(layers, config, device).items()
        if not (place.is_resident or place.keeps_copy)
        for p in layer.parameters()
        for part, dtype in precision.of_parts(p)
    )
    return (
        f"up to {size_text(weights)} of weights of layers in each forward and again in each backward, "
        f"{size_text(need.gradients)} of gradients back"
    )


def _precision_text(config: L2LConfig, device: torch.device) -> str:
    dtype = computing_dtype(config.cmp, device)
    computes = "as the masters are, or as autocast says" if dtype is None else f"{dtype}, over fp32 masters"
    kept = f"; gradients wait in {config.grad_dtype}, moments in {config.moment_dtype}"
    return f"{computes}{kept if dtype is not None or {config.grad_dtype, config.moment_dtype} != {'fp32'} else ''}"


_BOUNDARIES: dict[BoundaryPlace, str] = {
    "auto": "; what passes between layers is on the device if it is small, else with the stash",
    "device": "; what passes between layers is on the device",
    "host": ", and so is what passes between layers",
}


def _stash_text(config: L2LConfig, device: torch.device) -> str:
    if config.stash == "device":
        return "on the device: it grows with depth"
    on_disk = f"in a file in {config.spill_dir or tempfile.gettempdir()}"
    if stream.shares_host_memory(device):
        return on_disk if config.stash == "disk" else "in host memory"
    place = on_disk if config.stash == "disk" else "in host memory"
    if config.stash == "auto":
        first = "" if config.boundary == "host" else "on the device, "
        place = f"{first}in host memory or {on_disk}, the first that it fits"
    return f"{place}{_BOUNDARIES[config.boundary]}"


def _devices_text(devices: list[torch.device]) -> str:
    if len(devices) == 1:
        return str(devices[0])
    return f"{', '.join(map(str, devices))}: layers run on them in turn, the rest of the model on the first"


def _ubatch_text(config: L2LConfig, devices: int) -> str:
    if config.ubatch_size is None and devices > 1:
        return f"{2 * devices}, two for each device, or one for each row of fewer (ubatch_size=None)"
    if config.ubatch_size is None:
        return "the whole device batch at once (ubatch_size=None)"
    return f"{config.ubatch_size} rows at a time (ubatch_size={config.ubatch_size})"
