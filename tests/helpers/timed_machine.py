"""A machine of given speed, in the letters of the papers' time equations, and a step on it in virtual time."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.runtime.flat_memory import Layout
from hf_l2l.testing import Costs, VirtualClock, engine_on_clock, virtual_clock
from hf_l2l.testing.sim_disk import disk_on_clock

WIDTH = 16


class Block(nn.Module):
    """A layer whose work is matrix products and nothing else, so that its backward is twice its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, layers: int, block: type[Block] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


@dataclass(frozen=True)
class Machine:
    """The letters of the time equations (arXiv:2002.05645, first text, section 3.1.2)."""

    layers: int
    ubatches: int
    forward_s: float
    """One ubatch forwards through one layer."""
    transfer_s: float
    """One layer over the link, in one direction."""
    optimizer_s: float
    """The update of all layers on the host."""
    rows: int = 1
    """Of one ubatch."""
    disk_s: float = 0.0
    """The masters and moments of one layer read from the disk for state, or written to it."""

    def costs(self) -> Costs:
        block = Block()
        numel = sum(p.numel() for p in block.parameters())
        matrix = sum(p.numel() for p in block.parameters() if p.dim() == 2)
        adam_bytes = 28  # per parameter: gradient 4, weight 8, two moments 16
        return Costs(
            link_bytes_per_s=Layout(block.parameters()).num_bytes / self.transfer_s,  # it travels in one copy
            flop_per_s=2 * matrix * self.rows / self.forward_s,
            host_bytes_per_s=adam_bytes * numel * self.layers / self.optimizer_s,
            disk_bytes_per_s=12 * numel / self.disk_s if self.disk_s else math.inf,
        )

    @property
    def compute_s(self) -> float:
        """Forward, recompute and backward of all layers and ubatches."""
        return self.layers * self.ubatches * 4 * self.forward_s


V100 = Machine(layers=24, ubatches=16, forward_s=1.6e-3, transfer_s=50e6 / 16e9, optimizer_s=100 / 300)
"""BERT-large on a V100 with PCIe 3 (first text, section 3.1.2)."""


def timed_step(
    machine: Machine, block: type[Block] = Block, *, costs: Costs | None = None, updates: bool = True, **options: Any
) -> VirtualClock:
    """The clock of the second step, with or without its update; the first one learns the order of the layers."""
    torch.manual_seed(0)
    model = Stack(machine.layers, block)
    options = {"device": "sim", "eps_update": "serial", **options}
    eps = attach_l2l(model, L2LConfig(ubatch_size=machine.rows, layer_classes=(block.__name__,), **options))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
    x = torch.randn(machine.ubatches * machine.rows, WIDTH, device="sim:0", requires_grad=True)
    on_disk = options.get("state_tier") == "disk"
    for _ in range(3 if on_disk else 1):
        model(x).backward()
        optimizer.step()
    eps.synchronize()
    with virtual_clock(costs or machine.costs()) as clock, ExitStack() as stack:
        if on_disk:
            stack.enter_context(disk_on_clock(clock, eps.state.window))
            stack.enter_context(engine_on_clock(clock, eps))  # updates are made layer by layer, on its worker
        model(x).backward()
        if updates:
            optimizer.step()
    return clock


def sweeps_s(clock: VirtualClock) -> float:
    """From the first computation of the step to the last."""
    computed = [task for task in clock.tasks if task.lane == "compute"]
    return max(task.end for task in computed) - min(task.start for task in computed)
