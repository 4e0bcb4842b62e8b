"""Eager updates: finds the masters that have all gradients of a step, and keeps track of updates before the step.

The records of the masters count calls in the forward and arrivals of their gradients in the backward, since a layer
may be called more than once in a step, and a parameter may be tied. Gradients of a call whose graph is discarded never
arrive; its masters are then updated in `optimizer.step()`, which is late but correct.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from hf_l2l.compat import without_interception
from hf_l2l.eps.masters import Master
from hf_l2l.eps.pending import Update
from hf_l2l.optim.layer_optimizers import hyperparameters_of
from hf_l2l.runtime.worker import Worker

EAGER_NEEDS_OPTIMIZER = (
    "eps_update='eager' updates during backward and needs a wrapped optimizer before (none was given); call "
    "eps.wrap(optimizer) first"
)


class EagerStep:
    """The masters already updated in this step, and with which hyper-parameters. It stays empty in other modes."""

    def __init__(self, worker: Worker, is_accumulating: Callable[[], bool]) -> None:
        """`is_accumulating` returns True in a backward if another one follows before the step."""
        self.worker = worker
        self._is_accumulating = is_accumulating
        self._accumulates = False
        self._updated: set[Master] = set()
        """Masters that this step updated before `optimizer.step()`."""
        self._used: dict[torch.optim.Optimizer, list[dict[str, Any]]] = {}
        """Optimizer -> the hyper-parameters that its updates used."""

    @property
    def is_within_step(self) -> bool:
        """Whether masters have been updated for a step that is not over."""
        return bool(self._updated)

    @property
    def is_accumulating(self) -> bool:
        """Whether another backward follows before the step."""
        return self._accumulates or self._is_accumulating()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Inside, backwards are micro-steps that another one follows, so that no update is made."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    def complete(self, masters: Iterable[Master]) -> list[Master]:
        """Count the arrival of the gradients of one call.

        Returns:
            those of `masters` that will get no more gradients in this step.
        """
        masters = list(masters)
        for master in masters:
            master.arrivals += 1
        if self.is_accumulating:
            return []
        return [m for m in masters if m.arrivals >= m.calls]

    def begin(self, optimizer: torch.optim.Optimizer, masters: Iterable[Master]) -> None:
        """Record that `masters` are updated by `optimizer`, with its current hyper-parameters."""
        self._used.setdefault(optimizer, hyperparameters_of(optimizer))
        self._updated.update(masters)

    def refuse_second(self, masters: Iterable[Master]) -> None:
        """Raise RuntimeError for a gradient of a master that has already been updated in this step."""
        if not self._updated:
            return
        late = next((master for master in masters if master in self._updated), None)
        if late is not None:
            self._fail(
                f"eps_update='eager' has updated {late.name} with the gradients of a backward, and got "
                "more before optimizer.step(); put every backward but the last of a step in `with eps.accumulate():`, "
                "or use eps_update='deferred'"
            )

    def end(self, optimizer: torch.optim.Optimizer, masters: list[Master], *, has_later_hook: bool) -> None:
        """End the step of `optimizer`, which updates these `masters`.

        Raises:
            RuntimeError: if gradients, hooks, optimizer or hyper-parameters have changed since the updates.
        """
        if not self._updated:
            return
        with without_interception():  # gradients of a loss that uses masters directly do not pass through the EPS
            self.refuse_second(m for m in masters if m.parameter.grad is not None)
        if has_later_hook:
            self._fail(
                "eps_update='eager' has used the gradients before hooks of optimizer.step() could see them (got a "
                "hook that was registered after eps.wrap); register it before, or use eps_update='deferred'"
            )
        used = self._used.pop(optimizer, None)
        if used is None and not self._updated.isdisjoint(masters):
            self._fail(
                "eps_update='eager' has used the gradients with the optimizer that was wrapped before backward (got a "
                f"step of another {type(optimizer).__name__}); call eps.wrap(optimizer) before backward"
            )
        if used is not None and used != hyperparameters_of(optimizer):
            self._fail(
                "hyper-parameters must be set before backward with eps_update='eager', which uses them there (they "
                f"were {used}, and are {hyperparameters_of(optimizer)} in step()); use eps_update='deferred'"
            )
        ending = self._updated.intersection(masters)
        self._updated.difference_update(masters)
        of_updates: dict[Update, list[Master]] = {}
        for master in ending:
            master.guards_grad = False
            assert master.update is not None, "the update of a step is that of its masters until the step ends"
            of_updates.setdefault(master.update, []).append(master)
        for update, updated in of_updates.items():
            if update.end_step():  # else the worker makes its masters ordinary parameters again
                Master.end_update(updated)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Report an exception inside as a failed engine if some layers have been updated and others have not."""
        with ExitStack() as failure:
            failure.callback(self.fail_half_updated)
            yield
            failure.pop_all()

    def fail_half_updated(self) -> None:
        """Fail the engine after a failed backward, if some layers have been updated with its gradients."""
        if self._updated:
            self.worker.fail(RuntimeError("a backward failed after some layers had been updated with its gradients"))

    def _fail(self, rule: str) -> None:
        error = RuntimeError(rule)
        self.worker.fail(error)
        raise error
