"""The seconds of a step of several ranks of one host, each with a device, its own batch, and all layers.

Devices and links are one per rank; the host's memory and cores are there once: gradients of all ranks pass through it,
are added, and update one set of masters. So ranks scale until that memory has no more bytes per second: in the
forward, where it gives weights and updates them, or in the backward, where it gives weights and takes gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hf_l2l.pipeline.times import LayerSeconds, step_time

ADAMW_BYTES = 30
"""Bytes of host memory that an update moves per parameter: AdamW reads weight, gradient and two moments and writes
three of them; and the 16-bit copy that travels."""


class HostBytes(NamedTuple):
    """What a step moves through host memory for one layer, or what is outside the layers."""

    up: int
    """Bytes of weights that one rank uploads, in both sweeps."""
    down: int
    """Bytes of gradients that one rank downloads."""
    parameters: int
    """How many are updated."""

    def moved(self, ranks: int, *, on_devices: bool = False) -> int:
        """Bytes that are read and written in a step: uploads and gradients of each rank, which land and are read to
        be added; their sum, and the update. Where devices add the gradients, the sum alone lands, each rank's part of
        it."""
        update = ADAMW_BYTES * self.parameters
        if ranks == 1 or on_devices:
            return ranks * self.up + self.down + update
        return ranks * (self.up + 2 * self.down) + self.down + update


class RanksTime(NamedTuple):
    """A step, once steps repeat."""

    seconds: float
    bound: str
    """What takes longest: a lane of one device (see `PipelineTime`), "sums over ranks", or "host memory"."""
    times_as_many: float
    """Rows per second, of those of one rank alone."""
    host_bytes: int
    """Bytes that pass through host memory in a step."""
    forward: float
    backward: float
    """Until the gradients of all ranks are added. After it comes an update that is not deferred."""


def ranks_time(
    layers: Sequence[LayerSeconds],
    outside: LayerSeconds,
    moved: Sequence[HostBytes],
    ranks: int,
    *,
    ubatches: int = 1,
    devices: int = 1,
    passed: float = 0.0,
    launch: float = 0.0,
    defers: bool = True,
    dram: float,
    on_devices: bool = False,
) -> RanksTime:
    """The time of a step of so many ranks, each with as many rows.

    The owners add the gradients of a layer while its ranks compute the layer before; those of what comes last in the
    backward, the modules outside the layers, are added when all else is over. With sums `on_devices`, each rank
    downloads 1/n of them; what passes between the devices is not counted.

    Args:
        layers: the layer calls in order, and the modules `outside` them, of one rank.
        outside: see `layers`.
        moved: bytes of each layer, in the order of `layers`, and then those of what is outside.
        ranks: how many there are.
        ubatches: micro-batches of the batch of a rank.
        devices: how many of each rank run layers in turn.
        passed: see `hf_l2l.pipeline.times.step_time`.
        launch: seconds to launch one of them in a layer.
        defers: whether masters are updated while the next step runs.
        dram: bytes per second that the host reads and writes, both counted.
        on_devices: whether the devices of the ranks add the gradients, and not the host.
    """
    shared: dict[str, Any] = {"passed": passed, "launch": launch, "defers": defers}
    options = {"devices": devices, "ubatches": ubatches, **shared}
    one = step_time(layers, outside, **options)
    host_bytes = sum(each.moved(ranks, on_devices=on_devices) for each in moved)
    if ranks == 1:
        return RanksTime(one.seconds, one.bound, 1, host_bytes, one.forward, one.backward)
    busy, of_rank, last = {"host memory": host_bytes / dram}, one, 0.0
    if on_devices:
        *parts, part_outside = (each._replace(down=each.down / ranks) for each in (*layers, outside))
        of_rank = step_time(parts, part_outside, **options)
    else:
        added = [(ranks + 1) * each.down / dram for each in moved]
        busy, last = {"sums over ranks": sum(added), **busy}, added[-1]
    # Each sweep has work of its own for the host, which does not wait for the other sweep.
    updates = sum(each.parameters for each in moved) * ADAMW_BYTES
    given = sum(ranks * each.up * _in_forward(of) for each, of in zip(moved, (*layers, outside), strict=True))
    forward = max(of_rank.forward, (given + (updates if defers else 0)) / dram)
    backward = max(of_rank.backward + last, (host_bytes - updates - given) / dram)
    seconds = forward + backward + of_rank.seconds - of_rank.forward - of_rank.backward
    lanes = {**of_rank.busy, **busy}
    bound = max(lanes, key=lambda lane: lanes[lane])
    return RanksTime(seconds, bound, ranks * one.seconds / seconds, host_bytes, forward, backward)


def _in_forward(layer: LayerSeconds) -> float:
    """The part of its uploads that is in the forward."""
    return layer.up / (layer.up + layer.up_again) if layer.up else 0.0
