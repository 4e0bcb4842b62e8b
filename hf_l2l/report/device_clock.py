"""The times of a device's events, by the host's clock.

Events only tell how long after another one they came. The host's own waits relate them to its clock: when one returns,
its point lies in the past; and if it was a real wait, just now.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import torch

from hf_l2l.runtime import stream

Mark = stream.Point | float
"""A point in the work of the device, or in the host's time."""


class DeviceClock:
    """Reads timed points of one device when the device has come past them, in seconds of the host's clock `now`."""

    def __init__(self, device: torch.device, now: Callable[[], float]) -> None:
        self.device = device
        self.now = now
        self.is_reached: Callable[[stream.Point], bool] = stream.is_reached
        self._lock = threading.Lock()  # threads beside the computation wait for the device, too
        self._base: tuple[stream.Point, float] | None = None
        """From which the device's time is counted, and the host's time when it was recorded."""
        self._latest_s = math.inf
        """The base was reached by then: each wait tells such a time, and a real one when it was."""
        self._waits: list[tuple[stream.Point, float]] = []
        """What the host has waited for before it was known that the base is reached, and its time then."""

    def mark(self) -> Mark:
        """Where the current stream is now; on a device without streams, where the host is."""
        return stream.record(self.device) or self.now()

    def begin(self) -> None:
        """Count the device's time from now on, since events tell long times less exactly."""
        base = stream.record(self.device)
        with self._lock:
            self._base = None if base is None else (base, self.now())
            self._latest_s, self._waits = math.inf, []

    def host_reached(self, point: stream.Point) -> None:
        """The host has just waited for `point`."""
        with self._lock:
            self._waits.append((point, self.now()))
            self._take_in()

    def base_s(self) -> float | None:
        """When the base was reached, None if that is not known yet."""
        with self._lock:
            if self._base is None:
                return 0.0
            self._take_in()
            return None if self._latest_s == math.inf else max(self._base[1], self._latest_s)

    def _take_in(self) -> None:
        if self._base is not None and self._waits and self.is_reached(self._base[0]):
            base, waits, self._waits = self._base[0], self._waits, []
            self._latest_s = min(self._latest_s, *(now - _elapsed_s(base, point) for point, now in waits))

    def seconds(self, mark: Mark, base_s: float) -> float | None:
        """When `mark` was reached, None if the device has not come to it."""
        if not isinstance(mark, stream.Point):
            return mark
        assert self._base is not None, "there is one where there are points"
        return base_s + _elapsed_s(self._base[0], mark) if self.is_reached(mark) else None


def _elapsed_s(start: stream.Point, end: stream.Point) -> float:
    return float(start.event.elapsed_time(end.event)) / 1e3
