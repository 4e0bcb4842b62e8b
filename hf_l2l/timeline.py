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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
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
    """That it waited for the host to update weights."""

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
        self._clock = DeviceClock(device, time.perf_counter)
        self.device = device
        self._layers = {layer: i for i, layer in enumerate(layers, start=1)}
        self._names, self._parameters = _names(model, layers)
        self._trace = None if trace is None else TraceFile(trace, f"hf_l2l on {device}", ROWS)
        self._whereabouts = Whereabouts()
        self._forwards = 0
        self._noted: deque[_Noted] = deque()
        """In the order of the program."""
        self._step_began: float | None = None
        self._update_began: float | None = None
        self._waited_until = -math.inf
        self._open = dict.fromkeys(("upload", "download", "eps"), 0.0)
        """Waits of the step that has not ended."""
        self._sum = Averages(0, 0.0, 0.0, 0.0, 0.0)
        if trace is not None:
            self.watch()

    @property
    def now(self) -> Callable[[], float]:
        """The host's clock, in seconds; another one may be put in its place between steps."""
        return self._clock.now

    @now.setter
    def now(self, clock: Callable[[], float]) -> None:
        self._clock.now = clock

    # ---- who looks

    @property
    def is_watched(self) -> bool:
        """Whether anything is kept."""
        return watcher_of(self.device) is self

    def watch(self) -> None:
        """Keep what `averages` tells, from the next step on."""
        watch(self.device, self)
        self._clock.begin()

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
                watcher._clock.begin()
        if not self.is_watched:
            return
        if self._step_began is None and torch.is_grad_enabled():
            self._step_began = self.now()
            self._noted.append(_Noted(STEPS, "", self._step_began, self._step_began))

    def start_update(self) -> None:
        """The optimizer begins to update all layers, and everything waits for it."""
        self._update_began = self.now()

    def end_step(self) -> None:
        """The optimizer has stepped."""
        if self._step_began is not None:
            if self._update_began is not None:
                update = self._update_began, self.now()
                self._noted.append(_Noted(HOST_UPDATE, "all layers", *update))
                self._noted.append(_Noted(WAITS, "the step ends when all layers are updated", *update, "eps"))
                self._update_began = None
            self._noted.append(_Noted(STEPS, "step", self._step_began, self.now()))
            self._step_began = None
            self.collect()

    @contextmanager
    def layer(self, sweep: str, layer: nn.Module) -> Iterator[None]:
        """Inside, `layer` computes, on the "forward" or "backward" sweep."""
        name = self._name(layer)
        if self._forwards == 1 and self._whereabouts.is_due:
            place = f"layer {self._layers.get(layer, 0)} of {len(self._layers)} ({name})"
            self._whereabouts.at(f"{sweep}, {place}, {{seconds}} into this step")
        if not self.is_watched:
            yield
            return
        with self._span(COMPUTE, f"{sweep} {name}"):
            yield

    @contextmanager
    def host_works(self, name: str) -> Iterator[None]:
        """Inside, the host updates weights."""
        start = self.now()
        yield
        if self.is_watched:
            self._noted.append(_Noted(HOST_UPDATE, name, start, self.now()))

    @contextmanager
    def waiting_for_eps(self, why: str) -> Iterator[None]:
        """Inside, the host waits for an update, and gives the device nothing to compute."""
        start = self._clock.mark() if self.is_watched else 0.0
        yield
        if self.is_watched:
            self._noted.append(_Noted(WAITS, why, start, self.now(), "eps"))

    # ---- what `stream` tells

    def span(self, row: str, of: object, *, exposed: bool) -> AbstractContextManager[None]:
        """See `watching.Watcher`."""
        name = of if isinstance(of, str) else self._name(of)
        return self._span(row, name, row.split()[-1] if exposed else "")

    def waits(self, point: stream.Point, why: str) -> None:
        """See `watching.Watcher`."""
        if point.is_timed:
            self._noted.append(_Noted(WAITS, why, self._clock.mark(), point, point.row.split()[-1]))

    def host_reached(self, point: stream.Point) -> None:
        """See `watching.Watcher`."""
        if point.is_timed:
            self._clock.host_reached(point)

    # ---- times

    @contextmanager
    def _span(self, row: str, name: str, waits_for: str = "") -> Iterator[None]:
        start = self._clock.mark()
        yield
        if self.is_watched:
            self._noted.append(_Noted(row, name, start, self._clock.mark(), waits_for))

    def collect(self) -> None:
        """Take in what the device is done with; what it has not come to is left for the next time."""
        spans: list[Span] = []
        try:
            base_s = self._clock.base_s()
            while self._noted:
                noted = self._noted[0]
                span = Span(noted.row, noted.name, *(self._clock.seconds(mark, base_s) for mark in noted[2:4]))
                self._noted.popleft()
                spans.append(self._count(span, noted.waits_for))
        except RuntimeError:  # torch's, for an event that the device has not come to
            pass
        if self._trace is not None:
            self._trace.write(span for span in spans if span.end_s > span.start_s)

    def _count(self, span: Span, waits_for: str) -> Span:
        """Add a step, or what is waited for, to the sums; return what to draw."""
        if span.row == STEPS:
            if span.name:
                total = self._sum
                seconds = (span.end_s - span.start_s, *self._open.values())
                self._sum = Averages(total.steps + 1, *(a + b for a, b in zip(total[1:], seconds, strict=True)))
            self._open, self._waited_until = dict.fromkeys(self._open, 0.0), -math.inf
        elif waits_for:
            # One wait goes on where another one that began with it has ended.
            span = span._replace(start_s=min(span.end_s, max(span.start_s, self._waited_until)))
            self._waited_until = max(self._waited_until, span.end_s)
            if waits_for in self._open:
                self._open[waits_for] += span.end_s - span.start_s
        return span

    def _name(self, of: object) -> str:
        names = self._parameters if isinstance(of, torch.Tensor) else self._names
        return str(names.get(of, type(of).__name__))


def _names(model: nn.Module | None, layers: Sequence[nn.Module]) -> tuple[dict[object, str], WeakIdKeyDictionary]:
    """What the trace calls layers, and parameters: those of a layer by the layer."""
    parameters = WeakIdKeyDictionary()  # which the model may lose to others
    if model is None:
        return {}, parameters
    modules = {module: name for name, module in model.named_modules()}
    parameters.update({p: name for name, p in model.named_parameters()})
    for layer in layers:
        parameters.update(dict.fromkeys(layer.parameters(), modules[layer]))
    return {layer: modules[layer] for layer in layers}, parameters
