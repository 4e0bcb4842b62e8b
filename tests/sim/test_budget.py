"""A budget of device memory: the options that are chosen, on a device that has no more."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from accumulated import forwards, ragged, tiny_llama, train
from accumulated import made as accumulating
from budgeted import plan_of, use_machine_of_8_mib
from hf_l2l import L2LConfig, L2LTrainer, L2LTrainingArguments, attach_l2l, detach_l2l
from hf_l2l.budget.saved import PLAN_FILE
from hf_l2l.budget.within import plan_within
from hf_l2l.hf.attach import attachment_of
from hf_l2l.option_names import argument
from hf_l2l.plan.planner import BudgetError
from hf_l2l.probe.figures import HardwareFigures
from hf_l2l.testing import enable_simulated_accelerator
from models import batch_for
from training import (
    SAVING,
    arguments,
    assert_same_run,
    inner_optimizer,
    l2l_trainer,
    logs,
    rows,
    settled_memory,
    stopped_at_two,
    tiny_bert,
    trainer,
)

KIB = 2**10


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A device of 8 MiB, whose figures are known."""
    use_machine_of_8_mib(monkeypatch, tmp_path)
    yield
    enable_simulated_accelerator()


def bert(dropout: float = 0.0) -> nn.Module:
    return tiny_bert(dropout=dropout, layers=3, width=64)


def planned(folder: Path, budget: str | None, **options: Any) -> Any:
    """With options that are given, there is less to plan, and the test takes half the time."""
    options = {"ubatch_size": 2, "stash": "device", "l2l_gradient_slots": 1, "max_steps": 2, **options}
    return trainer(L2LTrainer, folder, model=bert(), device_memory_budget=budget, **options)


def peak_of(made: Any) -> int:
    return int(made.eps.memory_report()["device"]["total"]["peak"])


# ---- in any loop


def stepped(model: nn.Module, config: L2LConfig, steps: int = 3) -> tuple[list[float], Any]:
    eps = attach_l2l(model, config, inputs=batch_for(model))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for _ in range(steps):
        loss = model(**batch_for(model)).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, eps


@pytest.mark.one_in(4)
@pytest.mark.parametrize("budget", ["520KiB", "1500KiB", "auto"])
def test_training_keeps_inside_the_budget(budget):
    limit = {"520KiB": 520 * KIB, "1500KiB": 1500 * KIB, "auto": int(0.9 * 2**23)}[budget]
    model = bert()
    expected, _ = stepped(model, L2LConfig(device="sim"))
    detach_l2l(model)
    model = bert()
    settled_memory()
    torch.accelerator.reset_peak_memory_stats()
    losses, eps = stepped(model, L2LConfig(device="sim", device_memory_budget=budget))
    attached = attachment_of(model)
    assert attached is not None
    plan = attached.plan
    assert plan is not None
    assert plan.peak_bytes <= limit
    assert eps.memory_report()["device"]["total"]["peak"] <= limit
    assert losses == pytest.approx(expected, rel=1e-6)
    detach_l2l(model)


def test_a_model_that_is_attached_inside_autocast_is_planned_for_it():
    """As the loop calls it, in other regions."""
    peaks = []
    for enabled in (False, True):
        model, config = bert(), L2LConfig(device="sim", device_memory_budget="560KiB", ubatch_size=2)
        with torch.autocast("sim", torch.bfloat16, enabled=enabled):
            attach_l2l(model, config, inputs=batch_for(model))
        attached = attachment_of(model)
        assert attached is not None and attached.plan is not None
        peaks.append(attached.plan.peak)
        detach_l2l(model)
    assert peaks[0] != peaks[1]


def test_attaching_again_with_the_same_budget_is_the_same_attachment():
    model, config = bert(), L2LConfig(device="sim", device_memory_budget="1MiB", ubatch_size=2)
    eps = attach_l2l(model, config, inputs=batch_for(model))
    assert attach_l2l(model, config) is eps
    attached = attachment_of(model)
    assert attached is not None
    assert attach_l2l(model, attached.config) is eps
    with pytest.raises(ValueError, match="one config at a time"):
        attach_l2l(model, L2LConfig(device="sim"))
    detach_l2l(model)


def test_a_budget_needs_inputs():
    model = bert()
    with pytest.raises(ValueError, match=r"device_memory_budget .*without inputs.*attach_l2l\(model, config, inputs="):
        attach_l2l(model, L2LConfig(device="sim", device_memory_budget="1MiB"))
    assert attachment_of(model) is None
    attach_l2l(model, L2LConfig(device="cpu", device_memory_budget="1MiB"))  # where it changes nothing


def test_a_budget_that_cannot_be_met_ends_with_the_smallest():
    model, before = bert(), torch.accelerator.memory_allocated()
    with pytest.raises(BudgetError, match=r"smallest budget that can be met: device_memory_budget='\d+KiB'") as caught:
        attach_l2l(model, L2LConfig(device="sim", device_memory_budget="50KiB"), inputs=batch_for(model))
    assert (attachment_of(model), torch.accelerator.memory_allocated()) == (None, before)
    smallest = str(caught.value).rpartition("'")[0].rpartition("'")[2]
    stepped(model, L2LConfig(device="sim", device_memory_budget=smallest), steps=1)
    detach_l2l(model)


def test_options_that_bind_the_choice_are_named():
    model = bert()
    config = L2LConfig(device="sim", device_memory_budget="600KiB", stash="device", ubatch_size=8, resident_layers=3)
    with pytest.raises(BudgetError, match="do not bind the choice: without ubatch_size, resident_layers$"):
        attach_l2l(model, config, inputs=batch_for(model))


def test_less_free_memory_than_the_budget_is_refused():
    held = torch.empty(4 * 2**20, dtype=torch.uint8, device="sim")
    model = bert()
    with pytest.raises(ValueError, match=r"must have the memory of its budget free .*7.2 MiB, and 4.0 MiB are free"):
        attach_l2l(model, L2LConfig(device="sim", device_memory_budget="auto"), inputs=batch_for(model))
    attach_l2l(model, L2LConfig(device="sim", device_memory_budget="3MiB"), inputs=batch_for(model))
    detach_l2l(model)
    del held


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


@pytest.mark.parametrize(("budget", "resident"), [("1500KiB", "none"), ("auto", "all")])
def test_an_optimizer_that_steps_as_a_whole_has_all_or_nothing_resident(budget, resident):
    model = bert()
    optimizer = Squares(model.parameters())
    config = L2LConfig(device="sim", device_memory_budget=budget, eps_update="serial")
    eps = attach_l2l(model, config, inputs=batch_for(model), optimizer=optimizer)
    attached = attachment_of(model)
    assert attached is not None
    assert (attached.config.resident, attached.config.resident_layers) == (resident, 0)
    eps.wrap(optimizer)
    model(**batch_for(model)).loss.backward()
    optimizer.step()
    detach_l2l(model)


def test_weights_that_something_refers_to_are_not_chosen_to_be_resident():
    model = bert()
    handle = next(model.parameters()).register_post_accumulate_grad_hook(lambda p: None)
    attach_l2l(model, L2LConfig(device="sim", device_memory_budget="auto"), inputs=batch_for(model))
    attached = attachment_of(model)
    assert attached is not None
    assert (attached.config.resident, attached.config.resident_layers) == ("none", 0)
    handle.remove()
    detach_l2l(model)


def test_weights_that_stay_in_fp32_can_be_resident():
    """Of T5, `wo` does."""
    sizes: dict[str, Any] = {"d_model": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 100, "d_ff": 64, "d_kv": 16}
    model = hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0)).to(torch.bfloat16)
    ids = torch.ones(4, 8, dtype=torch.long)
    config = L2LConfig(device="sim", device_memory_budget="auto", cmp="bf16")
    attach_l2l(model, config, inputs={"input_ids": ids, "labels": ids})
    attached = attachment_of(model)
    assert attached is not None
    assert attached.config.resident == "all"
    detach_l2l(model)


# ---- under the Trainer


def test_a_model_that_fits_is_trained_as_with_plain_trainer(tmp_path):
    plain = trainer(hf.Trainer, tmp_path / "plain", model=bert(), max_steps=2)
    plain.train()
    plain.model.to("cpu")
    inner_optimizer(plain).state.clear()
    settled_memory()
    made = planned(tmp_path / "ours", "auto")
    made.train()
    assert attachment_of(made.model).config.resident == "all"
    for found, expected in zip(logs(made), logs(plain), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def test_auto_is_the_default_of_the_trainer(tmp_path):
    made = L2LTrainer(bert(), arguments(L2LTrainingArguments, tmp_path), train_dataset=rows())
    made.train()
    assert plan_of(made).budget == int(0.9 * 2**23)
    enable_simulated_accelerator()  # without a limit there is nothing to plan for
    made = L2LTrainer(bert(), arguments(L2LTrainingArguments, tmp_path), train_dataset=rows())
    made.train()
    assert plan_of(made) is None


def test_plain_arguments_have_a_budget_too(tmp_path):
    made = L2LTrainer(bert(), arguments(hf.TrainingArguments, tmp_path), train_dataset=rows())
    made.train()
    assert plan_of(made) is not None


@pytest.mark.parametrize(
    ("budget", "room"),
    [
        ("560KiB", 560),
        pytest.param("1MiB", 1024, marks=pytest.mark.slow),
        pytest.param("auto", 8192, marks=pytest.mark.slow),
    ],
)
def test_autocast_keeps_inside_the_budget(tmp_path, budget, room):
    """On a device that has no more, with the losses of the same options set by hand."""
    settled_memory()
    enable_simulated_accelerator(f"{room}KiB")
    torch.accelerator.reset_peak_memory_stats()
    made = planned(tmp_path / "planned", budget, bf16=True)
    made.train()
    plan = plan_of(made)
    assert plan.peak_bytes <= plan.budget <= room * KIB
    assert 0.9 < peak_of(made) / plan.peak_bytes < 1.03
    detach_l2l(made.model)
    enable_simulated_accelerator("8MiB")
    without = planned(tmp_path / "fp32", budget)
    without.train()
    assert plan_of(without).peak != plan.peak
    detach_l2l(without.model)
    by_hand = planned(tmp_path / "by hand", "off", bf16=True, **{argument(k): v for k, v in plan.chosen.items()})
    by_hand.train()
    assert plan_of(by_hand) is None
    assert [entry["loss"] for entry in logs(made) if "loss" in entry] == [
        entry["loss"] for entry in logs(by_hand) if "loss" in entry
    ]


def test_the_smallest_budget_is_refused_with_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--output_dir", "out", "--device_memory_budget", "50KiB"])
    with pytest.raises(BudgetError, match=r": \S*python\S* train.py --output_dir out --device_memory_budget=\d+KiB$"):
        planned(tmp_path, "50KiB").train()


def test_it_tells_what_was_chosen_and_what_was_measured(tmp_path, caplog):
    hf.utils.logging.set_verbosity_info()
    hf.utils.logging.enable_propagation()
    try:
        with caplog.at_level(logging.INFO):
            planned(tmp_path, "1MiB", max_steps=20, ubatch_size=8).train()
    finally:
        hf.utils.logging.set_verbosity_warning()
        hf.utils.logging.disable_propagation()
    assert "plan for 1.0 MiB of device memory: " in caplog.text
    assert "measured in 20 steps: " in caplog.text


def test_an_evaluation_before_and_after_the_training(tmp_path):
    made = planned(tmp_path, "auto")
    before = made.evaluate()["eval_loss"]
    assert plan_of(made) is None
    made.train()
    assert plan_of(made) is not None
    eps = made.eps
    assert made.evaluate()["eval_loss"] != before
    assert made.eps is eps


@pytest.mark.parametrize(
    "second",
    [
        {"device_memory_budget": "off", "ubatch_size": 2, "stash": "host"},
        {"device_memory_budget": "off", "l2l_resident": "all", "l2l_resident_update": "device"},
        {"device_memory_budget": "600KiB", "eps_update": "deferred"},
        {"cmp": "bf16"},
    ],
)
def test_another_trainer_with_other_options_plans_and_trains_as_with_a_new_model(tmp_path, second):
    budget = {"device_memory_budget": "auto"}
    before, model, new = settled_memory(), tiny_bert(), tiny_bert()
    l2l_trainer(tmp_path / "first", model=model, **budget).train()
    new.load_state_dict(model.state_dict())
    found, expected = (l2l_trainer(tmp_path / "second", model=each, **{**budget, **second}) for each in (model, new))
    torch.manual_seed(5)
    found.train()
    torch.manual_seed(5)
    expected.train()
    assert_same_run(found, expected)
    ours, theirs = attachment_of(model), attachment_of(new)
    assert ours is not None and theirs is not None and ours.config == theirs.config
    for each in (model, new):
        detach_l2l(each)
    del found, expected, each, ours, theirs
    assert settled_memory() <= before + 1024


def test_a_second_training_has_the_same_plan(tmp_path):
    made = planned(tmp_path, "1MiB")
    made.train()
    eps, plan = made.eps, plan_of(made)
    made.train()
    assert (made.eps, plan_of(made)) == (eps, plan)
    made.args.per_device_train_batch_size = 4
    made._train_batch_size = 4
    made.train(resume_from_checkpoint=False)
    assert plan_of(made) is not plan


def test_a_resumed_run_has_the_plan_of_its_checkpoint(tmp_path, monkeypatch):
    """To the bit, though the machine has become a faster one."""
    made = partial(planned, budget="1500KiB", stash=L2LConfig.stash, l2l_gradient_slots=L2LConfig.gradient_slots)
    whole = made(tmp_path / "whole", **SAVING)
    whole.train()
    checkpoint = stopped_at_two(made, tmp_path / "parts")
    chosen = json.loads((Path(checkpoint) / PLAN_FILE).read_text())["chosen"]
    fast = HardwareFigures("sim", 2**23, 1e13, 1e13, 1e13, 1e13, 1e10, {1: 1e13}, {"fp32": 1e10}, True, 1e13)
    (tmp_path / "figures.json").write_text(fast.to_json())
    fresh = made(tmp_path / "fresh", **{**SAVING, "max_steps": 1})
    fresh.train()
    assert plan_of(fresh).chosen != chosen  # planned for the other machine
    resumed = made(tmp_path / "parts", **SAVING)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert plan_of(resumed).chosen == chosen
    assert [entry for entry in logs(resumed) if "loss" in entry] == [entry for entry in logs(whole) if "loss" in entry]


@pytest.mark.parametrize(
    "budget", ["520KiB", *(pytest.param(each, marks=pytest.mark.slow) for each in ("auto", "off", None))]
)
def test_a_checkpoint_of_one_plan_resumes_under_any_other(budget, tmp_path):
    whole = planned(tmp_path / "whole", "1500KiB", **SAVING)
    whole.train()
    checkpoint = str(tmp_path / "whole" / "checkpoint-2")
    detach_l2l(whole.model)
    settled_memory()
    if budget is None:
        resumed = trainer(hf.Trainer, tmp_path / "parts", model=bert(), **SAVING)
    else:
        resumed = planned(tmp_path / "parts", budget, **SAVING)
    resumed.train(resume_from_checkpoint=checkpoint)
    for found, expected in zip(logs(resumed), logs(whole), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


# ---- trainers for which no plan can be made


def no_plan(folder: Path, budget: str, what: str) -> Any:
    if what == "compute_loss":

        class Mine(L2LTrainer):
            def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
                return super().compute_loss(*args, **kwargs)

        return trainer(Mine, folder, model=bert(), device_memory_budget=budget)
    if what == "streamed":
        made = planned(folder, budget)
        made.train_dataset = Streamed()
        return made
    return planned(folder, budget, label_smoothing_factor=0.1)


class Streamed(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(rows())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("what", ["compute_loss", "streamed", "label_smoothing_factor"])
def test_without_a_plan_auto_goes_on_and_a_size_is_refused(tmp_path, what):
    made = no_plan(tmp_path / "auto", "auto", what)
    made.train()
    assert plan_of(made) is None
    with pytest.raises(ValueError, match=f"device_memory_budget plans for .*{what}.*set 'off'"):
        no_plan(tmp_path / "sized", "1MiB", what).train()


# ---- accumulated batches


SLOW = pytest.mark.slow


@pytest.mark.parametrize("budget", ["900KiB", "2600KiB", "auto"])
@SLOW
def test_accumulated_batches_keep_inside_the_budget(tmp_path, budget):
    """They run as one where their weights would travel longer than their rows, and not where little travels."""
    limit = {"900KiB": 900 * KIB, "2600KiB": 2600 * KIB, "auto": int(0.9 * 2**23)}[budget]
    slow = HardwareFigures("sim", 2**23, 1e7, 1e7, 1e7, 1e7, 1e10, {1: 1e9}, {"fp32": 1e11}, True, 1e13)
    (tmp_path / "figures.json").write_text(slow.to_json())
    model = tiny_llama(layers=6, hidden_size=32, intermediate_size=256)
    data = ragged(longest=32, shortest=24)
    options: dict[str, Any] = {"device_memory_budget": budget, "per_device_train_batch_size": 6}
    made = accumulating(tmp_path / "out", model=model, data=data, **options)
    seen = forwards(made)
    settled_memory()
    torch.accelerator.reset_peak_memory_stats()
    said = train(made)
    assert peak_of(made) <= limit
    plan = plan_of(made)
    assert plan.peak_bytes <= limit
    assert (plan.batches, said) == (1 if budget == "auto" else 4, [])
    assert seen[-1] == 6 * plan.batches
    detach_l2l(made.model)


def test_batches_that_are_not_faster_at_once_run_one_by_one_without_a_warning(tmp_path):
    fast = HardwareFigures("sim", 2**23, 1e13, 1e13, 1e13, 1e13, 1e10, {1: 1e13}, {"fp32": 1e10}, True, 1e13)
    (tmp_path / "figures.json").write_text(fast.to_json())
    data = ragged(longest=32, shortest=24)
    options: dict[str, Any] = {"device_memory_budget": "400KiB", "per_device_train_batch_size": 6, "ubatch_size": 2}
    made = accumulating(
        tmp_path / "out", model=tiny_llama(layers=3, hidden_size=32), data=data, max_steps=2, **options
    )
    assert train(made) == []
    assert plan_of(made).batches == 1
    detach_l2l(made.model)


def test_a_plan_that_is_taken_again_expects_the_time_of_all_batches_of_a_step():
    model, config = bert(), L2LConfig(device="sim", device_memory_budget="auto", ubatch_size=2)
    plan = plan_within(model, config, batch_for(model), batches=4)
    assert plan is not None and plan.batches == 1
    chosen = {**plan.chosen, "batches": plan.batches}
    assert plan_within(model, config, batch_for(model), batches=4, chosen=chosen) == plan


# ---- out of memory all the same


def test_the_error_names_what_was_larger_than_planned(tmp_path):
    model = bert()
    plain = batch_for(model)
    short = {name: value[:2] if value.dim() else value for name, value in plain.items()}
    eps = attach_l2l(model, L2LConfig(device="sim", device_memory_budget="500KiB"), inputs=short)
    eps.wrap(torch.optim.AdamW(model.parameters()))
    many = {name: torch.cat([value] * 40) if value.dim() else value for name, value in plain.items()}
    enable_simulated_accelerator("600KiB")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(**many).loss.backward()
    [note] = [note for note in caught.value.__notes__ if "was planned" in note]
    assert "longer rows than the one that was planned for" in note
    enable_simulated_accelerator("8MiB")
    detach_l2l(model)
