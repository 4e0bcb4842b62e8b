"""The time of a step by a cost model: lanes for what computes and travels, and which of them bounds the step.

A schedule is made as the engine makes it (arXiv:2002.05645, first version, equations 5 to 7 are its serial form): a
layer is uploaded while another computes, gradients leave while the next layer computes, and a layer is updated in the
background before the next forward needs it. Steps follow one another until their times repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rates:
    """What the machine reaches."""

    flops: float
    """FLOP/s of layers in the dtype in which they compute."""
    link_up: float
    """Bytes/s from host to device."""
    link_down: float
    """Bytes/s from device to host."""
    adamw: float
    """Parameters/s that the host updates."""
    device_update: float = 0.0
    """Parameters/s that the device updates; 0 if nothing is updated there."""
    per_call: float = 0.0
    """Seconds of the host for one micro-batch of one layer: the device cannot be given work faster."""


@dataclass(frozen=True)
class LayerCost:
    """One layer call, for all rows of the device batch."""

    forward_flops: int
    backward_flops: int
    """Recompute and backward."""
    up: int
    """Bytes that are uploaded in each sweep: weights, unless they stay on the device."""
    down: int
    """Bytes of gradients that leave."""
    parameters: int
    """Parameters that the host updates."""
    rows_up: int = 0
    """Bytes of layer inputs that come from the host in the backward."""
    rows_down: int = 0
    """Bytes of layer inputs that go to the host in the forward."""
    forward_rows_up: int = 0
    """Bytes of layer inputs that come from the host in the forward (a boundary on the host)."""
    on_device: int = 0
    """Parameters that the device updates."""


@dataclass(frozen=True)
class ShellCost:
    """What is computed before and after the layers."""

    forward_flops: int
    backward_flops: int
    up: int
    down: int
    parameters: int
    on_device: int = 0


@dataclass
class StepTime:
    """Seconds of one step, and what it waited for."""

    seconds: float
    forward: float
    backward: float
    busy: dict[str, float] = field(default_factory=dict)
    """Lane -> seconds in which it was busy: "compute", "upload", "download", "update"."""

    @property
    def bound(self) -> str:
        """The lane that was busiest."""
        return max(self.busy, key=lambda lane: self.busy[lane])


class _Lane:
    def __init__(self) -> None:
        self.free_at = 0.0
        self.busy = 0.0

    def run(self, seconds: float, *after: float) -> float:
        """Begin when the lane is free and all of `after` is reached; returns the end."""
        start = max(self.free_at, *after)
        self.free_at = start + seconds
        self.busy += seconds
        return self.free_at


class _Steps:
    """Steps of one training, one after the other."""

    def __init__(self, layers: Sequence[LayerCost], shell: ShellCost, rates: Rates, ubatches: int) -> None:
        self.layers, self.shell, self.rates = layers, shell, rates
        self.lanes = {name: _Lane() for name in ("compute", "upload", "download", "update")}
        self.least = ubatches * rates.per_call
        self.updated = [0.0] * (len(layers) + 1)
        """When the shell, and each layer, has been updated."""
        self.begin = 0.0

    def _compute(self, flops: int, *after: float, least: float = 0.0) -> float:
        return self.lanes["compute"].run(max(flops / self.rates.flops, least), *after)

    def _up(self, num_bytes: int, *after: float) -> float:
        return self.lanes["upload"].run(num_bytes / self.rates.link_up, *after)

    def _down(self, num_bytes: int, *after: float) -> float:
        return self.lanes["download"].run(num_bytes / self.rates.link_down, *after)

    def step(self, *, overlaps: bool) -> StepTime:
        """Run one step."""
        for lane in self.lanes.values():
            lane.busy = 0.0
        start = self.begin
        turned = self.forward(overlaps=overlaps)
        end = self.backward(turned)
        if self.rates.device_update:
            there = self.shell.on_device + sum(layer.on_device for layer in self.layers)
            end = self.lanes["compute"].run(there / self.rates.device_update, end)
        units: list[ShellCost | LayerCost] = [self.shell, *self.layers]
        for number, each in enumerate(units):
            self.updated[number] = self.lanes["update"].run(each.parameters / self.rates.adamw, end)
        # The next step begins while masters are updated, unless updates are serial.
        self.begin = end if overlaps else max(end, *self.updated)
        busy = {name: lane.busy for name, lane in self.lanes.items()}
        return StepTime(self.begin - start, turned - start, end - turned, busy)

    def forward(self, *, overlaps: bool) -> float:
        """The forward sweep; returns its end."""
        slots = [self.begin, self.begin]
        done = self._up(self.shell.up, self.begin, self.updated[0])
        for number, layer in enumerate(self.layers):
            # A layer that is resident needs no slot.
            free = slots[number % 2] if layer.up else self.begin
            there = self._up(layer.up + layer.forward_rows_up, free, self.updated[number + 1] if layer.up else 0.0)
            done = self._compute(layer.forward_flops, there, done, least=self.least)
            slots[number % 2] = done
            if not overlaps:
                slots = [done, done]
            self._down(layer.rows_down, done)
        return self._compute(self.shell.forward_flops, done)

    def backward(self, begin: float) -> float:
        """The backward sweep; returns the end of what it computes and sends."""
        done = self._compute(self.shell.backward_flops, begin)
        slots, sums = [done, done], [done, done]
        last = self._down(self.shell.down, done)
        for turn, layer in enumerate(reversed(self.layers)):
            # The last two layers are in their slots still.
            there = self._up((layer.up if turn >= _SLOTS else 0) + layer.rows_up, slots[turn % _SLOTS])
            done = self._compute(layer.backward_flops, there, done, sums[turn % _SLOTS], least=self.least)
            slots[turn % _SLOTS] = done
            sums[turn % _SLOTS] = last = self._down(layer.down, done)
        return max(done, last)


def step_time(
    layers: Sequence[LayerCost],
    shell: ShellCost,
    rates: Rates,
    *,
    ubatches: int = 1,
    overlaps: bool = True,
    steps: int = 4,
) -> StepTime:
    """The time of a step once steps repeat.

    Args:
        layers: the layer calls in order.
        shell: the other modules.
        rates: of the machine.
        ubatches: micro-batches of the device batch.
        overlaps: False for serial updates and no prefetching.
        steps: how many are run until they repeat.
    """
    run = _Steps(layers, shell, rates, ubatches)
    return [run.step(overlaps=overlaps) for _ in range(steps)][-1]


_SLOTS = 2
"""Slots for weights, and for sums of gradients."""
