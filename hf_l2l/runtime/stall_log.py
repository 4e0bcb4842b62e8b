"""Says where a program is that has been silent for long."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from weakref import WeakSet

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
        self._call: tuple[int, CodeType] | None = None

    def go(self, place: str | None, call: CodeType | None = None) -> None:
        """The program is at `place` now, in which "{seconds}" stands for the time in all places; or it is away.

        With `call`, it is there no longer than this thread's call of that function: an exception may have left it.
        """
        now = time.monotonic()
        self._before_s, self._since, self.place = self._seconds(now), now, place
        self._call = None if call is None else (threading.get_ident(), call)
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
        if self._call is not None and not _is_in(*self._call):
            self.go(None)
        place, seconds = self.place, self._seconds(time.monotonic())
        if place is not None and seconds - self._said_s >= INTERVAL_S:
            self._said_s = seconds
            # A warning, since those are seen where logging has not been set up.
            logger.warning("%s", place.replace("{seconds}", f"{seconds:.0f} s"))

    def _seconds(self, now: float) -> float:
        return self._before_s + (now - self._since if self.place is not None else 0.0)


def _is_in(thread: int, call: CodeType) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not call:
        frame = frame.f_back
    return frame is not None


class _Lookout:
    """The thread, and what it looks at, as long as that lives."""

    lock = threading.Lock()
    at: WeakSet[Whereabouts] = WeakSet()
    thread: threading.Thread | None = None

    @classmethod
    def set(cls, whereabouts: Whereabouts, *, looks: bool) -> None:
        with cls.lock:
            (cls.at.add if looks else cls.at.discard)(whereabouts)
            if looks and (cls.thread is None or not cls.thread.is_alive()):
                cls.thread = threading.Thread(target=cls.look, name="hf_l2l whereabouts", daemon=True)
                cls.thread.start()

    @classmethod
    def renew(cls) -> None:
        """Begin anew, in a forked process: the thread is not there, and may have held the lock."""
        cls.lock, cls.at, cls.thread = threading.Lock(), WeakSet(), None

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
            while at:  # and none is kept while this sleeps
                at.pop().say()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Lookout.renew)
