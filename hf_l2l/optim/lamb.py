"""LAMB, the optimizer of the experiments in arXiv:2002.05645 (You et al., arXiv:1904.00962, algorithm 2).

That of timm, which this one is tested against, counts its steps in the groups: it cannot be stepped layer by layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT


class Lamb(torch.optim.Optimizer):
    """Adam whose update is scaled, for each parameter tensor, to the norm of the weights.

    Algorithm 2 with phi the identity, in every parameter tensor w: from Adam's moments m and v, both corrected for
    their start at zero, r = m / (sqrt(v) + eps) + weight_decay * w; then w <- w - lr * |w| / |r| * r. Where a norm is
    0, |w| / |r| counts as 1. Gradients are not scaled by a norm over all parameters: that is left to the caller.

    Args:
        params: parameters, floating point and dense, or groups of them.
        lr: the step relative to the norm of the weights, a number or a tensor of one element.
        betas: decay of the first and second moments.
        eps: added to the root of the second moment.
        weight_decay: part of the weights that is added to the update before it is scaled.

    Raises:
        ValueError: where a hyper-parameter is outside its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; also called for the first groups.

        Raises:
            ValueError: where a hyper-parameter is outside its range.
        """
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient.

        Args:
            closure: computes the loss and the gradients anew, where given.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: for a gradient that is sparse or complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)
        return loss

    def _update(self, p: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        if gradient.layout is not torch.strided or gradient.is_complex():
            raise RuntimeError(
                f"Lamb takes dense, real gradients (got {gradient.layout} of {gradient.dtype}); use another optimizer "
                "for these parameters"
            )
        beta1, beta2 = group["betas"]
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)  # a tensor, and of float32, as torch's optimizers have it
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        step = state["step"].item()
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update = square.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"]).mul_(1 - beta1**step)
        torch.div(mean, update, out=update)  # in place, so that there is one temporary tensor
        if group["weight_decay"]:
            update.add_(p, alpha=group["weight_decay"])
        p.add_(update, alpha=-float(group["lr"]) * _trust_ratio(p, update))


def _trust_ratio(weights: torch.Tensor, update: torch.Tensor) -> float:
    weight_norm = torch.linalg.vector_norm(weights, dtype=torch.promote_types(weights.dtype, torch.float32)).item()
    update_norm = torch.linalg.vector_norm(update, dtype=torch.promote_types(update.dtype, torch.float32)).item()
    return weight_norm / update_norm if weight_norm > 0 and update_norm > 0 else 1.0


def _check(group: dict[str, Any]) -> None:
    """Raise ValueError unless the hyper-parameters are in range; NaN is in none."""
    lr, betas, eps, decay = (group[key] for key in ("lr", "betas", "eps", "weight_decay"))
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must have one element (got a tensor of shape {list(lr.shape)})")
    for name, value in {"lr": lr, "eps": eps, "weight_decay": decay}.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be at least 0 and finite (got {value})")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers of at least 0 and below 1 (got {betas})")
