"""What a step spends its time on: what each lane of the device does when, and what the computation waits for.

Work on a device is timed by events in its streams, which are read when the device has come past them: nothing waits
in order to be measured. The computation waits for a point of another stream from when it has nothing left to do until
that point is reached; so a host that runs ahead of the device, and is held up at the end of a backward, loses no more
than the device does.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hf_l2l import stream
from hf_l2l.device_clock import DeviceClock, Mark
from hf_l2l.trace import Span, TraceFile
from hf_l2l.watching import unwatch, watch, watcher_of
from hf_l2l.whereabouts import Whereabouts

STEPS, COMPUTE, HOST_UPDATE, WAITS = "steps", "compute", "host update", "waits"
ROWS = (STEPS, COMPUTE, "upload", "stash upload", "download", "stash download", "norm", HOST_UPDATE, WAITS)
"""Of the trace, from top to bottom."""

COMPUTE_BOUND_BELOW = 0.05
"""A step is bound by computation if it waits for less than this share of its time."""


class Averages(NamedTuple):
    """Of one optimizer step, in seconds."""

    steps: int
    """How many were averaged."""
    step_s: float
    """From the beginning of its first forward to the end of `optimizer.step()`."""
    upload_s: float
    """That the computation waited for weights or layer inputs to arrive."""
    download_s: float
    """That it waited for gradients or layer inputs to leave."""
    eps_s: float
    """That it waited for the host to update weights, or for uploads that began late because of updates."""

    @property
    def bound(self) -> str:
        """What to improve first: "compute" if waits are less than 5 % of the step, else "link" or "host update"."""
        link_s = self.upload_s + self.download_s
        if link_s + self.eps_s < COMPUTE_BOUND_BELOW * self.step_s:
            return "compute"
        return "link" if link_s >= self.eps_s else "host update"


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
    """The timeline of one engine. It is kept while somebody looks: a trace file, or who has called `watch`.

    While nobody does, it only tells where the first forward and backward are if they take long.
    """

    def __init__(
        self,
        device: torch.device,
        model: nn.Module | None = None,
        layers: Sequence[nn.Module] = (),
        trace: str | None = None,
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
        self._whereabouts = Whereabouts()
        self._forwards = 0
        self._noted: deque[_Noted] = deque()
        """In the order of the program; but what `host_works` notes, in the background, is somewhere in between."""
        self._step_began: float | None = None
        self._update_began: float | None = None
        self._waits = _Waits()
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
        """Keep what `averages` tells, from the next step on."""
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
        self._noted.clear()
        unwatch(self.device, self)

    def averages(self) -> Averages | None:
        """Of the steps that have ended since the last call; None if there were none."""
        self.collect()
        total, self._sum = self._sum, Averages(0, 0.0, 0.0, 0.0, 0.0)
        return Averages(total.steps, *(seconds / total.steps for seconds in total[1:])) if total.steps else None

    # ---- what happens

    def start_forward(self) -> None:
        """A call enters the model. If it is to train and no step has begun, one begins."""
        self._forwards += 1
        self._whereabouts.begin()
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
        if self._forwards == 1:
            self._whereabouts.at("update of all layers, {seconds} into this step")

    def end_step(self) -> None:
        """The optimizer has stepped."""
        if self._step_began is not None:
            if self._update_began is not None:
                update = self._update_began, self.clock.now()
                self._noted.append(_Noted(HOST_UPDATE, "all layers", *update))
                why = "the step ends when all layers are updated"
                self._noted.append(_Noted(WAITS, why, *update, "eps", self._update_began))
            self._noted.append(_Noted(STEPS, "step", self._step_began, self.clock.now()))
            self.collect()
        self._step_began = self._update_began = None

    @contextmanager
    def layer(self, sweep: str, layer: nn.Module) -> Iterator[None]:
        """Inside, `layer` computes, on the "forward" or "backward" sweep."""
        name = self._name(layer)
        place = f"layer {self._layers.get(layer, 0)} of {len(self._layers)} ({name})"
        saying = self._whereabouts.inside(f"{sweep}, {place}, {{seconds}} into this step")
        with (
            saying if self._forwards == 1 else nullcontext(),
            self._span(COMPUTE, f"{sweep} {name}") if self.is_watched else nullcontext(),
        ):
            yield

    @contextmanager
    def host_works(self, name: str) -> Iterator[None]:
        """Inside, the host updates weights, in whatever thread."""
        start = self.clock.now()
        yield
        if self.is_watched:
            self._noted.append(_Noted(HOST_UPDATE, name, start, self.clock.now()))

    @contextmanager
    def waiting_for_eps(self, why: str) -> Iterator[None]:
        """Inside, the host waits for an update, and gives the device nothing to compute."""
        start, since = self.clock.mark() if self.is_watched else 0.0, self.clock.now()
        yield
        if self.is_watched:
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
        self._waits = _Waits()

    def _name(self, of: object) -> str:
        return str(self._names.get(of, type(of).__name__))


class _Waits:
    """Adds up what the computation waits for, from one span after the other in the order of the program."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("upload", "download", "eps"), 0.0)
        self._until = -math.inf
        """Waits that are counted end here."""
        self._held_up = -math.inf, -math.inf, 0.0
        """When the host last waited for an update, from and to, and what was counted of that."""
        self._uploaded = -math.inf
        """When the lane of uploads had nothing more to do."""
        self._late_s = 0.0
        """By which an update made the upload that will be waited for begin late, where that is not counted yet."""

    def count(self, span: Span, waits_for: str, since: float) -> Span:
        """Return what to draw: a wait goes on where another one that began with it has ended."""
        if waits_for:
            span = span._replace(start_s=min(span.end_s, max(span.start_s, self._until)))
            self._until = max(self._until, span.end_s)
        seconds = span.end_s - span.start_s
        if waits_for == "upload":
            late_s, self._late_s = min(seconds, self._late_s), 0.0
            self.seconds["eps"] += late_s
            self.seconds["upload"] += seconds - late_s
        elif waits_for in self.seconds:
            self.seconds[waits_for] += seconds
        if waits_for == "eps":
            self._held_up = since, span.end_s, seconds
        elif span.row == "upload" and not waits_for:  # while something may compute
            begin, end, counted_s = self._held_up
            self._late_s = max(0.0, min(end, span.start_s) - max(begin, self._uploaded) - counted_s)
            self._uploaded = span.end_s
        return span


def _names(model: nn.Module | None, layers: Sequence[nn.Module]) -> WeakIdKeyDictionary:
    """What the trace calls modules and parameters, which it does not keep alive: those of a layer by the layer."""
    names = WeakIdKeyDictionary()
    if model is not None:
        names.update({p: name for name, p in model.named_parameters()})
        names.update({module: name for name, module in model.named_modules()})
        for layer in layers:
            names.update(dict.fromkeys(layer.parameters(), names[layer]))
    return names
