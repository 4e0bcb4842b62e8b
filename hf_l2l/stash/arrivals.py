"""`Arrivals`: the points after which rows that are being downloaded are in host memory."""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import Any

import torch

from hf_l2l.runtime import stream


class Arrivals:
    """Points by rows. Memory may get other rows, cut in another way, before a step is over: what is known of its rows
    ends when it is used anew."""

    def __init__(self) -> None:
        self._points: dict[tuple[Any, ...], tuple[stream.Point | None, int]] = {}
        """Rows -> their point, and the use of their memory that they belong to."""
        self._uses: dict[int, int] = {}
        """The address of memory -> the number of its use."""
        self._addresses: list[int] = []
        """Those addresses in order."""

    def begin(self, host: torch.Tensor) -> None:
        """From now on, the memory of `host` is for its rows."""
        address = host.data_ptr()
        if address not in self._uses:
            insort(self._addresses, address)
        self._uses[address] = self._uses.get(address, 0) + 1

    def add(self, rows: torch.Tensor, point: stream.Point | None) -> None:
        """`rows`, a view of what `begin` was given, are there after `point`."""
        self._points[key(rows)] = point, self._use(rows)

    def of(self, rows: torch.Tensor, otherwise: stream.Point | None) -> stream.Point | None:
        """The point after which `rows` are there; `otherwise` if they were not downloaded as these rows."""
        point, use = self._points.get(key(rows), (otherwise, None))
        return point if use == self._use(rows) else otherwise

    def clear(self) -> None:
        """All rows are there."""
        self._points.clear()
        self._uses.clear()
        self._addresses.clear()

    def _use(self, rows: torch.Tensor) -> int:
        number = bisect_right(self._addresses, rows.data_ptr())
        return self._uses[self._addresses[number - 1]] if number else 0


def key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Identifies the memory and layout of a tensor, as long as it lives."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
