"""The time of a step by a cost model: lanes for what computes and travels, and which of them bounds the step.

A schedule is made as the engine makes it (arXiv:2002.05645, first version, equations 5 to 7 are its serial form): a
layer is uploaded while another computes, gradients leave while the next layer computes, and a layer is updated in the
background before the next forward needs it. Steps follow one another until their times repeat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hf_l2l.config import L2LConfig
from hf_l2l.optim.one_pass import relative_time
from hf_l2l.pipeline.times import Lane, LayerSeconds
from hf_l2l.probe.figures import HardwareFigures


@dataclass(frozen=True)
class Rates:
    """What the machine reaches."""

    flops: float
    """FLOP/s of layers in the dtype in which they compute."""
    link_up: float
    """Bytes/s from host to device."""
    link_down: float
    """Bytes/s from device to host."""
    update: float
    """Parameters/s that the host updates, with gradients, moments and copies of weights as the options say."""
    device_adamw: float
    """Parameters/s that the device updates."""
    per_call: float = 0.0
    """Seconds that a micro-batch of a layer takes besides its operations, in each sweep."""

    @classmethod
    def of(cls, figures: HardwareFigures, dtype: torch.dtype | None, config: L2LConfig) -> Rates:
        """Of a machine that was probed, for layers that multiply matrices in `dtype` (None: float32), and for updates
        with the options of `config`, which may keep gradients and moments in fewer bits.

        Where host and device share memory, nothing travels. A device that has not been seen to update is taken to
        update as fast as the host. Of several numbers of threads that were measured, the host has the fastest one, or
        the largest one that is not more than `num_threads`.
        """
        name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype or torch.float32, "fp32")
        threads = figures.adamw_by_threads
        fewer = [count for count in threads if count <= (config.num_threads or 0)]
        most = max(threads, key=threads.__getitem__)
        adamw = threads[most if config.num_threads is None else max(fewer, default=min(threads))]
        gradient = torch.bfloat16 if config.grad_dtype == "16bit" else torch.float32
        has_copies = config.cmp is not None and config.host_copies == "kept"
        update = adamw / relative_time(gradient, config.moment_dtype, torch.bfloat16 if has_copies else None)
        # Both directions are in use at once.
        up, down = figures.link_up_both or figures.link_up, figures.link_down_both or figures.link_down
        return cls(
            flops=figures.flops.get(name, max(figures.flops.values())),
            link_up=up or math.inf,
            link_down=down or math.inf,
            update=update,
            device_adamw=figures.device_adamw or adamw,
        )


@dataclass(frozen=True)
class Cost:
    """One layer call with all rows of the device batch; or the modules outside the layers, which are computed after
    the layers in the forward, and before them in the backward."""

    forward_flops: int = 0
    backward_flops: int = 0
    """The recompute included, if there is one."""
    recomputes: bool = True
    """Whether the backward begins with the forward."""
    forward_up: int = 0
    """Bytes of weights from the host in the forward."""
    backward_up: int = 0
    """Bytes of weights from the host in the backward; 0 for those that are still there."""
    keeps_weights: bool = False
    """Whether they stay from the forward to the backward, in memory of their own."""
    backward_down: int = 0
    """Bytes of gradients of weights to the host."""
    stashed: int = 0
    """Bytes of the input, which leave at once while the layer computes."""
    rows_up: int = 0
    """Bytes of rows from the host in the forward, one micro-batch at a time."""
    rows_down: int = 0
    """Bytes of rows to the host in the forward, likewise."""
    rows_up_again: int = 0
    """Bytes of rows from the host in the backward: of the stash, and of gradients."""
    gradient_rows: int = 0
    """Those of them that are gradients, which the layer above sends."""
    rows_down_again: int = 0
    """Bytes of rows to the host in the backward: gradients."""
    parameters: int = 0
    """Parameters that the host updates."""
    on_device: int = 0
    """Parameters that the device updates."""

    @property
    def takes_turns(self) -> bool:
        """Whether its weights are in one of the two slots."""
        return self.forward_up > 0 and not self.keeps_weights


@dataclass
class StepTime:
    """Seconds of one step, and what it waited for."""

    seconds: float
    forward: float
    backward: float
    """The update on the device included."""
    busy: dict[str, float] = field(default_factory=dict)
    """Lane -> seconds in which it was busy: "compute", "upload", "download", "update"."""

    @property
    def bound(self) -> str:
        """The lane that was busiest."""
        return max(self.busy, key=lambda lane: self.busy[lane])


class _Steps:
    """Steps of one training, one after the other."""

    def __init__(
        self, layers: Sequence[Cost], shell: Cost, rates: Rates, ubatches: int, sums: int, *, prefetches: bool
    ) -> None:
        self.layers, self.shell, self.rates = layers, shell, rates
        self.lanes = {name: Lane() for name in ("compute", "upload", "download", "update")}
        self.ubatches, self.sums, self.prefetches = ubatches, sums, prefetches
        self.updated = [0.0] * (len(layers) + 1)
        """When the masters of the shell, and of each layer, have been updated."""
        self.begin = 0.0
        in_forward = [number for number, layer in enumerate(layers) if layer.forward_up]
        in_backward = [number for number, layer in enumerate(layers) if layer.takes_turns]
        self._after = [next((each for each in in_forward if each > n), None) for n in range(len(layers))]
        self._before = [next((each for each in reversed(in_backward) if each < n), None) for n in range(len(layers))]

    def _compute(self, flops: float, fixed: float, *after: float) -> float:
        return self.lanes["compute"].run(fixed + flops / self.rates.flops, *after)

    def _up(self, num_bytes: float, *after: float) -> float:
        return self.lanes["upload"].run(num_bytes / self.rates.link_up, *after)

    def _down(self, num_bytes: float, *after: float) -> float:
        return self.lanes["download"].run(num_bytes / self.rates.link_down, *after)

    def step(self, *, defers: bool) -> StepTime:
        """Run one step."""
        for lane in self.lanes.values():
            lane.busy = 0.0
        start = self.begin
        turned = self.forward()
        end = self.backward(turned)
        units = [self.shell, *self.layers]
        there = sum(unit.on_device for unit in units)
        end = self.lanes["compute"].run(there / self.rates.device_adamw, end)
        for number, unit in enumerate(units):
            self.updated[number] = self.lanes["update"].run(unit.parameters / self.rates.update, end)
        # The next step begins while masters are updated, unless updates are serial.
        self.begin = end if defers else max(end, *self.updated)
        busy = {name: lane.busy for name, lane in self.lanes.items()}
        return StepTime(self.begin - start, turned - start, end - turned, busy)

    def forward(self) -> float:
        """The forward sweep; returns its end."""
        done = self._up(self.shell.forward_up, self.begin, self.updated[0])
        there: dict[int, float] = {}
        arrived: list[float] = []
        stashed = 0.0
        first = next((number for number, layer in enumerate(self.layers) if layer.forward_up), None)
        if first is not None and self.prefetches:
            there[first] = self._upload(first, self.begin)
        for number, layer in enumerate(self.layers):
            if layer.forward_up and number not in there:
                there[number] = self._upload(number, done)
            following, start = self._after[number], done
            if following in there or not self.prefetches:
                following = None
            # Rows wait behind weights that are uploaded at the same time, unless these are being updated.
            is_updated = following is not None and self.updated[following + 1] <= start
            if following is not None and is_updated:
                there[following] = self._upload(following, start)
            leaves = self._down(layer.stashed, start)
            begin = max(there.get(number, 0.0), done, stashed)
            done, arrived = self._forward_rows(layer, begin, start, arrived)
            stashed = leaves if layer.stashed else 0.0
            if following is not None and not is_updated:
                there[following] = self._upload(following, start)
        return self._compute(self.shell.forward_flops, 0.0, done, stashed)

    def _upload(self, number: int, free: float) -> float:
        """Upload a layer for the forward, once its slot is free and its masters are updated."""
        layer = self.layers[number]
        return self._up(layer.forward_up, free, self.updated[number + 1] if layer.parameters else 0.0)

    def _forward_rows(
        self, layer: Cost, begin: float, free: float, arrived: Sequence[float]
    ) -> tuple[float, list[float]]:
        """All micro-batches of a layer; returns the end, and when the rows of each have arrived on the host.

        Memory for rows is `free` when the device has done what it was given before; `arrived` is of what is uploaded.
        """
        count = self.ubatches if layer.rows_up or layer.rows_down else 1
        fixed = self.ubatches / count * self.rates.per_call
        ends, downs = [free, free], [0.0, 0.0]
        for turn in range(count):
            up = 0.0
            if layer.rows_up:
                there = arrived[turn] if turn < len(arrived) else 0.0
                up = self._up(layer.rows_up / count, ends[-1 if turn == 0 else -2], there)
            # A download must be over before the next but one micro-batch.
            ends.append(self._compute(layer.forward_flops / count, fixed, begin, ends[-1], up, downs[-2]))
            downs.append(self._down(layer.rows_down / count, ends[-1]) if layer.rows_down else 0.0)
        return ends[-1], downs[2:] if layer.rows_down else []

    def backward(self, begin: float) -> float:
        """The backward sweep; returns the end of what it computes and sends."""
        done = self._compute(self.shell.backward_flops, 0.0, begin)
        last = self._down(self.shell.backward_down, done)
        sums = [begin] * self.sums
        there: dict[int, float] = {}
        rows = _Rows(free=done)
        for number in reversed(range(len(self.layers))):
            layer, following = self.layers[number], self._before[number]
            if layer.backward_up and number not in there:
                there[number] = self._up(layer.backward_up, done)
            if following is not None and following not in there and self.prefetches:
                there[following] = self._up(self.layers[following].backward_up, done)
            before = self.layers[number - 1] if number else None
            done = self._backward_rows(layer, before, max(there.get(number, 0.0), done), sums, rows)
            if layer.backward_down:
                sums.append(self._down(layer.backward_down, done))
                last = max(last, sums[-1])
            last = max(last, *rows.arrived, 0.0)
        return max(done, last)

    def _backward_rows(
        self, layer: Cost, before: Cost | None, begin: float, sums: Sequence[float], rows: _Rows
    ) -> float:
        """All micro-batches of a layer; returns the end. `rows` tells of those of the layer above, and then of its
        own."""
        travel = layer.rows_up_again or layer.rows_down_again
        count = self.ubatches if travel else 1
        fixed = self.ubatches / count * self.rates.per_call
        # A slot for sums is waited for at the first gradient, once the first micro-batch is recomputed.
        recomputed = layer.forward_flops / self.ubatches if layer.recomputes else 0.0
        freed = sums[-self.sums] if layer.backward_down else 0.0
        ends, downs, arrived = [rows.free, begin], [0.0, 0.0], rows.arrived
        share = layer.rows_up_again / count
        up = self._up(share, begin, *arrived[:1]) if rows.first is None and share else rows.first or 0.0
        rows.first = None
        for turn in range(count):
            is_last = turn == count - 1
            current = up
            if not is_last and share:
                up = self._up(share, ends[-2], *(arrived[turn + 1 : turn + 2] if layer.gradient_rows else ()))
            elif is_last and before is not None and before.rows_up_again:
                needs = [downs[2]] if before.gradient_rows and count > 1 else []
                if not before.gradient_rows or count > 1:
                    rows.first = self._up(before.rows_up_again / self.ubatches, ends[-2], *needs)
            flops, after = layer.backward_flops / count, max(ends[-1], current, downs[-2])
            if turn == 0:
                after = self._compute(recomputed, 0.0, after)
                flops, after = flops - recomputed, max(after, freed)
            ends.append(self._compute(flops, fixed, after))
            downs.append(self._down(layer.rows_down_again / count, ends[-1]) if layer.rows_down_again else 0.0)
        rows.free, rows.arrived = ends[-2], downs[2:] if layer.rows_down_again else []
        return ends[-1]


@dataclass
class _Rows:
    """Rows that pass from one layer of the backward to the next one."""

    free: float
    """When the device has done all but the last micro-batch."""
    first: float | None = None
    """When the first rows of the next layer are there, if they are uploaded ahead."""
    arrived: list[float] = field(default_factory=list)
    """When the gradients of each micro-batch have arrived on the host."""


def step_time(
    layers: Sequence[Cost],
    shell: Cost,
    rates: Rates,
    *,
    ubatches: int = 1,
    gradient_slots: int = 2,
    prefetches: bool = True,
    defers: bool = True,
    steps: int = 4,
) -> StepTime:
    """The time of a step once steps repeat.

    Args:
        layers: the layer calls in order.
        shell: the other modules.
        rates: of the machine.
        ubatches: micro-batches of the device batch.
        gradient_slots: slots for sums of gradients.
        prefetches: whether layers are uploaded while others compute.
        defers: whether masters are updated while the next step runs.
        steps: how many are run until they repeat.
    """
    run = _Steps(layers, shell, rates, ubatches, gradient_slots, prefetches=prefetches)
    return [run.step(defers=defers) for _ in range(steps)][-1]


def pipelined(cost: Cost, rates: Rates) -> LayerSeconds:
    """The seconds of a layer call on one of several devices."""
    recompute = cost.forward_flops / rates.flops if cost.recomputes else 0.0
    return LayerSeconds(
        forward=cost.forward_flops / rates.flops,
        backward=cost.backward_flops / rates.flops - recompute,
        recompute=recompute,
        up=cost.forward_up / rates.link_up,
        up_again=cost.backward_up / rates.link_up,
        down=cost.backward_down / rates.link_down,
        update=cost.parameters / rates.update,
    )
