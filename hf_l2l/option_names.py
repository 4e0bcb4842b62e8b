"""What options are called: `L2LConfig` and the Trainer's arguments have different names for some."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

SHORT_NAMES = ("ubatch_size", "stash", "cmp", "eps_update", "device_memory_budget")
"""Options that the Trainer's arguments call what `L2LConfig` calls them; the others begin with "l2l_" there."""

_called: ContextVar[Callable[[str], str]] = ContextVar("_called", default=str)


@contextmanager
def options_called(named: Callable[[str], str]) -> Iterator[None]:
    """Inside, errors name options as `named` does."""
    before = _called.set(named)
    try:
        yield
    finally:
        _called.reset(before)


@contextmanager
def options_of_the_trainer() -> Iterator[None]:
    """Inside, errors name options as the Trainer's arguments do."""
    with options_called(argument):
        yield


def argument(name: str) -> str:
    """What the Trainer's arguments call the option `name` of `L2LConfig`."""
    return name if name in SHORT_NAMES else f"l2l_{name}"


def option(name: str) -> str:
    """What the user called the option `name` of `L2LConfig`; every error about one says it so."""
    return _called.get()(name)
