"""Functions that run alternately in one thread: one runs at a time, until it waits for the others.

Each has a stack of its own: a greenlet. Threads that take turns would not do: autograd numbers the nodes of each
thread by themselves, and a backward visits nodes in the order of these numbers, so that it would go through the layers
of one function after the layers of another one.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import greenlet
import torch

from hf_l2l.compat import ModeCounts, Modes, put_modes, take_modes
from hf_l2l.runtime.compute_state import AutocastState

T = TypeVar("T")


class _Settings(NamedTuple):
    """What torch has for a thread, and code sets for itself in a block that need not end before another one runs."""

    grad_enabled: bool
    autocast: AutocastState
    caches: bool
    """Whether autocast keeps what it has cast."""
    modes: Modes

    @classmethod
    def taken(cls, counts: ModeCounts, device: torch.device) -> _Settings:
        """The settings of now, of which the modes end that are beside the `counts` of those outside."""
        modes = take_modes(counts)
        return cls(torch.is_grad_enabled(), AutocastState.current(device), torch.is_autocast_cache_enabled(), modes)

    def set(self) -> None:
        """Let them be those of this thread, from now on."""
        torch.set_grad_enabled(self.grad_enabled)
        self.autocast.set()
        torch.set_autocast_cache_enabled(self.caches)
        # A weight that autocast has cast for one must not serve another one: their gradients would be added in the
        # dtype of the cast.
        torch.clear_autocast_cache()
        put_modes(self.modes)


class _Coroutine(greenlet.greenlet):
    """One of the functions."""

    number: int
    waits_for: object = None
    """What it waits for; None before it has begun."""
    turns: int = 0
    """How often it has waited."""
    settings: _Settings | None = None
    own: Any = None
    """What the caller has for it."""


class Coroutines(Generic[T]):
    """Runs functions that wait for one another: those that wait for the same come one after the other.

    The last function goes first, so that a backward, which visits what was made last first, visits the first one
    first.
    """

    def __init__(self, device: torch.device, swap: Callable[[Any], Any] = lambda _: None) -> None:
        """Of functions that compute on `device`. `swap` puts something in the place of what a caller has for the
        function that runs, and returns what was there; None stands for nothing."""
        self._device, self._swap = device, swap
        self._all: list[_Coroutine] = []
        self._here: object = None
        """What the one that ran last has waited for."""
        self._ends = False

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """What the functions return, in their order.

        Raises:
            BaseException: what one of them raises; the others end there, where they wait.
        """
        results: list[Any] = [None] * len(functions)

        def work(number: int) -> None:
            results[number] = functions[number]()

        self._counts, self._ends, self._here = ModeCounts.now(), False, None
        for number in range(len(functions)):
            each = _Coroutine(work)
            each.number, each.gr_context = number, contextvars.copy_context()
            self._all.append(each)
        own = _Settings.taken(self._counts, self._device)
        try:
            while alive := [each for each in self._all if not each.dead]:
                self._go_on(self._next(alive), own)
        finally:
            self._end(own)
            own.set()
        return results

    def wait_for(self, what: object) -> None:
        """Let the others run until they have come as far as this one, or wait for something else than `what`."""
        each = greenlet.getcurrent()
        assert isinstance(each, _Coroutine), "called in one of the functions"
        if self._ends:
            raise greenlet.GreenletExit
        each.waits_for, each.turns = what, each.turns + 1
        each.settings, each.own = _Settings.taken(self._counts, self._device), self._swap(None)
        assert each.parent is not None, "whoever runs the functions waits for them"
        each.parent.switch()

    def _next(self, alive: Sequence[_Coroutine]) -> _Coroutine:
        """Who waits for what was there last; else who is furthest behind. Of several, the last one."""
        ready = [each for each in alive if each.waits_for is self._here and each.turns]
        if not ready:
            least = min(each.turns for each in alive)
            ready = [each for each in alive if each.turns == least]
        return ready[-1]

    def _go_on(self, each: _Coroutine, own: _Settings) -> None:
        self._here = each.waits_for
        self._enter(each, own if each.settings is None else each.settings)
        try:
            each.switch(*(() if each.turns else (each.number,)))
        finally:
            if each.dead:
                _Settings.taken(self._counts, self._device)  # what it has left

    def _end(self, own: _Settings) -> None:
        """End those that have not: each leaves the blocks that it is inside of."""
        self._ends = True
        for each in [each for each in self._all if not each.dead]:
            if each.settings is not None:
                self._enter(each, each.settings)
                each.throw()
                _Settings.taken(self._counts, self._device)
        self._all.clear()

    def _enter(self, each: _Coroutine, settings: _Settings) -> None:
        settings.set()
        self._swap(each.own)
