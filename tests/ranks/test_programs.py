"""Programs of ranks that are unlike most: more threads, many tensors, other orders, a script that just ends."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from torch import distributed, nn

from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.optim import layerwise_step
from rank_cases import Block
from rank_pool import digest
from rank_trainer import fresh
from training import tiny_bert


class Layers(nn.Module):
    """Layers that a batch names, and a head. Of `Two`, the model has a weight of the first layer before its layers."""

    def __init__(self, count: int, layer: Any = Block) -> None:
        super().__init__()
        layers = [layer() for _ in range(count)]
        if layer is Two:
            self.alias = layers[0].second.weight
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(16, 3)

    def forward(self, rows: torch.Tensor, named: list[int] | None = None) -> Any:
        for number in range(len(self.layers)) if named is None else named:
            rows = self.layers[number](rows)
        return (self.head(rows),)


class Two(nn.Module):
    """A layer with two weights of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.second(self.first(rows).tanh())


class Many(nn.Module):
    """A layer with many small weights."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(400))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        parts = rows.split(4, dim=-1)
        return rows + torch.cat(parts, -1) * sum(expert(parts[0]).mean() for expert in self.experts)


KINDS = {"block": Block, "two": Two, "many": Many}


class Program:
    """A training of this rank, or of one process that plays all of them."""

    def __init__(self, size: int, kind: str = "block", layers: int = 4, **options: Any) -> None:
        self.numbers = [distributed.get_rank()] if distributed.is_initialized() else list(range(size))
        self.share = 1 if distributed.is_initialized() else size
        torch.manual_seed(0)
        self.model = Layers(layers, KINDS[kind])
        self.eps = attach_l2l(self.model, L2LConfig(layer_classes=(KINDS[kind].__name__,), **options))
        self.optimizer = self.eps.wrap(torch.optim.AdamW(self.model.parameters(), lr=1e-2))

    def rows(self, step: int, number: int) -> torch.Tensor:
        return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + number))

    def backward(self, step: int, named: list[int] | None = None, temperature: float | None = None) -> None:
        for number in self.numbers:
            with nullcontext() if number == self.numbers[-1] else self.eps.accumulate():
                (logits,) = self.model(self.rows(step, number), named)
                if temperature is not None:
                    logits /= temperature
                (logits.square().mean() / self.share).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def ended(self) -> tuple[str, str]:
        state = self.optimizer.state_dict()["state"]
        found = digest(*(each[key] for _, each in sorted(state.items()) for key in sorted(each)))
        detach_l2l(self.model)
        return digest(*self.model.parameters()), found


def trained(kind: str, layers: int, options: dict[str, Any], temperature: float | None = None) -> tuple[str, str]:
    program = Program(2, kind, layers, **options)
    for step in range(3):
        program.backward(step, temperature=temperature)
        program.step()
    return program.ended()


def same(pool: Any, *given: Any, sim: bool = False) -> None:
    """Two ranks have the bits of one process."""
    alone = pool(1, sim=sim).run(trained, *given)[0]
    assert pool(2, sim=sim).run(trained, *given) == [alone, alone]


@pytest.mark.parametrize("mode", ["deferred", pytest.param("eager", marks=pytest.mark.slow)])
def test_updates_on_two_threads_beside_the_sums(pool, mode):
    same(pool, "block", 24, {"eps_update": mode, "num_threads": 2})


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sim", [False, True])
def test_a_weight_that_the_model_has_before_its_layers(pool, sim):
    """The gradients of a layer come as one piece of memory, in the order of the layer and not of the model."""
    same(pool, "two", 3, {"eps_update": "deferred"}, sim=sim)


def test_a_layer_with_many_tensors(pool):
    """What is told of their optimizer state is longer than a message."""
    same(pool, "many", 1, {"eps_update": "deferred"})


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sim", [False, True])
def test_outputs_that_are_changed_in_place(pool, sim):
    same(pool, "block", 2, {"eps_update": "serial"}, 2.0, sim=sim)


def loaded_after_a_step(first: bool) -> tuple[str, str]:
    """A state is loaded once more, where the ranks have shared one already."""
    program = Program(2, eps_update="deferred")
    saved = copy.deepcopy(program.optimizer.state_dict())
    for step in range(3):
        program.backward(step)
        program.step()
        if step == (0 if first else 1):
            saved = copy.deepcopy(program.optimizer.state_dict())
    program.optimizer.load_state_dict(saved)
    program.backward(4)
    program.step()
    program.optimizer.load_state_dict(copy.deepcopy(program.optimizer.state_dict()))
    return program.ended()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("first", [True, False])
def test_all_ranks_have_the_state_that_was_loaded_again(pool, first):
    alone = pool(1).run(loaded_after_a_step, first)[0]
    assert pool(2).run(loaded_after_a_step, first) == [alone, alone]


def order_of_items() -> tuple[list[str], bool]:
    """The order in which gradients are expected after steps that used other layers each, and none of the first ones;
    and whether gradients of a step that uses all waited for others."""
    program, waited = Program(2), []

    def noted(keep: Any, step: int, master: Any, gradient: torch.Tensor) -> None:
        waited.append((step, master.name))
        keep(master, gradient)

    for step, named in enumerate([None, [2, 3], [0, 3], [3], [1, 2], None]):
        gradients = program.eps.gradients
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gradients, "_keep", partial(noted, gradients._keep, step))
            program.backward(step, named)
        program.step()
    items = program.eps.gradients._found[0]
    late = any(step == 5 and name.startswith("layers") for step, name in waited)
    program.ended()
    return [item.name for item in items.order], late


def test_layers_that_a_step_leaves_out_keep_their_place(pool):
    for order, late in pool(2).run(order_of_items):
        assert order == [f"layers.{n}" for n in (3, 2, 1, 0)] + ["small parameters in no layer"]
        assert not late


def refused(what: str) -> str:
    program = Program(2)
    program.backward(0)
    if what == "clipped":
        program.eps.clip_grad_norm_(0.01)
        with pytest.raises(RuntimeError) as error:
            program.backward(1)
        return str(error.value)
    sum(p.square().sum() for p in program.model.head.parameters()).backward()
    with pytest.raises(RuntimeError) as error:
        program.optimizer.step()
    return str(error.value)


def test_a_backward_after_clipping_is_refused(pool):
    texts = pool(2).run(refused, "clipped")
    assert any("several ranks clip gradients once" in text for text in texts)
    # Whichever rank comes to it later may hear of the other's error first.
    assert all("clip gradients once" in text or "a backward of it has raised" in text for text in texts)


def test_a_backward_that_adds_to_sums_of_all_ranks_is_refused(pool):
    for text in pool(2).run(refused, "alone"):
        assert "part of one backward with the model's" in text and "head.weight" in text


SCRIPT = """
import os, sys, torch
from torch import distributed
sys.path[:0] = {path!r}
import test_programs
distributed.init_process_group("gloo")
program = test_programs.Program(2, layers=24, eps_update="deferred", num_threads=1)
test_programs.slow_updates()
program.backward(0)
program.step()
if distributed.get_rank() == 0:
    torch.save([p.detach().clone() for p in program.model.parameters()], sys.argv[1])
distributed.destroy_process_group()  # else its own threads may abort the process while Python ends
"""


def slow_updates() -> None:
    """Each update takes some time, so that many have not begun when a script is at its end."""
    run = layerwise_step.Part.run

    def slow(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.02)
        run(*args, **kwargs)

    layerwise_step.Part.run = slow  # type: ignore[method-assign]


def test_a_script_that_ends_makes_its_updates_first(pool, tmp_path):
    """Else those that another rank waits for, to save the model, are never made."""
    here, top = Path(__file__).parent, Path(__file__).parents[2]
    script, file = tmp_path / "script.py", tmp_path / "saved.pt"
    script.write_text(SCRIPT.format(path=[str(top), str(here), str(here.parent / "helpers")]))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    ended = subprocess.run([*launch, script, file], env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120)
    assert ended.returncode == 0
    alone = pool(1).run(one_step)[0]
    assert digest(*torch.load(file, weights_only=True)) == alone


def one_step() -> str:
    program = Program(2, layers=24, eps_update="deferred")
    program.backward(0)
    program.step()
    return program.ended()[0]


def under_accelerate(engine: bool, alone: bool) -> dict[str, Any]:
    """Two batches under Accelerate, as one step of all ranks (`accumulate`), or as two of each rank (`LocalSGD`)."""
    fresh()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1 if alone else 2)
    model = tiny_bert(dropout=0.0, layers=2)
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.1)
    if engine:
        optimizer = attach_l2l(model, L2LConfig(device="cpu")).wrap(optimizer)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    batches = torch.randint(0, 50, (2, 4, 8), generator=torch.Generator().manual_seed(distributed.get_rank()))
    error = ""
    with LocalSGD(accelerator, wrapped, local_sgd_steps=100) if alone else nullcontext():
        for ids in batches:
            with accelerator.accumulate(wrapped) if not alone else nullcontext():
                accelerator.backward(wrapped(input_ids=ids, labels=ids[:, 0] % 2).loss)
                try:
                    optimizer.step()
                except ValueError as refused:
                    error = str(refused)
                optimizer.zero_grad()
        found = [weight.detach().clone() for weight in weights]
        detach_l2l(model)
    return {"error": error, "weights": found}


def test_batches_that_ranks_accumulate_under_accelerate(pool):
    ours, theirs = pool(2).run(under_accelerate, True, False), pool(2).run(under_accelerate, False, False)
    for mine, plain in zip(ours, theirs, strict=True):
        assert mine["error"] == ""
        torch.testing.assert_close(mine["weights"], plain["weights"])


def test_a_step_of_a_rank_alone_is_refused(pool):
    """As LocalSGD makes it: each rank has weights of its own until it averages them."""
    plain = pool(2).run(under_accelerate, False, True)
    assert not torch.equal(plain[0]["weights"][0], plain[1]["weights"][0])
    for found in pool(2).run(under_accelerate, True, True):
        assert found["error"].startswith("ranks under L2L have one set of weights, which they update together (got")
        assert "leave out LocalSGD" in found["error"]
