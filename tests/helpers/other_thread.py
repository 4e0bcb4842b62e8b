"""Work in a second thread, which a model under L2L refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable

REFUSAL = "a model under L2L serves one thread at a time"


def in_another_thread(work: Callable[[], object]) -> list[BaseException]:
    """Run `work` in a thread of its own, and return what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised
