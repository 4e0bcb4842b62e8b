"""Residency: weights of non-layer modules that stay on the device, with their gradients and optimizer state.

The weights remain the same parameters of the model; they are device tensors now, which optimizers update on the
device. Nothing of them travels in a step.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable

import torch
from torch import nn

from hf_l2l.compat import with_gradient_hooks
from hf_l2l.config import option
from hf_l2l.model.stacks import shell_modules
from hf_l2l.optim.layerwise_step import gradient_hook_error, parameters_of
from hf_l2l.runtime import stream
from hf_l2l.runtime.tensors import is_plain, sharing_memory


def resident_candidates(model: nn.Module, layers: Iterable[nn.Module]) -> dict[nn.Parameter, str]:
    """The parameters that are in no layer, and their names."""
    layers = list(layers)
    in_layers = {p for layer in layers for p in layer.parameters()}
    outside = {p for m in shell_modules(model, layers) for p in m._parameters.values() if p is not None} - in_layers
    return {p: name for name, p in model.named_parameters() if p in outside}


def make_resident(model: nn.Module, layers: Iterable[nn.Module], device: torch.device) -> None:
    """Move the parameters that are in no layer to `device`; they stay the same objects, tied or not.

    Parameters that share memory with others, and those of other classes than `nn.Parameter`, stay on the host, with a
    warning: they are uploaded in every step.

    Raises:
        ValueError: before anything moves, if there are weak references to a parameter, or hooks for its gradient.
        torch.OutOfMemoryError: if they do not fit; the model is on the host again.
    """
    candidates = resident_candidates(model, layers)
    sharing = sharing_memory([*model.parameters(), *model.buffers()])
    staying = [name for p, name in candidates.items() if p in sharing or not is_plain(p)]
    moving = {p: name for p, name in candidates.items() if name not in staying}
    for p in with_gradient_hooks(moving):
        raise ValueError(gradient_hook_error(moving[p]))  # type: ignore[index]
    held = next((name for p, name in moving.items() if weakref.getweakrefcount(p)), None)
    if held is not None:
        raise ValueError(
            f"{option('resident')}='shell' moves parameters to {device}, and they cannot be moved while something "
            f"refers to them weakly (got {held}); attach the model before anything else does, or use "
            f"{option('resident')}='none'"
        )
    if staying:
        warnings.warn(
            f"{option('resident')}='shell' leaves {', '.join(staying)} on the host, which share memory with other "
            "tensors or are no plain parameters: they are uploaded in every step",
            stacklevel=5,
        )
    try:
        for p in moving:
            _move(p, device)
    except torch.OutOfMemoryError as error:
        move_back(model)
        error.add_note(f"raised while {option('resident')}='shell' moved weights to {device}; 'none' leaves them")
        raise


def move_back(model: nn.Module) -> None:
    """Move all parameters of a model that is not attached any more to the host; they stay the same objects."""
    for name, p in model.named_parameters():
        if p.device != stream.HOST:
            try:
                _move(p, stream.HOST)
            except RuntimeError as error:  # torch cannot swap a tensor that a graph has saved
                warnings.warn(
                    f"{name} stays on {p.device}, since something still refers to its values, such as the graph of a "
                    f"loss ({error}); let go of that, and call model.to('cpu')",
                    stacklevel=4,
                )


def _move(parameter: nn.Parameter, device: torch.device) -> None:
    with torch.inference_mode(False), torch.no_grad():
        there = nn.Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad)
        if parameter.grad is not None:
            there.grad = parameter.grad.to(device)
    vars(there).update(vars(parameter))  # some optimizers read tags on the parameters
    torch.utils.swap_tensors(parameter, there)


def state_follows(optimizer: torch.optim.Optimizer) -> None:
    """Move the state of `optimizer` to where its parameters are, as `load_state_dict` does."""
    state = optimizer.state
    apart = any(
        isinstance(value, torch.Tensor) and value.dim() > 0 and value.device != p.device
        for p in parameters_of(optimizer)
        if p in state
        for value in state[p].values()
    )
    if apart:
        optimizer.load_state_dict(optimizer.state_dict())
