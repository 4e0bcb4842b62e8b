"""Stall log: a background thread names the current phase of a program every 10 s that it stays silent."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from weakref import WeakSet

from hf_l2l.log import logger

INTERVAL_S = 10.0
"""Seconds without a line until one is logged."""


class StallLog:
    """Logs one line for every `INTERVAL_S` seconds that the program spends in long phases.

    One background thread per process checks all stall logs. It ends after having had nothing to check for a while.
    """

    def __init__(self) -> None:
        self.phase: str | None = None
        self._before_s, self._since, self._logged_s = 0.0, 0.0, 0.0
        self._call: tuple[int, CodeType] | None = None

    def set_phase(self, phase: str | None, call: CodeType | None = None) -> None:
        """Set the current phase, None for none. "{seconds}" in it stands for the total time spent in all phases.

        With `call`, the phase ends at the latest with this thread's call of that function, which an exception may
        leave.
        """
        now = time.monotonic()
        self._before_s, self._since, self.phase = self._seconds(now), now, phase
        self._call = None if call is None else (threading.get_ident(), call)
        StallThread.register(self, active=phase is not None)

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """Set the phase for the block, and restore the previous one after it."""
        before = self.phase
        self.set_phase(phase)
        try:
            yield
        finally:
            self.set_phase(before)

    def log_if_due(self) -> None:
        """Log a line if `INTERVAL_S` seconds have passed since the last one."""
        if self._call is not None and not _is_in(*self._call):
            self.set_phase(None)
        phase, seconds = self.phase, self._seconds(time.monotonic())
        if phase is not None and seconds - self._logged_s >= INTERVAL_S:
            self._logged_s = seconds
            # A warning, since warnings are shown where logging has not been configured.
            logger.warning("%s", phase.replace("{seconds}", f"{seconds:.0f} s"))

    def _seconds(self, now: float) -> float:
        return self._before_s + (now - self._since if self.phase is not None else 0.0)


def _is_in(thread: int, call: CodeType) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not call:
        frame = frame.f_back
    return frame is not None


class StallThread:
    """The background thread, and the stall logs that it checks, which it does not keep alive."""

    NAME = "hf_l2l stall log"
    lock = threading.Lock()
    active: WeakSet[StallLog] = WeakSet()
    thread: threading.Thread | None = None

    @classmethod
    def register(cls, log: StallLog, *, active: bool) -> None:
        """Check `log` from now on, or no longer; start the thread if none runs."""
        with cls.lock:
            (cls.active.add if active else cls.active.discard)(log)
            if active and (cls.thread is None or not cls.thread.is_alive()):
                cls.thread = threading.Thread(target=cls.run, name=cls.NAME, daemon=True)
                cls.thread.start()

    @classmethod
    def reset(cls) -> None:
        """Start over in a forked process: the thread does not exist there, and may have held the lock."""
        cls.lock, cls.active, cls.thread = threading.Lock(), WeakSet(), None

    @classmethod
    def run(cls) -> None:
        idle = 0
        while True:
            time.sleep(INTERVAL_S / 10)
            with cls.lock:
                active = list(cls.active)
                idle = 0 if active else idle + 1
                if idle > 10:
                    cls.thread = None
                    return
            while active:  # emptied, so that no log is kept alive during the sleep
                active.pop().log_if_due()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=StallThread.reset)
