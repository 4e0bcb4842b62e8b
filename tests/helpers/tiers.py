"""Which combinations of parameters `make test` runs, and which `make test-all` alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def combined(*dimensions: Iterable[Any], one_in: int) -> list[Any]:
    """All combinations of values, of which one in `one_in` is fast and the others are slow.

    They are spread evenly: each value is in a fast one if another dimension has at least `one_in` values.
    """
    found = []
    for numbered in itertools.product(*(list(enumerate(values)) for values in dimensions)):
        numbers, values = zip(*numbered, strict=True)
        marks = () if sum(numbers) % one_in == 0 else pytest.mark.slow
        found.append(pytest.param(*values, marks=marks, id="-".join(_named(value) for value in values)))
    return found


def _named(value: Any) -> str:
    return getattr(value, "__name__", str(value))
