"""Which cases `make test` runs, and which `make test-all` or some devices alone: others are not collected."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import pytest

from devices import DEVICE, ON_EVERY_DEVICE

ALL = os.environ.get("L2L_TESTS") == "all"
"""Whether this is `make test-all`."""
T = TypeVar("T")


nightly = pytest.mark.nightly
"""Decorates a test that `make test-all` alone runs: one that is large, or of what other tests reach, too."""
cpu_suffices = pytest.mark.cpu_suffices
"""Decorates a test whose result does not depend on the device, or which reaches what others reach on the simulated
accelerator: there, `make test-all` alone runs it."""
on_the_host = pytest.mark.on_the_host
"""Decorates a test of what only a device that shares the memory of the host has."""
on_a_device = pytest.mark.on_a_device
"""Decorates a test of what only a device with memory of its own has."""
on_sim = pytest.mark.on_sim
"""Decorates a test of what the simulated accelerator alone can tell: exact bytes, a wait that is missing."""
not_on_cuda = pytest.mark.not_on_cuda
"""Decorates a test of bits that the host's arithmetic alone has, which is that of the simulated accelerator."""
ONLY = {"on_the_host": ("cpu",), "on_a_device": ("sim", "cuda"), "on_sim": ("sim",), "not_on_cuda": ("cpu", "sim")}
"""Marks of tests that are collected for some devices alone."""


def chosen(
    cases: list[T], marks: Collection[str], folder: str, *, device: str = DEVICE, is_all: bool = ALL
) -> list[T]:
    """Those of the cases of one test, in `folder`, that this run has: none of a test for `make test-all` alone, or for
    another device. `make test` deals the cases of a test to the CPU and to the simulated accelerator, where they take
    three times as long: three to the first, then one to the second; each has one at least. A test of what only a
    device with memory of its own has is `on_a_device`, and not dealt."""
    only = [ONLY[mark] for mark in marks if mark in ONLY]
    if any(device not in each for each in only) or ("nightly" in marks and not is_all):
        return []
    if "cpu_suffices" in marks and device == "sim" and not is_all:
        return []
    if is_all or folder not in ON_EVERY_DEVICE or device == "cuda" or only or "cpu_suffices" in marks:
        return cases
    if len(cases) == 1:
        return cases
    first = min(3, len(cases) - 1)  # of those on the simulated accelerator
    return [case for number, case in enumerate(cases) if ((number - first) % 4 == 0) == (device == "sim")]


def more(*values: Any) -> tuple[Any, ...]:
    """Values that `make test-all` alone runs, beside those it has in common with `make test`."""
    return values if ALL else ()


def times(few: int, many: int) -> int:
    """How many examples are drawn: few by `make test`, many by `make test-all`."""
    return many if ALL else few


def combinations(
    *dimensions: Iterable[Any],
    together: int = 2,
    at_night: int | None = None,
    where: Callable[..., bool] = lambda *_: True,
) -> list[Any]:
    """Combinations of one value of each dimension, of those for which `where` is true.

    `make test` has so many that any two values which can meet do; or, with `together=1`, that each value occurs.
    `make test-all` has all of them; or, where those are too many, so many that any `at_night` values meet.
    """
    every = [values for values in itertools.product(*map(tuple, dimensions)) if where(*values)]
    strength = at_night if ALL else together
    some = every if strength is None else few(every, min(strength, len(dimensions)))
    return [pytest.param(*each, id="-".join(map(_named, each))) for each in some]


def few(every: list[tuple[Any, ...]], together: int) -> list[tuple[Any, ...]]:
    """A few of these combinations in which so many values occur together as do in any: always the one that has most
    of what is missing, the first of several."""
    pairs = [set(itertools.combinations(enumerate(map(_named, each)), together)) for each in every]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(every)), key=lambda number: len(pairs[number] & missing))
        missing -= pairs[best]
        chosen.append(every[best])
    return chosen


def _named(value: Any) -> str:
    return str(getattr(value, "__name__", value))
