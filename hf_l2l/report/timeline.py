"""Timeline of a step: the work of each device stream and of the host over time, and the stall time of the computation.

Work on a device is timed by events in its streams, which are read after the device has passed them: measuring causes
no waits. A stall for a point of another stream lasts from the end of the compute stream's last work until that point
is reached. So where the host runs ahead of the device and waits at the end of a backward, only the device's stall
counts.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import nn

from hf_l2l.memory.device_memory import INPUTS
from hf_l2l.memory.ledger import Ledger
from hf_l2l.ranks.team import process_group_size
from hf_l2l.report.device_clock import DeviceClock, Mark
from hf_l2l.report.other_device import OtherDevice
from hf_l2l.report.trace_file import FreeRows, Span, TraceFile, names_in_trace
from hf_l2l.report.wait_time import Averages, Waits
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.runtime.observer import HERE, OBSERVERS, Rows, in_layer, observe, stop_observing
from hf_l2l.runtime.stall_log import StallLog

STEPS, COMPUTE, HOST_UPDATE, SECOND_UPDATE, WAITS = "steps", "compute", "host update", "host update 2", "waits"
ROWS = (
    STEPS,
    COMPUTE,
    "upload",
    "stash upload",
    "download",
    "stash download",
    "norm",
    HOST_UPDATE,
    SECOND_UPDATE,
    WAITS,
)
"""Rows of the trace, from top to bottom. Of two concurrent updates, the second has its own row."""

SUMS = "sums over ranks"
"""A row that ranks have before those of updates: the thread that adds gradients works beside them."""

_OF_DEVICE = (COMPUTE, "upload", "stash upload", stream.PEER, "download", "stash download", "norm", WAITS)
"""Rows that each of several devices has."""


class _Noted(NamedTuple):
    row: str
    name: str
    start: Mark
    end: Mark
    waits_for: str = ""
    """ "upload", "download" or "eps" if the computation waits for the end of this span; else empty."""
    since: float = 0.0
    """When the host began to wait for an update; since it runs ahead of the device, that may be before the start."""


class Timeline:
    """The timeline of one engine. It is recorded for a trace file, and from `watch` to `unwatch`.

    At other times it only feeds the stall log, during the first step. The seconds in a line of that log are those of
    the current sweep, without earlier sweeps of the step: with gradient accumulation, the end of the step determines
    which sweeps belong to it.
    """

    def __init__(
        self,
        device: torch.device,
        model: nn.Module | None = None,
        layers: Sequence[nn.Module] = (),
        trace: str | os.PathLike[str] | None = None,
        others: Sequence[torch.device] = (),
    ) -> None:
        """For the `layers` of `model`, which run on `device`, and on `others` in turn; spans are written to the file
        `trace` once the device has finished them.

        Raises:
            ValueError: if that file is not writable.
        """
        self._clocks = {device: DeviceClock(device, time.perf_counter)}
        for each in others:
            self._clocks[each] = DeviceClock(each, time.perf_counter, stream.Lane(each, "clock"))
        self.clock = self._clocks[device]
        self.device = device
        self._observers = {each: OtherDevice(self, each) for each in others}
        """What is told of the copies and waits of the other devices."""
        self.ledger = Ledger([device, *others])
        """What is held in memory; the events of the timeline are the phases in which its peaks are told apart."""
        self._layers = {layer: i for i, layer in enumerate(layers, start=1)}
        self._names = names_in_trace(model, layers)
        rows = [*ROWS, *(_row(each, row) for each in others for row in _OF_DEVICE)]
        self._has_peers = bool(others) or process_group_size() > 1
        rows[4:4] = [stream.PEER] if self._has_peers else []
        if process_group_size() > 1:
            rows.insert(rows.index(HOST_UPDATE), SUMS)
        where = ", ".join(map(str, self._clocks))
        self._trace = None if trace is None else TraceFile(trace, f"hf_l2l on {where}", rows)
        self._in_first_step = True
        self._sweep: tuple[str, StallLog] | None = None
        """The current sweep of the first step, and its stall log."""
        self._noted: deque[_Noted] = deque()
        """In program order, except spans of `host_works`, which background threads insert at any position."""
        self._host_rows = FreeRows([HOST_UPDATE, SECOND_UPDATE])
        self._step_began: float | None = None
        self._update_began: float | None = None
        self._waits = Waits()
        """Of the current step."""
        self._sum = Averages(0, 0.0, 0.0, 0.0, 0.0)
        self.at_step_end: Callable[[], None] = _nothing
        """Called when the optimizer has stepped."""
        self.at_no_memory: Callable[[BaseException], None] = _nothing
        """Given the error when a sweep finds no device memory."""
        if trace is not None:
            self.watch()

    @property
    def clocks(self) -> list[DeviceClock]:
        """Of all its devices, the first one's first."""
        return [*self._clocks.values()]

    # ---- recording

    @property
    def is_watched(self) -> bool:
        """Whether the timeline is recorded."""
        return OBSERVERS.get(self.device) is self

    def watch(self) -> None:
        """Record from the next step on what `averages` returns; discard earlier records and the current step."""
        before = OBSERVERS.get(self.device)
        if before is not self and isinstance(before, Timeline) and before._trace is not None:
            before.collect()
            warnings.warn(
                f"the trace {before._trace.path} ends here: a device has one recorded timeline, which is from now on "
                f"that of another model on {self.device}",
                stacklevel=3,
            )
        self.collect()
        self._sum, self._waits = Averages(0, 0.0, 0.0, 0.0, 0.0), Waits()
        self._step_began = self._update_began = None
        observe(self.device, self)
        for each, observer in self._observers.items():
            observe(each, observer)
        self._begin_clocks()

    def _begin_clocks(self) -> None:
        for clock in self._clocks.values():
            clock.begin()

    def begin_trace(self, at_s: float) -> None:
        """Make `at_s`, a time of the host's clock, the 0 of the trace file; else the first span begins there."""
        if self._trace is not None:
            self._trace.begins_s = at_s

    def unwatch(self) -> None:
        """Stop recording, unless a trace file is written."""
        self.collect()
        if self._trace is None:
            self.close()

    def close(self) -> None:
        """Write the remaining spans to the trace file, and stop recording."""
        self.collect()
        self._trace, self._step_began = None, None
        self._end_sweep()
        self._noted.clear()
        self._names.clear()
        stop_observing(self.device, self)
        for each, observer in self._observers.items():
            stop_observing(each, observer)

    @property
    def pending(self) -> int:
        """The number of recorded spans that `collect` has not processed yet."""
        return len(self._noted)

    def averages(self) -> Averages | None:
        """Averages over the steps that have ended since the last call; None if there were none."""
        self.collect()
        total, self._sum = self._sum, Averages(0, 0.0, 0.0, 0.0, 0.0)
        return Averages(total.steps, *(seconds / total.steps for seconds in total[1:])) if total.steps else None

    # ---- events of the engine

    def start_forward(self) -> None:
        """A call enters the model. With gradients enabled it begins a step, unless one has begun."""
        observer = OBSERVERS.get(self.device)
        if isinstance(observer, Timeline):  # this one, or that of another model on the device
            observer.collect()
            if not observer._noted:  # no recorded span refers to the old base
                observer._begin_clocks()
        if self.is_watched and self._step_began is None and torch.is_grad_enabled():
            self._step_began = self.clock.now()
            self._noted.append(_Noted(STEPS, "", self._step_began, self._step_began))

    def start_update(self) -> None:
        """The optimizer begins to update all layers, and the computation waits for it."""
        self._update_began = self.clock.now()
        self._end_sweep()
        if self._in_first_step:  # called in a hook of `optimizer.step()`, which may fail
            self._sweep = "update", StallLog()
            step = sys._getframe(1)
            while step.f_back is not None and step.f_globals.get("__name__", "").startswith("hf_l2l."):
                step = step.f_back
            self._sweep[1].set_phase("the update of all layers, {seconds} so far", call=step.f_code)

    def end_step(self) -> None:
        """The optimizer has stepped."""
        self._end_sweep()
        self.ledger.on_device.enter(INPUTS)
        self.ledger.look()
        self._in_first_step = False
        if self._step_began is not None:
            if self._update_began is not None:
                update = self._update_began, self.clock.now()
                self._noted.append(_Noted(HOST_UPDATE, "all layers", *update))
                why = wait_reasons.ALL_LAYERS_UPDATED
                self._noted.append(_Noted(WAITS, why, *update, "eps", self._update_began))
            self._noted.append(_Noted(STEPS, "step", self._step_began, self.clock.now()))
            self.collect()
        self._step_began = self._update_began = None
        self.at_step_end()

    @contextmanager
    def inside(self, sweep: str) -> Iterator[None]:
        """This thread runs the "forward" or "backward" sweep in the block: its waits delay the computation.

        Between the blocks of one backward, and until `end_backward`, autograd runs non-layer modules.
        """
        before, HERE.is_in_sweep = HERE.is_in_sweep, True
        memory = self.ledger.on_device
        memory.is_backward = sweep == "backward"
        trains = sweep == "backward" or torch.is_grad_enabled()
        if trains and self._in_first_step and (self._sweep is None or self._sweep[0] != sweep):
            self._end_sweep()
            self._sweep = sweep, StallLog()
            self._go("non-layer modules")
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.at_no_memory(error)
            raise
        finally:
            HERE.is_in_sweep = before
            if sweep == "forward" and trains:
                self._end_sweep()
            elif sweep == "forward":
                memory.enter(INPUTS)

    def end_backward(self) -> None:
        """The backward has ended or failed."""
        self._end_sweep()
        self.ledger.on_device.enter(INPUTS)

    @contextmanager
    def at(self, layer: nn.Module) -> Iterator[None]:
        """The sweep processes `layer` in the block: waits for it, computes it, or tries how to split its inputs."""
        with self.ledger.on_device.in_layer(), in_layer(layer):
            if self._sweep is None:  # in all steps but the first
                yield
                return
            place = f"layer {self._layers.get(layer, 0)} of {len(self._layers)} ({self._name(layer)})"
            self._go(place)
            yield
            self._go(f"non-layer modules, after {place}")

    def computes(self, sweep: str, layer: nn.Module, device: torch.device) -> AbstractContextManager[None]:
        """`layer` computes in the block on `device`, in the "forward" or "backward" sweep."""
        if not self.is_watched:
            return nullcontext()
        return self._span(self._row(device, COMPUTE), f"{sweep} {self._name(layer)}", device=device)

    def _go(self, place: str) -> None:
        if self._sweep is not None:  # None in an evaluation
            sweep, stall_log = self._sweep
            stall_log.set_phase(f"{sweep}, {place}, {{seconds}} into this {sweep}")

    def _end_sweep(self) -> None:
        if self._sweep is not None:
            self._sweep[1].set_phase(None)
            self._sweep = None

    @contextmanager
    def host_works(self, name: str, row: str | None = None) -> Iterator[None]:
        """The host updates weights in the block, in any thread; with a `row`, one thread does what belongs there."""
        with self._host_rows.taken() if row is None else nullcontext(row) as found:
            start = self.clock.now()
            yield
            if self.is_watched:
                self._noted.append(_Noted(found, name, start, self.clock.now()))

    @contextmanager
    def waiting_for_eps(self, why: str) -> Iterator[None]:
        """The host waits for an update in the block. In a sweep, the device gets no work meanwhile, and may stall."""
        counts = self.is_watched and HERE.is_in_sweep
        start, since = self.clock.mark() if counts else 0.0, self.clock.now()
        yield
        if counts:
            self._noted.append(_Noted(WAITS, why, start, self.clock.now(), "eps", since))

    # ---- reports from `stream`

    def span(self, row: str, of: object, *, exposed: bool) -> AbstractContextManager[None]:
        """See `observer.Observer`."""
        if row == stream.PEER and not self._has_peers:  # of another model, which has several devices
            return nullcontext()
        return self._span(row, self._name(of), row.split()[-1] if exposed else "")

    def waits(self, point: stream.Point, why: str) -> None:
        """See `observer.Observer`. Another model on the device may wait for a device that has no clock here."""
        if point.is_timed and point.device in self._clocks:
            self._noted.append(_Noted(WAITS, why, self.clock.mark(), point, point.row.split()[-1]))

    def host_reached(self, point: stream.Point) -> None:
        """See `observer.Observer`."""
        if point.is_timed and point.device in self._clocks:
            self._clocks[point.device].host_reached(point)

    def spans_on(self, device: torch.device, row: str, of: object) -> AbstractContextManager[None]:
        """See `observer.Observer`; of another device than the first."""
        return self._span(self._row(device, row), self._name(of), device=device)

    def waits_on(self, device: torch.device, point: stream.Point, why: str) -> None:
        """See `observer.Observer`; of another device than the first, whose stall time alone is counted."""
        if point.is_timed and point.device in self._clocks:
            self._noted.append(_Noted(_row(device, WAITS), why, self._clocks[device].mark(), point))

    # ---- times

    @contextmanager
    def _span(self, row: str, name: str, waits_for: str = "", *, device: torch.device | None = None) -> Iterator[None]:
        clock = self._clocks[device or self.device]
        start = clock.mark()
        yield
        if self.is_watched:
            self._noted.append(_Noted(row, name, start, clock.mark(), waits_for))

    def _row(self, device: torch.device, row: str) -> str:
        return row if device == self.device else _row(device, row)

    def _seconds(self, mark: Mark) -> float | None:
        """The time of `mark`; None if it is not known yet."""
        clock = self._clocks[mark.device] if isinstance(mark, stream.Point) else self.clock
        base_s = clock.base_s()
        return None if base_s is None else clock.seconds(mark, base_s)

    def collect(self) -> None:
        """Process the spans that the device has finished; leave the others for the next call."""
        spans: list[Span] = []
        late: list[_Noted] = []
        while self._noted:
            noted = self._noted[0]
            start_s, end_s = self._seconds(noted.start), self._seconds(noted.end)
            # A step is over before its last gradients have landed.
            may_be_late = noted.row.endswith("download") and not noted.waits_for
            if (start_s is None or end_s is None) and not may_be_late:
                break
            self._noted.popleft()
            if start_s is None or end_s is None:
                late.append(noted)
                continue
            if noted.row == STEPS:
                self._count_step(noted.name, end_s - start_s)
            span = self._waits.count(Span(noted.row, noted.name, start_s, end_s), noted.waits_for, noted.since)
            spans.append(span)
            if noted.waits_for and span.row != WAITS:
                spans.append(span._replace(row=WAITS, name=f"{span.row} of {span.name}"))
        self._noted.extendleft(reversed(late))
        if self._trace is not None:
            self._trace.write(spans)

    def _count_step(self, name: str, step_s: float) -> None:
        """Add a step to the sums at its end; the span at its beginning has no name."""
        if name:
            seconds = (step_s, *self._waits.seconds.values())
            total = (a + b for a, b in zip(self._sum[1:], seconds, strict=True))
            self._sum = Averages(self._sum.steps + 1, *total)
        self._waits = Waits()

    def _name(self, of: object) -> str:
        if isinstance(of, Rows):
            return f"{of.what} of {self._name(of.layer)}"
        return of if isinstance(of, str) else str(self._names.get(of, type(of).__name__))


def _row(device: torch.device, row: str) -> str:
    return f"{device} {row}"


def _nothing(*_: object) -> None:
    pass
