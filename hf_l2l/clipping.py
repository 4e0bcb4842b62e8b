"""Clipping by the norm of all gradients, to the bit as `torch.nn.utils.clip_grad_norm_` does it.

The norm comes first; multiplying the gradients may be left to whoever uses them next, which is the thread that updates
the weights unless somebody looks at them before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

from hf_l2l.pending import Pending, can_hold, hold, let_go, pending_of, settle, untouched


class Scaling(Pending):
    """A gradient that is to be multiplied before its values are used."""

    def __init__(self, factor: torch.Tensor) -> None:
        self.factor = factor
        self._lock = threading.Lock()

    def before_values(self, tensor: torch.Tensor) -> None:
        with self._lock:
            if pending_of(tensor) is self:  # and no other thread was faster
                with untouched(), torch.no_grad():
                    tensor.mul_(self.factor)
                let_go(tensor, self)


def taken_factor(gradient: torch.Tensor) -> torch.Tensor | None:
    """What `gradient` is still to be multiplied by, which the caller sees to from now on."""
    pending = pending_of(gradient)
    let_go(gradient)
    return pending.factor if isinstance(pending, Scaling) else None


@torch.no_grad()
def clip(gradients: Iterable[torch.Tensor], total_norm: torch.Tensor, max_norm: float, *, later: bool) -> None:
    """Scale `gradients`, whose norm is `total_norm` (0-dim, on the host), so that it is at most `max_norm`.

    With `later`, each of them when its values are used next.
    """
    factor = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    if factor == 1.0:
        return  # and not if it is nan
    for gradient in gradients:
        if later and can_hold(gradient):
            settle(gradient)
            hold(gradient, Scaling(factor))
        else:
            gradient.mul_(factor)
