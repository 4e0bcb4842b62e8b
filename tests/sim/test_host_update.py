"""The update on the host: what the simulated accelerator sees of it, and parameters that are updated in pieces."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hf_l2l import EngineFailedError, L2LConfig, Lamb, attach_l2l, detach_l2l
from hf_l2l.eps import masters
from hf_l2l.optim import one_pass
from hf_l2l.optim.layer_optimizers import LayerOptimizers, SplitStep
from hf_l2l.optim.one_pass import OnePass
from hf_l2l.testing import Costs, copies_under_way, engine_on_clock, virtual_clock
from left_over import gone
from memory_switches import copies_at_unlocks
from runs import Run, assert_same_run, run_of
from tiers import more
from timed_machine import WIDTH, Block

VOCABULARY = 150_000
"""Of 2.4 million elements: three pieces."""


class Decoder(nn.Module):
    """An embedding, layers, and a head, which may have the weight of the embedding."""

    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), ids)


def trained(
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, *, is_tied: bool = True, **options: Any
) -> Run:
    """What three steps leave of a decoder on the simulated accelerator."""
    torch.manual_seed(0)
    model, ids, losses = Decoder(is_tied=is_tied), torch.arange(7) * 1000, []
    eps = attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), **options))
    more = {"fused": True} if optimizer is torch.optim.AdamW else {}
    wrapped = eps.wrap(optimizer(model.parameters(), lr=1e-2, **more))
    for _ in range(3):
        loss = model(ids)
        loss.backward()
        if options.get("eps_update") != "eager":
            losses.append(float(eps.clip_grad_norm_(0.1)))
        wrapped.step()
        wrapped.zero_grad()
        losses.append(loss.item())
    eps.synchronize()
    return copy.deepcopy(run_of(model, wrapped, losses))


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {"cmp": "bf16", "grad_dtype": "16bit", "moment_dtype": "8bit"}),
        (torch.optim.AdamW, {"eps_update": "eager"}),
        (Lamb, {"cmp": "bf16", "moment_dtype": "bf16"}),
        *more(
            (torch.optim.AdamW, {}),
            (torch.optim.AdamW, {"eps_update": "serial", "cmp": "bf16"}),
            (torch.optim.AdamW, {"cmp": "bf16", "grad_dtype": "16bit", "moment_dtype": "bf16"}),
            (torch.optim.AdamW, {"cmp": "bf16", "host_copies": "per_sweep"}),
            (torch.optim.SGD, {}),
            (torch.optim.Adagrad, {"cmp": "bf16"}),
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_compiled", [True, *more(False)])
def test_pieces_have_the_bits_of_the_whole(optimizer, options, is_compiled, monkeypatch):
    if not is_compiled:
        monkeypatch.setattr(one_pass.ENGINES, "compiles", lambda form, kind: False)
    found = trained(optimizer, is_tied=bool(options), **options)
    monkeypatch.setattr(masters, "pieces_of", lambda count: [count])
    assert_same_run(found, trained(optimizer, is_tied=bool(options), **options))


def test_a_piece_is_updated_and_uploaded_while_others_are_on_their_way():
    torch.manual_seed(0)
    model, ids = Decoder(), torch.arange(7)
    eps = attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), eps_update="deferred"))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), fused=True))

    def step() -> None:
        model(ids).backward()
        eps.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    eps.synchronize()
    embedding = model.embed.weight.numel()
    # The embedding travels in a second, and is updated in another one.
    costs = Costs(link_bytes_per_s=4.0 * embedding, flop_per_s=1e12, host_bytes_per_s=28.0 * embedding)
    with virtual_clock(costs) as clock, engine_on_clock(clock, eps):
        step()
        called = clock.now
        model(ids)
        begun = min(task.start for task in clock.tasks if task.lane == "compute" and task.start > called)
        backward_s = max(task.end for task in clock.tasks if task.lane == "compute" and task.end <= called)
    assert called - backward_s < 0.1  # clipping waits for norms alone
    # One after the other, download, update and upload take 3 s; of three pieces, all but the first third overlap.
    assert 1.0 < begun - called < 2.1
    lanes = {lane: [t for t in clock.tasks if t.lane == lane] for lane in ("download", "host", "upload")}
    for lane, other in (("download", "host"), ("host", "upload")):
        assert any(a.start < b.end and b.start < a.end for a in lanes[lane] for b in lanes[other])


def test_memory_of_an_eager_update_that_fails_is_unlocked_when_its_gradient_has_arrived(monkeypatch):
    under_way = copies_at_unlocks(monkeypatch)
    model = Decoder(is_tied=False)
    eps = attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), eps_update="eager"))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), fused=True))

    def spoil(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: gradient * torch.nan)

    model.embed.register_forward_hook(spoil)
    model(torch.arange(7)).backward()
    assert gone(lambda: eps.updates.worker.has_failed) and copies_under_way()
    with pytest.warns(UserWarning, match="an update failed"):
        detach_l2l(model)
    assert optimizer.param_groups and under_way and not any(under_way)


def test_a_forward_that_waits_for_a_piece_gets_the_failure_of_the_update(monkeypatch):
    model, ids = Decoder(), torch.arange(7)
    eps = attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",)))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), fused=True))
    update_of = one_pass.ENGINES.update

    def failing(form: Any, kind: Any, updates: Any) -> None:
        if sum(each.master.numel() for each in updates) == 2**20 and failing.calls:
            raise ArithmeticError("in the second piece")
        failing.calls += sum(each.master.numel() for each in updates) == 2**20
        update_of(form, kind, updates)

    failing.calls = 0
    monkeypatch.setattr(one_pass.ENGINES, "update", failing)
    model(ids).backward()
    optimizer.step()
    with pytest.raises(ArithmeticError, match="in the second piece"):
        model(ids)
    with pytest.raises(EngineFailedError, match="in the second piece"):
        model(ids)


def update(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """One step of fused AdamW, in one pass."""
    optimizer = torch.optim.AdamW([parameter], fused=True)
    SplitStep(LayerOptimizers(optimizer, OnePass.of(optimizer)), {parameter: gradient}).run([parameter])


@pytest.mark.parametrize("is_compiled", [True, False])
def test_an_update_takes_the_time_of_its_bytes(is_compiled, monkeypatch):
    if not is_compiled:
        monkeypatch.setattr(one_pass.ENGINES, "compiles", lambda form, kind: False)
    parameter = nn.Parameter(torch.zeros(1000))
    with virtual_clock(Costs(link_bytes_per_s=1.0, flop_per_s=1.0, host_bytes_per_s=28.0)) as clock:
        update(parameter, torch.ones(1000))
        assert clock.now == pytest.approx(1000 * one_pass.BYTE_TIMES[torch.float32])


def test_an_update_of_what_a_copy_uses_is_refused():
    parameter, gradient = nn.Parameter(torch.zeros(8)), torch.zeros(8)
    lane, there = torch.sim.Stream(), torch.ones(8, device="sim")
    torch.sim.synchronize()
    with torch.sim.stream(lane):
        gradient.copy_(there, non_blocking=True)
    with pytest.raises(RuntimeError, match="read-after-write race"):
        update(parameter, gradient)
    lane.synchronize()
    update(parameter, gradient)
    with torch.sim.stream(lane), torch.no_grad():
        there.copy_(parameter, non_blocking=True)
    with pytest.raises(RuntimeError, match="write-after-read race"):
        update(parameter, gradient)
    lane.synchronize()


def test_an_update_of_memory_that_was_freed_since_a_copy_read_it_is_no_race():
    memory = np.zeros(8, np.float32)
    lane, there = torch.sim.Stream(), torch.zeros(8, device="sim")
    source = torch.from_numpy(memory)
    torch.sim.synchronize()
    with torch.sim.stream(lane):
        there.copy_(source, non_blocking=True)
    torch.sim.current_stream().wait_stream(lane)
    there.add_(1)  # the copy lands, and the host has not waited
    del source  # as memory that is freed, and given to another tensor
    update(nn.Parameter(torch.from_numpy(memory)), torch.ones(8))
    assert memory.any()
