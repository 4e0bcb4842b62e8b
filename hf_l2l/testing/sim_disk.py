"""A disk on the virtual clock: what it reads and writes takes its time, one transfer after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hf_l2l.testing.sim_clock import VirtualClock
from hf_l2l.testing.sim_recorder import Moment


@dataclass(frozen=True)
class DiskTransfer:
    """A transfer that takes virtual time; the values are where they are."""

    clock: VirtualClock
    end: Moment

    def done(self) -> bool:
        """Whether it is over by now, or its clock has stopped."""
        return not self.clock.is_running or self.end.seconds <= self.clock.now

    def result(self) -> None:
        """Make the calling thread wait for it, in virtual time."""
        if self.clock.is_running:
            self.clock.wait_for(self.end)


class VirtualDisk:
    """Takes the place of `hf_l2l.state_tier.disk.Disk` while a clock runs."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def read(self, piece: Any) -> DiskTransfer:
        """Begin to read."""
        return DiskTransfer(self._clock, self._clock.disk_work("read", piece.num_bytes))

    def leave(self, piece: Any, *, is_changed: bool) -> DiskTransfer:
        """Begin to write what `is_changed`; memory is freed in no time."""
        num_bytes = piece.num_bytes if is_changed else 0
        return DiskTransfer(self._clock, self._clock.disk_work("write", num_bytes))


@contextlib.contextmanager
def disk_on_clock(clock: VirtualClock, window: Any) -> Iterator[None]:
    """In the block, the window of state on disk (`hf_l2l.state_tier.window.Window`) has a disk on the clock."""
    before, window.disk = window.disk, VirtualDisk(clock)
    try:
        yield
    finally:
        window.disk = before
