"""Values as they were at one moment, written to files while training goes on.

What is written together (a layer: its weights and the optimizer's state of them) is a group. A thread writes group
after group. Before the values of a group change, `secure` makes sure that they are written, or copied; copies take no
more than a fixed amount of memory, beyond which `secure` waits for the thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from enum import Enum, auto
from pathlib import Path
from threading import Condition

from hf_l2l.checkpoint.reserved import Region, locked


class _Is(Enum):
    """What has happened to a group."""

    UNTOUCHED = auto()
    BEING_COPIED = auto()
    COPIED = auto()
    BEING_WRITTEN = auto()
    WRITTEN = auto()


class _Group:
    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = list(regions)
        self.num_bytes = sum(region.values.numel() for region in regions)
        self.now = _Is.UNTOUCHED
        self.is_urgent = False
        """Whether a thread waits until it is written."""


def _nobody_asks(number: int | None) -> None:
    """Tell nobody that a group is secured."""


class Snapshot:
    """The values of some groups when this was made."""

    def __init__(
        self,
        groups: Iterable[Sequence[Region]],
        room: int,
        secured: Callable[[int | None], None] = _nobody_asks,
        *,
        locks: bool = False,
    ) -> None:
        """
        Args:
            groups: what is written, in this order.
            room: bytes that copies take at most.
            secured: called with the number of a group when its values may change, and with None when all may.
            locks: whether other hosts write to the same files.
        """
        self._secured, self._locks = secured, locks
        self._groups = [_Group(regions) for regions in groups]
        self._free = self._least_free = self.room = room
        self._changed = Condition()
        self._has_ended = self.is_stopped = False

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies that there are now."""
        return self.room - self._free

    @property
    def most_copied_bytes(self) -> int:
        """The most that they have been."""
        return self.room - self._least_free

    def write(self) -> None:
        """Write all groups; to be called once, on a thread of its own.

        Raises:
            OSError: if a file cannot be written. Nobody waits for the others then.
        """
        try:
            with ExitStack() as stack:
                opened: dict[Path, int] = {}
                while (group := self.next_group()) is not None:
                    for region in group.regions:
                        if region.file not in opened:
                            opened[region.file] = os.open(region.file, os.O_WRONLY)
                            stack.callback(os.close, opened[region.file])
                        with locked(opened[region.file], region) if self._locks else nullcontext():
                            region.write(opened[region.file])
                    self._is_written(group)
        finally:
            with self._changed:
                self._has_ended = True
                for group in self._groups:
                    group.regions = []
                self._changed.notify_all()
            self._secured(None)
            self._secured = _nobody_asks  # it refers to who has made this

    def stop(self) -> None:
        """Write no further group: nobody needs the files any more."""
        with self._changed:
            self.is_stopped = True
            self._changed.notify_all()

    def next_group(self) -> _Group | None:
        """The group to write next: copies first, since others may wait for their memory, then what somebody waits for.
        Waits for a copy that is being made, if nothing else is left; None if all is written."""

        def order(group: _Group) -> tuple[bool, bool]:
            return group.now is not _Is.COPIED, not group.is_urgent

        with self._changed:
            while not self.is_stopped:
                ready = [g for g in self._groups if g.now in (_Is.UNTOUCHED, _Is.COPIED)]
                if ready:
                    found = min(ready, key=order)
                    if found.now is _Is.COPIED:
                        return found  # stays so: its values may change meanwhile
                    found.now = _Is.BEING_WRITTEN
                    return found
                if all(g.now is _Is.WRITTEN for g in self._groups):
                    return None
                self._changed.wait()
            return None

    def _is_written(self, group: _Group) -> None:
        with self._changed:
            was_copied = group.now is _Is.COPIED
            if was_copied:
                self._free += group.num_bytes
            group.now, group.regions = _Is.WRITTEN, []
            self._changed.notify_all()
        if not was_copied:
            self._secured(self._groups.index(group))

    def secure(self, number: int) -> None:
        """Wait until the values of a group may change: until they are written, or copied. Without memory for copies,
        this waits until they are written."""
        group, may_copy = self._groups[number], True
        while not self._is_secured(group, may_copy=may_copy):
            may_copy = self._copy(group)

    def _is_secured(self, group: _Group, *, may_copy: bool) -> bool:
        """Wait until the group is written or copied. With `may_copy`, False if this thread is to copy it instead, for
        which there is room."""
        with self._changed:
            while not (self._has_ended or group.now in (_Is.WRITTEN, _Is.COPIED)):
                if may_copy and group.now is _Is.UNTOUCHED and group.num_bytes <= self._free:
                    self._free -= group.num_bytes
                    self._least_free = min(self._least_free, self._free)
                    group.now = _Is.BEING_COPIED
                    return False
                group.is_urgent = True
                self._changed.wait()
            return True

    def _copy(self, group: _Group) -> bool:
        """Copy the group; False if the host has no memory for that."""
        copies: list[Region] | None = None
        try:
            copies = [region.clone() for region in group.regions]
        except (MemoryError, RuntimeError):  # torch raises the latter
            return False
        finally:
            with self._changed:
                if copies is None:  # the values are still those of the snapshot
                    group.now = _Is.UNTOUCHED
                    self._free += group.num_bytes
                else:
                    group.now, group.regions = _Is.COPIED, copies
                self._changed.notify_all()
        self._secured(self._groups.index(group))
        return True

    def wait(self) -> None:
        """Wait until all is written, or writing has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended)
