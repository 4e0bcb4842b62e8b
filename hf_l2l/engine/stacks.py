"""Functions that run in stacks of their own, in one thread: one runs at a time, until it waits for the others.

A stack is a greenlet. Threads that take turns would not do: autograd numbers the nodes of each thread by themselves,
and a backward visits nodes in the order of these numbers, so that it would go through the layers of one function after
the layers of another one.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import greenlet
import torch
from torch.utils._python_dispatch import _pop_mode, _push_mode

from hf_l2l.runtime.compute_state import AutocastState

T = TypeVar("T")


class _Settings(NamedTuple):
    """What torch has for a thread, and code sets for itself in a block that need not end before another stack runs."""

    grad_enabled: bool
    autocast: AutocastState
    caches: bool
    """Whether autocast keeps what it has cast."""
    hooks: list[tuple[Callable[..., Any], Callable[..., Any]]]
    """Those of saved tensors, the innermost last."""
    function_modes: list[Any]
    dispatch_modes: list[Any]
    """Those of the stack alone, the innermost last."""


class _Base(NamedTuple):
    """How many modes there were outside all stacks."""

    function_modes: int
    dispatch_modes: int

    @classmethod
    def now(cls) -> _Base:
        return cls(torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack())


def _taken(base: _Base, device: torch.device) -> _Settings:
    """The settings of now, of which modes and hooks end."""
    hooks: list[Any] = []
    functions: list[Any] = []
    dispatches: list[Any] = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    while torch._C._len_torch_function_stack() > base.function_modes:
        functions.append(torch._C._pop_torch_function_stack())
    while torch._C._len_torch_dispatch_stack() > base.dispatch_modes:
        dispatches.append(_pop_mode())
    autocast, caches = AutocastState.current(device), torch.is_autocast_cache_enabled()
    return _Settings(torch.is_grad_enabled(), autocast, caches, hooks[::-1], functions[::-1], dispatches[::-1])


def _set(settings: _Settings) -> None:
    torch.set_grad_enabled(settings.grad_enabled)
    settings.autocast.set()
    torch.set_autocast_cache_enabled(settings.caches)
    # A weight that autocast has cast for one stack must not serve another one: their gradients would be added in the
    # dtype of the cast.
    torch.clear_autocast_cache()
    for pack, unpack in settings.hooks:
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
    for mode in settings.function_modes:
        torch._C._push_on_torch_function_stack(mode)
    for mode in settings.dispatch_modes:
        _push_mode(mode)


class _Stack(greenlet.greenlet):
    """One of the functions."""

    number: int
    waits_for: object = None
    """What it waits for; None before it has begun."""
    turns: int = 0
    """How often it has waited."""
    settings: _Settings | None = None
    own: Any = None
    """What the caller has for it."""


class Stacks(Generic[T]):
    """Runs functions that wait for one another: those that wait for the same come one after the other.

    The last function goes first, so that a backward, which visits what was made last first, visits the first one
    first.
    """

    def __init__(self, device: torch.device, swap: Callable[[Any], Any] = lambda _: None) -> None:
        """Of functions that compute on `device`. `swap` puts something in the place of what a caller has for the
        function that runs, and returns what was there; None stands for nothing."""
        self._device, self._swap = device, swap
        self._stacks: list[_Stack] = []
        self._here: object = None
        """What the one that ran last has waited for."""
        self._ends = False

    @property
    def is_inside(self) -> bool:
        """Whether one of the functions runs now."""
        return isinstance(greenlet.getcurrent(), _Stack) and greenlet.getcurrent() in self._stacks

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """What the functions return, in their order.

        Raises:
            BaseException: what one of them raises; the others end there, where they wait.
        """
        results: list[Any] = [None] * len(functions)

        def work(number: int) -> None:
            results[number] = functions[number]()

        self._base, self._ends, self._here = _Base.now(), False, None
        for number in range(len(functions)):
            stack = _Stack(work)
            stack.number, stack.gr_context = number, contextvars.copy_context()
            self._stacks.append(stack)
        own = _taken(self._base, self._device)
        try:
            while alive := [stack for stack in self._stacks if not stack.dead]:
                self._go_on(self._next(alive), own)
        finally:
            self._end(own)
            _set(own)
        return results

    def wait_for(self, what: object) -> None:
        """Let the others run until they have come as far as this one, or wait for something else than `what`."""
        stack = greenlet.getcurrent()
        assert isinstance(stack, _Stack), "called in one of the functions"
        if self._ends:
            raise greenlet.GreenletExit
        stack.waits_for, stack.turns = what, stack.turns + 1
        stack.settings, stack.own = _taken(self._base, self._device), self._swap(None)
        assert stack.parent is not None, "whoever runs the functions waits for them"
        stack.parent.switch()

    def _next(self, alive: Sequence[_Stack]) -> _Stack:
        """Who waits for what was there last; else who is furthest behind. Of several, the last one."""
        ready = [stack for stack in alive if stack.waits_for is self._here and stack.turns]
        if not ready:
            least = min(stack.turns for stack in alive)
            ready = [stack for stack in alive if stack.turns == least]
        return ready[-1]

    def _go_on(self, stack: _Stack, own: _Settings) -> None:
        self._here = stack.waits_for
        self._enter(stack, own if stack.settings is None else stack.settings)
        try:
            stack.switch(*(() if stack.turns else (stack.number,)))
        finally:
            if stack.dead:
                _taken(self._base, self._device)  # what it has left

    def _end(self, own: _Settings) -> None:
        """End those that have not: each leaves the blocks that it is inside of."""
        self._ends = True
        for stack in [stack for stack in self._stacks if not stack.dead]:
            if stack.settings is not None:
                self._enter(stack, stack.settings)
                stack.throw()
                _taken(self._base, self._device)
        self._stacks.clear()

    def _enter(self, stack: _Stack, settings: _Settings) -> None:
        _set(settings)
        self._swap(stack.own)
