"""A budget of device memory in any loop: the options that are chosen, on a device that has no more."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from budgeted import use_machine_of_8_mib
from hf_l2l import L2LCallback, L2LConfig, L2LTrainer, attach_l2l, detach_l2l
from hf_l2l.budget.within import plan_within
from hf_l2l.hf.attach import attachment_of
from hf_l2l.plan.planner import BudgetError
from hf_l2l.testing import enable_simulated_accelerator
from models import Toy, batch_for, t5
from tiers import nightly
from training import settled_memory, tiny_bert, trainer

KIB = 2**10
GIVEN: dict[str, Any] = {"ubatch_size": 2, "stash": "device", "gradient_slots": 1}
"""With options that are given, there is less to plan."""


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A device of 8 MiB, whose figures are known; the file that has them."""
    use_machine_of_8_mib(monkeypatch, tmp_path)
    yield tmp_path / "figures.json"
    enable_simulated_accelerator()


def toy(dropout: float = 0.0) -> nn.Module:
    return Toy(3, 84, tied=False, dropout=dropout)


BATCH = batch_for(toy(), masked=False)


def config_of(budget: str | None, **options: Any) -> L2LConfig:
    return L2LConfig(device="sim", device_memory_budget=budget, layer_classes=("Block",), **options)


def plan_of(of: nn.Module) -> Any:
    """The plan with which a model is attached."""
    attached = attachment_of(of)
    assert attached is not None
    return attached.plan


def chosen_for(model: nn.Module, config: L2LConfig, **options: Any) -> L2LConfig:
    """The options that a model is attached with; it is an ordinary one afterwards."""
    attach_l2l(model, config, **{"inputs": BATCH, **options})
    attached = attachment_of(model)
    assert attached is not None
    detach_l2l(model)
    return attached.config


@nightly
def test_a_plan_is_for_training_and_for_the_autocast_around_it():
    """As the loop calls the model, whatever mode it is in now."""
    peaks = []
    for trains, casts in ((True, False), (False, False), (True, True)):
        model = toy(dropout=0.1).train(trains)
        with torch.autocast("sim", torch.bfloat16, enabled=casts):
            attach_l2l(model, config_of("560KiB", **GIVEN), inputs=BATCH)
        peaks.append(plan_of(model).peak)
        assert model.training == trains
        detach_l2l(model)
    assert peaks[0] == peaks[1] != peaks[2]


def test_one_budget_is_one_attachment_and_needs_inputs(tmp_path):
    model = toy()
    with pytest.raises(ValueError, match="without inputs"):
        attach_l2l(model, config_of("1MiB"))
    with pytest.raises(ValueError, match="callback knows no batches"):
        trainer(hf.Trainer, tmp_path, model=toy(), callbacks=[L2LCallback(config_of("1MiB"))])
    assert attachment_of(model) is None
    config = config_of("1MiB", ubatch_size=2)
    eps = attach_l2l(model, config, inputs=BATCH)
    attached = attachment_of(model)
    assert attached is not None
    assert attach_l2l(model, config) is attach_l2l(model, attached.config) is eps
    with pytest.raises(ValueError, match="one config at a time"):
        attach_l2l(model, config_of("off"))
    detach_l2l(model)
    attach_l2l(model, L2LConfig(device="cpu", device_memory_budget="1MiB"))  # where it changes nothing


def test_a_budget_that_cannot_be_met_ends_with_the_smallest(tmp_path, monkeypatch):
    """Inside which the model trains. And with options that bind the choice. No machine is measured for it."""
    model, before, figures = toy(), torch.accelerator.memory_allocated(), os.environ["HF_L2L_FIGURES"]
    monkeypatch.setenv("HF_L2L_FIGURES", str(tmp_path / "none"))
    with pytest.raises(BudgetError, match=r"device_memory_budget='\d+KiB'") as caught:
        attach_l2l(model, config_of("50KiB"), inputs=BATCH)
    assert (attachment_of(model), torch.accelerator.memory_allocated()) == (None, before)
    monkeypatch.setenv("HF_L2L_FIGURES", figures)
    smallest = str(caught.value).rpartition("'")[0].rpartition("'")[2]
    before = settled_memory()
    torch.accelerator.reset_peak_memory_stats()
    eps = attach_l2l(model, config_of(smallest), inputs=BATCH)
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(2):
        model(**BATCH).loss.backward()
        optimizer.step()
    limit = int(smallest.removesuffix("KiB")) * KIB
    assert plan_of(model).peak_bytes <= limit
    assert eps.memory_report()["device"]["total"]["peak"] - before <= limit
    detach_l2l(model)
    with pytest.raises(BudgetError, match="without (ubatch_size, )?resident_layers$"):
        chosen_for(model, config_of("600KiB", stash="device", ubatch_size=8, resident_layers=3))
    monkeypatch.setattr(sys, "argv", ["train.py", "--output_dir", "out", "--device_memory_budget", "5KiB"])
    with pytest.raises(BudgetError, match=r"python\S* train.py --output_dir out --device_memory_budget=\d+KiB$"):
        trainer(L2LTrainer, tmp_path, model=tiny_bert(layers=2), device_memory_budget="5KiB").train()


class Squares(torch.optim.Optimizer):
    """Steps by the sum over all gradients, so that it cannot update some weights alone."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = sum(float(p.grad.square().sum()) for p in given)
        for p in given:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"] / (1 + total))


def test_which_weights_may_be_resident():
    """Of an optimizer that steps as a whole all or none; none that something refers to; those that stay in fp32, such
    as `wo` of T5."""
    for budget, resident in (("1400KiB", "none"), ("auto", "all")):
        model = toy()
        optimizer = Squares(model.parameters())
        found = chosen_for(model, config_of(budget, eps_update="serial", **GIVEN), optimizer=optimizer)
        assert (found.resident, found.resident_layers) == (resident, 0)
    handle = next(model.parameters()).register_post_accumulate_grad_hook(lambda p: None)
    found = chosen_for(model, config_of("auto", **GIVEN))
    assert (found.resident, found.resident_layers) == ("none", 0)
    handle.remove()
    inputs = dict.fromkeys(("input_ids", "labels"), torch.ones(4, 8, dtype=torch.long))
    config = L2LConfig(device="sim", device_memory_budget="auto", cmp="bf16", **GIVEN)
    assert chosen_for(t5().to(torch.bfloat16), config, inputs=inputs).resident == "all"


@nightly
def test_models_that_are_gone_leave_the_device():
    """Their memory counts as free, though nothing has collected them."""
    gc.disable()
    try:
        for _ in range(2):
            model = toy()
            attach_l2l(model, config_of("7800KiB"), inputs=BATCH)
            assert plan_of(model).config.resident == "all"
            del model
    finally:
        gc.enable()


def test_a_plan_is_taken_again_if_it_can_be_had(caplog):
    """With the time of all batches of a step."""
    model = toy()
    again = partial(plan_within, model, config_of("auto", **GIVEN), BATCH, batches=2)
    plan = again()
    assert plan is not None and plan.batches == 1
    assert again(chosen={**plan.chosen, "batches": 1}) == plan
    small = partial(plan_within, model, config_of("1MiB", **GIVEN), BATCH)
    for made, expected, chosen, said in (
        (again, plan, {"batches": 3}, "a step had 3 batches at once, and has 2 now"),
        (again, plan, {"batches": 1, "resident_layers": 9}, "number of layers"),
        (small, small(), {"batches": 1, "resident": "all", "kept_graphs": 3}, "it needs more than 1.0 MiB"),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "hf_l2l"):
            assert made(chosen=chosen) == expected
        assert said in caplog.text
    handle = next(model.parameters()).register_post_accumulate_grad_hook(lambda p: None)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "hf_l2l"):
        again(chosen={"batches": 1, "resident_layers": 1})
    assert "resident_layers cannot be chosen" in caplog.text
    handle.remove()


def test_out_of_memory_all_the_same_names_what_was_larger_than_planned():
    model = toy()
    short = {name: value[:2] for name, value in BATCH.items()}
    eps = attach_l2l(model, config_of("500KiB"), inputs=short)
    eps.wrap(torch.optim.AdamW(model.parameters()))
    many = {name: torch.cat([value] * 40) for name, value in BATCH.items()}
    enable_simulated_accelerator(settled_memory() + 600 * KIB)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(**many).loss.backward()
    [note] = [note for note in caught.value.__notes__ if "was planned" in note]
    assert "longer rows than the one that was planned for" in note
    enable_simulated_accelerator("8MiB")
    detach_l2l(model)
