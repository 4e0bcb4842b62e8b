"""`Arrivals`: the points after which rows that are on their way are in the memory that they go to, in the host or on a
device."""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_l2l.runtime import stream


@dataclass(slots=True)
class _Use:
    """One use of memory, for rows that go there."""

    start: int
    stop: int
    """Addresses, of which the second is behind it."""
    on_host: bool
    free: list[stream.Point] = field(default_factory=list)
    """After these, the memory may be written: what was in it before has been read."""
    points: dict[tuple[Any, ...], stream.Point | None] = field(default_factory=dict)
    """Rows -> the point after which they are there."""
    read: list[stream.Point] = field(default_factory=list)
    """After these, what reads rows elsewhere than on the device that they were sent from has read them."""


class Arrivals:
    """Points by rows. Memory may get other rows, cut in another way, before a step is over: what is known of its rows
    ends when it is used anew."""

    def __init__(self) -> None:
        self._uses: dict[int, _Use] = {}
        """By the address at which they start."""
        self._starts: list[int] = []
        """Those addresses in order."""

    def begin(self, memory: torch.Tensor, free: stream.Point | None = None) -> None:
        """From now on, the memory of `memory` is for its rows, which may be written after `free`."""
        if memory.numel() == 0:  # it has no address
            return
        start = memory.data_ptr()
        pairs = zip(memory.shape, memory.stride(), strict=True)
        stop = start + (1 + sum((size - 1) * step for size, step in pairs)) * memory.element_size()
        use = _Use(start, stop, memory.device == stream.HOST, [] if free is None else [free])
        # On a device, later memory may lie across what was other memory before.
        while (before := self._before(stop - 1)) is not None and before.stop > start:
            use.free += before.read
            self._drop(before)
        self._uses[start] = use
        insort(self._starts, start)

    def reopen(self, memory: torch.Tensor) -> None:
        """Each row of what `begin` was given will be sent once more; as long as it is not, it is there as before."""
        if self._at(memory) is None:  # it was settled
            self.begin(memory)

    def free(self, rows: torch.Tensor) -> list[stream.Point]:
        """The points after which `rows` may be written for the first time."""
        use = self._at(rows)
        return [] if use is None else use.free

    def add(self, rows: torch.Tensor, point: stream.Point | None) -> None:
        """`rows`, a view of what `begin` was given, are there after `point`."""
        if rows.numel() == 0:
            return
        use = self._at(rows)
        assert use is not None, "`begin` was called for the memory"
        use.points[key(rows)] = point

    def of(self, rows: torch.Tensor) -> list[stream.Point]:
        """The points after which `rows` are there: their own, or, if they were not sent as these rows, those of all
        rows of their memory."""
        use = self._at(rows)
        if use is None:
            return []
        known = key(rows)
        points = [use.points[known]] if known in use.points else use.points.values()
        return [point for point in points if point is not None]

    def was_read(self, rows: torch.Tensor, point: stream.Point | None) -> None:
        """What copies `rows` to another place has read them after `point`."""
        use = self._at(rows)
        if use is not None and point is not None:
            use.read.append(point)

    def settle(self) -> None:
        """The host has waited for all copies from and to host memory: forget what is there."""
        for use in list(self._uses.values()):
            points = [point for point in (*use.points.values(), *use.read) if point is not None]
            if use.on_host or all(map(stream.is_reached, points)):
                self._drop(use)

    def _drop(self, use: _Use) -> None:
        del self._uses[use.start]
        del self._starts[bisect_right(self._starts, use.start) - 1]

    def _before(self, address: int) -> _Use | None:
        number = bisect_right(self._starts, address)
        return self._uses[self._starts[number - 1]] if number else None

    def _at(self, rows: torch.Tensor) -> _Use | None:
        use = self._before(rows.data_ptr())
        return use if use is not None and rows.data_ptr() < use.stop else None


def key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Identifies the memory and layout of a tensor, as long as it lives."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
