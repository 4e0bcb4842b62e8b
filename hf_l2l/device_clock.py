"""The times of a device's events, by the host's clock.

Events only tell how long after another one they came. The host's own waits relate them to its clock: when one returns,
its point lies in the past; and if it was a real wait, just now.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_l2l import stream

Mark = stream.Point | float
"""A point in the work of the device, or in the host's time."""


class DeviceClock:
    """Reads timed points of one device when the device has come past them, in seconds of the host's clock `now`."""

    def __init__(self, device: torch.device, now: Callable[[], float]) -> None:
        self.device = device
        self.now = now
        self._base: tuple[stream.Point, float] | None = None
        """From which the device's time is counted, and the host's time when it was recorded."""
        self._reached: list[tuple[stream.Point, float]] = []
        """Points that the host has waited for since, and its time then."""

    def mark(self) -> Mark:
        """Where the current stream is now; on a device without streams, where the host is."""
        return stream.record(self.device) or self.now()

    def begin(self) -> None:
        """Count the device's time from now on, since events tell long times less exactly."""
        base = stream.record(self.device)
        self._base, self._reached = None if base is None else (base, self.now()), []

    def host_reached(self, point: stream.Point) -> None:
        """The host has just waited for `point`."""
        self._reached.append((point, self.now()))

    def base_s(self) -> float:
        """When the base was reached.

        Raises:
            RuntimeError: if that is not known yet.
        """
        if self._base is None:
            return 0.0
        base, recorded_s = self._base
        # Each is that time or later, and the one of a wait that was real is it.
        latest = [now - _elapsed_s(base, point) for point, now in self._reached]
        if not latest:
            raise RuntimeError("the host has not waited for the device")
        return max(recorded_s, min(latest))

    def seconds(self, mark: Mark, base_s: float) -> float:
        """When `mark` was reached.

        Raises:
            RuntimeError: torch's, if the device has not come to it.
        """
        if not isinstance(mark, stream.Point):
            return mark
        assert self._base is not None, "there is one where there are points"
        return base_s + _elapsed_s(self._base[0], mark)


def _elapsed_s(start: stream.Point, end: stream.Point) -> float:
    return float(start.event.elapsed_time(end.event)) / 1e3
