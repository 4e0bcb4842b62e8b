"""Says where a program is that has been silent for long."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL_S = 10.0
"""Of silence, until a line is logged."""

logger = logging.getLogger("hf_l2l")


class Whereabouts:
    """Logs one line every `INTERVAL_S` seconds, of where it was told that the program is."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Something begins now that may take long."""
        self._begun = self._said = time.monotonic()

    def at(self, where: str) -> None:
        """Log `where`, in which "{seconds}" stands for the time since the beginning, if a line is due."""
        now = time.monotonic()
        if now - self._said >= INTERVAL_S:
            self._said = now
            # A warning, since those are seen where logging has not been set up.
            logger.warning("hf_l2l: %s", where.replace("{seconds}", f"{now - self._begun:.0f} s"))

    @contextmanager
    def inside(self, where: str) -> Iterator[None]:
        """`at`, and again whenever a line is due, as long as the block runs: another thread looks at the clock."""
        self.at(where)
        over = threading.Event()
        threading.Thread(target=self._repeat, args=(where, over), name="hf_l2l whereabouts", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _repeat(self, where: str, over: threading.Event) -> None:
        while not over.wait(max(0.0, self._said + INTERVAL_S - time.monotonic())):
            self.at(where)
