"""Says how far something has come that takes long."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")
_SHOW_AFTER_S = 5.0


def with_progress_bar(units: Sequence[T], what: str) -> Iterator[T]:
    """Go through units of work; what takes long says how far it has come."""
    begun, bar = time.monotonic(), None
    try:
        for done, unit in enumerate(units):
            yield unit
            if bar is None and time.monotonic() - begun > _SHOW_AFTER_S:
                bar = tqdm(desc=what, total=len(units), initial=done, leave=False)
            if bar is not None:
                bar.update()
    finally:
        if bar is not None:
            bar.close()
