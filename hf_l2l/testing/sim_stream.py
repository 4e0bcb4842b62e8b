"""Streams and events of the simulated accelerator: the part of torch.cuda's interface that orders work.

Streams have no time. An asynchronous copy on a side stream lands when an operation waits for it, and never earlier. If
no wait orders two operations on the same memory, the second one raises an error when it is issued. So a program that
runs here without an error, with the right results, has all waits that it needs on a device where these operations take
any time.

A download by `copy_(..., non_blocking=True)` is late on the default stream as well, and host memory counts as pinned:
the host does not wait for a copy because its memory is pageable. Only in the virtual time of `sim_clock` does the host
wait for such a copy.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from hf_l2l.testing import sim_copies
from hf_l2l.testing.sim_devices import index_of
from hf_l2l.testing.sim_race import CURRENT, DEFAULT_LINES, LOCK, ORDER, Clock, Line, merge
from hf_l2l.testing.sim_recorder import Moment, Running

_Device = torch.device | str | int | None


class Event:
    """A point in a stream's order that other streams and the host can wait for.

    The arguments are those of `torch.cuda.Event`; there is one process and waiting costs nothing, so only
    `enable_timing` has an effect.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._clock: Clock | None = None
        self._moment: Moment | None = None  # in virtual time; none if no virtual clock ran
        self._timed = enable_timing
        self._recorded_at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Make this event mark the end of all work issued to `stream` (None: the current one) so far."""
        with LOCK:
            line = _line(stream)
            line.see_host()
            self._clock = dict(line.clock)
            self._moment = None if Running.recorder is None else Running.recorder.mark(line)
            self._recorded_at = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Order all that is issued to `stream` (None: the current one) from now on after this point."""
        if self._clock is not None:
            with LOCK:
                line = _line(stream)
                merge(line.clock, self._clock)
                if line.is_default:  # its kernels run at once
                    sim_copies.land(line.clock)
                if Running.recorder is not None:
                    Running.recorder.line_waits(line, self._moment)

    def synchronize(self) -> None:
        """Make the host wait for this point."""
        if self._clock is not None:
            with LOCK:
                sim_copies.host_waits(self._clock)
                if Running.recorder is not None:
                    Running.recorder.host_waits(self._moment)

    def query(self) -> bool:
        """Return whether all work before this point is done; if so, the host has waited for it."""
        if self._clock is None:
            return True
        with LOCK:
            done = sim_copies.is_done(self._clock)
            if done:
                self.synchronize()
        return done

    def elapsed_time(self, end_event: Event) -> float:
        """Return milliseconds from this point to `end_event`, negative if that comes first.

        The time is virtual if a virtual clock ran when either was recorded (it starts at 0); otherwise it is the real
        time between the two calls of `record`.

        Raises:
            ValueError: one of them was made without `enable_timing`, or not recorded.
            RuntimeError: work before one of them is not done.
        """
        events = (self, end_event)
        if not all(event._timed and event._clock is not None for event in events):
            raise ValueError("both events must be made with enable_timing=True and recorded before time is measured")
        with LOCK:
            if not all(event.is_reached() for event in events):
                raise RuntimeError("both events must be completed before time is measured between them")
            if self._moment is None and end_event._moment is None:
                return 1e3 * (end_event._recorded_at - self._recorded_at)
            start, end = (0.0 if event._moment is None else event._moment.seconds for event in events)
            return 1e3 * (end - start)

    def is_reached(self) -> bool:
        """Whether all work before this point is done; unlike `query`, this does not count as a wait of the host."""
        recorder = Running.recorder
        if recorder is not None and self._moment is not None and self._moment.recorder is recorder:
            return self._moment.seconds <= Moment(recorder, recorder.host.node).seconds
        return self._clock is None or sim_copies.is_done(self._clock)


class Stream(torch.Stream):
    """A stream: its operations run in order, and in no order with those of other streams, except after waits.

    Args:
        device: one of the simulated ones; None is the current one.
        priority: ignored.
        name: the name of the stream in errors; by default "sim stream 2" and so on.
    """

    _line: Line

    def __new__(cls, device: _Device = None, priority: int = 0, *, name: str | None = None, **known: Any) -> Stream:
        """Make a new stream; `known` is for the default stream."""
        index = index_of(device)
        with LOCK:
            line: Line | None = known.get("line")
            if line is None:
                ORDER.activate()
                line = Line(name, index)
        kind = torch._C._autograd.DeviceType.PrivateUse1.value
        stream: Stream = super().__new__(cls, stream_id=line.id, device_index=line.device, device_type=kind)
        stream._line = line
        return stream

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `__new__` has made the stream."""

    @property
    def name(self) -> str:
        """The name of this stream in errors."""
        return self._line.name

    def wait_event(self, event: Event) -> None:  # type: ignore[override]  # torch has events of its own
        """Order all that is issued to this stream from now on after `event`."""
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:  # type: ignore[override]
        """Order all that is issued to this stream from now on after all work issued to `stream` so far."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]
        """Record `event`, or a new one, on this stream and return it."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Make the host wait for all work issued to this stream so far."""
        self.record_event().synchronize()

    def query(self) -> bool:
        """Return whether all work issued to this stream is done; if so, the host has waited for it."""
        return self.record_event().query()

    def __enter__(self) -> Stream:
        """Make this the current stream of the thread, and its device the current one."""
        _entered.before.append((CURRENT.device, current_stream(self._line.device)))
        set_stream(self)
        return self

    def __exit__(self, *error: object) -> None:
        """Make the previous stream of the thread current again."""
        device, stream = _entered.before.pop()
        set_stream(stream)
        CURRENT.device = device

    def __repr__(self) -> str:
        return f"<torch.sim.Stream {self.name!r}>"


class _Entered(threading.local):
    def __init__(self) -> None:
        self.before: list[tuple[int, Stream]] = []


_entered = _Entered()
_default: dict[int, Stream] = {}  # made when first asked for: torch must know the device by then


def default_stream(device: _Device = None) -> Stream:
    """Return the stream on which every thread starts."""
    index = index_of(device)
    with LOCK:
        if index not in _default:
            _default[index] = Stream(line=DEFAULT_LINES[index])
    return _default[index]


def current_stream(device: _Device = None) -> Stream:
    """Return the stream to which this thread issues its operations on a device."""
    index = index_of(device)
    current = CURRENT.streams[index]
    return current if isinstance(current, Stream) else default_stream(index)


def set_stream(stream: Stream | None) -> None:
    """Make `stream` the current one of this thread, and its device, too; None changes nothing."""
    if stream is not None:
        device = CURRENT.device = stream._line.device
        CURRENT.lines[device], CURRENT.streams[device] = stream._line, stream


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Make `stream` the current one of this thread inside; None changes nothing."""
    if stream is None:
        yield
        return
    with stream:
        yield


def synchronize_device(index: int) -> None:
    """Make the host wait for every stream of a device."""
    if ORDER.active:
        with LOCK:
            of_device = {line: count for line, count in ORDER.issued.items() if ORDER.devices[line] == index}
            sim_copies.host_waits(of_device)
            for line in of_device:
                del ORDER.issued[line]
            if Running.recorder is not None:
                Running.recorder.host_waits_for_device(index)


@contextlib.contextmanager
def late_copies(late: bool) -> Iterator[None]:
    """With False, queued copies land at issue; races are still detected. A switch for tests."""
    with _landing(late, None):
        yield


@contextlib.contextmanager
def random_landing(seed: int) -> Iterator[None]:
    """Make each queued copy land at issue, at a wait for it, or between, drawn from `seed`. A switch for tests."""
    with _landing(True, random.Random(seed)):
        yield


@contextlib.contextmanager
def _landing(late: bool, draws: random.Random | None) -> Iterator[None]:
    landing = sim_copies.LANDING
    before = landing.late, landing.draws
    landing.late, landing.draws = late, draws
    try:
        yield
    finally:
        landing.late, landing.draws = before


def _line(stream: Stream | None) -> Line:
    return CURRENT.line if stream is None else stream._line
