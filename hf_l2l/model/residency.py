"""Residency: weights that stay on the device, with their gradients and optimizer state: those of non-layer modules,
and those of whole layers.

The weights remain the same parameters of the model; they are device tensors now, which optimizers update on the
device. Nothing of them travels in a step.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hf_l2l.compat import with_gradient_hooks
from hf_l2l.config import LAYER_COUNTS, L2LConfig
from hf_l2l.model.kept_state import known_tensors
from hf_l2l.model.stacks import shell_modules
from hf_l2l.optim.layer_optimizers import gradient_hook_error
from hf_l2l.optim.rounded_state import widen
from hf_l2l.option_names import option
from hf_l2l.ranks.team import process_group_size
from hf_l2l.runtime import stream
from hf_l2l.runtime.tensors import is_plain, sharing_memory


@dataclass(frozen=True)
class LayerPlace:
    """What of one layer stays on the device, as the options say."""

    number: int = 0
    """Its number in the model. Of several devices, that number modulo theirs has what stays of it."""
    is_resident: bool = False
    """Its weights with their gradients and state; they are updated there."""
    keeps_weights: bool = False
    """What is uploaded of it, from its forward to its backward. Of a resident one, nothing is uploaded."""
    keeps_copy: bool = False
    """What is uploaded of it, until its masters are updated, on the host."""
    keeps_graph: bool = False
    """The graph of its forward, until its backward."""
    stashes_on_device: bool = False
    """Its input, until its backward, though that of other layers may leave the device."""

    @property
    def keeps_input(self) -> bool:
        """Whether the device keeps its input, in the stash or in its graph."""
        return self.keeps_graph or self.stashes_on_device

    @property
    def is_fetched_in_backward(self) -> bool:
        """Whether its weights are uploaded for the backward, unless they happen to be there."""
        return not (self.is_resident or self.keeps_weights)


STREAMED = LayerPlace()
"""Nothing of it: its weights travel."""


def places_of(layers: Sequence[nn.Module], config: L2LConfig, device: torch.device) -> dict[nn.Module, LayerPlace]:
    """The place of each of `layers`, which are all layers of a model in its order.

    Where the device shares the memory of the host, weights do not travel, and only graphs are kept.

    Raises:
        ValueError: if an option is a number of more layers than there are.
    """
    count = len(layers)
    resident = count if config.resident == "all" else config.resident_layers
    for name in LAYER_COUNTS:
        asked, most, which = getattr(config, name), count, "layers"
        if name == "kept_weights":
            most, which = count - resident, "layers that are not resident"
        if asked > most:
            raise ValueError(
                f"{option(name)} must be at most the number of {which} of the model (got {asked} for a model of "
                f"{most} {which}); use {most} for all of them"
            )
    travels = not stream.shares_host_memory(device)
    if travels and (resident or config.resident != "none") and config.resident_update == "device":
        _refuse_ranks(config)
    places: dict[nn.Module, LayerPlace] = {}
    for number, layer in enumerate(layers):
        stays, on_device = number < resident, config.resident_update == "device"
        keeps_graph = number >= count - config.kept_graphs
        keeps_weights = keeps_graph or number >= count - config.kept_weights
        places[layer] = LayerPlace(
            number=number,
            is_resident=travels and stays and on_device,
            keeps_weights=travels and (not on_device if stays else keeps_weights),
            keeps_copy=travels and stays and not on_device,
            keeps_graph=keeps_graph,
            stashes_on_device=travels and number >= count - config.device_stash,
        )
    return places


def _refuse_ranks(config: L2LConfig) -> None:
    """Raise ValueError if several ranks train the model: its masters are shared by them, on the host."""
    count = process_group_size()
    if count > 1:
        raise ValueError(
            f"ranks share the weights on the host, where they are updated (got {option('resident')}="
            f"{config.resident!r}, {option('resident_layers')}={config.resident_layers} and {count} ranks); set "
            f"{option('resident_update')}='host', which keeps copies on the device, or leave both out"
        )


def refuse_misplaced(layer: str, place: LayerPlace, misplaced: Iterable[str]) -> None:
    """Raise ValueError for the first of the weights of `layer` that are on the device or the host against its
    `place`."""
    kind, rule, found = "streamed", "stay on the host", "the device"
    if place.is_resident:
        kind, rule, found = "resident", "are on the device", "the host"
    for name in misplaced:
        raise ValueError(
            f"weights of a {kind} layer {rule} (got {name} on {found}, which was put into {layer} after the model was "
            f"attached); attach the model as it is to be trained, or leave {option('resident')} and "
            f"{option('resident_layers')} out"
        )


def moves_shell(config: L2LConfig, device: torch.device) -> bool:
    """Whether the weights in no layer become device tensors."""
    is_asked = config.resident != "none" and config.resident_update == "device"
    return is_asked and not stream.shares_host_memory(device)


@dataclass(frozen=True)
class ToMove:
    """The parameters of a model that are to be resident."""

    names: dict[nn.Parameter, str]
    """Those that can be, with their names."""
    of_layers: set[torch.Tensor]
    """Those of them that are in a layer."""
    staying: list[str]
    """The names of those in no layer that share memory with other tensors, or are of another class than
    `nn.Parameter`."""
    refused: dict[str, str]
    """The names of those of resident layers that cannot move -> why."""


def parameters_to_move(model: nn.Module, places: Mapping[nn.Module, LayerPlace], *, shell: bool) -> ToMove:
    """What is to be resident: the parameters of resident layers, and with `shell` those in no layer."""
    found: dict[bool, set[torch.Tensor]] = {True: set(), False: set()}
    for layer, place in places.items():
        found[place.is_resident].update(layer.parameters())
    outside = {p for m in shell_modules(model, places) for p in m._parameters.values() if p is not None}
    outside = outside - found[True] - found[False] if shell else set()
    wanted = found[True] | outside
    sharing = sharing_memory(known_tensors(model))
    names: dict[nn.Parameter, str] = {}
    staying: list[str] = []
    refused: dict[str, str] = {}
    for name, p in model.named_parameters():
        if p in found[True] and p in found[False]:
            refused[name] = "a layer that is not resident has it, too"
        elif p in wanted and p not in sharing and is_plain(p):
            names[p] = name
        elif p in outside:
            staying.append(name)
        elif p in wanted:
            refused[name] = f"it {'shares memory with another tensor' if p in sharing else f'is a {type(p).__name__}'}"
    return ToMove(names, found[True], staying, refused)


def make_resident(
    model: nn.Module, places: Mapping[nn.Module, LayerPlace], devices: Sequence[torch.device], *, shell: bool
) -> None:
    """Move the parameters of resident layers to `devices` in turn, and with `shell` those that are in no layer to the
    first; they stay the same objects, tied or not.

    Those in no layer that cannot be moved stay on the host, with a warning: they are uploaded in every step.

    Raises:
        ValueError: if a parameter of a resident layer cannot be moved; if something refers to a parameter weakly, or
            to its values, or a parameter has a gradient hook. The model is on the host as before.
        torch.OutOfMemoryError: if they do not fit; likewise.
    """
    moving = parameters_to_move(model, places, shell=shell)
    for name, why in moving.refused.items():
        raise ValueError(
            f"a resident layer must have weights that can move to the device by themselves (got {name}: {why}); leave "
            f"{option('resident_layers')} out, or choose other layers"
        )
    for p in with_gradient_hooks(moving.names):
        raise ValueError(gradient_hook_error(next(name for each, name in moving.names.items() if each is p)))
    held = next((name for p, name in moving.names.items() if weakref.getweakrefcount(p)), None)
    if held is not None:
        raise ValueError(_cannot_move(held, devices[0], "something refers to it weakly"))
    if moving.staying:
        warnings.warn(
            f"{option('resident')}='shell' leaves {', '.join(moving.staying)} on the host, which share memory with "
            "other tensors or are no plain parameters: they are uploaded in every step",
            stacklevel=4,
        )
    numbers = {p: place.number for layer, place in places.items() for p in layer.parameters()}
    for p, name in moving.names.items():
        device = devices[numbers.get(p, 0) % len(devices)]
        try:
            _move(p, device)
        except torch.OutOfMemoryError as error:
            move_back(model)
            what = f"{option('resident')}='shell'" if p not in moving.of_layers else option("resident_layers")
            error.add_note(f"raised while {what} moved weights to {device}; without it they stay on the host")
            raise
        except RuntimeError as error:  # torch cannot swap a tensor that a graph has saved
            move_back(model)
            raise ValueError(_cannot_move(name, device, f"something refers to its values: {error}")) from error


def _cannot_move(name: str, device: torch.device, why: str) -> str:
    return (
        f"{option('resident')} and {option('resident_layers')} move parameters to {device}, which is impossible for "
        f"{name} ({why}); attach the model before its first forward and before anything else refers to its "
        "parameters, or leave these options out"
    )


def move_back(model: nn.Module) -> list[nn.Parameter]:
    """Move all parameters of a model that is not attached to the host; they stay the same objects.

    Returns:
        those that have moved.
    """
    moved: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        if p.device != stream.HOST:
            try:
                _move(p, stream.HOST)
                moved.append(p)
            except RuntimeError as error:
                warnings.warn(
                    f"{name} stays on {p.device}, since something still refers to its values, such as the graph of a "
                    f"loss ({error}); let go of that, call model.to('cpu'), and for each optimizer "
                    "optimizer.load_state_dict(optimizer.state_dict()), which moves its state",
                    stacklevel=3,
                )
    return moved


def _move(parameter: nn.Parameter, device: torch.device) -> None:
    with torch.inference_mode(False), torch.no_grad():
        there = nn.Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad)
        if parameter.grad is not None:
            there.grad = parameter.grad.to(device)
    vars(there).update(vars(parameter))  # some optimizers read tags on the parameters
    torch.utils.swap_tensors(parameter, there)


def state_follows(optimizer: torch.optim.Optimizer, moved: Container[torch.Tensor], *, widens: bool = False) -> None:
    """Move the state of `optimizer` for these parameters to where they are now.

    Numbers (0-dim), such as the count of steps, move only if the optimizer reads them on the device. Dtypes stay; with
    `widens`, bfloat16 tensors become float32, as the state of resident masters is.
    """
    for group in optimizer.param_groups:
        reads_numbers = bool(group.get("fused") or group.get("capturable"))
        for p in group["params"]:
            if p in moved and p in optimizer.state:
                state = optimizer.state[p]
                if widens:
                    widen(state)
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and (value.dim() > 0 or reads_numbers):
                        state[key] = value.to(p.device)
