"""`Window`: which segments are in host memory, of a bounded number of bytes; the others are on disk alone."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from hf_l2l.memory.state_traffic import Recent

KeyT = TypeVar("KeyT", bound=Hashable)


class Order(Generic[KeyT]):
    """Tells what follows in a sequence that repeats, such as a sweep forward and one backward: what followed the last
    time after the same two."""

    def __init__(self) -> None:
        self._before: tuple[KeyT | None, KeyT | None] = None, None
        self._followed: dict[tuple[KeyT | None, KeyT | None], KeyT] = {}

    def next_after(self, key: KeyT) -> KeyT | None:
        """`key` is the next one of the sequence: what is expected after it, None if that is not known."""
        if key != self._before[1]:
            self._followed[self._before] = key
            self._before = self._before[1], key
        return self._followed.get(self._before)


class Window:
    """Segments in host memory, and those that are being written. What is used last stays longest.

    The bytes are bounded as far as that is possible: what is used is always let in, and waits only for what is being
    written. It is no lock: a segment that has been freed while somebody uses it is read again by the system, page by
    page, with the same values.
    """

    def __init__(self, disk: Any) -> None:
        """`disk` is a `Disk`, or what takes its place."""
        self.disk = disk
        self.limit = self._reserve = 0
        self.peak = self.bytes_read = self.bytes_written = 0
        self._failure: OSError | None = None
        """Of the disk, the first one: what was to be written is lost, whatever comes after."""
        self._lock = threading.Condition()
        self._here: Recent[Any] = Recent()
        self._changed: set[Any] = set()
        self._held: Counter[Any] = Counter()
        """Segments that are in use until they are let go: they stay in memory."""
        self._arriving: dict[Any, Any] = {}
        """Segment -> the transfer that reads it."""
        self._leaving: dict[Any, Any] = {}
        """Segment -> the transfer that writes it; it takes memory until that is over."""

    def resize(self, limit: int, reserve: int) -> None:
        """Hold at most `limit` bytes; of these, `reserve` are for what is being written or read ahead."""
        self.limit, self._reserve = limit, reserve

    def num_bytes(self) -> int:
        """Bytes in memory now, those that are being written included."""
        with self._lock:
            return self._count()

    def check(self) -> None:
        """Raise OSError if the disk has failed."""
        with self._lock:
            self._count()
            if self._failure is not None:
                raise OSError(
                    self._failure.errno,
                    f"masters and optimizer state on disk must be written and read (got {self._failure}); resume from "
                    "a checkpoint, with a disk that works",
                ) from self._failure

    @contextmanager
    def held(self, segments: Sequence[Any]) -> Iterator[None]:
        """Have these segments in memory, and keep them there in the block, which writes to them. Waits while others
        hold so much that all of it would not fit; a thread holds one set of segments at a time."""
        with self._lock:
            self._lock.wait_for(lambda: self._fits(segments))
            self._held.update(segments)
        try:
            self.use(segments, changes=True)
            yield
        finally:
            with self._lock:
                self._held -= Counter(segments)
                self._lock.notify_all()

    def _fits(self, segments: Sequence[Any]) -> bool:
        own = sum(each.num_bytes for each in segments if each not in self._held)
        return not self._held or sum(each.num_bytes for each in self._held) + own <= self.limit

    def use(self, segments: Iterable[Any], *, changes: bool = False, is_new: bool = False) -> None:
        """Have these segments in memory; waits until they have been read.

        Args:
            segments: what is used now.
            changes: whether it is written to.
            is_new: whether it has no values on disk yet.

        Raises:
            OSError: if the disk fails.
        """
        for segment in segments:
            while (transfer := self._entered(segment, is_new=is_new, changes=changes)) is not None:
                self._wait(transfer)
            arriving = self._arriving.get(segment)
            if arriving is not None:
                self._wait(arriving)
                self._arriving.pop(segment, None)
        self.check()

    def _wait(self, transfer: Any) -> None:
        try:
            transfer.result()
        except OSError as error:
            self._failure = self._failure or error

    def read_ahead(self, segments: Iterable[Any], used: Sequence[Any]) -> None:
        """Begin to read these segments, as far as there is room beside those that are `used` now, and without waiting
        for what is being written."""
        taken = sum(each.num_bytes for each in used)
        for segment in segments:
            taken += segment.num_bytes
            if taken > self.limit - self._reserve or self._entered(segment, keep=used) is not None:
                return

    def _entered(self, segment: Any, *, is_new: bool = False, changes: bool = False, keep: Sequence[Any] = ()) -> Any:
        """Let a segment in, and begin to read it. If something must be written before, returns that transfer."""
        with self._lock:
            if segment in self._leaving and not self._leaving[segment].done():
                return self._leaving[segment]
            if segment not in self._here:
                most = max(0, self.limit - self._reserve - segment.num_bytes)
                for oldest in self._here.drop_oldest(most, {*keep, *self._held}):
                    self._begin_to_leave(oldest)
                if self._count() + segment.num_bytes > self.limit and self._leaving:
                    return next(iter(self._leaving.values()))
                if not is_new:
                    self._arriving[segment] = self.disk.read(segment)
                    self.bytes_read += segment.num_bytes
            self._here.touch(segment, segment.num_bytes)
            if changes:
                self._changed.add(segment)
            self.peak = max(self.peak, self._count())
            return None

    def _begin_to_leave(self, segment: Any) -> None:
        is_changed = segment in self._changed
        self._changed.discard(segment)
        self._arriving.pop(segment, None)
        self.bytes_written += segment.num_bytes if is_changed else 0
        self._leaving[segment] = self.disk.leave(segment, is_changed=is_changed)

    def _count(self) -> int:
        for segment in [each for each, transfer in self._leaving.items() if transfer.done()]:
            self._wait(self._leaving.pop(segment))
        leaving: int = sum(segment.num_bytes for segment in self._leaving)
        return self._here.num_bytes + leaving

    def clear(self) -> None:
        """Forget all segments."""
        with self._lock:
            self._here = Recent()
            self._changed.clear()
            self._arriving.clear()
            self._leaving.clear()
