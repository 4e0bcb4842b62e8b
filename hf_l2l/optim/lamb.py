"""LAMB, the optimizer of the experiments in arXiv:2002.05645 (You et al., arXiv:1904.00962, algorithm 2).

The LAMB of timm, with which this one is compared in tests, counts steps per group, so it cannot step layer by layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from hf_l2l.optim.chunked_pass import update_in_chunks
from hf_l2l.optim.forms import LAMB, Chunk, ParameterUpdate


class Lamb(torch.optim.Optimizer):
    """Adam with the update of each parameter tensor scaled by the norm of its weights.

    Algorithm 2 with phi the identity, for every parameter tensor w: from Adam's bias-corrected moments m and v,
    r = m / (sqrt(v) + eps) + weight_decay * w; then w <- w - lr * |w| / |r| * r. If a norm is 0, |w| / |r| is taken as
    1. Clipping by the norm of all gradients is left to the caller.

    Args:
        params: parameters, floating point and dense, or groups of them.
        lr: the step size relative to the norm of the weights, a number or a tensor with one element.
        betas: decay of the first and second moments.
        eps: added to the root of the second moment.
        weight_decay: fraction of the weights that is added to the update before scaling.

    Raises:
        ValueError: if a hyper-parameter is out of range.
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
        """Add a group; the constructor calls this, too.

        Raises:
            ValueError: if a hyper-parameter is out of range.
        """
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient.

        Args:
            closure: recomputes the loss and the gradients, if given.

        Returns:
            The return value of the closure, or None.

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
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)  # a float32 tensor, as in torch's optimizers
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        step, moments = state["step"].item(), (state["exp_avg"], state["exp_avg_sq"])
        of_numbers = {**group, "lr": float(group["lr"])}
        update = ParameterUpdate(p, gradient, 1.0, of_numbers, state, None, (0, 0), moments, step=step)
        update.numbers = LAMB.numbers(of_numbers, 1.0, step)
        if all(_is_of_the_host(tensor) for tensor in (p, gradient, *moments)):
            update_in_chunks(LAMB, update)  # with sums in their order: the bits of `one_pass`
            return
        change = LAMB.direction(Chunk(p, gradient, moments, update))
        norms = (torch.linalg.vector_norm(each, dtype=torch.float64).item() for each in (p, change))
        p.sub_(change.mul_(LAMB.size(of_numbers, *norms)))


def _is_of_the_host(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()


def _check(group: dict[str, Any]) -> None:
    """Raise ValueError unless the hyper-parameters are in range; NaN is out of every range."""
    lr, betas, eps, decay = (group[key] for key in ("lr", "betas", "eps", "weight_decay"))
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must have one element (got a tensor of shape {list(lr.shape)}); give a number")
    for name, value in {"lr": lr, "eps": eps, "weight_decay": decay}.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be at least 0 and finite (got {value}); leave it out for the default")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(
            f"betas must be two numbers of at least 0 and below 1 (got {betas}); leave them out for the default"
        )
