"""The host's side of asynchronous copies: downloads that it cannot see yet, upload sources that it may not write yet.

Downloaded values become visible to the host when the host itself waits, or when a copy that has waited for the
download uses that host memory. The source of an upload must not change until the host has waited; operations of the
host are not intercepted, so this is checked by comparing the tensor's contents.
"""

from __future__ import annotations

import ctypes
import weakref
import zlib
from dataclasses import dataclass

import torch

from hf_l2l.runtime.observer import HostWork
from hf_l2l.testing.sim_pages import PAGES
from hf_l2l.testing.sim_race import LOCK, ORDER, Access, Clock, Line, range_of, within


@dataclass(eq=False)
class Arrival:
    """A download that the device has done and the host has not waited for."""

    stream: int
    count: int
    target: torch.Tensor
    values: torch.Tensor


@dataclass(eq=False)
class Watched:
    """Host memory that a copy has read, and that the host must not write until it has waited for that copy."""

    access: Access
    storage: weakref.ref[torch.UntypedStorage]
    like: tuple[torch.dtype, int, torch.Size, tuple[int, ...]]
    digest: int
    is_whole: bool
    """Whether the elements fill their range of addresses, in memory order."""
    stream: str


_arrivals: list[Arrival] = []
_most_kept = [0]  # bytes of values at once
WATCHED: list[Watched] = []


def keep_for_host(values: torch.Tensor, target: torch.Tensor, line: Line, count: int) -> None:
    """Keep the `values` that operation `count` of `line` downloads to `target` until the host may see them."""
    _arrivals.append(Arrival(line.id, count, target, values))
    _most_kept[0] = max(kept_bytes())


def kept_bytes() -> tuple[int, int]:
    """Return the bytes of downloaded values that the host may not see yet, now and at most."""
    return sum(a.values.nbytes for a in _arrivals), _most_kept[0]


def watch(source: torch.Tensor, line: Line, count: int) -> None:
    """Watch the host tensor `source`, which the copy that is operation `count` of `line` has read."""
    if source.numel():
        access = Access(*range_of(source), line.id, count, False, "aten::copy_")
        like = (source.dtype, int(source.storage_offset()), source.size(), source.stride())
        storage, is_whole = weakref.ref(source.untyped_storage()), source.is_contiguous()
        WATCHED.append(Watched(access, storage, like, _digest(source), is_whole, line.name))


def all_visible(clock: Clock) -> bool:
    """Return whether the host sees every download that `clock` covers and that the device has done."""
    return not any(clock.get(a.stream, 0) >= a.count for a in _arrivals)


def host_has_waited(clock: Clock) -> None:
    """Show the host the downloads within `clock`, and end the watches within it."""
    _publish([a for a in _arrivals if clock.get(a.stream, 0) >= a.count])
    _end_watch([w for w in WATCHED if within(w.access, clock)])


def show_at_once(target: torch.Tensor) -> None:
    """Show the host the download with this target, although the host has not waited."""
    _publish([a for a in _arrivals if a.target is target])


def refuse_races(work: HostWork) -> None:
    """Raise for work of the host on memory that a copy which the device has done is using, for which the host has not
    waited.

    Raises:
        RuntimeError: if it reads or writes what is being downloaded, or writes what is being uploaded.
    """
    with LOCK:
        for tensor in (*work.reads, *work.changes, *work.writes):
            touched = range_of(tensor)
            found = next((a for a in _arrivals if overlap(range_of(a.target), touched)), None)
            if found is not None:
                raise RuntimeError(
                    f"{work.what} reads a host tensor of shape {tuple(tensor.shape)} whose download on "
                    f"{ORDER.names[found.stream]} the host has not waited for: read-after-write race; let the host "
                    "wait (synchronize) for an event recorded after the copy"
                )
        for tensor in (*work.changes, *work.writes):
            touched = range_of(tensor)
            watching = (w for w in WATCHED if overlap((w.access.low, w.access.high), touched) and _has_memory(w))
            watched = next(watching, None)
            if watched is not None and not within(watched.access, ORDER.host):
                raise RuntimeError(
                    f"{work.what} writes into a host tensor of shape {tuple(tensor.shape)} that "
                    f"{watched.access.name} on {watched.stream} still reads: write-after-read race; let the host wait "
                    f"(synchronize) for an event recorded on {watched.stream} after the copy before it writes again"
                )


def bring_arrived(tensor: torch.Tensor) -> None:
    """Write values that were downloaded into `tensor`, and are not visible yet, to its memory."""
    touched = range_of(tensor)
    _publish([a for a in _arrivals if overlap(range_of(a.target), touched)])


def settle_written(tensor: torch.Tensor) -> None:
    """Prepare the memory of `tensor` for a write by the device: a watch over it ends."""
    bring_arrived(tensor)
    touched = range_of(tensor)
    _end_watch([w for w in WATCHED if overlap((w.access.low, w.access.high), touched)])


def _publish(arrivals: list[Arrival]) -> None:
    """Make the downloaded values visible to the host."""
    for arrival in arrivals:
        _arrivals.remove(arrival)
        with torch.inference_mode():
            arrival.target.copy_(arrival.values)


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether two ranges of addresses have an address in common."""
    return one[0] < other[1] and other[0] < one[1]


def _digest(tensor: torch.Tensor) -> int:
    whole = tensor.contiguous()
    return _digest_of(whole.data_ptr(), whole.data_ptr() + whole.nbytes)


def _digest_of(low: int, high: int) -> int:
    return zlib.crc32((ctypes.c_char * (high - low)).from_address(low))


def _end_watch(over: list[Watched]) -> None:
    WATCHED[:] = [w for w in WATCHED if w not in over]
    for watched in over:
        _refuse_changed(watched)


def _has_memory(watched: Watched) -> bool:
    """Whether the memory is still that which was read: after it is freed, another tensor may get it."""
    access = watched.access
    # The memory outlives a tensor over page-locked pages that was made for the copy alone.
    return watched.storage() is not None or (watched.is_whole and PAGES.hold(access.low, access.high))


def _refuse_changed(watched: Watched) -> None:
    storage, access = watched.storage(), watched.access
    dtype, *place = watched.like
    if not _has_memory(watched):
        return
    if storage is not None:
        digest = _digest(torch.empty(0, dtype=dtype).set_(storage, *place))
    else:
        digest = _digest_of(access.low, access.high)
    if digest != watched.digest:
        raise RuntimeError(
            f"the host wrote into a tensor of shape {tuple(watched.like[2])} that {watched.access.name} on "
            f"{watched.stream} still reads: write-after-read race; let the host wait (synchronize) for an event "
            f"recorded on {watched.stream} after the copy before it writes again"
        )
