"""Batches that grow with the critical batch: the same rows, in the same order, in fewer steps; resumed exactly."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from accumulated import train
from hf_l2l import L2LBatchGrowth
from hf_l2l.noise import growth as growth_of
from hf_l2l.noise import trainer_part
from hf_l2l.noise.estimate import NoiseScale
from plain import Streamed
from runs import assert_same_run, assert_same_tensors
from saving import At
from tiers import cpu_suffices, more, nightly
from training import l2l_trainer, on, rows, tiny_bert, trained_batches

ROWS = 44
"""In an epoch: 11 batches of 4."""
RUN: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "ubatch_size": 2,
    "max_steps": -1,
    "num_train_epochs": 2,
    "lr_scheduler_type": "linear",
    "l2l_log_times": False,
    "l2l_noise_scale": True,
    "l2l_noise_scale_every": "1",
}


@pytest.fixture(autouse=True)
def critical(monkeypatch):
    """The critical batch after so many measured steps, in the place of the measured one; it is looked at in each."""
    found: dict[int, float] = {}

    def at(self: NoiseScale) -> float:
        return max((value for step, value in found.items() if step <= self.steps), default=1.0)

    monkeypatch.setattr(trainer_part, "LOOKS_EVERY", 1)
    monkeypatch.setattr(growth_of, "FEWEST_MEASURED", 0)
    monkeypatch.setattr(NoiseScale, "critical_batch", property(at))
    return found


MEASURED = NoiseScale.critical_batch


class Watch(hf.TrainerCallback):
    """Notes the batches of each step, and its learning rate."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.rates: list[float] = []
        self.on_step_begin = lambda args, *_, **__: self.steps.append(args.gradient_accumulation_steps)

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def save_at(*steps: int) -> hf.TrainerCallback:
    """Asks for a checkpoint after each of these steps."""

    def ask(args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save |= state.global_step in steps

    return on("on_step_end", ask)


def grown(
    folder: Path, growth: L2LBatchGrowth | None, *others: hf.TrainerCallback, **options: Any
) -> tuple[hf.Trainer, Watch, list[Any]]:
    """A trainer, what its steps are noted by, and the batches that it trains on."""
    watch = Watch()
    callbacks = [*([] if growth is None else [growth]), watch, *others]
    made = l2l_trainer(folder, model=tiny_bert(layers=2), callbacks=callbacks, **{**RUN, **options})
    made.train_dataset = rows(ROWS)
    return made, watch, trained_batches(made)


def assert_same_batches(found: list[Any], expected: list[Any]) -> None:
    assert [batch["input_ids"].tolist() for batch in found] == [batch["input_ids"].tolist() for batch in expected]


@nightly
@cpu_suffices
def test_the_same_rows_in_fewer_steps(tmp_path, critical):
    critical.update({3: 8.0, 5: 100.0})
    plain, watch, expected = grown(tmp_path, None)
    plain.train()
    made, of_growth, seen = grown(tmp_path, L2LBatchGrowth(16))
    made.train()
    assert_same_batches(seen, expected)
    assert watch.steps == [1] * 22
    # 8 rows from the fourth batch on, where the batches of the epoch are even; 16 from the eighth on.
    assert of_growth.steps == [1, 1, 1, 1, 2, 2, 4, *[4] * 3]
    assert made.state.global_step == made.state.max_steps == 10 and made.state.epoch == 2.0
    assert made.args.gradient_accumulation_steps == 1
    # The learning rate of each batch is that of the step with which it was used before.
    starts = [0, 1, 2, 3, 4, 6, 8, 11, 15, 19]
    assert of_growth.rates == [watch.rates[start] for start in starts]
    assert made.lr_scheduler.get_last_lr() == plain.lr_scheduler.get_last_lr() == [0.0, 0.0]
    # After a step that has doubled the batch, the log has the rows of the next one.
    logged = [entry["l2l_step_rows"] for entry in made.state.log_history if "loss" in entry]
    assert logged == [4 * each for each in (*of_growth.steps[1:], of_growth.steps[-1])]


@cpu_suffices
@pytest.mark.parametrize(
    ("most", "rule", "factor", "steps"),
    [
        (16, "sqrt", math.sqrt(2), [1, 1, 1, 1, 2, 2, 4]),
        (16, "linear", 2.0, [1, 1, 1, 1, 2, 2, 4]),
        (15, "keep", 1.0, [1, 1, 1, 1, 2, 2, 2, 2]),
    ],
)
def test_a_bound_holds_and_the_learning_rate_is_scaled_by_a_rule(tmp_path, critical, most, rule, factor, steps):
    critical.update({2: 100.0})
    made, watch, _ = grown(tmp_path, L2LBatchGrowth(most, rule), lr_scheduler_type="constant", num_train_epochs=1)
    made.train()
    assert watch.steps == steps
    assert watch.rates == pytest.approx([1e-3 * factor ** math.log2(each) for each in steps])


@nightly
@cpu_suffices
def test_batches_grow_with_what_is_measured(tmp_path, critical, monkeypatch):
    """With what is logged."""
    monkeypatch.setattr(NoiseScale, "critical_batch", MEASURED)
    made, watch, _ = grown(tmp_path, L2LBatchGrowth(32), learning_rate=3e-3, num_train_epochs=4)
    made.train()
    logged = [entry.get("l2l_critical_batch") for entry in made.state.log_history if "loss" in entry]
    for step, (before, after) in enumerate(itertools.pairwise(watch.steps)):
        assert after == before or any(each and each >= 8 * before for each in logged[: step + 1])
    assert len(logged) == len(watch.steps) and watch.steps[-1] > watch.steps[0]


@nightly
@cpu_suffices
def test_it_looks_once_enough_steps_are_measured(tmp_path, critical, monkeypatch):
    """At every 4th step, and after each doubling anew."""
    monkeypatch.setattr(trainer_part, "LOOKS_EVERY", 4)
    monkeypatch.setattr(growth_of, "FEWEST_MEASURED", 6)
    critical.update({1: 1000.0})
    made, watch, _ = grown(tmp_path, L2LBatchGrowth(16), num_train_epochs=3, logging_strategy="no")
    train(made)
    assert watch.steps.index(2) == 10  # the look after step 8, and then an even batch of the epoch
    # 6 more after the 8 that had been measured: the look at step 16.
    assert watch.steps.index(4) >= 16


# ---- resumed


@cpu_suffices
@pytest.mark.parametrize(("saves", "restores"), [("trainer", True), ("callback", False)])
def test_it_is_resumed_exactly(tmp_path, critical, saves, restores):
    """Also where a callback saves, as transformers does when a job is about to end (`enable_jit_checkpoint`)."""
    critical.update({3: 8.0, 5: 100.0})
    options: dict[str, Any] = {"restore_callback_states_from_checkpoint": restores}
    resumed = (5, *(() if saves == "callback" else (2,)), *more(1, 3, 4, 6, 7, 8, 9))
    asked = [save_at(*resumed)] if saves == "trainer" else []
    whole, watch, seen = grown(tmp_path, L2LBatchGrowth(16, "sqrt"), *asked, **options)
    if saves == "callback":
        save = At("on_step_end", None, lambda: whole._save_checkpoint(whole.model, None))
        whole.callback_handler.callbacks.insert(0, save)
    train(whole)
    assert whole.state.global_step == 10
    for at in resumed:
        again, later, rest = grown(tmp_path, L2LBatchGrowth(16, "sqrt"), **options)
        train(again, str(tmp_path / f"checkpoint-{at}"))
        assert later.steps == watch.steps[at:] and later.rates == watch.rates[at:]
        assert_same_batches(rest, seen[len(seen) - len(rest) :])
        if saves == "trainer":
            assert again.state.max_steps == 10
            assert_same_run(again, whole)
        assert_same_tensors(again.model.state_dict(), whole.model.state_dict())


@cpu_suffices
def test_one_that_has_ended_is_not_trained_on(tmp_path, critical, caplog):
    critical.update({3: 8.0, 5: 100.0})
    whole, _, _ = grown(tmp_path, L2LBatchGrowth(16), save_at(10), max_steps=20)
    whole.train()
    assert whole.state.global_step == 10  # 7, and 3 for the other 9 of 20 batches
    again, watch, _ = grown(tmp_path, L2LBatchGrowth(16), max_steps=20)
    train(again, True)
    assert watch.steps == [] and "the training is finished" in caplog.text
    longer, watch, _ = grown(tmp_path, L2LBatchGrowth(16), max_steps=33)
    train(longer, True)
    assert watch.steps and longer.state.epoch == 3.0
    first = {"gradient_accumulation_steps": 2, "max_steps": 33}
    with pytest.raises(ValueError, match="gradient_accumulation_steps=1, with which it began"):
        train(grown(tmp_path, L2LBatchGrowth(16), **first)[0], True)


@cpu_suffices
def test_it_is_added_to_a_training_that_began_without_it(tmp_path, critical):
    """In an epoch and at the end of one; and what an earlier training of the same trainer left is forgotten."""
    grown(tmp_path, None, save_at(11, 14))[0].train()
    made, watch, _ = grown(tmp_path, L2LBatchGrowth(8))
    train(made, str(tmp_path / "checkpoint-11"))
    assert made.state.epoch == 2.0 and watch.steps == [1] * 11
    critical.update({2: 8.0})
    made, watch, _ = grown(tmp_path / "other", L2LBatchGrowth(8))
    train(made, str(tmp_path / "checkpoint-14"))
    assert watch.steps == [1, 2, 2, 2, 2] and made.state.epoch == 2.0
    train(made)
    assert watch.steps[5] == 1 and made.state.epoch == 2.0


@cpu_suffices
def test_data_that_are_not_skipped_begin_an_epoch(tmp_path, critical):
    critical.update({3: 8.0})
    options = {"ignore_data_skip": True}
    grown(tmp_path, L2LBatchGrowth(8), save_at(5), **options)[0].train()
    again, watch, _ = grown(tmp_path, L2LBatchGrowth(8), **options)
    train(again, str(tmp_path / "checkpoint-5"))
    assert watch.steps == [2] * 12  # two epochs, the first of them anew


# ---- errors


def fail(made: hf.Trainer, batches: int, error: BaseException) -> None:
    """Raises once, in the first step of so many batches."""
    errors = [error]

    def at_begin() -> None:
        if made.args.gradient_accumulation_steps == batches and errors:
            raise errors.pop()

    made.add_callback(At("on_step_begin", None, at_begin))


@nightly
@cpu_suffices
def test_arguments_are_given_back_after_an_error(tmp_path, critical):
    """And a search for a batch size begins with the first batch, of fewer rows."""
    critical.update({1: 1000.0})
    made, _, _ = grown(tmp_path, L2LBatchGrowth(8))
    fail(made, 2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert made.args.gradient_accumulation_steps == 1
    made, watch, _ = grown(tmp_path, L2LBatchGrowth(16), auto_find_batch_size=True, num_train_epochs=1)
    fail(made, 4, RuntimeError("CUDA out of memory."))
    train(made)
    assert watch.steps[watch.steps.index(4) + 1] == 1
    assert made.state.epoch == 1.0 and made.args.gradient_accumulation_steps == 1


@cpu_suffices
def test_data_of_unknown_length_are_refused(tmp_path):
    made, _, _ = grown(tmp_path, L2LBatchGrowth(8), max_steps=2)
    made.train_dataset = Streamed(rows(ROWS))
    with pytest.raises(ValueError, match="a length"):
        made.train()
