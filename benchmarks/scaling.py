"""The time of a step of 1 to 64 ranks of one host, on the virtual clock of the simulated accelerator.

Each rank has a device with a link of its own; the memory of the host is there once. What the engine does in a step is
laid out layer by layer, with what waits for what, and the clock says when each transfer, computation, sum and update
runs. The table has the formula of `hf_l2l/pipeline/ranks.py` beside it, which `hf-l2l estimate --ranks n` uses.
Nothing here depends on the machine that it runs on.

    python benchmarks/scaling.py [--out FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from hf_l2l.pipeline.ranks import ADAMW_BYTES, HostBytes, RanksTime, ranks_time
from hf_l2l.pipeline.times import LayerSeconds
from hf_l2l.testing.sim_schedule import START, Schedule

RANKS = (1, 2, 4, 8, 16, 32, 64)
UBATCHES, TOKENS = 8, 8 * 4096
"""Of the batch of a rank."""


class Machine(NamedTuple):
    """A model, and what it runs on."""

    layer: int
    """Parameters of a layer."""
    layers: int
    outside: int
    """Parameters outside the layers."""
    flops: float
    """Operations per second that a device reaches."""
    link: float
    """Bytes per second of the link of a device, in each direction."""
    dram: float
    """Bytes per second that the host reads and writes, both counted."""

    def bytes_of(self, parameters: int) -> HostBytes:
        """Weights travel in 16 bits, in each sweep, and sums of gradients in fp32."""
        return HostBytes(up=4 * parameters, down=4 * parameters, parameters=parameters)

    def seconds_of(self, parameters: int) -> LayerSeconds:
        """What they take one rank."""
        forward, up = 2 * parameters * TOKENS / self.flops, 2 * parameters / self.link
        update = parameters * ADAMW_BYTES / self.dram
        return LayerSeconds(forward, 2 * forward, forward, up=up, up_again=up, down=2 * up, update=update)

    def by_formula(self, ranks: int, *, on_devices: bool = False) -> RanksTime:
        """A step of so many ranks, as the estimate has it; their devices add gradients, or the host."""
        sizes = [self.layer] * self.layers
        moved = [self.bytes_of(each) for each in (*sizes, self.outside)]
        layers = [self.seconds_of(each) for each in sizes]
        outside, options = self.seconds_of(self.outside), {"dram": self.dram, "on_devices": on_devices}
        return ranks_time(layers, outside, moved, ranks, ubatches=UBATCHES, **options)


BERT, LLAMA = (12_600_000, 24, 32_000_000), (218_000_000, 32, 1_050_000_000)
MACHINES = {
    "BERT-large, V100 at 100 TFLOP/s, PCIe 12 GB/s, host 100 GB/s": Machine(*BERT, 1e14, 12e9, 1e11),
    "BERT-large, the same, host 400 GB/s": Machine(*BERT, 1e14, 12e9, 4e11),
    "Llama-8B, H100 at 400 TFLOP/s, PCIe 50 GB/s, host 300 GB/s": Machine(*LLAMA, 4e14, 5e10, 3e11),
    "Llama-8B, the same, host 800 GB/s": Machine(*LLAMA, 4e14, 5e10, 8e11),
}


class _Rank:
    """Where the lanes of one rank are: the last task of each."""

    def __init__(self) -> None:
        self.computed = self.uploaded = self.downloaded = START
        self.begun = START
        """When its present layer has begun, so that the upload of the next one may."""
        self.ended = [START, START]
        """The ends of its last layers, after which their slots are free."""


class VirtualRanks:
    """Steps of several ranks, as tasks of a schedule."""

    def __init__(self, machine: Machine, ranks: int, *, on_devices: bool = False) -> None:
        """With sums `on_devices`, the links between the devices take no time."""
        self.machine, self.schedule = machine, Schedule()
        self._adds = self._sums_of_devices if on_devices and ranks > 1 else self._sums
        self.ranks = [_Rank() for _ in range(ranks)]
        self.updated = [START] * (machine.layers + 1)
        """The last update of each layer, and last that of what is outside."""
        self._summed = [START, START]
        """The last sums: two slots of each rank are read by them."""
        self.busy: dict[str, float] = {}
        """Seconds of the last step, by what is busy."""

    def step(self) -> None:
        """Record one step, with deferred updates."""
        self.busy = dict.fromkeys(("compute", "upload", "download", "host memory"), 0.0)
        outside = self.machine.layers
        for rank in self.ranks:
            rank.begun = rank.computed
        self._forward(outside, is_first=True)
        for layer in range(outside):
            self._forward(layer)
        self._all_compute(outside, 3.0)  # the head, forward and backward
        for layer in reversed(range(outside)):
            self._backward(layer)
        self._adds(outside)
        over = self._summed[-1]
        for rank in self.ranks:
            rank.computed = self.schedule.join(rank.computed, over)
        for part in (outside, *range(outside)):
            over = self._on_host(ADAMW_BYTES * self._size(part), over, over, "update")
            self.updated[part] = over

    @property
    def end(self) -> float:
        """When the last step is over, but for its updates, which the next one waits for."""
        return max(self.schedule.end_of(rank.computed) for rank in self.ranks)

    def _size(self, part: int) -> int:
        return self.machine.layer if part < self.machine.layers else self.machine.outside

    def _forward(self, part: int, *, is_first: bool = False) -> None:
        there = [self._upload(number, part, self.updated[part]) for number in range(len(self.ranks))]
        if is_first:  # what is outside comes before the layers
            for rank, at in zip(self.ranks, there, strict=True):
                rank.computed = self.schedule.join(rank.computed, at)
            return
        self._compute(part, there, 1.0)

    def _backward(self, part: int) -> None:
        there = [self._upload(number, part, START) for number in range(len(self.ranks))]
        self._compute(part, there, 3.0)
        self._adds(part)

    def _upload(self, number: int, part: int, after: int) -> int:
        """A rank's copy of weights: over its link, and out of the host's memory, while the layer before computes."""
        rank, num_bytes = self.ranks[number], 2 * self._size(part)
        free = self.schedule.join(self.schedule.join(rank.begun, rank.ended[-2]), after)
        at = self._task("upload", num_bytes / self.machine.link, free, rank.uploaded, number)
        rank.uploaded = at
        return self.schedule.join(at, self._on_host(num_bytes, free, free, "upload"))

    def _compute(self, part: int, there: Sequence[int], times: float) -> None:
        for rank, at in zip(self.ranks, there, strict=True):
            rank.begun = self.schedule.join(rank.computed, at)
        self._all_compute(part, times)
        for rank in self.ranks:
            rank.ended = [rank.ended[-1], rank.computed]

    def _all_compute(self, part: int, times: float) -> None:
        seconds = times * 2 * self._size(part) * TOKENS / self.machine.flops
        for number, rank in enumerate(self.ranks):
            rank.computed = self._task("compute", seconds, rank.computed, rank.begun, number)

    def _sums(self, part: int) -> None:
        """Gradients leave the devices into one of two slots; when all are there, they are read and added."""
        num_bytes, landed = 4 * self._size(part), START
        for number, rank in enumerate(self.ranks):
            # A slot of the host is free when the sums before the last have read it.
            free = self.schedule.join(rank.computed, self._summed[-2] if len(self.ranks) > 1 else START)
            at = self._task("download", num_bytes / self.machine.link, free, rank.downloaded, number)
            rank.downloaded = at
            there = self.schedule.join(at, self._on_host(num_bytes, free, free, "landing"))
            landed = self.schedule.join(landed, there)
        count = len(self.ranks)
        moved = (count + 1) * num_bytes if count > 1 else 0
        added = self._on_host(moved, landed, self._summed[-1], "sums") if count > 1 else landed
        self._summed = [self._summed[-1], added]

    def _sums_of_devices(self, part: int) -> None:
        """Once all devices have computed gradients, they add them, each its share, which leaves for the host."""
        computed, landed = START, START
        for rank in self.ranks:
            computed = self.schedule.join(computed, rank.computed)
        num_bytes = 4 * self._size(part) / len(self.ranks)
        for number, rank in enumerate(self.ranks):
            rank.downloaded = self._task("download", num_bytes / self.machine.link, computed, rank.downloaded, number)
            there = self.schedule.join(rank.downloaded, self._on_host(num_bytes, computed, computed, "landing"))
            landed = self.schedule.join(landed, there)
        self._summed = [self._summed[-1], landed]

    def _on_host(self, num_bytes: float, first: int, second: int, name: str) -> int:
        return self._task("host", num_bytes / self.machine.dram, first, second, 0, name)

    def _task(self, lane: str, seconds: float, first: int, second: int, device: int, name: str = "") -> int:
        if lane == "host" or device == 0:  # all ranks do the same
            self.busy["host memory" if lane == "host" else lane] += seconds
        return self.schedule.add(
            first,
            second,
            seconds=seconds,
            lane=lane,
            name=name or lane,
            stream=name or lane,
            rank=(0, ""),
            device=device,
        )


class OnClock(NamedTuple):
    """A step once steps repeat."""

    seconds: float
    busiest: str
    share: float
    """Of the step, in which that is busy."""


def on_clock(machine: Machine, ranks: int, steps: int = 3, *, on_devices: bool = False) -> OnClock:
    """The last of so many steps of so many ranks."""
    run, ends = VirtualRanks(machine, ranks, on_devices=on_devices), [0.0]
    for _ in range(steps):
        run.step()
        ends.append(run.end)
    seconds = ends[-1] - ends[-2]
    busiest = max(run.busy, key=lambda lane: run.busy[lane])
    return OnClock(seconds, busiest, run.busy[busiest] / seconds)


def rows_of(name: str, machine: Machine, counts: Sequence[int] = RANKS, *, on_devices: bool = False) -> list[str]:
    """The lines of the table for one machine."""
    one, by_formula = on_clock(machine, 1), machine.by_formula(1)
    where = "devices" if on_devices else "host"
    lines = []
    for ranks in counts:
        clock = on_clock(machine, ranks, on_devices=on_devices)
        formula = machine.by_formula(ranks, on_devices=on_devices)
        times = ranks * one.seconds / clock.seconds
        expected = ranks * by_formula.seconds / formula.seconds
        lines.append(
            f"| {name} | {where} | {ranks} | {clock.seconds:.3f} | {times:.1f} | {expected:.1f} | "
            f"{clock.busiest}, {100 * clock.share:.0f} % |"
        )
    return lines


HEAD = (
    "| | sums on | ranks | seconds of a step | times the rows per second of one | by formula | what is busiest |\n"
    "|---|---|---|---|---|---|---|"
)


def main(argv: Sequence[str] | None = None) -> list[str]:
    """Print the table, and write it with `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for the table")
    args = parser.parse_args(argv)
    lines = [HEAD]
    for name, machine in MACHINES.items():
        lines += [*rows_of(name, machine), *rows_of(name, machine, RANKS[1:], on_devices=True)]
    text = "\n".join(lines)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
    return lines


if __name__ == "__main__":
    main()
