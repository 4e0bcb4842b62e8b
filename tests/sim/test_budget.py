"""A budget of device memory: the options that are chosen, on a device that has no more, in any loop; and under
trainers that train twice, share a model, make new ones, or change it."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import accumulated
from accumulated import tiny_llama
from budgeted import FIGURES, SumOfSquares, plan_of, use_machine_of_8_mib
from hf_l2l import L2LBatchGrowth, L2LCallback, L2LConfig, L2LTrainer, attach_l2l, detach_l2l
from hf_l2l.budget.saved import PLAN_FILE, save_plan, saved_choice
from hf_l2l.budget.within import plan_within
from hf_l2l.checkpoint.manifest import MANIFEST
from hf_l2l.hf.attach import attachment_of
from hf_l2l.option_names import argument
from hf_l2l.plan.planner import BudgetError
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.probe.figures import LINK
from hf_l2l.sizing.fit import fits
from hf_l2l.testing import enable_simulated_accelerator
from models import Toy, batch_for, llama, t5
from plain import Streamed
from runs import UNCHECKED, assert_same_run
from tiers import more, nightly
from training import SAVING, arguments, l2l_trainer, logs, rows, settled_memory, tiny_bert, trainer

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


def chosen_for(model: nn.Module, config: L2LConfig, **options: Any) -> L2LConfig:
    """The options that a model is attached with; it is an ordinary one afterwards."""
    attach_l2l(model, config, **{"inputs": BATCH, **options})
    chosen = plan_of(model).config
    detach_l2l(model)
    return chosen


def peak_of(eps: Any) -> int:
    return int(eps.memory_report()["device"]["total"]["peak"])


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
    assert peak_of(eps) - before <= limit
    detach_l2l(model)
    with pytest.raises(BudgetError, match="without (ubatch_size, )?resident_layers$"):
        chosen_for(model, config_of("600KiB", stash="device", ubatch_size=8, resident_layers=3))
    monkeypatch.setattr(sys, "argv", ["train.py", "--output_dir", "out", "--device_memory_budget", "5KiB"])
    with pytest.raises(BudgetError, match=r"python\S* train.py --output_dir out --device_memory_budget=\d+KiB$"):
        trainer(L2LTrainer, tmp_path, model=tiny_bert(layers=2), device_memory_budget="5KiB").train()


def test_which_weights_may_be_resident():
    """Of an optimizer that steps as a whole all or none; none that something refers to; those that stay in fp32, such
    as `wo` of T5."""
    for budget, resident in (("1400KiB", "none"), ("auto", "all")):
        model = toy()
        optimizer = SumOfSquares(model.parameters())
        found = chosen_for(model, config_of(budget, eps_update="serial", **GIVEN), optimizer=optimizer)
        assert (found.resident, found.resident_layers) == (resident, 0)
    handle = next(model.parameters()).register_post_accumulate_grad_hook(lambda p: None)
    found = chosen_for(model, config_of("auto", **GIVEN))
    assert (found.resident, found.resident_layers) == ("none", 0)
    handle.remove()
    inputs = dict.fromkeys(("input_ids", "labels"), torch.ones(4, 8, dtype=torch.long))
    config = L2LConfig(device="sim", device_memory_budget="auto", cmp="bf16", **GIVEN)
    assert chosen_for(t5().to(torch.bfloat16), config, inputs=inputs).resident == "all"


def test_a_plan_is_taken_again_if_it_can_be_had(caplog):
    """With the time of all batches of a step."""
    model = toy()
    again = partial(plan_within, model, config_of("auto", **GIVEN), BATCH, batches=2)
    plan = again()
    assert plan.batches == 1 and again(chosen={**plan.chosen, "batches": 1}) == plan
    small = partial(plan_within, model, config_of("1MiB", **GIVEN), BATCH)
    for made, expected, chosen, said in (
        (again, plan, {"batches": 3}, "a step had 3 batches at once, and has 2 now"),
        (again, plan, {"batches": 1, "resident_layers": 9}, "number of layers"),
        (small, small(), {"batches": 1, "resident": "all", "kept_graphs": 3}, "it needs more than 1.0 MiB"),
    ):
        with caplog.at_level(logging.WARNING, "hf_l2l"):
            assert made(chosen=chosen) == expected
        assert said in caplog.messages[-1]
    next(model.parameters()).register_post_accumulate_grad_hook(lambda p: None)
    with caplog.at_level(logging.WARNING, "hf_l2l"):
        again(chosen={"batches": 1, "resident_layers": 1})
    assert "resident_layers cannot be chosen" in caplog.messages[-1]


MANY = batch_for(llama(), rows=100)
"""600 tokens."""


def test_chunks_of_logits_have_as_many_tokens_as_a_sixteenth_of_the_memory_allows(tmp_path):
    """Of the budget, or else of the device; a resumed training has those of its checkpoint, and that of an earlier
    version has the fewest, as has the smallest budget."""

    def rows(budget: str | None, **options: Any) -> int:
        model = llama()
        attach_l2l(model, L2LConfig(device="sim", device_memory_budget=budget, **options), inputs=MANY)
        logits = model(**MANY).logits
        detach_l2l(model)
        return int(logits.deferred.head.rows)

    assert (rows("auto", **GIVEN), rows("auto", chunked_loss=200, **GIVEN)) == (256, 200)
    assert (rows(None), rows(None, chunked_loss="300")) == (512, 300), "text of a command line"
    config = L2LConfig(device="sim", device_memory_budget="auto", **GIVEN)
    plans = partial(plan_within, llama(), inputs=MANY)
    plan = plans(config)
    assert plan.chosen["chunked_loss"] == plan.config.chunked_loss == 256
    save_plan(tmp_path, plan, config)
    saved = saved_choice(tmp_path, config)
    for number, chosen in ((256, saved), (512, {**saved, "chunked_loss": 512})):
        again = plans(config, chosen=chosen)
        assert (again.chosen, again.batches) == ({**plan.chosen, "chunked_loss": number}, 1)
    # The peak of the plan has larger chunks.
    assert again.peak_bytes > plan.peak_bytes
    earlier = {name: value for name, value in saved.items() if name != "chunked_loss"}
    assert plans(config, chosen=earlier).config.chunked_loss == 128
    off = plans(replace(config, chunked_loss="off"))
    assert "chunked_loss" not in off.chosen and off.config.chunked_loss == "off"
    enable_simulated_accelerator()
    assert rows(None) == 128, "of a device without a limit"


def test_the_smallest_budget_has_the_smallest_chunks(caplog):
    """Of a model whose slots are large, and whose head takes more than a layer computes with. A plan with larger ones
    is not used again, which is said."""
    plans = partial(plan_within, llama(vocab_size=30, intermediate_size=8192), inputs=batch_for(llama(), rows=100))
    config = L2LConfig(device="sim", ubatch_size=1, stash="host", boundary="host", gradient_slots=1)
    with pytest.raises(BudgetError) as caught:
        plans(replace(config, device_memory_budget="1KiB"))
    least, more = (
        plans(replace(config, device_memory_budget=f"{caught.value.smallest + size}B")) for size in (0, 2**20)
    )
    assert (least.config.chunked_loss, more.config.chunked_loss) == (128, 768)
    config = replace(config, device_memory_budget=f"{caught.value.smallest}B")
    resumed = plans(config, chosen={**more.chosen, "batches": 1})
    assert resumed.config.chunked_loss == 128
    assert "chunks of logits, of 768 tokens, need more than the budget" in caplog.text
    model = llama(vocab_size=30, intermediate_size=8192)
    run = RunShapes(model, config, batch_for(model, rows=100))
    found = fits(run, config, 2**40, caught.value.smallest, FIGURES).by_setting["fp32"]
    assert found.fits and found.device_bytes <= caught.value.smallest
    with pytest.raises(BudgetError, match=r"fewer tokens in a chunk of logits \(leave out chunked_loss\)"):
        plans(replace(config, chunked_loss=768))


def test_out_of_memory_all_the_same_names_what_was_larger_than_planned():
    model = toy()
    eps = attach_l2l(model, config_of("500KiB"), inputs={name: value[:2] for name, value in BATCH.items()})
    eps.wrap(torch.optim.AdamW(model.parameters()))
    many = {name: torch.cat([value] * 40) for name, value in BATCH.items()}
    enable_simulated_accelerator(settled_memory() + 600 * KIB)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(**many).loss.backward()
    [note] = [note for note in caught.value.__notes__ if "was planned" in note]
    assert "longer rows than the one that was planned for" in note
    detach_l2l(model)


OF_TRAINER: dict[str, Any] = {argument(name): value for name, value in GIVEN.items()}
FAST = replace(FIGURES, **dict.fromkeys(LINK, 1e13), flops={"fp32": 1e10}, adamw_by_threads={1: 1e13})
SLOW = replace(FIGURES, **dict.fromkeys(LINK, 1e7))


def data(count: int = 48) -> list[dict[str, Any]]:
    """Rows of 8 tokens, which are their labels, too."""
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows(count)]


def planned(folder: Path, budget: str | None, kind: Any = L2LTrainer, **options: Any) -> Any:
    if "model_init" not in options:
        options.setdefault("model", toy())
    given = {**OF_TRAINER, "l2l_layer_classes": ["Block"]}
    made = trainer(kind, folder, device_memory_budget=budget, **{"max_steps": 1, **given, **options})
    made.train_dataset, made.eval_dataset = data(), data(16)
    return made


def test_auto_is_the_default_and_a_model_that_fits_stays_on_the_device(tmp_path):
    """Evaluations and later trainings have the same plan; without a limit there is nothing to plan for."""
    args = arguments(hf.TrainingArguments, tmp_path, max_steps=1)
    made = L2LTrainer(tiny_bert(0.0, 3, 64), args, train_dataset=rows(), eval_dataset=rows(16))
    before = made.evaluate()["eval_loss"]
    assert plan_of(made) is None
    made.train()
    plan, eps = plan_of(made), made.eps
    assert plan.budget == int(0.9 * 2**23) and plan.config.resident == "all"
    assert made.evaluate()["eval_loss"] != before and made.eps is eps
    made.train()
    assert (made.eps, plan_of(made)) == (eps, plan)
    enable_simulated_accelerator()
    made = planned(tmp_path, "auto")
    made.train()
    assert plan_of(made) is None


def test_larger_evaluations_are_told_of(tmp_path, caplog):
    """Before a training, if they may need more, and once when one has taken more."""
    torch.accelerator.reset_peak_memory_stats()
    made = planned(tmp_path, "560KiB", eval_strategy="epoch", per_device_eval_batch_size=256)
    made.eval_dataset = data(2)
    hf.utils.logging.enable_propagation()
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
    assert caplog.text.count("an evaluation has taken more") == 1


@nightly
def test_what_the_program_has_attached_with_the_same_budget_is_planned_for_the_batches_of_the_trainer(tmp_path):
    model = toy()
    attach_l2l(model, config_of("1MiB", **UNCHECKED, **GIVEN), inputs=BATCH)
    before = plan_of(model)
    planned(tmp_path, "1MiB", model=model).train()
    assert plan_of(model) not in (before, None)


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


def test_batches_of_a_data_loader_of_the_program(tmp_path):
    class Mine(L2LTrainer):
        def get_train_dataloader(self) -> Any:
            made = torch.utils.data.DataLoader(data(), batch_size=24, collate_fn=self.data_collator)  # type: ignore[arg-type]
            return self.accelerator.prepare(made)

    made = planned(tmp_path, "700KiB", Mine)
    made.train()
    assert plan_of(made).peak_bytes <= 700 * KIB and peak_of(made.eps) <= 700 * KIB


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
    made = planned(tmp_path, "1MiB", auto_find_batch_size=True)
    made.train()
    assert made._train_batch_size < 8 and seen[0] is not seen[1] is plan_of(made)


class Own(L2LTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize("what", ["compute_loss", "streamed", "label_smoothing_factor", "a fault"])
def test_without_a_plan_auto_goes_on_and_a_size_is_refused(what, tmp_path, monkeypatch):
    """Of a loss of the trainer's own, a data set without a length, a smoothed loss, and a fault in planning."""

    def fails(*_: Any, **__: Any) -> Any:
        raise LookupError("a fault")

    if what == "a fault":
        monkeypatch.setattr("hf_l2l.budget.within.make_plan", fails)
    made = planned(tmp_path, "1MiB", Own if what == "compute_loss" else L2LTrainer)
    if "smoothing" in what:
        options: dict[str, Any] = {"device_memory_budget": "1MiB", what: 0.1}
        made = l2l_trainer(tmp_path, model=tiny_bert(layers=2), **options)
    if what == "streamed":
        made.train_dataset = Streamed(data())
    with pytest.raises(ValueError, match=f"no plan can be made: .*{what}"):
        made.train()
    if what in ("compute_loss", "a fault"):
        made.args.device_memory_budget = "auto"
        made.train()
        assert plan_of(made) is None


@nightly
def test_an_error_outside_the_layers_names_what_was_larger_than_planned(tmp_path, monkeypatch):
    made = planned(tmp_path, "1MiB")

    def no_room(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(made, "_clip_grad_norm", no_room)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        made.train()
    assert ["device memory was planned" in note for note in caught.value.__notes__] == [True]


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
    assert plan_of(resumed).chosen == chosen
    assert [each.get("loss") for each in logs(resumed)] == [each.get("loss") for each in logs(whole)]
    for each in (whole, fresh, resumed):
        detach_l2l(each.model)
    settled_memory()
    other = planned(tmp_path / "other", "560KiB", **SAVING)
    with caplog.at_level(logging.WARNING, "hf_l2l"):
        other.train(resume_from_checkpoint=str(checkpoint))
    for found, expected in zip(logs(other), logs(whole), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    assert "for other options" in caplog.text and plan_of(other).peak_bytes <= 560 * KIB


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
    options: dict[str, Any] = {"max_steps": 1, "device_memory_budget": budget, **OF_TRAINER}
    model = tiny_llama(layers=3, hidden_size=32, intermediate_size=256)
    made = accumulated.made(tmp_path, model=model, data=accumulated.ragged(), **options)
    seen = accumulated.forwards(made)
    settled_memory()
    torch.accelerator.reset_peak_memory_stats()
    assert accumulated.train(made) == []
    plan = plan_of(made)
    assert max(peak_of(made.eps), plan.peak_bytes) <= plan.budget
    assert plan.batches == batches and seen[-1] == 2 * batches


@nightly
def test_growing_batches_are_planned_once(tmp_path, monkeypatch, machine):
    """Memory is planned for the largest step, so that a resumed training runs as the unbroken one: to the bit."""
    enable_simulated_accelerator()
    machine.write_text(FIGURES.to_json())
    monkeypatch.setattr("hf_l2l.noise.trainer_part.LOOKS_EVERY", 1)
    monkeypatch.setattr("hf_l2l.noise.growth.FEWEST_MEASURED", 0)
    critical = property(lambda self: 1000.0 if self.steps > 1 else 1.0)
    monkeypatch.setattr("hf_l2l.noise.estimate.NoiseScale.critical_batch", critical)
    options = {**OF_TRAINER, "device_memory_budget": "1GiB", "gradient_accumulation_steps": 2, "max_steps": 6}
    options |= {"save_strategy": "steps", "save_steps": 3, "l2l_noise_scale": True, "l2l_noise_scale_every": "1"}
    runs = []
    for checkpoint in ([], [str(tmp_path / "checkpoint-3")]):
        made = accumulated.made(tmp_path, of_trainer={"callbacks": [L2LBatchGrowth(16)]}, **options)
        accumulated.train(made, *checkpoint)
        assert plan_of(made).batches in (1, 8)
        runs.append(made)
    whole, again = runs
    assert whole.args.gradient_accumulation_steps == 2 and whole.state.global_step < 6
    assert plan_of(again) == plan_of(whole)
    assert_same_run(again, whole)
