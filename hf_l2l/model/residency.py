"""Residency: weights of non-layer modules that stay on the device, with their gradients and optimizer state.

The weights remain the same parameters of the model; they are device tensors now, which optimizers update on the
device. Nothing of them travels in a step.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Container, Iterable

import torch
from torch import nn

from hf_l2l.compat import with_gradient_hooks
from hf_l2l.config import option
from hf_l2l.model.stacks import shell_modules
from hf_l2l.optim.bf16_state import widened
from hf_l2l.optim.layerwise_step import gradient_hook_error
from hf_l2l.runtime import stream
from hf_l2l.runtime.tensors import is_plain, sharing_memory


def resident_parameters(model: nn.Module, layers: Iterable[nn.Module]) -> tuple[dict[nn.Parameter, str], list[str]]:
    """The parameters that can be resident, with their names: those in no layer. And the names of those in no layer
    that cannot: they share memory with other tensors, or are of another class than `nn.Parameter`."""
    layers = list(layers)
    in_layers = {p for layer in layers for p in layer.parameters()}
    outside = {p for m in shell_modules(model, layers) for p in m._parameters.values() if p is not None} - in_layers
    sharing = sharing_memory([*model.parameters(), *model.buffers()])
    named = {p: name for name, p in model.named_parameters() if p in outside}
    staying = [name for p, name in named.items() if p in sharing or not is_plain(p)]
    return {p: name for p, name in named.items() if name not in staying}, staying


def make_resident(model: nn.Module, layers: Iterable[nn.Module], device: torch.device) -> None:
    """Move the parameters that are in no layer to `device`; they stay the same objects, tied or not.

    Those that cannot be moved stay on the host, with a warning: they are uploaded in every step.

    Raises:
        ValueError: if something refers to a parameter weakly, or to its values, or a parameter has a gradient hook.
            The model is on the host as before.
        torch.OutOfMemoryError: if they do not fit; likewise.
    """
    moving, staying = resident_parameters(model, layers)
    for p in with_gradient_hooks(moving):
        raise ValueError(gradient_hook_error(next(name for each, name in moving.items() if each is p)))
    held = next((name for p, name in moving.items() if weakref.getweakrefcount(p)), None)
    if held is not None:
        raise ValueError(_cannot_move(held, device, "something refers to it weakly"))
    if staying:
        warnings.warn(
            f"{option('resident')}='shell' leaves {', '.join(staying)} on the host, which share memory with other "
            "tensors or are no plain parameters: they are uploaded in every step",
            stacklevel=4,
        )
    for p, name in moving.items():
        try:
            _move(p, device)
        except torch.OutOfMemoryError as error:
            move_back(model)
            error.add_note(f"raised while {option('resident')}='shell' moved weights to {device}; 'none' leaves them")
            raise
        except RuntimeError as error:  # torch cannot swap a tensor that a graph has saved
            move_back(model)
            raise ValueError(_cannot_move(name, device, f"something refers to its values: {error}")) from error


def _cannot_move(name: str, device: torch.device, why: str) -> str:
    return (
        f"{option('resident')}='shell' moves parameters to {device}, which is impossible for {name} ({why}); attach "
        "the model before its first forward and before anything else refers to its parameters, or use "
        f"{option('resident')}='none'"
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
                    state.update(widened(state))
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and (value.dim() > 0 or reads_numbers):
                        state[key] = value.to(p.device)
