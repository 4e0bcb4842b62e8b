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
    """Logs one line every `INTERVAL_S` seconds that the program is in places that take long.

    Another thread looks at the clock, one for the whole process; it ends when there was nothing to look at for long.
    """

    def __init__(self) -> None:
        self.place: str | None = None
        self._before_s, self._since, self._said_s = 0.0, 0.0, 0.0

    def go(self, place: str | None) -> None:
        """The program is at `place` now, in which "{seconds}" stands for the time in all places; or it is away."""
        now = time.monotonic()
        self._before_s, self._since, self.place = self._seconds(now), now, place
        _Lookout.set(self, looks=place is not None)

    @contextmanager
    def inside(self, place: str) -> Iterator[None]:
        """`go` there for the block, and back to where it was."""
        before = self.place
        self.go(place)
        try:
            yield
        finally:
            self.go(before)

    def say(self) -> None:
        """Log a line if one is due."""
        place, seconds = self.place, self._seconds(time.monotonic())
        if place is not None and seconds - self._said_s >= INTERVAL_S:
            self._said_s = seconds
            # A warning, since those are seen where logging has not been set up.
            logger.warning("%s", place.replace("{seconds}", f"{seconds:.0f} s"))

    def _seconds(self, now: float) -> float:
        return self._before_s + (now - self._since if self.place is not None else 0.0)


class _Lookout:
    """The thread, and what it looks at: text alone, so that it keeps no model alive."""

    lock = threading.Lock()
    at: set[Whereabouts] = set()
    thread: threading.Thread | None = None

    @classmethod
    def set(cls, whereabouts: Whereabouts, *, looks: bool) -> None:
        with cls.lock:
            (cls.at.add if looks else cls.at.discard)(whereabouts)
            if looks and (cls.thread is None or not cls.thread.is_alive()):
                cls.thread = threading.Thread(target=cls.look, name="hf_l2l whereabouts", daemon=True)
                cls.thread.start()

    @classmethod
    def look(cls) -> None:
        idle = 0
        while True:
            time.sleep(INTERVAL_S / 10)
            with cls.lock:
                at = list(cls.at)
                idle = 0 if at else idle + 1
                if idle > 10:
                    cls.thread = None
                    return
            for whereabouts in at:
                whereabouts.say()
