"""The end and the start of a step in virtual time: how long the device waits between two steps, and for what.

Models of the shapes of Llama-3.2-1B (16 layers; an embedding of 4.3 layers, tied to the head) and Llama-3.1-8B (32
layers; an embedding and a head of 2.4 layers each) run on the simulated accelerator. The virtual clock gives them the
times of a real machine: how long a layer travels, computes and is updated on the host. Updates are deferred, with
clipping. Nothing here depends on the machine that it runs on.

    python benchmarks/step_start.py [--options '{"cmp": "bf16"}'] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.testing import Costs, VirtualClock, enable_simulated_accelerator, engine_on_clock, virtual_clock

WIDTH, ROWS = 512, 4
LINK_BYTES_PER_S, HOST_BYTES_PER_S, FLOP_PER_S = 50e9, 200e9, 440e12
"""Of the machine: its link, its memory as AdamW uses it, and its device in a training."""


class Shape(NamedTuple):
    """A model, of which a smaller one with as many layers takes the times."""

    layers: int
    layer_parameters: float
    embedding_parameters: float
    is_tied: bool
    tokens: int
    """Of a step."""

    @property
    def scale(self) -> float:
        """How many of its parameters one of the small model stands for."""
        return self.layer_parameters / sum(p.numel() for p in Block().parameters())

    @property
    def vocabulary(self) -> int:
        """Rows of the small model's embedding."""
        return round(self.embedding_parameters / self.scale / WIDTH)

    @property
    def compute_s(self) -> float:
        """Of a step: a forward, its repetition, and a backward."""
        return 8 * self.tokens * (self.layers * self.layer_parameters + self.embedding_parameters) / FLOP_PER_S


SHAPES = {
    "1B, 16,384 tokens": Shape(16, 60.8e6, 262.7e6, True, 16_384),
    "8B, 16,384 tokens": Shape(32, 218.1e6, 525.3e6, False, 16_384),
}


class Block(nn.Module):
    """A layer whose work is matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Decoder(nn.Module):
    """An embedding, layers, and a head, which may have the weight of the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(shape.vocabulary, WIDTH), nn.Linear(WIDTH, shape.vocabulary, bias=False)
        if shape.is_tied:
            self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Block() for _ in range(shape.layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), ids)


def costs(shape: Shape) -> Costs:
    """Rates at which the small model takes the times of the large one."""
    layer = sum(p.numel() for p in Block().parameters())
    forward_flops = 2 * ROWS * (shape.layers * layer + shape.vocabulary * WIDTH)
    return Costs(
        link_bytes_per_s=LINK_BYTES_PER_S / shape.scale,
        flop_per_s=4 * forward_flops / shape.compute_s,
        host_bytes_per_s=HOST_BYTES_PER_S / shape.scale,
    )


def steps_on_clock(shape: Shape, options: dict[str, Any], *, steps: int = 3) -> tuple[VirtualClock, list[float]]:
    """The clock of some steps after the first, and when each of them called the model."""
    torch.manual_seed(0)
    model = Decoder(shape)
    eps = attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), eps_update="deferred", **options))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), fused=True))
    ids, begun = torch.arange(ROWS), []

    def step() -> None:
        model(ids).backward()
        eps.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    step(), step()
    eps.synchronize()
    with virtual_clock(costs(shape)) as clock, engine_on_clock(clock, eps):
        for _ in range(steps):
            begun.append(clock.now)
            step()
    return clock, begun


def exposed(shape: Shape, clock: VirtualClock, begun: list[float]) -> dict[str, float]:
    """Seconds around the last call of the model in which the device computes nothing, and what was busy then.

    The time of the host between kernels is not in it (see `host_overhead.py`).
    """
    before_s, call_s = begun[-2:]
    compute = sorted((task.start, task.end) for task in clock.tasks if task.lane == "compute")
    last = max(end for _, end in compute if end <= call_s)
    # The embedding's forward and the loss are short; a layer's computation is at least a tenth of its share.
    long_s = 0.1 * shape.compute_s / (shape.layers * 4)
    first = min(start for start, end in compute if start >= last and end - start >= long_s)
    found = {"end": call_s - last, "start": first - call_s}
    for lane in ("download", "host", "upload"):
        spans = [(max(t.start, last), min(t.end, first)) for t in clock.tasks if t.lane == lane]
        found[lane] = sum(end - start for start, end in spans if end > start)
    found["step"] = call_s - before_s
    found["all"] = found["step"] - clock.busy("compute", before_s, call_s)
    return found


LABELS = {
    "end": "the device waits at the end of a step",
    "start": "it waits at the start of the next one, for the first layer",
    "download": "in these two, gradients are downloaded",
    "host": "the host updates",
    "upload": "weights are uploaded",
    "all": "the device waits in a step, in all",
    "step": "a step takes",
}


def main() -> None:
    """Print the figures as a table, and write it to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--options", type=json.loads, default={}, help="options of L2LConfig, as JSON")
    parser.add_argument("--out", type=Path, help="markdown file for the table")
    options = parser.parse_args()
    enable_simulated_accelerator()
    shapes = [exposed(shape, *steps_on_clock(shape, options.options)) for shape in SHAPES.values()]
    lines = [f"| milliseconds | {' | '.join(SHAPES)} |", f"|---|{'---|' * len(SHAPES)}"]
    for key, label in LABELS.items():
        lines.append(f"| {label} | {' | '.join(f'{1e3 * found[key]:.1f}' for found in shapes)} |")
    print("\n".join(lines))
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
