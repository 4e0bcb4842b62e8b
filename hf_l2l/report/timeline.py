"""What a step spends its time on: what each lane of the device does when, and what the computation waits for.

Work on a device is timed by events in its streams, which are read when the device has come past them: nothing waits
in order to be measured. The computation waits for a point of another stream from when it has nothing left to do until
that point is reached; so a host that runs ahead of the device, and is held up at the end of a backward, loses no more
than the device does.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hf_l2l.report.device_clock import DeviceClock, Mark
from hf_l2l.report.trace_file import FreeRows, Span, TraceFile
from hf_l2l.report.wait_time import Averages, Waits
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.runtime.observer import HERE, unwatch, watch, watcher_of
from hf_l2l.runtime.stall_log import Whereabouts

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
"""Of the trace, from top to bottom. What is updated while another update runs has a row of its own."""


class _Noted(NamedTuple):
    row: str
    name: str
    start: Mark
    end: Mark
    waits_for: str = ""
    """ "upload", "download" or "eps" where the computation comes after the end."""
    since: float = 0.0
    """When the host began to wait for an update: it runs ahead of the device, so that may be before the start."""


class Timeline:
    """The timeline of one engine. It is kept for a trace file, and from `watch` to `unwatch`.

    At other times it only warns where a sweep of the first step is, if that sweep takes long. The seconds in such a
    warning are those of the sweep that is under way. They leave out earlier sweeps of the step: while gradients are
    accumulated, it is not known before the step ends which sweeps belong to it.
    """

    def __init__(
        self,
        device: torch.device,
        model: nn.Module | None = None,
        layers: Sequence[nn.Module] = (),
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        """For the `layers` of `model`; spans go to the file `trace` as soon as the device is done with them.

        Raises:
            ValueError: if that file cannot be written.
        """
        self.clock = DeviceClock(device, time.perf_counter)
        self.device = device
        self._layers = {layer: i for i, layer in enumerate(layers, start=1)}
        self._names = _names(model, layers)
        self._trace = None if trace is None else TraceFile(trace, f"hf_l2l on {device}", ROWS)
        self._in_first_step = True
        self._sweep: tuple[str, Whereabouts] | None = None
        """The sweep of the first step that is under way, and where it is."""
        self._noted: deque[_Noted] = deque()
        """In the order of the program; but what `host_works` notes, in the background, is somewhere in between."""
        self._host_rows = FreeRows([HOST_UPDATE, SECOND_UPDATE])
        self._step_began: float | None = None
        self._update_began: float | None = None
        self._waits = Waits()
        """Of the step that has not ended."""
        self._sum = Averages(0, 0.0, 0.0, 0.0, 0.0)
        if trace is not None:
            self.watch()

    # ---- who looks

    @property
    def is_watched(self) -> bool:
        """Whether anything is kept."""
        return watcher_of(self.device) is self

    def watch(self) -> None:
        """Keep what `averages` tells, from the next step on: what was kept, or has begun, does not count."""
        before = watcher_of(self.device)
        if before is not self and isinstance(before, Timeline) and before._trace is not None:
            before.collect()
            warnings.warn(
                f"the trace {before._trace.path} ends here: from now on, steps of another model on {self.device} are "
                "looked at, and a device has one who looks",
                stacklevel=3,
            )
        self.collect()
        self._sum, self._waits = Averages(0, 0.0, 0.0, 0.0, 0.0), Waits()
        self._step_began = self._update_began = None
        watch(self.device, self)
        self.clock.begin()

    def unwatch(self) -> None:
        """Keep no more than a trace asks for."""
        self.collect()
        if self._trace is None:
            self.close()

    def close(self) -> None:
        """Write what has not been written, and keep nothing any more."""
        self.collect()
        self._trace, self._step_began = None, None
        self._end_sweep()
        self._noted.clear()
        self._names.clear()
        unwatch(self.device, self)

    def averages(self) -> Averages | None:
        """Of the steps that have ended since the last call; None if there were none."""
        self.collect()
        total, self._sum = self._sum, Averages(0, 0.0, 0.0, 0.0, 0.0)
        return Averages(total.steps, *(seconds / total.steps for seconds in total[1:])) if total.steps else None

    # ---- what happens

    def start_forward(self) -> None:
        """A call enters the model. If it is to train and no step has begun, one begins."""
        watcher = watcher_of(self.device)
        if isinstance(watcher, Timeline):  # this one, or that of another model on the device
            watcher.collect()
            if not watcher._noted:  # nothing counts from the old base any more
                watcher.clock.begin()
        if self.is_watched and self._step_began is None and torch.is_grad_enabled():
            self._step_began = self.clock.now()
            self._noted.append(_Noted(STEPS, "", self._step_began, self._step_began))

    def start_update(self) -> None:
        """The optimizer begins to update all layers, and everything waits for it."""
        self._update_began = self.clock.now()
        self._end_sweep()
        if self._in_first_step:  # called in a hook of `optimizer.step()`, which may fail
            self._sweep = "update", Whereabouts()
            self._sweep[1].go("the update of all layers, {seconds} so far", call=sys._getframe(2).f_code)

    def end_step(self) -> None:
        """The optimizer has stepped."""
        self._end_sweep()
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

    @contextmanager
    def inside(self, sweep: str) -> Iterator[None]:
        """Inside, this thread is on the "forward" or "backward" sweep: the computation waits for what it waits for.

        Between those of one backward, autograd computes what is in no layer, until `end_backward`.
        """
        before, HERE.is_in_sweep = HERE.is_in_sweep, True
        trains = sweep == "backward" or torch.is_grad_enabled()
        if trains and self._in_first_step and (self._sweep is None or self._sweep[0] != sweep):
            self._end_sweep()
            self._sweep = sweep, Whereabouts()
            self._go("what is in no layer")
        try:
            yield
        finally:
            HERE.is_in_sweep = before
            if sweep == "forward" and trains:
                self._end_sweep()

    def end_backward(self) -> None:
        """The backward is over, or has failed."""
        self._end_sweep()

    @contextmanager
    def at(self, layer: nn.Module) -> Iterator[None]:
        """Inside, the sweep is at `layer`, which is waited for, computes, or is learned about."""
        if self._sweep is None:  # as in every step but the first
            yield
            return
        place = f"layer {self._layers.get(layer, 0)} of {len(self._layers)} ({self._name(layer)})"
        self._go(place)
        yield
        self._go(f"what is in no layer, after {place}")

    def computes(self, sweep: str, layer: nn.Module) -> AbstractContextManager[None]:
        """Inside, `layer` computes, on the "forward" or "backward" sweep."""
        return self._span(COMPUTE, f"{sweep} {self._name(layer)}") if self.is_watched else nullcontext()

    def _go(self, place: str) -> None:
        if self._sweep is not None:  # in an evaluation, the program is nowhere
            sweep, whereabouts = self._sweep
            whereabouts.go(f"{sweep}, {place}, {{seconds}} into this {sweep}")

    def _end_sweep(self) -> None:
        if self._sweep is not None:
            self._sweep[1].go(None)
            self._sweep = None

    @contextmanager
    def host_works(self, name: str) -> Iterator[None]:
        """Inside, the host updates weights, in whatever thread."""
        with self._host_rows.taken() as row:
            start = self.clock.now()
            yield
            if self.is_watched:
                self._noted.append(_Noted(row, name, start, self.clock.now()))

    @contextmanager
    def waiting_for_eps(self, why: str) -> Iterator[None]:
        """Inside, the host waits for an update; on a sweep, it gives the device nothing to compute meanwhile."""
        counts = self.is_watched and HERE.is_in_sweep
        start, since = self.clock.mark() if counts else 0.0, self.clock.now()
        yield
        if counts:
            self._noted.append(_Noted(WAITS, why, start, self.clock.now(), "eps", since))

    # ---- what `stream` tells

    def span(self, row: str, of: object, *, exposed: bool) -> AbstractContextManager[None]:
        """See `watching.Watcher`."""
        name = of if isinstance(of, str) else self._name(of)
        return self._span(row, name, row.split()[-1] if exposed else "")

    def waits(self, point: stream.Point, why: str) -> None:
        """See `watching.Watcher`."""
        if point.is_timed:
            self._noted.append(_Noted(WAITS, why, self.clock.mark(), point, point.row.split()[-1]))

    def host_reached(self, point: stream.Point) -> None:
        """See `watching.Watcher`."""
        if point.is_timed:
            self.clock.host_reached(point)

    # ---- times

    @contextmanager
    def _span(self, row: str, name: str, waits_for: str = "") -> Iterator[None]:
        start = self.clock.mark()
        yield
        if self.is_watched:
            self._noted.append(_Noted(row, name, start, self.clock.mark(), waits_for))

    def collect(self) -> None:
        """Take in what the device is done with; what it has not come to is left for the next time."""
        spans: list[Span] = []
        base_s = self.clock.base_s()
        while self._noted and base_s is not None:
            noted = self._noted[0]
            start_s, end_s = (self.clock.seconds(mark, base_s) for mark in (noted.start, noted.end))
            if start_s is None or end_s is None:
                break
            self._noted.popleft()
            if noted.row == STEPS:
                self._count_step(noted.name, end_s - start_s)
            span = self._waits.count(Span(noted.row, noted.name, start_s, end_s), noted.waits_for, noted.since)
            spans.append(span)
            if noted.waits_for and span.row != WAITS:
                spans.append(span._replace(row=WAITS, name=f"{span.row} of {span.name}"))
        if self._trace is not None:
            self._trace.write(span for span in spans if span.end_s > span.start_s)

    def _count_step(self, name: str, step_s: float) -> None:
        """Add a step to the sums when it has ended; at its beginning, the span has no name."""
        if name:
            seconds = (step_s, *self._waits.seconds.values())
            total = (a + b for a, b in zip(self._sum[1:], seconds, strict=True))
            self._sum = Averages(self._sum.steps + 1, *total)
        self._waits = Waits()

    def _name(self, of: object) -> str:
        return str(self._names.get(of, type(of).__name__))


def _names(model: nn.Module | None, layers: Sequence[nn.Module]) -> WeakIdKeyDictionary:
    """What the trace calls modules and parameters, which it does not keep alive: those of a layer by the layer."""
    names = WeakIdKeyDictionary()
    if model is not None:
        names.update({p: name for name, p in model.named_parameters()})
        names.update({module: name for name, module in model.named_modules()})
        for layer in layers:
            names.update(dict.fromkeys(layer.parameters(), names[layer]))
    return names
