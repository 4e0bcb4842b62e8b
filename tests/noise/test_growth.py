"""Batches that grow with the critical batch: the same rows, in the same order, in fewer steps; resumed exactly."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from accumulated import train
from hf_l2l import L2LBatchGrowth
from hf_l2l.noise import growth as growth_of
from hf_l2l.noise import trainer_part
from hf_l2l.noise.estimate import NoiseScale
from tiers import combined
from training import assert_same_run, l2l_trainer, rows, tiny_bert

ROWS = 44
"""In an epoch: 11 batches of 4."""
RUN: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "ubatch_size": 2,
    "max_steps": -1,
    "num_train_epochs": 3,
    "lr_scheduler_type": "linear",
    "l2l_log_times": False,
    "l2l_noise_scale": True,
    "l2l_noise_scale_every": "1",
}


@pytest.fixture(autouse=True)
def _looks(monkeypatch):
    """At each step."""
    monkeypatch.setattr(trainer_part, "LOOKS_EVERY", 1)
    monkeypatch.setattr(growth_of, "FEWEST_MEASURED", 0)


@pytest.fixture
def critical(monkeypatch):
    """The critical batch after so many measured steps, in the place of the measured one."""
    found: dict[int, float] = {}

    def at(self: NoiseScale) -> float:
        return max((value for step, value in found.items() if step <= self.steps), default=1.0)

    monkeypatch.setattr(NoiseScale, "critical_batch", property(at))
    return found


class Watch(hf.TrainerCallback):
    """Notes the batches of each step, and its learning rate."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.rates: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(args.gradient_accumulation_steps)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any, **kwargs: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def grown(folder: Path, growth: L2LBatchGrowth | None, **options: Any) -> tuple[hf.Trainer, Watch, list[list[int]]]:
    """A trainer, what its steps are noted by, and the batches that the model is given."""
    watch = Watch()
    callbacks = [watch] if growth is None else [growth, watch]
    made = l2l_trainer(folder, model=tiny_bert(dropout=0.1, layers=2), callbacks=callbacks, **{**RUN, **options})
    made.train_dataset = rows(ROWS)
    seen: list[list[int]] = []
    collate = made.data_collator

    def note(given: Any) -> Any:
        seen.append([row["input_ids"][0] for row in given])
        return collate(given)

    made.data_collator = note
    return made, watch, seen


def test_the_same_rows_in_fewer_steps(tmp_path, critical):
    critical.update({3: 8.0, 5: 100.0})
    plain, watch, expected = grown(tmp_path, None)
    plain.train()
    made, of_growth, seen = grown(tmp_path, L2LBatchGrowth(16))
    made.train()
    assert seen == expected and watch.steps == [1] * 33
    # 8 rows from the fourth batch on, where the batches of the epoch are even; 16 from the eighth on.
    first, later = [1, 1, 1, 1, 2, 2], [4] * 3
    assert of_growth.steps == [*first, 4, *later, *later]
    assert made.state.global_step == made.state.max_steps == 13 and made.state.epoch == 3.0
    assert made.args.gradient_accumulation_steps == 1
    # The learning rate of each batch is that of the step with which it was used before.
    starts = [0, 1, 2, 3, 4, 6, 8, 11, 15, 19, 22, 26, 30]
    assert of_growth.rates == [watch.rates[start] for start in starts]
    assert made.lr_scheduler.get_last_lr() == plain.lr_scheduler.get_last_lr() == [0.0, 0.0]


@pytest.mark.parametrize(("rule", "factor"), [("keep", 1.0), ("sqrt", math.sqrt(2)), ("linear", 2.0)])
def test_the_learning_rate_is_scaled_by_a_rule(tmp_path, critical, rule, factor):
    critical.update({2: 100.0})
    made, watch, _ = grown(tmp_path, L2LBatchGrowth(16, rule), lr_scheduler_type="constant", num_train_epochs=1)
    made.train()
    assert watch.steps == [1, 1, 1, 1, 2, 2, 4]
    assert watch.rates == pytest.approx([1e-3 * factor**doubled for doubled in (0, 0, 0, 0, 1, 1, 2)])


@pytest.mark.parametrize("most", [8, 15])
def test_a_bound_holds(tmp_path, critical, most):
    critical.update({1: 1000.0})
    made, watch, _ = grown(tmp_path, L2LBatchGrowth(most), num_train_epochs=1)
    made.train()
    assert {*watch.steps} == {1, 2}


def test_batches_grow_with_what_is_measured(tmp_path):
    """Without anything in the place of the measured scale; and what is logged is what decides."""
    made, watch, _ = grown(tmp_path, L2LBatchGrowth(32), learning_rate=3e-3, num_train_epochs=8)
    made.train()
    logged = [entry.get("l2l_critical_batch") for entry in made.state.log_history if "loss" in entry]
    for step, (before, after) in enumerate(zip(watch.steps, watch.steps[1:], strict=False)):
        assert after == before or any(each and each >= 8 * before for each in logged[: step + 1])
    assert len(logged) == len(watch.steps) and watch.steps[-1] > watch.steps[0]


SAVED = {"save_strategy": "steps", "save_steps": 1}


@pytest.mark.at_most(12)
@pytest.mark.parametrize(("at", "restores"), combined([2, 4, 5, 7, 8, 12], [False, True], one_in=6))
def test_it_is_resumed_exactly(tmp_path, critical, at, restores):
    critical.update({3: 8.0, 5: 100.0})
    options = {**SAVED, "restore_callback_states_from_checkpoint": restores}
    whole, watch, seen = grown(tmp_path, L2LBatchGrowth(16, "sqrt"), **options)
    whole.train()
    again, later, rest = grown(tmp_path, L2LBatchGrowth(16, "sqrt"), **options)
    train(again, str(tmp_path / f"checkpoint-{at}"))
    assert later.steps == watch.steps[at:] and later.rates == watch.rates[at:]
    assert rest == seen[len(seen) - len(rest) :]
    assert_same_run(again, whole)
    assert again.state.max_steps == 13 and again.args.gradient_accumulation_steps == 1


def test_one_that_has_ended_is_not_trained_on(tmp_path, critical, caplog):
    critical.update({3: 8.0, 5: 100.0})
    whole, _, _ = grown(tmp_path, L2LBatchGrowth(16), max_steps=20, **SAVED)
    whole.train()
    assert whole.state.global_step == 10  # 7, and 3 for the other 9 of 20 batches
    again, watch, _ = grown(tmp_path, L2LBatchGrowth(16), max_steps=20, **SAVED)
    train(again, True)
    assert watch.steps == [] and "the training is finished" in caplog.text
    longer, watch, _ = grown(tmp_path, L2LBatchGrowth(16), max_steps=33, **SAVED)
    train(longer, True)
    assert watch.steps and longer.state.epoch == 3.0


def test_a_training_without_it_is_resumed_with_it(tmp_path, critical):
    critical.update({2: 8.0})
    grown(tmp_path, None, **SAVED, num_train_epochs=2)[0].train()
    made, watch, _ = grown(tmp_path, L2LBatchGrowth(8), num_train_epochs=2)
    train(made, str(tmp_path / "checkpoint-14"))
    assert watch.steps == [1, 2, 2, 2, 2] and made.state.epoch == 2.0


def test_data_that_are_not_skipped_begin_an_epoch(tmp_path, critical):
    critical.update({3: 8.0})
    options = {**SAVED, "ignore_data_skip": True}
    grown(tmp_path, L2LBatchGrowth(8), **options)[0].train()
    again, watch, _ = grown(tmp_path, L2LBatchGrowth(8), **options)
    train(again, str(tmp_path / "checkpoint-5"))
    assert watch.steps == [2] * 18  # three epochs, the first of them anew


def test_arguments_are_given_back_after_an_error(tmp_path, critical):
    class Stop(hf.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if args.gradient_accumulation_steps > 1:
                raise KeyboardInterrupt

    critical.update({1: 100.0})
    made, _, _ = grown(tmp_path, L2LBatchGrowth(8))
    made.add_callback(Stop())
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert made.args.gradient_accumulation_steps == 1


def test_a_bound_below_twice_the_first_batch_is_refused(tmp_path):
    made, _, _ = grown(tmp_path, L2LBatchGrowth(7))
    with pytest.raises(
        ValueError, match=r"must be at least twice the rows of a step, 8 \(got 7\); raise it, or leave"
    ):
        made.train()


def test_two_are_refused(tmp_path):
    made, _, _ = grown(tmp_path, L2LBatchGrowth(8))
    made.add_callback(L2LBatchGrowth(16))
    with pytest.raises(ValueError, match=r"one L2LBatchGrowth doubles the batches of a training \(got 2\); pass one"):
        made.train()


def test_another_first_batch_is_refused(tmp_path, critical):
    critical.update({1: 100.0})
    grown(tmp_path, L2LBatchGrowth(8), **SAVED, num_train_epochs=1)[0].train()
    again, _, _ = grown(tmp_path, L2LBatchGrowth(8), gradient_accumulation_steps=2, num_train_epochs=1)
    with pytest.raises(ValueError, match=r"resumed with gradient_accumulation_steps=1, with which it began \(got 2\)"):
        train(again, True)


def test_what_nothing_tells_the_critical_batch_of_is_refused(tmp_path):
    made, _, _ = grown(tmp_path, L2LBatchGrowth(8), l2l_noise_scale=False, l2l_noise_scale_every="auto")
    with pytest.raises(
        ValueError, match=r"needs the critical batch \(got l2l_noise_scale=False\); set l2l_noise_scale"
    ):
        made.train()


def test_data_of_unknown_length_are_refused(tmp_path):
    class Streamed(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(rows(ROWS))

    made, _, _ = grown(tmp_path, L2LBatchGrowth(8), max_steps=2)
    made.train_dataset = Streamed()
    with pytest.raises(ValueError, match=r"needs a train_dataset with a length \(got one without\)"):
        made.train()


@pytest.mark.parametrize("most", [0, 2.5, None, True])
def test_a_bound_that_is_none_is_refused(most):
    with pytest.raises(
        ValueError, match=r"most_rows must be a number of rows from 1 on \(got .*\); give that of a step"
    ):
        L2LBatchGrowth(most)


def test_a_rule_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"learning_rate must be one of 'keep', 'sqrt', 'linear' \(got 'half'\)"):
        L2LBatchGrowth(8, "half")


@pytest.mark.one_in(12)
@pytest.mark.at_most(12)
@pytest.mark.parametrize("at", range(1, 13))
def test_what_other_callbacks_save_is_resumed_exactly(tmp_path, critical, at):
    """As transformers saves when a job is about to end (`enable_jit_checkpoint`): in its own `on_step_end`."""

    class Save(hf.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == at:
                whole._save_checkpoint(whole.model, None)

    critical.update({3: 8.0, 5: 100.0})
    whole, watch, seen = grown(tmp_path, L2LBatchGrowth(16, "sqrt"))
    whole.callback_handler.callbacks.insert(0, Save())
    train(whole)
    again, later, rest = grown(tmp_path, L2LBatchGrowth(16, "sqrt"))
    train(again, str(tmp_path / f"checkpoint-{at}"))
    assert later.steps == watch.steps[at:] and later.rates == watch.rates[at:]
    assert rest == seen[len(seen) - len(rest) :]
    for name, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name


def test_a_search_for_a_batch_size_begins_with_the_first_batch(tmp_path, critical):
    class Fail(hf.TrainerCallback):
        has_failed = False

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if args.gradient_accumulation_steps == 4 and not self.has_failed:
                self.has_failed = True
                raise RuntimeError("CUDA out of memory.")

    critical.update({1: 1000.0})
    made, watch, _ = grown(tmp_path, L2LBatchGrowth(16), auto_find_batch_size=True, num_train_epochs=1)
    made.add_callback(Fail())
    train(made)
    assert watch.steps[watch.steps.index(4) + 1] == 1  # with batches of fewer rows
    assert made.state.epoch == 1.0 and made.args.gradient_accumulation_steps == 1


def test_what_an_earlier_training_left_is_forgotten(tmp_path, critical):
    critical.update({2: 8.0})
    grown(tmp_path, None, **SAVED, num_train_epochs=1)[0].train()
    made, watch, _ = grown(tmp_path / "other", L2LBatchGrowth(8), num_train_epochs=1)
    train(made)
    once, steps = made.state.global_step, len(watch.steps)
    train(made, str(tmp_path / "checkpoint-2"))
    assert once == 8 and len(watch.steps) - steps == 6 and watch.steps[steps] == 1  # 2 steps before, and 9 batches


@pytest.mark.one_in(3)
@pytest.mark.parametrize("at", [10, 11, 12])
def test_it_is_added_at_the_end_of_an_epoch(tmp_path, critical, at):
    grown(tmp_path, None, **SAVED, num_train_epochs=2)[0].train()
    made, watch, _ = grown(tmp_path, L2LBatchGrowth(8), num_train_epochs=2)
    train(made, str(tmp_path / f"checkpoint-{at}"))
    assert made.state.epoch == 2.0 and watch.steps == [1] * (22 - at)


def test_it_looks_once_enough_steps_are_measured(tmp_path, critical, monkeypatch):
    """At every 8th step, and after each doubling anew. A wish for a larger batch ends with the reason for it."""
    monkeypatch.setattr(trainer_part, "LOOKS_EVERY", 8)
    monkeypatch.setattr(growth_of, "FEWEST_MEASURED", 20)
    critical.update({1: 1000.0})
    made, watch, _ = grown(tmp_path, L2LBatchGrowth(16), num_train_epochs=8, logging_strategy="no")
    train(made)
    assert watch.steps.index(2) == 26  # the look after step 24, and then an even batch of the epoch
    # 20 more after the 24 that had been measured: the look at step 48.
    assert watch.steps.index(4) >= 48
    growth = next(each for each in made.callback_handler.callbacks if isinstance(each, L2LBatchGrowth))
    growth.look(made.args, made.state, 1e9, 10**6)
    assert not growth.wants_more  # the bound
    growth.most_rows = 10**6
    growth.look(made.args, made.state, 1e9, 10**6)
    assert growth.wants_more
    growth.look(made.args, made.state, None, 10**6)
    assert not growth.wants_more


def test_the_rows_of_a_step_are_logged(tmp_path, critical):
    critical.update({2: 8.0})
    made, watch, _ = grown(tmp_path, L2LBatchGrowth(8), num_train_epochs=1)
    train(made)
    logged = [entry["l2l_step_rows"] for entry in made.state.log_history if "loss" in entry]
    # After a step that has doubled the batch, the log has that of the next one.
    assert logged == [4 * each for each in (*watch.steps[1:], watch.steps[-1])]


@given(
    st.integers(1, 30),
    st.integers(1, 6),
    st.integers(1, 60),
    st.sets(st.integers(1, 60), max_size=4),
)
def test_the_last_step_is_known(whole, first, end, wishes):
    """In the loop of transformers, with a wish for a larger batch after any steps."""
    growth = L2LBatchGrowth(10**6)
    args = SimpleNamespace(gradient_accumulation_steps=first, l2l_noise_scale=True, world_size=1)
    state = SimpleNamespace(global_step=0, epoch=0, max_steps=end, train_batch_size=1)
    optimizer = SimpleNamespace(param_groups=[])
    made = [0]
    scheduler = SimpleNamespace(step=lambda: made.__setitem__(0, made[0] + 1))
    known = {"optimizer": optimizer, "lr_scheduler": scheduler, "train_dataloader": range(whole)}
    growth.on_train_begin(args, state, None, **known)
    assert state.max_steps == end
    rows_used = 0
    epochs, more = divmod(end, math.ceil(whole / first))
    last = (epochs - (more == 0), math.ceil(whole / first) if more == 0 else more)  # epoch, and steps of it
    for _ in range(last[0] + 1):
        batches = 0
        while batches < whole and state.global_step < state.max_steps:
            before = args.gradient_accumulation_steps
            used = min(before, whole - batches)
            # transformers ends a step where all batches of the epoch so far are a multiple of this.
            assert all((batches + n) % before for n in range(1, used))
            batches += used
            scheduler.step()
            state.global_step += 1
            growth.wants_more = growth.wants_more or state.global_step in wishes
            growth.on_step_end(args, state, None, **known)
        rows_used += batches
        if batches == whole:
            growth.on_epoch_end(args, state, None, **known)
    assert state.global_step == state.max_steps
    least = last[0] * whole + min(last[1] * first, whole)
    assert least <= rows_used < least + growth.now
    assert made[0] >= end  # of the schedule


def test_state_is_plain():
    growth = L2LBatchGrowth(8)
    assert json.loads(json.dumps(growth.state())) == growth.state()
    assert torch.tensor(growth.state()["attributes"]["now"]) == 0
