"""Work in a second thread, which a model under L2L refuses."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

REFUSAL = "a model under L2L serves one thread at a time"


def in_another_thread(work: Callable[[], object]) -> list[BaseException]:
    """Run `work` in a thread of its own, and return what it raised."""
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(work).exception()
    return [] if error is None else [error]
