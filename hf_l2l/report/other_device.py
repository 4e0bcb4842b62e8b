"""`OtherDevice`: tells a timeline of the copies and waits of a device other than its first."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hf_l2l.runtime import stream


class OtherDevice:
    """The observer of one of the devices of a `Timeline`, but not of the first."""

    def __init__(self, timeline: Any, device: torch.device) -> None:
        self._timeline, self._device = weakref.ref(timeline), device

    def waits(self, point: stream.Point, why: str) -> None:
        """See `observer.Observer`."""
        timeline = self._timeline()
        if timeline is not None:
            timeline.waits_on(self._device, point, why)

    def host_reached(self, point: stream.Point) -> None:
        """See `observer.Observer`."""
        timeline = self._timeline()
        if timeline is not None:
            timeline.host_reached(point)

    def span(self, row: str, of: object, *, exposed: bool) -> AbstractContextManager[None]:
        """See `observer.Observer`."""
        timeline = self._timeline()
        return nullcontext() if timeline is None else timeline.spans_on(self._device, row, of)
