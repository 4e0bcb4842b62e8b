"""What an optimizer must be like, so that it can update the masters."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from hf_l2l.compat import with_gradient_hooks
from hf_l2l.optim.layer_optimizers import gradient_hook_error


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, *, wide: bool = False) -> None:
    """Raise ValueError if `optimizer` cannot update the masters of `model` (see `EagerParamServer.wrap`).

    With `wide`, masters that train must have more than 16 bits.
    """
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"the optimizer must step without a closure, which would run the model inside the update (got "
            f"{name}); use one that takes gradients, such as torch.optim.AdamW"
        )
    masters: dict[torch.Tensor, str] = {p: n for n, p in model.named_parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    strange = [p for p in held if p not in masters]
    if strange:
        raise ValueError(
            f"the optimizer must hold parameters of the model only (got {name} with {len(strange)} others of "
            f"{len(held)}, the first of shape {list(strange[0].shape)}); build it from model.parameters() after "
            "the model has its final parameters, and with the model on the host"
        )
    short = [masters[p] for p in held if p.requires_grad and p.is_floating_point() and p.itemsize < 4]
    if wide and short:
        raise ValueError(
            f"parameters that train must be float32 with cmp (got {short[0]} in 16 bits, which was frozen when the "
            "model was attached); call hf_l2l.detach_l2l(model), and attach it again"
        )
    hooked = with_gradient_hooks(masters)
    if hooked:
        raise ValueError(gradient_hook_error(masters[hooked[0]]))
