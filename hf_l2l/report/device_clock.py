"""Times of a device's events on the host's clock.

Events only give the time elapsed between two of them. Waits of the host relate them to its clock: when a wait returns,
the device has passed its point, and has done so just now if the wait had to block. Of several devices, the host waits
for the first one; another one passes a point of an idle stream as soon as that is recorded.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import torch

from hf_l2l.runtime import stream

Mark = stream.Point | float
"""A point in the work of the device, or a time of the host in seconds."""


class DeviceClock:
    """Reads timed points of one device after it has passed them, in seconds of the host's clock `now`."""

    def __init__(self, device: torch.device, now: Callable[[], float], idle: stream.Lane | None = None) -> None:
        """`idle` is a lane without work, for a device that the host does not wait for."""
        self.device = device
        self._idle = idle
        self.now = now
        self.is_reached: Callable[[stream.Point], bool] = stream.is_reached
        self._lock = threading.Lock()  # background threads also wait for the device
        self._base: tuple[stream.Point, float] | None = None
        """The point from which the device's time is counted, and the host's time at its recording."""
        self._latest_s = math.inf
        """Upper bound of the time at which the base was reached: each wait gives one, a blocking wait an exact one."""
        self._waits: list[tuple[stream.Point, float]] = []
        """Points that the host waited for, with its time after each wait, until the base is known to be reached."""

    def mark(self) -> Mark:
        """The current point of the current stream; on a device without streams, the host's time."""
        return stream.record(self.device) or self.now()

    def begin(self) -> None:
        """Set the base to now, since events measure long times less exactly."""
        base = stream.record(self.device) if self._idle is None else self._idle.record()
        with self._lock:
            self._base = None if base is None else (base, self.now())
            self._latest_s, self._waits = math.inf, []

    def host_reached(self, point: stream.Point) -> None:
        """The host has just waited for `point`."""
        if self._idle is not None:
            return
        with self._lock:
            self._waits.append((point, self.now()))
            self._take_in()

    def base_s(self) -> float | None:
        """The time at which the base was reached; None if that is not known yet."""
        with self._lock:
            if self._base is None:
                return 0.0
            if self._idle is not None:
                return self._base[1]
            self._take_in()
            return None if self._latest_s == math.inf else max(self._base[1], self._latest_s)

    def _take_in(self) -> None:
        if self._base is not None and self._waits and self.is_reached(self._base[0]):
            base, waits, self._waits = self._base[0], self._waits, []
            self._latest_s = min(self._latest_s, *(now - _elapsed_s(base, point) for point, now in waits))

    def seconds(self, mark: Mark, base_s: float) -> float | None:
        """The time at which `mark` was reached; None if the device has not reached it."""
        if not isinstance(mark, stream.Point):
            return mark
        assert self._base is not None, "a point implies a base"
        return base_s + _elapsed_s(self._base[0], mark) if self.is_reached(mark) else None


def _elapsed_s(start: stream.Point, end: stream.Point) -> float:
    return float(start.event.elapsed_time(end.event)) / 1e3
