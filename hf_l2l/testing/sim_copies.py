"""Asynchronous copies to, from and inside "sim": they are done as late as the program's waits allow.

A copy that is issued on a side stream is queued, and its destination holds poison until the copy "lands". It lands
when an operation waits for it. `sim_host` simulates what the host can see and may write until then.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hf_l2l.runtime.observer import HostWork
from hf_l2l.testing import sim_host
from hf_l2l.testing.sim_host import overlap
from hf_l2l.testing.sim_memory import Block, MemoryAccount
from hf_l2l.testing.sim_race import (
    CURRENT,
    FREED,
    LOCK,
    ORDER,
    Clock,
    Line,
    Touch,
    check,
    check_host_reads,
    merge,
    range_of,
)
from hf_l2l.testing.sim_recorder import Running


class Landing:
    """Decides when queued copies land: as late as possible, at issue, or between, drawn from a seed."""

    def __init__(self) -> None:
        self.late = True
        self.draws: random.Random | None = None

    def at_issue(self) -> bool:
        """Return whether the copy that is issued now lands at once."""
        return not self.late or (self.draws is not None and self.draws.random() < 0.3)

    def now(self) -> QueuedCopy | None:
        """Return a queued copy that lands before the operation that is issued now, although nothing waits for it."""
        lands = bool(_queue) and self.draws is not None and self.draws.random() < 0.1
        return self.draws.choice(_queue) if lands and self.draws is not None else None


@dataclass(eq=False)
class Ticket:
    """The link from memory to a queued copy that uses it."""

    stream: int
    number: int
    waiting: bool = True
    freed_early: bool = False  # the memory was freed although the copy's stream was not recorded on it


class QueuedCopy:
    """A copy that has not landed yet. It keeps the memory alive, but not the tensors, so that these can be freed too
    early."""

    def __init__(self, line: Line, source: torch.Tensor, target: torch.Tensor, views: tuple[torch.Tensor, ...]):
        self.line = line
        self.count = line.clock[line.id]
        self.clock = dict(line.clock)
        self.source, self.target = views
        self.shape = tuple(target.shape)
        self.uploads, self.downloads = source.device.type == "cpu", target.device.type == "cpu"
        self.ranges = range_of(source), range_of(target)
        self.ticket = Ticket(line.id, self.count)
        self._kept = [_keep(self.ticket, t) for t in (source, target)]

    def run(self) -> None:
        """Do the copy; for a download, only the device's part of it."""
        self.ticket.waiting = False
        if self.downloads:
            sim_host.keep_for_host(self.source.clone(), self.target, self.line, self.count)
        else:
            _do(self.source, self.target)
            if self.uploads:
                sim_host.watch(self.source, self.line, self.count)
        if self.ticket.freed_early:
            raise RuntimeError(
                f"a queued copy on {self.line.name} used memory that was freed before it landed (target of shape "
                f"{self.shape}); keep both tensors until the copy is waited for, or call record_stream on them"
            )


LANDING = Landing()
_queue: list[QueuedCopy] = []  # in the order of issue, which every order that waits can ask for respects
# Bytes of blocks that were freed, and the copies that were queued then on the streams recorded on them.
_held: list[tuple[MemoryAccount, int, list[Ticket]]] = []


@contextlib.contextmanager
def in_order(name: str, touches: list[Touch], device: int, host_follows: bool = False) -> Iterator[None]:
    """Run the block as a kernel of the current stream of the device: after the copies that this has waited for, and
    checked for races."""
    with LOCK:
        line = CURRENT.lines[device]
        line.advance(name)
        check(line, touches)
        land(line.clock)
        early = LANDING.now()
        if early is not None:
            land(early.clock)
        line.running = True
        try:
            yield
        finally:
            line.running = False
        if host_follows:
            host_waits(line.clock)
            if Running.recorder is not None:
                Running.recorder.host_waits_for(line)


def land(clock: Clock) -> None:
    """Do the queued copies that `clock` has waited for."""
    try:
        for copy in [c for c in _queue if clock.get(c.line.id, 0) >= c.count]:
            _queue.remove(copy)
            # Autograd has nothing to see here, and the copy may have been issued in inference mode.
            with torch.inference_mode():
                copy.run()
    finally:
        _give_back_held()


def refuse_races(work: HostWork) -> None:
    """Raise RuntimeError for work of the host on memory that a copy is using, for which the host has not waited."""
    with LOCK:
        touched = [range_of(tensor) for tensor in (*work.reads, *work.changes, *work.writes)]
        for copy in list(_queue):  # the device does those now: nothing says that it does them later
            on_host = [
                place for place, there in zip(copy.ranges, (copy.uploads, copy.downloads), strict=True) if there
            ]
            if any(overlap(place, each) for place in on_host for each in touched):
                land(copy.clock)
    sim_host.refuse_races(work)


def copies_under_way(stream: torch.Stream | None = None) -> int:
    """Return the number of asynchronous copies that have been queued and have not landed.

    Args:
        stream: a `torch.sim.Stream` whose copies alone are counted; None for all streams.
    """
    with LOCK:
        return sum(stream is None or copy.line.id == stream.stream_id for copy in _queue)


def is_done(clock: Clock) -> bool:
    """Return whether all operations within `clock` have run and are visible to the host."""
    queued = any(clock.get(c.line.id, 0) >= c.count for c in _queue)
    return not queued and sim_host.all_visible(clock)


def host_waits(clock: Clock) -> None:
    """Make the host wait for `clock`: it sees the downloads, and may write again to memory that was uploaded."""
    land(clock)
    ORDER.host_waits(clock)
    sim_host.host_has_waited(ORDER.host)


def copy(source: torch.Tensor, target: torch.Tensor, views: tuple[torch.Tensor, ...], non_blocking: bool) -> None:
    """Copy `source` to `target`, one or both on "sim", on the current stream; `views` are both as host tensors.

    Between devices, the copy runs on the stream of the source's device, after what the current stream of the other one
    has been given, which waits for it, as with CUDA.
    """
    with LOCK:
        downloads, uploads = target.device.type == "cpu", source.device.type == "cpu"
        line = CURRENT.lines[target.device.index if uploads else source.device.index]
        crosses, other = downloads or uploads, None
        ORDER.activate()
        if source.device != target.device and not crosses:
            other = CURRENT.lines[target.device.index]
            other.see_host()
            merge(line.clock, other.clock)
            if Running.recorder is not None:
                Running.recorder.line_waits(line, Running.recorder.mark(other))
        line.advance("aten::copy_")
        # What a blocking copy does to host memory is done when it returns.
        check(
            line,
            [
                Touch(source, True, False, remember=non_blocking or not uploads),
                Touch(target, False, True, remember=non_blocking or not downloads),
            ],
        )
        if uploads and not source.is_contiguous():
            check_host_reads(source)
        if (crosses or other is not None) and Running.recorder is not None:
            Running.recorder.copy(line, source, target, non_blocking)
        if other is not None:
            merge(other.clock, line.clock)
            if Running.recorder is not None:
                Running.recorder.line_waits(other, Running.recorder.mark(line))
        if non_blocking and (downloads or not line.is_default):
            _issue(QueuedCopy(line, source, target, views))
            return
        land(line.clock)
        with torch.inference_mode():
            _do(*views)
            if non_blocking and uploads:
                sim_host.watch(views[0], line, line.clock[line.id])
        if crosses and not non_blocking:
            host_waits(line.clock)


def _issue(copy: QueuedCopy) -> None:
    # Poison must not come before what is ordered earlier and is late only here.
    for earlier in list(_queue):
        if any(overlap(copy.ranges[1], r) for r in earlier.ranges):
            land(earlier.clock)
    sim_host.settle_written(copy.target)
    _queue.append(copy)
    with torch.inference_mode():
        _poison(copy.target)
        if LANDING.at_issue():
            land(copy.clock)
            sim_host.show_at_once(copy.target)


def _do(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy between views of host memory, after earlier copies into them have landed."""
    sim_host.bring_arrived(source)
    sim_host.settle_written(target)
    target.copy_(source)


def _poison(target: torch.Tensor) -> None:
    if target.is_floating_point() or target.is_complex():
        target.fill_(float("nan"))
    else:
        target.fill_(True if target.dtype is torch.bool else torch.iinfo(target.dtype).max)


def _keep(ticket: Ticket, tensor: torch.Tensor) -> object:
    """Return an object that keeps the memory of `tensor` alive for the copy with this ticket."""
    storage = tensor.untyped_storage()
    block: Block | None = getattr(storage, "_block", None)
    if block is None:
        return storage
    block.copies = [*(t for t in block.copies if t.waiting), ticket]
    block.on_free = free
    return block.owner


def record(block: Block, stream: int) -> None:
    """Make `block`, when it is freed, wait for the copies that are then queued on `stream`."""
    with LOCK:
        block.recorded |= {stream}
        block.on_free = free


def free(block: Block) -> None:
    """Free `block`, though queued copies may use it.

    The garbage collector calls this at any point, so it takes no lock. Memory is returned to the stream for which it
    was allocated, so the copies of that stream are safe, as are those that it has waited for, and those
    of the recorded streams.
    """
    waited = ORDER.lines[block.stream].clock if block.stream in ORDER.lines else {}
    waiting = [t for t in block.copies if t.waiting and waited.get(t.stream, 0) < t.number]
    early = [t for t in waiting if t.stream not in block.recorded | {block.stream}]
    for ticket in early:
        ticket.freed_early = True
    if early:
        ctypes.memset(block.host.data_ptr(), 0xFF, block.nbytes)  # NaN in every floating-point format
    elif block.history is not None:
        # What has landed or was no copy: the memory may be handed out again on its stream while others still use it.
        safe = block.recorded | {block.stream}
        FREED[block.stream].extend(a for a in block.history.accesses if a.stream not in safe)
    queued = [c.ticket for c in list(_queue) if c.ticket.waiting and c.line.id in block.recorded]
    if queued:
        _held.append((block.account, block.nbytes, queued))
    else:
        block.account.give_back(block.nbytes)


def _give_back_held() -> None:
    for held in list(_held):
        account, nbytes, tickets = held
        if not any(t.waiting for t in tickets):
            _held.remove(held)
            account.give_back(nbytes)
