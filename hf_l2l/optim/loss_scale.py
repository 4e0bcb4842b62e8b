"""Dynamic loss scaling for fp16: gradients are made larger on the device, so that small ones are not lost.

The policy is that of `torch.amp.GradScaler`: a step whose gradients are not all finite is skipped, and the scale is
multiplied by `backoff`; after `interval` steps that were made in a row it is multiplied by `growth`. The scale enters
at the outputs of the model and leaves on the fp32 sums, so that any training loop has it: neither the loss that a
program sees nor `p.grad` is scaled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hf_l2l.logits.deferred import DeferredLogits
from hf_l2l.runtime.tensors import map_tensors

_SMALLEST = 2.0**-100
_COPIED = 2**20
"""Elements up to which an output is copied; there may be no room for two of larger ones, as logits of a vocabulary."""


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, factor: Callable[[], float], tensor: torch.Tensor) -> torch.Tensor:
        ctx.factor = factor
        # Some loops divide a loss or logits in place, which a view would not allow.
        return tensor.clone() if tensor.numel() <= _COPIED else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient * ctx.factor()


def with_gradients_times(factor: Callable[[], float], value: Any) -> Any:
    """`value` with every tensor in it that needs a gradient replaced by one that hands on `factor` times as much.

    The factor is asked for in the backward, since a step may have changed it after the forward.
    """
    if not torch.is_grad_enabled():
        return value
    scaled = partial(_Scaled.apply, factor)

    def of_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        return tensor.deferred.derived(scaled, step=scaled) if isinstance(tensor, DeferredLogits) else scaled(tensor)

    return map_tensors(of_tensor, value)


class LossScale:
    """The loss scale, with the interface of `torch.amp.GradScaler`, which `Accelerator` asks for as its `scaler`.

    With growth and backoff 1 it stays what it is, and only the vote is left: a step is made, or skipped and counted.
    Losses and gradients are scaled inside the engine, so that for a program `scale` and `unscale_` do nothing.
    """

    def __init__(
        self, initial: float = 2.0**16, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000
    ) -> None:
        self.value = initial
        """What gradients are multiplied by on the device now."""
        self.growth = growth
        self.backoff = backoff
        self.interval = interval
        self.steps = 0
        """Made in a row since the value changed."""
        self.skipped = 0
        """Steps skipped, in all."""
        self.may_step: Callable[[], bool] = lambda: True
        """Whether the gradients of this step are finite; the EPS sets it to its own vote."""

    @property
    def is_dynamic(self) -> bool:
        """Whether gradients are scaled at all."""
        return self.growth != 1

    def vote(self, *, finite: bool) -> bool:
        """Whether a step may be made with gradients that are `finite` or not; the scale changes accordingly."""
        if not finite:
            # A float has room for this many halvings only, and nothing can be divided by 0.
            self.value = max(self.value * self.backoff, _SMALLEST) if self.is_dynamic else self.value
            self.steps, self.skipped = 0, self.skipped + 1
            return False
        self.steps += 1
        if self.steps == self.interval:
            self.value, self.steps = self.value * self.growth, 0
        return True

    # ---- the interface of torch.amp.GradScaler

    def scale(self, outputs: Any) -> Any:
        """The outputs as they are: the engine scales their gradients."""
        return outputs

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: gradients on the host are not scaled."""

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer's step, or one that finds no gradients and that no patch of `optimizer.step` sees.

        Accelerate takes a step that does not call the optimizer's `step` for a skipped one; schedulers then wait.
        """
        if self.may_step():
            return optimizer.step(*args, **kwargs)
        return type(optimizer).step(optimizer, *args, **kwargs)

    def update(self) -> None:
        """Do nothing: the scale has changed with the vote."""

    def get_scale(self) -> float:
        """The loss scale now."""
        return self.value

    def is_enabled(self) -> bool:
        """True: steps are voted on."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it: the keys of `torch.amp.GradScaler`, and the number of skipped steps."""
        return {
            "scale": self.value,
            "growth_factor": self.growth,
            "backoff_factor": self.backoff,
            "growth_interval": self.interval,
            "_growth_tracker": self.steps,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, or from that of a `GradScaler`; growth, backoff and interval stay as configured."""
        if self.is_dynamic:  # a fixed one may be given the state of an fp16 run
            self.value, self.steps = state["scale"], state["_growth_tracker"]
        self.skipped = state.get("skipped", 0)
