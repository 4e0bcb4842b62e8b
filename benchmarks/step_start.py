"""The start of a step in virtual time: how long the device waits between two steps, and for what.

A model of the shape of Llama-3.2-1B (16 layers; an embedding, tied to the head, of 4.3 layers) runs on the simulated
accelerator. The virtual clock gives it the times of a real machine: how long a layer travels, computes and is updated
on the host. Updates are deferred, with clipping. Nothing here depends on the machine that it runs on.

    python benchmarks/step_start.py [--options '{"cmp": "bf16"}'] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.testing import Costs, VirtualClock, enable_simulated_accelerator, engine_on_clock, virtual_clock

WIDTH, ROWS, LAYERS = 256, 4, 16
VOCAB = 8880
"""Rows of the embedding: 4.3 times as many elements as a layer has."""
LAYER_TRANSFER_S = 4.4e-3
"""60.8 million parameters in fp32 at 55 GB/s."""
STEP_COMPUTE_S = 0.8
"""32,768 tokens at 400 TFLOP/s."""
EMBEDDING_UPDATE_S = 75e-3
"""262.7 million parameters, 28 bytes each, at 98 GB/s of host memory."""


class Block(nn.Module):
    """A layer whose work is matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Decoder(nn.Module):
    """An embedding, layers, and a head, which may have the weight of the embedding."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), ids)


def costs() -> Costs:
    """Rates at which the small model takes the times above."""
    layer = sum(p.numel() for p in Block().parameters())
    forward_flops = 2 * ROWS * (LAYERS * layer + VOCAB * WIDTH)
    return Costs(
        link_bytes_per_s=4 * layer / LAYER_TRANSFER_S,
        flop_per_s=4 * forward_flops / STEP_COMPUTE_S,
        host_bytes_per_s=28 * VOCAB * WIDTH / EMBEDDING_UPDATE_S,
    )


def steps_on_clock(options: dict[str, Any], *, tied: bool, steps: int = 3) -> tuple[VirtualClock, list[float]]:
    """The clock of some steps after the first, and when each of them called the model."""
    torch.manual_seed(0)
    model = Decoder(tied=tied)
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
    with virtual_clock(costs()) as clock, engine_on_clock(clock, eps):
        for _ in range(steps):
            begun.append(clock.now)
            step()
    return clock, begun


def idle(clock: VirtualClock, begun: list[float]) -> dict[str, float]:
    """Seconds of the last step's start: the device idle before the first layer's computation, and what was busy then.

    The time of the host between kernels is not in it (see `host_overhead.py`).
    """
    call_s = begun[-1]
    compute = sorted((task.start, task.end) for task in clock.tasks if task.lane == "compute")
    last = max(end for _, end in compute if end <= call_s)
    # The embedding's forward and the loss are short; a layer's computation is at least a tenth of its share.
    long_s = 0.1 * STEP_COMPUTE_S / (LAYERS * 4)
    first = min(start for start, end in compute if start >= last and end - start >= long_s)
    found = {"idle": first - last}
    for lane in ("download", "host", "upload"):
        spans = [(max(t.start, last), min(t.end, first)) for t in clock.tasks if t.lane == lane]
        found[lane] = sum(end - start for start, end in spans if end > start)
    return found


def main() -> None:
    """Print the figures as a table, and write it to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--options", type=json.loads, default={}, help="options of L2LConfig, as JSON")
    parser.add_argument("--out", type=Path, help="markdown file for the table")
    options = parser.parse_args()
    enable_simulated_accelerator()
    shapes = [idle(*steps_on_clock(options.options, tied=tied)) for tied in (True, False)]
    rows = {
        "the device waits for the first layer of a step": "idle",
        "gradients are downloaded": "download",
        "the host updates": "host",
        "weights are uploaded": "upload",
    }
    lines = ["| milliseconds | tied head | head of its own |", "|---|---|---|"]
    for label, key in rows.items():
        lines.append(f"| {label} | {' | '.join(f'{1e3 * found[key]:.1f}' for found in shapes)} |")
    lines.append(
        f"| the update of the embedding alone takes | {' | '.join([f'{1e3 * EMBEDDING_UPDATE_S:.1f}'] * 2)} |"
    )
    print("\n".join(lines))
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
