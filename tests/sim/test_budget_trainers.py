"""A budget of device memory under trainers that train twice, share a model, make new ones, or change it."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from budgeted import plan_of, use_machine_of_8_mib
from hf_l2l import L2LCallback, L2LConfig, L2LTrainer, attach_l2l
from hf_l2l.budget.saved import PLAN_FILE
from hf_l2l.checkpoint.manifest import MANIFEST
from hf_l2l.hf.attach import attachment_of
from hf_l2l.option_names import argument
from hf_l2l.testing import enable_simulated_accelerator
from models import batch_for
from training import CHECKPOINTING, SAVING, rows, tiny_bert, trainer


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A device of 8 MiB, whose figures are known."""
    use_machine_of_8_mib(monkeypatch, tmp_path)
    yield
    enable_simulated_accelerator()


def bert(dropout: float = 0.0) -> nn.Module:
    return tiny_bert(dropout=dropout, layers=3, width=64)


GIVEN: dict[str, Any] = {"ubatch_size": 2, "stash": "device", "gradient_slots": 1}


def planned(folder: Path, budget: str | None, kind: Any = L2LTrainer, **options: Any) -> Any:
    """With options that are given, there is less to plan, and the test takes half the time."""
    if "model_init" not in options:
        options.setdefault("model", bert())
    given = {argument(name): value for name, value in GIVEN.items()}
    return trainer(kind, folder, device_memory_budget=budget, **{"max_steps": 2, **given, **options})


def test_larger_batches_of_evaluations_are_warned_of(tmp_path, caplog):
    hf.utils.logging.enable_propagation()
    try:
        with caplog.at_level(logging.WARNING):
            planned(tmp_path, "1MiB", max_steps=1, eval_strategy="epoch", per_device_eval_batch_size=8).train()
            assert "evaluations" not in caplog.text
            planned(tmp_path, "1MiB", max_steps=1, eval_strategy="epoch", per_device_eval_batch_size=16).train()
    finally:
        hf.utils.logging.disable_propagation()
    assert "per_device_eval_batch_size=16, and per_device_train_batch_size=8): they may need more" in caplog.text


def test_an_evaluation_that_takes_more_than_the_budget_is_told_of(tmp_path, caplog):
    made = planned(tmp_path, "560KiB", per_device_eval_batch_size=128)
    made.train()
    with caplog.at_level(logging.WARNING, "hf_l2l"):
        made.evaluate(rows(8))
        made.evaluate(rows(128))
        made.evaluate(rows(128))
    (said,) = [each.message for each in caplog.records if "an evaluation has taken more" in each.message]
    assert "and the budget is 560.0 KiB); give its batches fewer rows (per_device_eval_batch_size=128)" in said


# ---- one model, several trainers


def test_trainers_share_a_model(tmp_path):
    """As in a notebook, whose cell with the trainer runs again; each has the plan for its own batches."""
    first = planned(tmp_path, "1MiB")
    first.train()
    second = planned(tmp_path, "1MiB", model=first.model, per_device_train_batch_size=16)
    eps = second.eps
    second.evaluate()
    assert second.eps is eps
    second.train()
    assert plan_of(second).chosen != first._l2l_plan.plan.chosen
    first.train()
    assert plan_of(first) is first._l2l_plan.plan


def test_what_the_program_has_attached_stays(tmp_path):
    model = bert()
    eps = attach_l2l(model, L2LConfig(device="sim", **GIVEN))
    made = planned(tmp_path, "auto", model=model)
    made.train()
    made.train()
    assert (made.eps, plan_of(made)) == (eps, None)


def test_a_model_that_was_attached_with_the_same_budget_is_planned_for_the_batches_of_the_trainer(tmp_path):
    model = bert()
    attach_l2l(model, L2LConfig(device="sim", device_memory_budget="1MiB", **GIVEN), inputs=batch_for(model))
    before = attachment_of(model)
    assert before is not None
    made = planned(tmp_path, "1MiB", model=model)
    made.train()
    assert plan_of(made) not in (before.plan, None)


# ---- one trainer, several trainings


def test_a_training_that_was_refused_is_planned_when_it_is_tried_again(tmp_path):
    held = torch.empty(4 * 2**20, dtype=torch.uint8, device="sim")
    made = planned(tmp_path, "auto")
    with pytest.raises(ValueError, match=r"4.0 MiB are free on sim:0, where this program itself holds 4.0 MiB"):
        made.train()
    del held
    made.train()
    assert plan_of(made) is not None


def test_a_budget_that_is_turned_off_later(tmp_path):
    made = planned(tmp_path, "1MiB")
    made.train()
    made.args.device_memory_budget = "off"
    made.train()
    assert plan_of(made) is None
    config = attachment_of(made.model).config
    assert (config.ubatch_size, config.stash, config.kept_graphs) == (2, "device", 0)


def test_longer_rows_are_planned_for(tmp_path):
    made = planned(tmp_path, "1MiB")
    made.train()
    before = plan_of(made)
    made.train_dataset = [{k: v * 2 if isinstance(v, list) else v for k, v in row.items()} for row in rows()]
    made.train()
    assert plan_of(made).peak_bytes != before.peak_bytes


def test_parameters_that_are_frozen_no_more_are_planned_for(tmp_path):
    model = bert()
    model.bert.requires_grad_(False)  # type: ignore[union-attr, operator]
    made = planned(tmp_path, "1MiB", model=model)
    made.train()
    before = plan_of(made)
    model.requires_grad_(True)
    made.train()
    assert plan_of(made).peak_bytes != before.peak_bytes


def test_each_model_of_model_init_is_planned(tmp_path):
    """The one before leaves the device, which has no room for both."""
    made = planned(tmp_path, "auto", model_init=lambda: bert())
    made.train()
    first = made.model
    made.train()
    assert plan_of(made).config.resident == "all"
    assert attachment_of(first) is None
    assert {p.device.type for p in first.parameters()} == {"cpu"}


def test_models_that_are_gone_leave_the_device():
    """Their memory counts as free, though nothing has collected them."""
    config, batch = L2LConfig(device="sim", device_memory_budget="7800KiB"), batch_for(bert())
    gc.disable()
    try:
        for _ in range(2):
            model = bert()
            attach_l2l(model, config, inputs=batch)
            attached = attachment_of(model)
            assert attached is not None and attached.config.resident == "all"
            del model, attached
    finally:
        gc.enable()


class Grow(hf.TrainerCallback):
    """Adds layers while the model trains."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            model.bert.encoder.layer.extend(bert().bert.encoder.layer)  # type: ignore[union-attr, operator]


def test_changed_layers_are_planned_for(tmp_path):
    plans: list[Any] = []

    class Seen(hf.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            plans.append(plan_of(made))

    made = planned(tmp_path, "700KiB", callbacks=[Seen(), Grow()], **SAVING)
    made.train()
    first, last = plans[0], plan_of(made)
    assert last not in (None, first)
    assert last.peak_bytes <= 700 * 2**10
    saved = json.loads((tmp_path / "checkpoint-2" / PLAN_FILE).read_text())
    assert saved["chosen"] == last.chosen


def test_changed_layers_are_planned_for_though_the_program_has_taken_memory_since(tmp_path):
    """It was free when the training began; a training that runs is not refused for it."""
    held: list[torch.Tensor] = []

    class Holds(hf.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            held.append(torch.empty(2**20, dtype=torch.uint8, device="sim"))

    made = planned(tmp_path, "7MiB", callbacks=[Holds(), Grow()])
    made.train()
    assert plan_of(made) is not None


# ---- what is planned


def test_activation_checkpointing_changes_nothing_of_the_plan(tmp_path):
    plain = planned(tmp_path / "plain", "560KiB")
    plain.train()
    both = planned(tmp_path / "both", "560KiB", **{CHECKPOINTING: True})
    with pytest.warns(UserWarning, match="turned off"):
        both.train()
    assert (plan_of(both).chosen, plan_of(both).peak) == (plan_of(plain).chosen, plan_of(plain).peak)


def test_a_model_in_evaluation_mode_is_planned_for_training():
    peaks = []
    for training in (True, False):
        model = bert(dropout=0.1).train(training)
        attach_l2l(
            model, L2LConfig(device="sim", device_memory_budget="560KiB", ubatch_size=2), inputs=batch_for(model)
        )
        attached = attachment_of(model)
        assert attached is not None and attached.plan is not None
        peaks.append(attached.plan.peak)
        assert model.training == training
    assert peaks[0] == peaks[1]


def test_batches_of_a_data_loader_of_the_program(tmp_path):
    class Mine(L2LTrainer):
        def get_train_dataloader(self) -> Any:
            made = torch.utils.data.DataLoader(rows(), batch_size=24, collate_fn=self.data_collator)  # type: ignore[arg-type]
            return self.accelerator.prepare(made)

    made = planned(tmp_path, "700KiB", Mine)
    made.train()
    assert plan_of(made).peak_bytes <= 700 * 2**10
    assert made.eps.memory_report()["device"]["total"]["peak"] <= 700 * 2**10


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
    made = planned(tmp_path, "1MiB", per_device_train_batch_size=16, auto_find_batch_size=True)
    made.train()
    assert made._train_batch_size < 16
    assert seen[0] is not seen[1] is plan_of(made)


# ---- callbacks of libraries


def test_a_callback_refuses_a_budget_when_the_trainer_is_made(tmp_path):
    callbacks = [L2LCallback(L2LConfig(device_memory_budget="1MiB"))]
    with pytest.raises(ValueError, match=r"callback knows no batches.*got '1MiB'.*use L2LTrainer"):
        trainer(hf.Trainer, tmp_path, model=bert(), callbacks=callbacks)


# ---- resumes


def resumed(folder: Path, caplog: Any, change: dict[str, Any], **options: Any) -> tuple[Any, str]:
    """The plan of a training that is resumed from one with other content of its file, and what was logged."""
    planned(folder, "1MiB", **SAVING, **options).train()
    file = folder / "checkpoint-2" / PLAN_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    (file.parent / MANIFEST).unlink()  # which would refuse the file
    again = planned(folder, "1MiB", **SAVING, **options)
    with caplog.at_level(logging.WARNING, "hf_l2l"):
        again.train(resume_from_checkpoint=str(file.parent))
    return plan_of(again), caplog.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"batches": 3}, "a step had 3 batches at once, and has 1 now", marks=pytest.mark.slow),
        pytest.param({"chosen": {"resident_layers": 9}}, "at most the number of layers", marks=pytest.mark.slow),
        pytest.param(
            {"chosen": {"resident": "all", "kept_graphs": 3}}, "it needs more than 1.0 MiB", marks=pytest.mark.slow
        ),
        ({"asked": {"device_memory_budget": "2MiB", **GIVEN}}, r"for other options (device_memory_budget)"),
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_had_again_is_replaced_with_a_warning(tmp_path, caplog, change, said):
    plan, text = resumed(tmp_path, caplog, change)
    assert said in text
    assert plan.peak_bytes <= 2**20


def test_a_trainer_that_has_trained_takes_the_plan_of_the_checkpoint_that_it_resumes(tmp_path):
    made = planned(tmp_path, "1MiB", **SAVING)
    made.train()
    file, chosen = tmp_path / "checkpoint-2" / PLAN_FILE, {"kept_weights": 1}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chosen": chosen}))
    (file.parent / MANIFEST).unlink()  # which would refuse the file
    before = plan_of(made)
    assert before.chosen != chosen
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert plan_of(made) is before
    made.train(resume_from_checkpoint=str(file.parent))
    assert plan_of(made).chosen == chosen


# ---- out of memory


def test_an_error_outside_the_layers_names_what_was_larger_than_planned(tmp_path, monkeypatch):
    made = planned(tmp_path, "1MiB")

    def no_room(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(made, "_clip_grad_norm", no_room)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        made.train()
    assert ["device memory was planned" in note for note in caught.value.__notes__] == [True]


def test_a_fault_in_planning_does_not_end_a_training_that_asked_for_no_plan(tmp_path, monkeypatch):
    def fails(*_: Any, **__: Any) -> Any:
        raise LookupError("a fault")

    monkeypatch.setattr("hf_l2l.budget.within.make_plan", fails)
    made = planned(tmp_path / "auto", "auto")
    made.train()
    assert plan_of(made) is None
    with pytest.raises(ValueError, match="no plan can be made: .*a fault"):
        planned(tmp_path / "sized", "1MiB").train()
