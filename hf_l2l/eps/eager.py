"""The step that eager updates are in the middle of: what they have used before `optimizer.step()` is called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from hf_l2l.eps.update_task import Update
from hf_l2l.eps.weight_copies import Copies
from hf_l2l.model.masters import Masters
from hf_l2l.optim.layerwise_step import hyperparameters_of
from hf_l2l.runtime.tensors import untouched
from hf_l2l.runtime.worker import Worker


class EagerStep:
    """Which masters have been updated, with what. Nothing is in it in the other modes."""

    def __init__(self, masters: Masters, worker: Worker, copies: Copies) -> None:
        self.masters = masters
        self.copies = copies
        self.worker = worker
        self._updated: dict[torch.Tensor, Update] = {}
        self._used: dict[torch.optim.Optimizer, list[dict[str, Any]]] = {}
        """Hyper-parameters of the optimizers."""

    def begin(self, optimizer: torch.optim.Optimizer, masters: Iterable[torch.Tensor], update: Update) -> None:
        """`update` is going to update `masters`."""
        self._used.setdefault(optimizer, hyperparameters_of(optimizer))
        self._updated.update(dict.fromkeys(masters, update))

    def refuse_second(self, masters: Iterable[torch.Tensor]) -> None:
        """Raise RuntimeError if a gradient comes for a master that has been updated in this step."""
        late = next((master for master in masters if master in self._updated), None)
        if late is not None:
            self._fail(
                f"eps_update='eager' has updated {self.masters.name(late)} with the gradients of a backward, and got "
                "more before optimizer.step(); put every backward but the last of a step in `with eps.accumulate():`, "
                "or use eps_update='deferred'"
            )

    def end(self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], *, later_hooks: bool) -> None:
        """`optimizer`, which has these `parameters`, steps.

        Raises:
            RuntimeError: if what the step is to be has changed since the gradients were used.
        """
        with untouched():  # a loss that uses masters themselves has gradients that do not pass through the EPS
            self.refuse_second(p for p in parameters if p in self._updated and p.grad is not None)
        if self._updated and later_hooks:
            self._fail(
                "eps_update='eager' has used the gradients before hooks of optimizer.step() could see them (got a "
                "hook that was registered after eps.wrap); register it before, or use eps_update='deferred'"
            )
        used = self._used.pop(optimizer, None)
        if used is None and any(p in self._updated for p in parameters):
            self._fail(
                "eps_update='eager' has used the gradients with the optimizer that it had in backward (got a step of "
                f"another {type(optimizer).__name__}); call eps.wrap(optimizer) before backward"
            )
        if used is not None and used != hyperparameters_of(optimizer):
            self._fail(
                "hyper-parameters must be set before backward with eps_update='eager', which uses them there (they "
                f"were {used}, and are {hyperparameters_of(optimizer)} in step()); use eps_update='deferred'"
            )
        for p in parameters:
            update = self._updated.pop(p, None)
            if update is not None:
                update.in_step = False
                if update.task.done:
                    self.copies.let_go(p, update)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """What fails inside must not leave some layers updated and others not, unsaid."""
        with ExitStack() as failure:
            failure.callback(self.fail_half_updated)
            yield
            failure.pop_all()

    def fail_half_updated(self) -> None:
        """A backward has failed."""
        if self._updated:
            self.worker.fail(RuntimeError("a backward failed after some layers had been updated with its gradients"))

    def _fail(self, rule: str) -> None:
        error = RuntimeError(rule)
        self.worker.fail(error)
        raise error


class Arrivals:
    """Which masters have all the gradients of a step: calls of the forward and arrivals of the backward are counted.

    A layer may be called more than once in a step, and a parameter may be tied. Counting errs on one side only: a call
    whose graph is thrown away never arrives, and its masters are updated in `optimizer.step()`.
    """

    def __init__(self, goes_on: Callable[[], bool]) -> None:
        """With `goes_on`, which says in a backward whether another one follows before the step."""
        self._goes_on = goes_on
        self._accumulating = False
        self._calls: Counter[torch.Tensor] = Counter()
        self._arrivals: Counter[torch.Tensor] = Counter()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Another micro-step follows the ones inside."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def expect(self, masters: Iterable[torch.Tensor]) -> None:
        """A call that `masters` may get gradients from is in the graph."""
        self._calls.update(masters)

    def count(self, masters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of one such call have arrived; returns those of `masters` that will get no more."""
        masters = list(masters)
        self._arrivals.update(masters)
        if self._accumulating or self._goes_on():
            return []
        return [m for m in masters if self._arrivals[m] >= self._calls[m]]

    def forget(self, masters: Iterable[torch.Tensor]) -> None:
        """The step of `masters` is over."""
        for master in masters:
            self._calls.pop(master, None)
            self._arrivals.pop(master, None)
