"""An update in the background: when there is one, what readers of its weights wait for, and what the worker does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch

from hf_l2l.eps.pending import Pending, let_go
from hf_l2l.eps.weight_copies import Copies
from hf_l2l.optim.layerwise_step import Part
from hf_l2l.report.timeline import Timeline
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.runtime.observer import aside
from hf_l2l.runtime.worker import Task


class Update(Pending):
    """Masters that the worker is to update."""

    def __init__(self, task: Task, timeline: Timeline, *, in_step: bool) -> None:
        self.task = task
        self.timeline = timeline
        self.in_step = in_step
        """Whether this is an eager update, and `optimizer.step()` has not been called yet."""
        self.made = False
        """Whether it is over, and has not failed."""

    def before_look(self, tensor: torch.Tensor) -> None:
        waiting = nullcontext() if self.task.done else self.timeline.waiting_for_eps(self.task.what)
        with waiting:
            self.task.wait(wait_reasons.WEIGHTS_UPDATED)

    def before_values(self, tensor: torch.Tensor) -> None:
        self.before_look(tensor)
        if not self.in_step:
            let_go(tensor, self)

    def before_grad(self, tensor: torch.Tensor) -> None:
        if self.in_step:
            self.task.check()
            raise RuntimeError(
                "eps_update='eager' has used this gradient during backward, and there is no p.grad any more; use "
                "eps.grad_norm() for the norm, and eps_update='deferred' to clip, change or drop gradients"
            )


def carry_out(
    part: Part,
    masters: list[torch.Tensor],
    factors: Mapping[torch.Tensor, torch.Tensor],
    check: Callable[[], None],
    landed: stream.Point | None,
    update: Update,
    copies: Copies,
) -> None:
    """Update `masters` and what travels in their place, on a thread of the worker.

    Args:
        part: the update.
        masters: those that it updates.
        factors: master -> what its gradient is multiplied by first.
        check: raises if the gradients, which are there by then, must not be used.
        landed: after which they are there.
        update: what readers of the masters wait for.
        copies: what travels.
    """
    if landed is not None:
        with aside():
            stream.wait(landed, wait_reasons.LAYER_GRADIENTS_DOWNLOADED, host=True)
    with update.timeline.host_works(update.task.what):
        check()
        part.run(factors)
        copies.renew(masters, update)
    update.made = True
    if not update.in_step:
        for master in masters:
            copies.let_go(master, update)
