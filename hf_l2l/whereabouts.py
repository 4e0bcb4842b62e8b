"""Says where a program is that has been silent for long."""

from __future__ import annotations

import logging
import time

INTERVAL_S = 10.0
"""Of silence, until a line is logged."""

logger = logging.getLogger("hf_l2l")


class Whereabouts:
    """Logs one line every `INTERVAL_S` seconds, when it is told where the program is at that moment.

    It has no thread of its own: between two calls nothing is logged.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Something begins now that may take long."""
        self._begun = self._said = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether a line would be logged now."""
        return time.monotonic() - self._said >= INTERVAL_S

    def at(self, where: str) -> None:
        """Log `where`, in which "{seconds}" stands for the time since the beginning, if a line is due."""
        if self.is_due:
            self._said = time.monotonic()
            # A warning, since those are seen where logging has not been set up.
            logger.warning("hf_l2l: %s", where.replace("{seconds}", f"{self._said - self._begun:.0f} s"))
