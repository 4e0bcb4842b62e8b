"""Race detection: records which operations of "sim" wait for which, and raises for two that conflict without a wait.

Every stream counts its operations and has a clock: for each stream, the last operation that it has waited for. Events
and the host have such clocks, too; what is issued comes after all that the host has waited for. Memory has a history
of its last writes and the reads since then. If an operation uses bytes that another stream writes, or writes bytes
that another stream reads, its clock must cover the other operation.

Nothing is checked before the process makes its first stream or starts its first asynchronous download.
"""

from __future__ import annotations

import collections
import itertools
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

Clock = dict[int, int]  # by stream, the count of its operations up to which something has waited

DEFAULT = 0
MOST_DEVICES = 8

# Held while an operation is issued and run, so that threads cannot come between its checks and its effect.
LOCK = threading.RLock()


class Access(NamedTuple):
    """One read or write of a range of addresses by an operation."""

    low: int
    high: int
    stream: int
    number: int
    writes: bool
    name: str


class History:
    """The accesses to one storage that a later one may conflict with."""

    __slots__ = ("accesses",)

    def __init__(self, *accesses: Access) -> None:
        self.accesses = list(accesses)

    def conflict(self, new: Access, clock: Clock) -> Access | None:
        """Return the last access that conflicts with `new` and is not within `clock`."""
        for old in reversed(self.accesses):
            if old.low < new.high and new.low < old.high and (old.writes or new.writes) and not within(old, clock):
                return old
        return None

    def add(self, new: Access) -> None:
        """Record `new`, which conflicts with none, and drop accesses that it or the host's wait makes redundant."""
        if len(self.accesses) == 1 and _covers(new, self.accesses[0]):  # mostly: a stream uses its own result
            self.accesses[0] = new
            return
        self.accesses = [old for old in self.accesses if not (_covers(new, old) or within(old, ORDER.host))]
        self.accesses.append(new)


def within(access: Access, clock: Clock) -> bool:
    """Return whether `clock`, or the host, has waited for `access`."""
    return max(clock.get(access.stream, 0), ORDER.host.get(access.stream, 0)) >= access.number


def _covers(new: Access, old: Access) -> bool:
    """Return whether `new` makes `old` redundant: it comes after `old`, and conflicts with all that `old` does."""
    inside = new.low <= old.low and old.high <= new.high
    return inside and (new.writes or (not old.writes and old.stream == new.stream))


class Line:
    """The operations of one stream, in order: their number, and the clock of the next one."""

    def __init__(self, name: str | None = None, device: int = 0, *, number: int | None = None) -> None:
        self.id = next(_ids) if number is None else number
        self.device = device
        self.is_default = number is not None
        self.name = name or f"sim stream {self.id}"
        self.clock: Clock = {self.id: 0}
        self.operation = "an operation"  # the name of the last one
        self.running = False  # whether that one is still at work, so that memory handed out is its result's
        self._host_seen = -1
        ORDER.names[self.id], ORDER.devices[self.id] = self.name, device
        ORDER.issued[self.id] = self.clock[self.id]
        ORDER.lines[self.id] = self

    def advance(self, name: str) -> int:
        """Count one more operation."""
        self.see_host()
        self.operation = name
        count = self.clock[self.id] = ORDER.issued[self.id] = self.clock[self.id] + 1
        return count

    def see_host(self) -> None:
        """Forget what the host has waited for as well: it counts for every operation that is issued from now on."""
        if self._host_seen != ORDER.host_version:
            host = ORDER.host
            self.clock = {
                stream: count
                for stream, count in self.clock.items()
                if stream == self.id or count > host.get(stream, 0)
            }
            self._host_seen = ORDER.host_version


class Order:
    """The state of the process: whether operations are checked, the host's clock, and streams' counts and names."""

    def __init__(self) -> None:
        self.active = False
        self.before = 0  # the count that stands for all that the default stream did while nothing was looked at
        self.host: Clock = {}
        self.host_version = 0
        self.issued: Clock = {}
        self.names: dict[int, str] = {}
        self.devices: dict[int, int] = {}
        self.lines: weakref.WeakValueDictionary[int, Line] = weakref.WeakValueDictionary()

    def activate(self) -> None:
        """Check every operation from now on."""
        if not self.active:
            self.active = True
            for line in DEFAULT_LINES:
                self.before = line.advance("an operation")

    def host_waits(self, clock: Clock) -> None:
        """Order everything that is issued from now on after `clock`."""
        merge(self.host, clock)
        self.host_version += 1


def merge(clock: Clock, other: Clock) -> None:
    """Advance `clock` to `other` for each stream for which `other` has waited for more."""
    for stream, count in other.items():
        if clock.get(stream, 0) < count:
            clock[stream] = count


# By stream, the uses by other streams of memory that was freed to it.
FREED: collections.defaultdict[int, collections.deque[Access]] = collections.defaultdict(collections.deque)

_ids = itertools.count(DEFAULT + 1)
ORDER = Order()
# Their numbers are below those of others.
DEFAULT_LINES = tuple(
    Line("the default stream" + (f" of sim:{device}" if device else ""), device, number=-2 * device)
    for device in range(MOST_DEVICES)
)


class Streams:
    """The current stream of each device, in one thread."""

    def __init__(self, lines: Sequence[Line] = DEFAULT_LINES, objects: Sequence[Any] = (None,) * MOST_DEVICES) -> None:
        self.thread = threading.get_ident()
        self.lines = list(lines)
        self.objects: list[torch.Stream | None] = list(objects)
        """The public objects for `lines`, None for default streams."""


OF_BACKWARD = "hf_l2l.testing: streams of a backward"
"""Where torch takes along the `Streams` of the thread that calls a backward, for those that run it."""


_is_in_tls = torch._C._is_key_in_tls


class _Current(threading.local):
    """The device of a thread, and its stream on each device; every thread starts on default streams, on the first.

    A thread of autograd has the streams of the thread that called the backward. (In CUDA each node runs on the stream
    of its forward: the same, where a backward runs on the streams of its forward.)
    """

    device = 0
    """Also in the middle of `__init__`, where garbage may be collected that unlocks pages."""

    def __init__(self) -> None:
        self._streams = Streams()
        self._taken: Streams | None = None
        """Those of a backward that the thread has taken over."""

    def _now(self) -> Streams:
        if _is_in_tls(OF_BACKWARD):
            given = torch._C._get_obj_in_tls(OF_BACKWARD)
            if given is not None and given is not self._taken and given.thread != self._streams.thread:
                self._taken, self._streams.lines = given, list(given.lines)
                self._streams.objects = list(given.objects)
        return self._streams

    @property
    def lines(self) -> list[Line]:
        """By device."""
        # Asked for by every operation, so that a call less counts.
        return self._now().lines if _is_in_tls(OF_BACKWARD) else self._streams.lines

    @property
    def streams(self) -> list[torch.Stream | None]:
        """The public objects for `lines`, None for default streams."""
        return self._now().objects

    @property
    def line(self) -> Line:
        """The stream of the current device."""
        return self.lines[self.device]


CURRENT = _Current()


def range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of `tensor` and the address past its last; they are equal if it is empty."""
    low, count = tensor.data_ptr(), tensor.numel()
    if count == 0 or tensor.is_contiguous():  # most are, and every operation asks for all of its tensors
        return low, low + count * tensor.element_size()
    last = sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    return low, low + (last + 1) * tensor.element_size()


def creation(low: int, nbytes: int, device: int) -> tuple[int, History]:
    """Return the current stream of the device and the history of the memory at address `low` that is allocated on it
    now.

    The memory may have been in use until now, so an allocation counts as a write.

    Raises:
        RuntimeError: memory that was freed to this stream, and may be allocated again, is used by another stream.
    """
    with LOCK:
        line = CURRENT.lines[device]
        if not line.running:
            line.advance("the allocation")
        while FREED[line.id]:
            old = FREED[line.id].popleft()
            if not within(old, line.clock):
                raise RuntimeError(
                    f"{line.operation} on {line.name} may be given memory that was freed while {old.name} on "
                    f"{ORDER.names[old.stream]} still uses it; call record_stream on the tensor before that, or "
                    f"let {line.name} wait for {ORDER.names[old.stream]}"
                )
        return line.id, History(Access(low, low + nbytes, line.id, line.clock[line.id], True, line.operation))


def history_of(tensor: torch.Tensor, make: bool = True) -> History | None:
    """Return the history of the memory of `tensor`; host memory has one only after a copy, or if `make` is set."""
    storage = tensor.untyped_storage()
    if tensor.device.type == "cpu":
        history: History | None = getattr(storage, "_history", None)
        if history is None and make:
            history = storage._history = History()  # type: ignore[attr-defined]  # storages take attributes
        return history
    block = getattr(storage, "_block", None)
    if block is None:  # made by torch's own code over memory that another storage holds
        return None
    if block.history is None:
        before = "an operation before the first stream was made"
        line = DEFAULT_LINES[block.device]
        block.history = History(Access(0, sys.maxsize, line.id, ORDER.before, True, before))
    known: History = block.history
    return known


class Touch(NamedTuple):
    """A tensor that an operation is about to use."""

    tensor: torch.Tensor
    reads: bool
    writes: bool
    remember: bool = True  # off for what the host waits for at once


def check(line: Line, touches: list[Touch]) -> None:
    """Raise if the last operation on `line` conflicts with one that it has not waited for; else record it.

    Raises:
        RuntimeError: another stream writes bytes that it reads or writes, or reads bytes that it writes, in no order.
    """
    count, found = line.clock[line.id], []
    for touch in touches:
        low, high = range_of(touch.tensor)
        history = history_of(touch.tensor, touch.remember) if low < high else None
        if history is None:
            continue
        new = Access(low, high, line.id, count, touch.writes, line.operation)
        old = history.conflict(new, line.clock)
        if old is not None:
            raise RuntimeError(_race(touch, new, old))
        if touch.remember:
            found.append((history, new))
    for history, new in found:
        history.add(new)


def check_host_reads(tensor: torch.Tensor) -> None:
    """Raise if the host reads `tensor`, in its memory, before it has waited for what writes there.

    Raises:
        RuntimeError: an operation that the host has not waited for writes bytes of it.
    """
    low, high = range_of(tensor)
    history = history_of(tensor, make=False) if low < high else None
    reading = Access(low, high, -1, 0, False, "the host")
    old = None if history is None else history.conflict(reading, ORDER.host)
    if old is not None:
        raise RuntimeError(
            f"the host reads a strided tensor of shape {tuple(tensor.shape)} when it gives it to the device, which "
            f"copies contiguous ones only, and {old.name} on {ORDER.names[old.stream]} still writes it; let the host "
            "wait for that (synchronize), or copy contiguous rows"
        )


def _race(touch: Touch, new: Access, old: Access) -> str:
    here, there = ORDER.names[new.stream], ORDER.names[old.stream]
    if not old.writes:
        kind, before = "write-after-read", "still reads"
    else:
        kind, before = ("read" if touch.reads else "write") + "-after-write", "still writes"
    does = "writes" if kind.startswith("write") else "reads"
    where = "on the device" if touch.tensor.device.type != "cpu" else "on the host"
    return (
        f"{new.name} on {here}: {kind} race. It {does} a tensor of shape {tuple(touch.tensor.shape)} {where} that "
        f"{old.name} on {there} {before} and that {here} has not waited for; let {here} wait for an event recorded on "
        f"{there} after {old.name} (wait_event or wait_stream), or let the host wait for one (synchronize)"
    )
