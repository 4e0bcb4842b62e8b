"""When each device runs which micro-batch of which layer: the modular pipeline of arXiv:2106.02679, section 4.

Layer l runs on device l mod n. A device runs all micro-batches of a layer before it begins with its next one, which is
n layers further, and begins with a micro-batch when the device before it has finished that. Time is counted in
executions of one layer with one micro-batch, which take the same time on each device; transfers are not counted, since
those of layer l + n run under the execution of layer l.
"""

from __future__ import annotations

from typing import NamedTuple


class Step(NamedTuple):
    """One micro-batch of one layer."""

    when: int
    """Its start."""
    device: int
    layer: int
    ubatch: int


class Turn(NamedTuple):
    """The calls of layers that one of several devices runs."""

    number: int
    """Of the device, from 0."""
    devices: int

    def has(self, call: int) -> bool:
        """Whether the device runs this call."""
        return call % self.devices == self.number

    @property
    def is_first(self) -> bool:
        """Whether the modules outside the layers are on it."""
        return self.number == 0


def forward_steps(layers: int, ubatches: int, devices: int) -> list[Step]:
    """The forward sweep through `layers` layers on so many devices, by start and then by device."""
    return _steps(list(range(layers)), ubatches, devices)


def backward_steps(layers: int, ubatches: int, devices: int) -> list[Step]:
    """The backward sweep, from the last layer to the first; micro-batches run in the order of the forward, so that
    their gradients are added in the same order as on one device."""
    return _steps(list(reversed(range(layers))), ubatches, devices)


def sweep_length(layers: int, ubatches: int, devices: int) -> int:
    """The time of one sweep: until its last step has ended.

    With at least as many micro-batches as devices, ceil(layers / devices) * ubatches, and one for each device that the
    last layers need beyond the first; else layers + ubatches - 1, since a device waits for its next layer's input.
    """
    return int(sweep_s(layers, ubatches, devices, 1))


def sweep_s(layers: int, ubatches: int, devices: int, step_s: float, after_input_s: float | None = None) -> float:
    """The seconds of one sweep whose steps take `step_s` each.

    `after_input_s` is the part of a step that needs what the layer before has computed (None: all of it). In a
    backward sweep that is the backward alone, and not the recompute before it.
    """
    rounds, rest = divmod(layers - 1, devices)
    hop_s = step_s if after_input_s is None else after_input_s
    return rounds * max(ubatches * step_s, devices * hop_s) + rest * hop_s + ubatches * step_s


def idle_share(layers: int, ubatches: int, devices: int) -> float:
    """The share of a sweep in which a device does not execute, on average: the bubble.

    It is (devices - 1) / (layers / devices * ubatches + devices - 1) where the devices divide the layers, and there
    are as many micro-batches at least: a pipeline whose devices have layers in a row has layers / devices = 1 there.
    """
    return 1 - layers * ubatches / (devices * sweep_length(layers, ubatches, devices))


def _steps(order: list[int], ubatches: int, devices: int) -> list[Step]:
    each = max(ubatches, devices)  # from one layer of a device to its next one
    found = [
        Step(turn // devices * each + turn % devices + ubatch, layer % devices, layer, ubatch)
        for turn, layer in enumerate(order)
        for ubatch in range(ubatches)
    ]
    return sorted(found)
