"""Switches of `hf_l2l.runtime.stream` for tests: copies where memory is shared, NaN in memory that was released."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from hf_l2l.runtime import stream
from hf_l2l.runtime.flat_memory import Piece, Room, elements
from hf_l2l.testing import copies_under_way, sim_host
from hf_l2l.testing.sim_host import overlap, range_of
from training import settled_memory


@contextmanager
def forced_copies() -> Iterator[None]:
    """Make uploads and downloads real copies even where host and device share memory.

    Code that is right with views and with copies depends on neither.
    """
    with mock.patch.object(stream, "shares_host_memory", lambda device: False):
        yield


def copies_at_unlocks(patch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of copies of the simulated accelerator that are under way, whenever memory is
    unlocked from now on."""
    settled_memory()  # models of earlier tests go, whose memory would be unlocked in this one
    torch.sim.synchronize()
    found: list[int] = []
    unlock = stream.page_unlock
    patch.setattr(stream, "page_unlock", lambda *of: (found.append(copies_under_way()), unlock(*of)))
    return found


@contextmanager
def poisoned_releases() -> Iterator[None]:
    """Fill released memory with NaN, so that a read after the release shows."""

    def poison(memory: torch.Tensor) -> None:
        memory.fill_(0xFF)  # all bits set is NaN in every floating-point dtype

    def poisoned_tensor(room: Room, piece: Piece) -> torch.Tensor:
        tensor = tensor_of(room, piece)
        # Where a copy of the simulated accelerator still reads, the next copy may write, but not the host.
        if tensor.numel() and not is_watched(tensor):
            poison(elements(tensor).view(torch.uint8))
        return tensor

    tensor_of = Room.tensor_of
    with mock.patch.object(stream, "released", poison), mock.patch.object(Room, "tensor_of", poisoned_tensor):
        yield


def is_watched(tensor: torch.Tensor) -> bool:
    """Whether the simulated accelerator has a copy under way that reads memory of `tensor`."""
    touched = range_of(tensor)
    return any(overlap((watched.access.low, watched.access.high), touched) for watched in sim_host.WATCHED)


def land_the_rest() -> None:
    """Let what a test left on its way land now, and not in the next one."""
    while True:
        try:
            torch.sim.synchronize()
        except RuntimeError:  # each of the copies that came to harm raises once
            continue
        return
