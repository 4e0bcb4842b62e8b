"""Runs of the Trainer with updates in the background, which begin as late as the waits of the program allow."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf

from hf_l2l.eps import updates
from late_updates import late_updates
from plain import small_bert, trained
from runs import assert_same_run, assert_same_tensors
from slow_disk import assert_same_checkpoints
from tiers import cpu_suffices, nightly
from training import l2l_trainer, left_in, logs

pytestmark = pytest.mark.filterwarnings(
    # torch warns of the scheduler's order when the optimizer is loaded; plain Trainer does the same.
    "ignore:.*lr_scheduler.step.*:UserWarning",
)

STEPS = 3
SAVING: dict[str, Any] = {
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": 1,
    "lr_scheduler_type": "cosine",
    "eval_strategy": "steps",
    "eval_steps": 1,
}
CLIPS = {"deferred": 1.0, "eager": 0.0}


@pytest.fixture(autouse=True)
def _late() -> Iterator[None]:
    """An update begins when somebody waits for it: code without a wait reads the weights before it."""
    with late_updates() as gate:
        yield
        gate.open_all()


class Average(hf.TrainerCallback):
    """An exponential average of the weights, read while the update runs."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            for name, p in model.named_parameters():
                self.average.setdefault(name, p.clone()).lerp_(p, 0.5)


@nightly
@cpu_suffices
@pytest.mark.parametrize("mode", CLIPS)
def test_checkpoints_evaluations_and_callbacks_see_finished_weights(tmp_path, mode):
    """Those of serial updates, at every step; and the best model is loaded at the end."""
    runs, averages = {}, {}
    for each in ("serial", mode):
        callback = Average()
        options = {"max_grad_norm": CLIPS[mode], "load_best_model_at_end": True, "callbacks": [callback], **SAVING}
        runs[each] = trained(l2l_trainer, tmp_path / each, eps_update=each, **options)
        averages[each] = callback.average
    assert_same_checkpoints(tmp_path / mode, tmp_path / "serial")
    assert_same_run(runs[mode], runs["serial"])
    assert_same_tensors(averages[mode], averages["serial"])
    assert len(averages[mode]) == len(list(small_bert().parameters()))
    assert len([entry for entry in logs(runs[mode]) if "eval_loss" in entry]) == STEPS


def test_an_update_that_fails_leaves_no_folder_of_a_checkpoint(tmp_path, monkeypatch):
    made = l2l_trainer(tmp_path, model=small_bert(), eps_update="deferred", **{**SAVING, "eval_strategy": "no"})
    carry_out, save_checkpoint, saving = updates.carry_out, made._save_checkpoint, threading.Event()

    def save(*args: Any) -> None:
        if made.state.global_step == 2:
            saving.set()
        save_checkpoint(*args)

    def failing(*args: Any) -> None:
        if (tmp_path / "checkpoint-1" / "trainer_state.json").exists():
            assert saving.wait(60)
            raise KeyError("in an update")
        carry_out(*args)

    monkeypatch.setattr(made, "_save_checkpoint", save)
    monkeypatch.setattr(updates, "carry_out", failing)
    with pytest.raises(KeyError, match="in an update"):
        made.train()
    assert left_in(tmp_path) == ["checkpoint-1"]


def test_an_update_of_the_last_step_that_fails_is_raised_by_the_training(tmp_path, monkeypatch):
    def failing(*args: Any) -> None:
        raise KeyError("in an update")

    monkeypatch.setattr(updates, "carry_out", failing)
    with pytest.raises(KeyError, match="in an update"):
        trained(l2l_trainer, tmp_path, eps_update="deferred", max_steps=1)


@cpu_suffices
def test_forked_data_loaders_live_with_the_worker(tmp_path):
    """They are forked while an update is under way; the second epoch's, too."""
    options = {"dataloader_num_workers": 2, "max_steps": 8, "logging_steps": 4, "l2l_num_threads": 2}
    modes = ("deferred", "serial")
    found, expected = (trained(l2l_trainer, tmp_path / mode, eps_update=mode, **options) for mode in modes)
    assert found.state.epoch > 1
    assert_same_run(found, expected)
