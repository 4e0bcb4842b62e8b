"""Which masters have all the gradients of a step: calls of the forward and arrivals of the backward are counted.

A layer may be called more than once in a step, and a parameter may be tied. Counting errs on one side only: a call
whose graph is thrown away never arrives, and its masters are updated in `optimizer.step()`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch


class Arrivals:
    """The counts of the step that is under way."""

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
