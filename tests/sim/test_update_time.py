"""What an update in the background costs a step: the formulas, on the virtual clock with a worker of its own time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.hf.training_args import l2l_config
from hf_l2l.testing import VirtualClock, engine_on_clock, virtual_clock
from tiers import nightly
from timed_machine import V100, WIDTH, Machine, Stack
from training import l2l_trainer, tiny_bert


class Embedded(Stack):
    """A stack with an input embedding as large as two layers, which is all the shell."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        numel = sum(p.numel() for p in self.blocks[0].parameters())
        self.embed = torch.nn.Embedding(2 * numel // WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.embed(torch.zeros(len(x), dtype=torch.long, device=x.device)))


def step_s(machine: Machine, mode: str, model: torch.nn.Module | None = None) -> float:
    """How long a step takes after the first ones, from the end of one `optimizer.step()` to the end of the next."""
    torch.manual_seed(0)
    model = Stack(machine.layers) if model is None else model
    config = L2LConfig(device="sim", ubatch_size=machine.rows, layer_classes=("Block",), eps_update=mode)
    eps = attach_l2l(model, config)
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
    x = torch.randn(machine.ubatches * machine.rows, WIDTH, device="sim", requires_grad=True)

    def step() -> None:
        model(x).backward()
        assert eps.clip_grad_norm_(1e-3) > 1e-3
        optimizer.step()
        model.zero_grad()

    step()  # the first one learns the order of the layers
    eps.synchronize()
    with virtual_clock(machine.costs()) as clock, engine_on_clock(clock, eps):
        step()  # and this one leaves an update behind
        begun = clock.now
        step()
        return clock.now - begun


def layer_update_s(machine: Machine) -> float:
    return machine.optimizer_s / machine.layers


@nightly
def test_the_example_with_clipping():
    """All of the update but the first layer's goes under the forward."""
    layers, ubatches = 8, 2
    times = V100.layers / layers  # a layer is so many of the example's
    forward_s = times * V100.forward_s * V100.ubatches / ubatches
    machine = replace(V100, layers=layers, ubatches=ubatches, forward_s=forward_s, transfer_s=times * V100.transfer_s)
    assert machine.compute_s == pytest.approx(2.458, rel=1e-3)
    deferred = step_s(machine, "deferred")
    unhidden = layer_update_s(machine)
    assert deferred == pytest.approx(2.458 + unhidden, rel=0.02)
    assert step_s(machine, "serial") == pytest.approx(2.458 + 0.333, rel=0.02)


def test_an_embedding_is_exposed():
    """It is the first that the next forward needs, and its gradient the last that arrives."""
    machine = Machine(layers=6, ubatches=4, forward_s=1.0, transfer_s=0.5, optimizer_s=6 * 3.0)
    embedding = 2 * layer_update_s(machine)
    deferred = step_s(machine, "deferred", Embedded(machine.layers))
    assert deferred == pytest.approx(machine.compute_s + layer_update_s(machine) + embedding, rel=0.03)


class _Moments(hf.TrainerCallback):
    """The clock before an optimizer's step, after it, and after what other callbacks do at the end of the step."""

    def __init__(self) -> None:
        self.clock: VirtualClock | None = None
        self.found: dict[str, list[float]] = {"before": [], "after": [], "end": []}

    def _note(self, what: str) -> None:
        if self.clock is not None:
            self.found[what].append(self.clock.now)

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._note("before")

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._note("after")

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._note("end")


def run_on_clock(folder: Path, mode: str) -> _Moments:
    moments = _Moments()
    model = tiny_bert(layers=2, dropout=0.0)
    made = l2l_trainer(folder, model=model, eps_update=mode, max_steps=3, ubatch_size=4, callbacks=[moments])
    # A slow host: the update of the whole model takes 10 seconds.
    numel = sum(p.numel() for p in model.parameters())
    costs = Machine(layers=1, ubatches=1, forward_s=1e-6, transfer_s=1e-6, optimizer_s=1.0).costs()
    slow = type(costs)(
        link_bytes_per_s=costs.link_bytes_per_s, flop_per_s=costs.flop_per_s, host_bytes_per_s=28 * numel / 10.0
    )
    with virtual_clock(slow) as clock:
        moments.clock = clock
        with engine_on_clock(clock, attach_l2l(model, l2l_config(made.args))):
            made.train()
    return moments


def test_with_the_callbacks_of_transformers_a_step_waits_for_nothing(tmp_path):
    """The progress bar, the log and the flow of control look at a step that is still being made."""
    serial, deferred = (run_on_clock(tmp_path / mode, mode).found for mode in ("serial", "deferred"))
    for before, after in zip(serial["before"], serial["after"], strict=True):
        assert after - before == pytest.approx(10.0, rel=0.01)
    assert len(deferred["before"]) == len(deferred["end"]) == 3
    for before, after, end in zip(*deferred.values(), strict=True):
        assert before == after == end
