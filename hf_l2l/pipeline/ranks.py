"""The seconds of a step of several ranks of one host, each with a device, its own batch, and all layers.

Devices and links are one per rank; the host's memory and cores are there once: gradients of all ranks pass through it,
are added, and update one set of masters. So ranks scale until that memory has no more bytes per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hf_l2l.pipeline.times import LayerSeconds, PipelineTime, step_time

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

    def moved(self, ranks: int) -> int:
        """Bytes that are read and written in a step: uploads and gradients of each rank, which land and are read to
        be added; their sum, and the update."""
        sums = self.down if ranks > 1 else 0
        return ranks * (self.up + self.down + sums) + sums + ADAMW_BYTES * self.parameters


class RanksTime(NamedTuple):
    """A step, once steps repeat."""

    seconds: float
    bound: str
    """What takes longest: a lane of one device (see `PipelineTime`), "sums over ranks", or "host memory"."""
    times_as_many: float
    """Rows per second, of those of one rank alone."""
    host_bytes: int
    """Bytes that pass through host memory in a step."""


def ranks_time(
    layers: Sequence[LayerSeconds],
    outside: LayerSeconds,
    moved: Sequence[HostBytes],
    ranks: int,
    *,
    ubatches: int = 1,
    launch: float = 0.0,
    defers: bool = True,
    dram: float,
) -> RanksTime:
    """The time of a step of so many ranks, each with as many rows.

    The owners add the gradients of a layer while its ranks compute the layer before; those of what comes last in the
    backward, the modules outside the layers, are added when all else is over.

    Args:
        layers: the layer calls in order, and the modules `outside` them, of one rank.
        outside: see `layers`.
        moved: bytes of each layer, in the order of `layers`, and then those of what is outside.
        ranks: how many there are.
        ubatches: micro-batches of the batch of a rank.
        launch: seconds to launch one of them in a layer.
        defers: whether masters are updated while the next step runs.
        dram: bytes per second that the host reads and writes, both counted.
    """
    one = step_time(layers, outside, ubatches=ubatches, launch=launch, defers=defers)
    if ranks == 1:
        return _time(one, {}, moved, 1, one.seconds)
    added = [(ranks + 1) * each.down / dram for each in moved]
    busy = {"sums over ranks": sum(added), "host memory": sum(each.moved(ranks) for each in moved) / dram}
    return _time(one, busy, moved, ranks, max(one.seconds + added[-1], *busy.values()))


def _time(
    one: PipelineTime, busy: dict[str, float], moved: Sequence[HostBytes], ranks: int, seconds: float
) -> RanksTime:
    lanes = {**one.busy, **busy}
    return RanksTime(
        seconds,
        max(lanes, key=lambda lane: lanes[lane]),
        ranks * one.seconds / seconds,
        sum(each.moved(ranks) for each in moved),
    )
