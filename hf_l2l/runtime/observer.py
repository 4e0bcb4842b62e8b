"""Registry of one observer per device, which is told of copies and waits; empty by default."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch

NON_LAYER = "non-layer modules"
"""What is outside of the layers, in names."""


class Rows(NamedTuple):
    """What a copy of the stash is of, for its name in a trace."""

    what: str
    """Such as "input"."""
    layer: object
    """The module whose input or output they are; outside of layers `NON_LAYER`."""


class Observer(Protocol):
    """Receives what `stream` reports of one device; points are `stream.Point`s, whose times can be read later."""

    def waits(self, point: Any, why: str) -> None:
        """The compute stream, or the host, is about to wait for `point`."""

    def host_reached(self, point: Any) -> None:
        """The host has waited for `point`."""

    def span(self, row: str, of: object, *, exposed: bool) -> AbstractContextManager[None]:
        """The current stream is given work inside the block that is shown in `row`; if `exposed`, the computation
        waits for that work."""


OBSERVERS: WeakValueDictionary[torch.device, Observer] = WeakValueDictionary()
"""Device -> its observer, as long as that lives."""


def observe(device: torch.device, observer: Observer) -> None:
    """Make `observer` the only observer of `device`, for as long as it lives."""
    OBSERVERS[device] = observer


def stop_observing(device: torch.device, observer: Observer) -> None:
    """Remove `observer`, if it is the one of `device`."""
    if OBSERVERS.get(device) is observer:
        del OBSERVERS[device]


class HostWork(NamedTuple):
    """Work of the host that is done outside of torch, and that nothing else can see."""

    what: str
    reads: Sequence[torch.Tensor]
    """The tensors that are read."""
    changes: Sequence[torch.Tensor]
    """Those that are read and written."""
    writes: Sequence[torch.Tensor]
    """Those that are written."""
    slowness: float
    """Its time for each byte, relative to that of torch's fused AdamW in fp32."""


HOST_LISTENERS: list[Callable[[HostWork], None]] = []
"""Told of such work before it is done."""


def host_works(work: HostWork) -> None:
    """Tell that this thread is about to do `work`."""
    for listener in HOST_LISTENERS:
        listener(work)


class _Here(threading.local):
    """State of this thread: which work it submits to the device."""

    row = "compute"
    """Kind of the work: "compute", or what `stream.Lane.entered` was given."""
    on_compute_stream = True
    is_in_sweep = False
    """True inside a forward or backward of an engine."""
    layer: object = NON_LAYER
    """The layer that this thread forwards or runs backward."""
    is_aside = False
    """True where a wait does not delay the computation; see `aside`."""


HERE = _Here()


@contextmanager
def aside() -> Iterator[None]:
    """Mark waits of this thread inside the block as not delaying the computation."""
    before, HERE.is_aside = HERE.is_aside, True
    try:
        yield
    finally:
        HERE.is_aside = before


@contextmanager
def in_layer(layer: object) -> Iterator[None]:
    """This thread forwards `layer` or runs it backward in the block."""
    before, HERE.layer = HERE.layer, layer
    try:
        yield
    finally:
        HERE.layer = before
