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
    device_adamw: float
    """Parameters/s that the device updates."""
    per_call: float = 0.0
    """Seconds that a micro-batch of a layer takes besides its operations, in each sweep."""


@dataclass(frozen=True)
class Cost:
    """One layer call with all rows of the device batch; or the modules outside the layers, which are computed after
    the layers in the forward, and before them in the backward."""

    forward_flops: int = 0
    backward_flops: int = 0
    """The recompute included, if there is one."""
    forward_up: int = 0
    """Bytes from the host in the forward: weights, and rows of a boundary on the host."""
    forward_down: int = 0
    """Bytes to the host in the forward: rows of the stash."""
    backward_up: int = 0
    """Bytes from the host in the backward: weights, and rows of the stash and the boundary."""
    backward_down: int = 0
    """Bytes to the host in the backward: gradients of weights, and rows of the boundary."""
    parameters: int = 0
    """Parameters that the host updates."""
    on_device: int = 0
    """Parameters that the device updates."""


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


class _Lane:
    def __init__(self) -> None:
        self.free_at = 0.0
        self.busy = 0.0

    def run(self, seconds: float, *after: float) -> float:
        """Begin when the lane is free and all of `after` is reached; returns the end."""
        if seconds == 0:  # it waits for nothing
            return max(after, default=0.0)
        self.free_at = max(self.free_at, *after) + seconds
        self.busy += seconds
        return self.free_at


class _Steps:
    """Steps of one training, one after the other."""

    def __init__(self, layers: Sequence[Cost], shell: Cost, rates: Rates, ubatches: int) -> None:
        self.layers, self.shell, self.rates = layers, shell, rates
        self.lanes = {name: _Lane() for name in ("compute", "upload", "download", "update")}
        self.fixed = ubatches * rates.per_call
        self.updated = [0.0] * (len(layers) + 1)
        """When the masters of the shell, and of each layer, have been updated."""
        self.begin = 0.0

    def _compute(self, flops: int, fixed: float, *after: float) -> float:
        return self.lanes["compute"].run(fixed + flops / self.rates.flops, *after)

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
        end = self.backward(turned, overlaps=overlaps)
        units = [self.shell, *self.layers]
        there = sum(unit.on_device for unit in units)
        end = self.lanes["compute"].run(there / self.rates.device_adamw, end)
        for number, unit in enumerate(units):
            self.updated[number] = self.lanes["update"].run(unit.parameters / self.rates.adamw, end)
        # The next step begins while masters are updated, unless updates are serial.
        self.begin = end if overlaps else max(end, *self.updated)
        busy = {name: lane.busy for name, lane in self.lanes.items()}
        return StepTime(self.begin - start, turned - start, end - turned, busy)

    def forward(self, *, overlaps: bool) -> float:
        """The forward sweep; returns its end."""
        slots = [self.begin] * _SLOTS
        done = self._up(self.shell.forward_up, self.begin, self.updated[0])
        uploads = 0
        for layer, updated in zip(self.layers, self.updated[1:], strict=True):
            # What is resident needs no slot, and has been updated on the device.
            turn = uploads % _SLOTS
            there = self._up(layer.forward_up, slots[turn] if overlaps else done, updated if layer.parameters else 0.0)
            uploads += bool(layer.forward_up)
            done = self._compute(layer.forward_flops, self.fixed, there if layer.forward_up else 0.0, done)
            if layer.forward_up:
                slots[turn] = done
            self._down(layer.forward_down, done)
        return self._compute(self.shell.forward_flops, 0.0, done)

    def backward(self, begin: float, *, overlaps: bool) -> float:
        """The backward sweep; returns the end of what it computes and sends."""
        done = self._compute(self.shell.backward_flops, 0.0, begin)
        slots, sums = [begin] * _SLOTS, [begin] * _SLOTS
        last = self._down(self.shell.backward_down, done)
        for number, layer in enumerate(reversed(self.layers)):
            turn = number % _SLOTS
            there = self._up(layer.backward_up, slots[turn] if overlaps else done)
            done = self._compute(layer.backward_flops, self.fixed, there, done, sums[turn])
            slots[turn] = done
            sums[turn] = self._down(layer.backward_down, done)
            last = max(last, sums[turn])
        return max(done, last)


def step_time(
    layers: Sequence[Cost], shell: Cost, rates: Rates, *, ubatches: int = 1, overlaps: bool = True, steps: int = 4
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
