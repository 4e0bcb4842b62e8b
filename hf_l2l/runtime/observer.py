"""Who is told what a device does beside computing, and what is waited for. Nobody, until somebody asks to be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch


class Watcher(Protocol):
    """What `stream` tells of one device; points are its `Point`s, with times that can be read later."""

    def waits(self, point: Any, why: str) -> None:
        """The compute stream, or the host, is about to wait for `point`."""

    def host_reached(self, point: Any) -> None:
        """The host has waited for `point`."""

    def span(self, row: str, of: object, *, exposed: bool) -> AbstractContextManager[None]:
        """Inside, the current stream is given work that belongs in `row`; if `exposed`, what computes comes after."""


_watchers: WeakValueDictionary[torch.device, Watcher] = WeakValueDictionary()


def watcher_of(device: torch.device) -> Watcher | None:
    """Who is told of `device`."""
    return _watchers.get(device)


def watch(device: torch.device, watcher: Watcher) -> None:
    """Tell `watcher` of `device` from now on, as long as it lives, and nobody else."""
    _watchers[device] = watcher


def unwatch(device: torch.device, watcher: Watcher) -> None:
    """Tell `watcher` no more."""
    if _watchers.get(device) is watcher:
        del _watchers[device]


class _Here(threading.local):
    """Where this thread gives the device its work."""

    row = "compute"
    """Of what kind the work is: "compute", or what `stream.Lane.entered` was told."""
    on_compute_stream = True
    is_in_sweep = False
    """Whether this thread is inside a forward or backward of an engine."""
    is_aside = False
    """Whether what is waited for holds up something else than the computation."""


HERE = _Here()


@contextmanager
def aside() -> Iterator[None]:
    """What this thread waits for inside holds up something else than the computation."""
    before, HERE.is_aside = HERE.is_aside, True
    try:
        yield
    finally:
        HERE.is_aside = before
