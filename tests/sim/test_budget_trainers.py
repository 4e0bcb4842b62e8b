"""A budget of device memory under trainers: those that train twice, share a model, make new ones, or change it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from accumulated import forwards, ragged, tiny_llama, train
from accumulated import made as accumulating
from budgeted import FIGURES, plan_of, use_machine_of_8_mib
from hf_l2l import L2LBatchGrowth, L2LConfig, L2LTrainer, attach_l2l, detach_l2l
from hf_l2l.budget.saved import PLAN_FILE
from hf_l2l.checkpoint.manifest import MANIFEST
from hf_l2l.hf.attach import attachment_of
from hf_l2l.noise import growth, trainer_part
from hf_l2l.noise.estimate import NoiseScale
from hf_l2l.option_names import argument
from hf_l2l.probe.figures import HardwareFigures
from hf_l2l.testing import enable_simulated_accelerator
from models import VOCAB, Toy, batch_for
from runs import UNCHECKED, assert_same_run
from tiers import more, nightly
from training import (
    SAVING,
    arguments,
    inner_optimizer,
    l2l_trainer,
    logs,
    rows,
    settled_memory,
    tiny_bert,
    trainer,
)

KIB = 2**10
GIVEN: dict[str, Any] = {"ubatch_size": 2, "stash": "device", "gradient_slots": 1}
"""With options that are given, there is less to plan, and a test takes half the time."""
OF_TRAINER: dict[str, Any] = {argument(name): value for name, value in GIVEN.items()}
FAST = HardwareFigures("sim", 2**23, 1e13, 1e13, 1e13, 1e13, 1e10, {1: 1e13}, {"fp32": 1e10}, True, 1e13)
SLOW = HardwareFigures("sim", 2**23, 1e7, 1e7, 1e7, 1e7, 1e10, {1: 1e9}, {"fp32": 1e11}, True, 1e13)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A device of 8 MiB, whose figures are known; the file that has them."""
    use_machine_of_8_mib(monkeypatch, tmp_path)
    yield tmp_path / "figures.json"
    enable_simulated_accelerator()


def toy(layers: int = 3) -> nn.Module:
    return Toy(layers, 84, tied=False, dropout=0.0)


def bert() -> nn.Module:
    return tiny_bert(dropout=0.0, layers=3, width=64)


def data(count: int = 48) -> list[dict[str, Any]]:
    """Rows of 8 tokens, which are their labels, too."""
    ids = torch.randint(5, VOCAB, (count, 8), generator=torch.Generator().manual_seed(5)).tolist()
    return [{"input_ids": row, "labels": row} for row in ids]


def planned(folder: Path, budget: str | None, kind: Any = L2LTrainer, **options: Any) -> Any:
    if "model_init" not in options:
        options.setdefault("model", toy())
    given = {**OF_TRAINER, "l2l_layer_classes": ["Block"]}
    made = trainer(kind, folder, device_memory_budget=budget, **{"max_steps": 1, **given, **options})
    made.train_dataset, made.eval_dataset = data(), data(16)
    return made


def peak_of(made: Any) -> int:
    return int(made.eps.memory_report()["device"]["total"]["peak"])


def losses(made: Any) -> list[float]:
    return [entry["loss"] for entry in logs(made) if "loss" in entry]


# ---- under the Trainer


@nightly
def test_auto_is_the_default_and_a_model_that_fits_is_trained_as_with_plain_trainer(tmp_path):
    """Evaluations and later trainings have the same plan; without a limit there is nothing to plan for."""
    args = arguments(hf.TrainingArguments, tmp_path, max_steps=1)
    plain = hf.Trainer(bert(), args, train_dataset=rows())
    torch.manual_seed(0)
    plain.train()
    plain.model.to("cpu")
    inner_optimizer(plain).state.clear()
    settled_memory()
    made = L2LTrainer(bert(), args, train_dataset=rows(), eval_dataset=rows(16))
    before = made.evaluate()["eval_loss"]
    assert plan_of(made) is None
    torch.manual_seed(0)
    made.train()
    for found, expected in zip(logs(made), logs(plain), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    plan, eps = plan_of(made), made.eps
    assert plan.budget == int(0.9 * 2**23) and plan.config.resident == "all"
    assert made.evaluate()["eval_loss"] != before and made.eps is eps
    made.train()
    assert (made.eps, plan_of(made)) == (eps, plan)
    enable_simulated_accelerator()
    made = planned(tmp_path, "auto")
    made.train()
    assert plan_of(made) is None


@nightly
@pytest.mark.parametrize(("budget", "room"), [("560KiB", 560), *more(("auto", 8192))])
def test_autocast_keeps_inside_the_budget(tmp_path, budget, room):
    """On a device that has no more, with the losses of the same options set by hand."""
    before = settled_memory()
    enable_simulated_accelerator(before + room * KIB)
    torch.accelerator.reset_peak_memory_stats()
    options: dict[str, Any] = {**OF_TRAINER, "bf16": True, "max_steps": 2}
    made = l2l_trainer(tmp_path / "planned", model=bert(), device_memory_budget=budget, **options)
    made.train()
    plan = plan_of(made)
    assert plan.peak_bytes <= plan.budget <= room * KIB
    assert 0.9 < (peak_of(made) - before) / plan.peak_bytes < 1.03
    detach_l2l(made.model)
    enable_simulated_accelerator("8MiB")
    options |= {argument(name): value for name, value in plan.chosen.items()}
    by_hand = l2l_trainer(tmp_path / "by hand", model=bert(), **options)
    by_hand.train()
    assert plan_of(by_hand) is None and losses(made) == losses(by_hand)
    detach_l2l(by_hand.model)


def test_larger_evaluations_are_told_of(tmp_path, caplog):
    """Before a training, if they may need more, and once when one has taken more."""
    hf.utils.logging.enable_propagation()
    torch.accelerator.reset_peak_memory_stats()
    made = planned(tmp_path, "560KiB", eval_strategy="epoch", per_device_eval_batch_size=256)
    made.eval_dataset = data(2)
    try:
        with caplog.at_level(logging.WARNING):
            made.train()
            made.evaluate(data(4))
            assert "more than the budget" not in caplog.text and "has taken more" not in caplog.text
            for _ in range(2):
                made.evaluate(data(256))
    finally:
        hf.utils.logging.disable_propagation()
    assert "per_device_eval_batch_size=256, and per_device_train_batch_size=8" in caplog.text
    assert len([each for each in caplog.records if "an evaluation has taken more" in each.getMessage()]) == 1


# ---- one model, several trainers


@nightly
def test_what_the_program_has_attached_stays_unless_it_has_the_same_budget(tmp_path):
    model = toy()
    eps = attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), **UNCHECKED, **GIVEN))
    made = planned(tmp_path, "auto", model=model)
    made.train()
    made.train()
    assert (made.eps, plan_of(made)) == (eps, None)
    detach_l2l(model)
    config = L2LConfig(device="sim", device_memory_budget="1MiB", layer_classes=("Block",), **UNCHECKED, **GIVEN)
    attach_l2l(model, config, inputs=batch_for(model, masked=False))
    before = plan_of(made)
    made = planned(tmp_path, "1MiB", model=model)
    made.train()
    assert plan_of(made) not in (before, None), "planned for the batches of the trainer"


@nightly
def test_another_trainer_with_other_options_plans_and_trains_as_with_a_new_model(tmp_path):
    options: dict[str, Any] = {"device_memory_budget": "auto", "max_steps": 2}
    second = {"device_memory_budget": "off", "l2l_resident": "all", "l2l_resident_update": "device"}
    before, model, new = settled_memory(), tiny_bert(layers=2), tiny_bert(layers=2)
    l2l_trainer(tmp_path / "first", model=model, **options).train()
    new.load_state_dict(model.state_dict())
    found, expected = (l2l_trainer(tmp_path / "second", model=each, **{**options, **second}) for each in (model, new))
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


# ---- one trainer, several trainings


def test_a_training_that_was_refused_is_planned_when_it_is_tried_again(tmp_path):
    held = torch.empty(4 * 2**20 - settled_memory(), dtype=torch.uint8, device="sim")
    made = planned(tmp_path, "auto")
    with pytest.raises(ValueError, match=r"7.2 MiB, and 4.0 MiB are free on sim:0, where .* itself holds 4.0 MiB"):
        made.train()
    del held
    made.train()
    assert plan_of(made) is not None


def test_what_has_changed_since_is_planned_for(tmp_path):
    """Parameters that are frozen no more, other rows, and a budget that is turned off."""
    model = toy()
    model.embed.requires_grad_(False)
    model.blocks.requires_grad_(False)
    made = planned(tmp_path, "1MiB", model=model)
    made.train()
    frozen = plan_of(made)
    model.requires_grad_(True)
    made.train()
    trained = plan_of(made)
    made.train_dataset = [{name: value * 2 for name, value in row.items()} for row in data()]
    made.train()
    assert len({each.peak_bytes for each in (frozen, trained, plan_of(made))}) == 3
    made.args.device_memory_budget = "off"
    made.train()
    attached = attachment_of(model)
    assert attached is not None and attached.plan is None
    assert {name: getattr(attached.config, name) for name in (*GIVEN, "kept_graphs")} == {**GIVEN, "kept_graphs": 0}


def test_each_model_of_model_init_is_planned(tmp_path):
    """The one before leaves the device, which has no room for both."""
    made = planned(tmp_path, "auto", model_init=lambda: toy())
    made.train()
    first = made.model
    made.train()
    assert plan_of(made).config.resident == "all" and attachment_of(first) is None
    assert {p.device.type for p in first.parameters()} == {"cpu"}


def test_changed_layers_are_planned_for(tmp_path):
    """Though the program has taken memory since, that was free when the training began: one that runs is not
    refused for it."""
    plans: list[Any] = []
    held: list[torch.Tensor] = []

    class Grow(hf.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            plans.append(plan_of(made))

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 1:
                model.blocks.append(toy().blocks[0])
                held.append(torch.empty(7200 * KIB, dtype=torch.uint8, device="sim"))

    made = planned(tmp_path, "700KiB", callbacks=[Grow()], **{**SAVING, "max_steps": 2})
    made.train()
    first, last = plans[0], plan_of(made)
    assert last not in (None, first) and last.peak_bytes <= 700 * KIB
    saved = json.loads((tmp_path / "checkpoint-2" / PLAN_FILE).read_text())
    assert saved["chosen"] == last.chosen


# ---- what is planned


def test_batches_of_a_data_loader_of_the_program(tmp_path):
    class Mine(L2LTrainer):
        def get_train_dataloader(self) -> Any:
            made = torch.utils.data.DataLoader(data(), batch_size=24, collate_fn=self.data_collator)  # type: ignore[arg-type]
            return self.accelerator.prepare(made)

    made = planned(tmp_path, "700KiB", Mine)
    made.train()
    assert plan_of(made).peak_bytes <= 700 * KIB and peak_of(made) <= 700 * KIB


def test_a_batch_that_does_not_fit_is_halved_and_planned_again(tmp_path, monkeypatch):
    seen: list[Any] = []
    step = L2LTrainer.training_step

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(plan_of(self))
        if len(seen) == 1:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return step(self, *args, **kwargs)

    training_step.__module__ = step.__module__  # it calls the model as that one does
    monkeypatch.setattr(L2LTrainer, "training_step", training_step)
    made = planned(tmp_path, "1MiB", per_device_train_batch_size=8, auto_find_batch_size=True)
    made.train()
    assert made._train_batch_size < 8
    assert seen[0] is not seen[1] is plan_of(made)


class Streamed(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(data())


class Own(L2LTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def test_without_a_plan_auto_goes_on_and_a_size_is_refused(tmp_path, monkeypatch):
    """Of a loss of the trainer's own, a data set without a length, a smoothed loss, and a fault in planning."""

    def fails(*_: Any, **__: Any) -> Any:
        raise LookupError("a fault")

    for what in ("compute_loss", "streamed", "label_smoothing_factor", "a fault"):
        for budget in ("1MiB", "auto") if what in ("compute_loss", "a fault") else ("1MiB",):
            made = planned(tmp_path, budget, Own if what == "compute_loss" else L2LTrainer)
            if "smoothing" in what:
                options: dict[str, Any] = {"device_memory_budget": budget, "max_steps": 1, what: 0.1}
                made = trainer(L2LTrainer, tmp_path, model=tiny_bert(layers=2), **options)
            if what == "streamed":
                made.train_dataset = Streamed()
            if what == "a fault":
                monkeypatch.setattr("hf_l2l.budget.within.make_plan", fails)
            if budget == "auto":
                made.train()
                assert plan_of(made) is None
            else:
                with pytest.raises(ValueError, match=f"no plan can be made: .*{what}"):
                    made.train()


@nightly
def test_an_error_outside_the_layers_names_what_was_larger_than_planned(tmp_path, monkeypatch):
    made = planned(tmp_path, "1MiB")

    def no_room(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(made, "_clip_grad_norm", no_room)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        made.train()
    assert ["device memory was planned" in note for note in caught.value.__notes__] == [True]


# ---- resumes


def test_a_resumed_run_has_the_plan_of_its_checkpoint(tmp_path, machine, caplog):
    """To the bit, though the machine has become a faster one. With another budget, it is planned again, with a
    warning, and trains on all the same."""
    free = {argument(name): getattr(L2LConfig(), name) for name in ("stash", "gradient_slots")}
    whole = planned(tmp_path / "whole", "1500KiB", **SAVING, **free)
    whole.train()
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    chosen = json.loads((checkpoint / PLAN_FILE).read_text())["chosen"]
    machine.write_text(FAST.to_json())
    fresh = planned(tmp_path / "fresh", "1500KiB", **free)
    fresh.train()
    assert plan_of(fresh).chosen != chosen, "planned for the other machine"
    resumed = planned(tmp_path / "parts", "1500KiB", **SAVING, **free)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert plan_of(resumed).chosen == chosen and losses(resumed) == losses(whole)
    for each in (whole, fresh, resumed):
        detach_l2l(each.model)
    settled_memory()
    for budget in ("560KiB", *more("auto", "off")):
        other = planned(tmp_path / budget, budget, **SAVING)
        with caplog.at_level(logging.WARNING, "hf_l2l"):
            other.train(resume_from_checkpoint=str(checkpoint))
        for found, expected in zip(logs(other), logs(whole), strict=True):
            assert found == pytest.approx(expected, rel=1e-5)
        assert budget != "560KiB" or ("for other options" in caplog.text and plan_of(other).peak_bytes <= 560 * KIB)
        detach_l2l(other.model)


def test_a_trainer_that_has_trained_takes_the_plan_of_the_checkpoint_that_it_resumes(tmp_path):
    made = planned(tmp_path, "1MiB", **{**SAVING, "max_steps": 2, "save_steps": 1})
    made.train()
    file, chosen = tmp_path / "checkpoint-1" / PLAN_FILE, {"kept_weights": 1}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chosen": chosen}))
    (file.parent / MANIFEST).unlink()  # which would refuse the file
    before = plan_of(made)
    assert before.chosen != chosen
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert plan_of(made) is before
    made.train(resume_from_checkpoint=str(file.parent))
    assert plan_of(made).chosen == chosen


# ---- accumulated batches


@pytest.mark.parametrize(("budget", "batches"), [("700KiB", 4), *more(("auto", 1))])
def test_accumulated_batches_keep_inside_the_budget(tmp_path, budget, batches, machine):
    """They run as one where their weights would travel longer than their rows, and not where little travels."""
    machine.write_text(SLOW.to_json())
    model = tiny_llama(layers=3, hidden_size=32, intermediate_size=256)
    made = accumulating(
        tmp_path, model=model, data=ragged(longest=9), max_steps=1, device_memory_budget=budget, **OF_TRAINER
    )
    seen = forwards(made)
    settled_memory()
    torch.accelerator.reset_peak_memory_stats()
    assert train(made) == []
    plan = plan_of(made)
    assert max(peak_of(made), plan.peak_bytes) <= plan.budget
    assert plan.batches == batches and seen[-1] == 2 * batches


def test_growing_batches_are_planned_once(tmp_path, monkeypatch, machine):
    """Memory is planned for the largest step, so that a resumed training runs as the unbroken one: to the bit."""
    enable_simulated_accelerator()
    machine.write_text(FIGURES.to_json())
    monkeypatch.setattr(trainer_part, "LOOKS_EVERY", 1)
    monkeypatch.setattr(growth, "FEWEST_MEASURED", 0)
    monkeypatch.setattr(NoiseScale, "critical_batch", property(lambda self: 1000.0 if self.steps > 1 else 1.0))
    options = {
        **OF_TRAINER,
        "device_memory_budget": "1GiB",
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 3,
        "l2l_noise_scale": True,
        "l2l_noise_scale_every": "1",
    }
    runs = []
    for checkpoint in ([], [str(tmp_path / "checkpoint-3")]):
        made = accumulating(tmp_path, of_trainer={"callbacks": [L2LBatchGrowth(16)]}, **options)
        seen = forwards(made)
        train(made, *checkpoint)
        assert plan_of(made).batches in (1, 8) and seen
        runs.append(made)
    whole, again = runs
    assert whole.args.gradient_accumulation_steps == 2 and whole.state.global_step < 6
    assert plan_of(again) == plan_of(whole)
    assert_same_run(again, whole)
