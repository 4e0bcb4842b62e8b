"""The seconds of a step on several devices that run layers in turn, from what each layer computes and moves.

The lanes are those of the engine: each device computes on one stream, and has a link of its own in each direction; one
thread launches for all of them; the host updates all masters. With one device it is the time of the plain relay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class LayerSeconds(NamedTuple):
    """One layer call with all rows of the device batch."""

    forward: float
    backward: float
    """Without the recompute."""
    recompute: float
    up: float = 0.0
    """Its weights over the link, in the forward."""
    up_again: float = 0.0
    """The same in the backward; 0 for weights that are still there."""
    down: float = 0.0
    """Its gradients over the link."""
    update: float = 0.0
    """The update of its masters on the host."""


class PipelineTime(NamedTuple):
    """A step, once steps repeat."""

    seconds: float
    forward: float
    backward: float
    busy: dict[str, float]
    """Seconds by lane: "compute", "upload" and "download" of the busiest device, "launch" and "update" of the host."""
    idle: float
    """The share of the two sweeps in which a device does not compute, on average."""

    @property
    def bound(self) -> str:
        """The lane that was busiest."""
        return max(self.busy, key=lambda lane: self.busy[lane])


class Lane:
    """What does one thing after the other: a stream of a device, a link in one direction, a thread of the host."""

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


@dataclass
class _Device:
    compute: Lane = field(default_factory=Lane)
    upload: Lane = field(default_factory=Lane)
    download: Lane = field(default_factory=Lane)
    begun: float = 0.0
    """When its present layer has begun, so that the upload of the next one may."""
    ended: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """The ends of its last layers, after which their slots are free."""
    sent: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """The ends of its last downloads of gradients, likewise."""


class _Steps:
    """Steps of one training, one after the other."""

    def __init__(
        self,
        layers: Sequence[LayerSeconds],
        outside: LayerSeconds,
        devices: int,
        ubatches: int,
        *,
        passed: float,
        launch: float,
    ) -> None:
        self.layers, self.outside, self.ubatches = layers, outside, ubatches
        self.devices = [_Device() for _ in range(devices)]
        self.passed = passed if devices > 1 else 0.0
        self.launch_s = launch
        self.launch, self.update = Lane(), Lane()
        self.updated = [0.0] * (len(layers) + 1)
        """When the masters outside the layers, and of each layer, have been updated."""
        self.begin = 0.0

    def step(self, *, defers: bool) -> PipelineTime:
        """Run one step."""
        of_devices = [lane for each in self.devices for lane in (each.compute, each.upload, each.download)]
        for lane in (*of_devices, self.launch, self.update):
            lane.busy = 0.0
        start = self.begin
        turned = self._forward()
        end = self._backward(turned)
        for number, unit in enumerate((self.outside, *self.layers)):
            self.updated[number] = self.update.run(unit.update, end)
        self.begin = end if defers else max(end, *self.updated)
        computed = [each.compute.busy for each in self.devices]
        busy = {
            "compute": max(computed),
            "upload": max(each.upload.busy for each in self.devices),
            "download": max(each.download.busy for each in self.devices),
            "launch": self.launch.busy,
            "update": self.update.busy,
        }
        idle = 1 - sum(computed) / (len(computed) * (end - start))
        return PipelineTime(self.begin - start, turned - start, end - turned, busy, idle)

    def _forward(self) -> float:
        first = self.devices[0]
        there = first.upload.run(self.outside.up, self.begin, self.updated[0])
        given = [there] * self.ubatches
        for each in self.devices:
            each.begun = self.begin
        for number, layer in enumerate(self.layers):
            at = self.devices[number % len(self.devices)]
            # While the layer before on this device computes, in the slot of the one before that.
            weights = at.upload.run(layer.up, at.begun, at.ended[-2], self.updated[number + 1] if layer.up else 0.0)
            given = self._rows(at, given, 0.0, layer.forward / self.ubatches, weights)
        return first.compute.run(self.outside.forward, *given)

    def _backward(self, begin: float) -> float:
        first = self.devices[0]
        given = [first.compute.run(self.outside.backward, begin)] * self.ubatches
        last = first.download.run(self.outside.down, given[0])
        for each in self.devices:
            each.begun = begin
        for number in reversed(range(len(self.layers))):
            layer, at = self.layers[number], self.devices[number % len(self.devices)]
            weights = at.upload.run(layer.up_again, at.begun, at.ended[-2])
            parts = layer.recompute / self.ubatches, layer.backward / self.ubatches
            given = self._rows(at, given, *parts, weights, sums_free=at.sent[-2] if layer.down else 0.0)
            if layer.down:
                at.sent.append(at.download.run(layer.down, at.ended[-1]))
                last = max(last, at.sent[-1])
        return max(last, *given)

    def _rows(
        self, at: _Device, given: Sequence[float], before: float, after: float, weights: float, sums_free: float = 0.0
    ) -> list[float]:
        """All micro-batches of a layer: the part `before` their rows are `given`, and the one after that; returns when
        the next device has them."""
        ends: list[float] = []
        for turn, arrived in enumerate(given):
            launched = self.launch.run(self.launch_s * (2 if before else 1), self.begin)
            begun = max(at.compute.free_at, weights, launched)
            if turn == 0:
                at.begun = begun
            ready = at.compute.run(before, weights, launched)
            ends.append(at.compute.run(after, ready, arrived, weights, launched, sums_free))
        at.ended.append(ends[-1])
        return [end + self.passed for end in ends]


def step_time(
    layers: Sequence[LayerSeconds],
    outside: LayerSeconds,
    devices: int = 1,
    ubatches: int = 1,
    *,
    passed: float = 0.0,
    launch: float = 0.0,
    defers: bool = True,
    steps: int = 4,
) -> PipelineTime:
    """The time of a step once steps repeat.

    Args:
        layers: the layer calls in order; of so many `devices`, call number l runs on device l mod devices.
        outside: the other modules, which are on the first device: before the layers in the backward, after them in the
            forward.
        devices: how many run layers in turn.
        ubatches: micro-batches of the device batch.
        passed: seconds that the rows of one micro-batch take from one device to the next.
        launch: seconds that the host takes to launch one micro-batch of a layer in the forward; twice that in the
            backward.
        defers: whether masters are updated while the next step runs.
        steps: how many are run until they repeat.
    """
    run = _Steps(layers, outside, devices, ubatches, passed=passed, launch=launch)
    return [run.step(defers=defers) for _ in range(steps)][-1]
