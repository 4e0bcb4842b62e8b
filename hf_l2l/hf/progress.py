"""A progress bar for work that takes long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")
_SHOW_AFTER_S = 5


class _Bar(tqdm):  # type: ignore[misc]  # tqdm ships no types
    """tqdm without the thread that redraws bars which have not moved for long."""

    monitor_interval = 0


def with_progress_bar(units: Sequence[T], what: str) -> Iterator[T]:
    """Go through units of work, with a bar called `what` once it has taken more than 5 seconds."""
    yield from _Bar(units, desc=what, delay=_SHOW_AFTER_S, leave=False)
