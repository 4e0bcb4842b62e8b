"""When accumulated batches are folded: what is compared with batch by batch, and steps that end early."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import accumulated
from accumulated import forwards, padded, ragged, tiny_llama, train
from folded import EAGER, ONE_STEP, OutOfRoom, assert_folded, pair, told
from plain import Streamed
from runs import assert_same_run


def test_steps_that_cannot_be_compared_are_followed_by_some_that_can(tmp_path):
    """Without labels that count, the loss is not a number."""
    data = [{**row, "labels": [-100] * len(row["labels"])} for row in ragged(8)] + ragged(24)
    options = {"train_sampling_strategy": "sequential", "l2l_nonfinite": "skip", "max_steps": 4}
    folded, apart = pair(tmp_path, data=data, **options)
    seen = forwards(folded)
    assert told(folded)
    assert seen == [*ONE_STEP, 8] + ONE_STEP + [*ONE_STEP, 8] + [8, 8, 8]
    assert [e.get("skipped_steps") for e in folded.state.log_history[:-1]] == [1, 1, 1, 1]
    assert_folded(folded, apart)


def test_data_that_ends_within_a_step_leave_their_gradients_to_the_next_epoch(tmp_path):
    folded, apart = pair(tmp_path, data=Streamed(ragged(2 * 6)))
    train(folded)
    assert folded.state.global_step == apart.state.global_step
    assert_folded(folded, apart)


def test_the_comparison_leaves_buffers_as_they_are(tmp_path):
    def count(module: nn.Module, _: object) -> None:
        module.calls += 1

    made = accumulated.made(tmp_path)
    embedding = made.model.model.embed_tokens
    embedding.register_buffer("calls", torch.zeros(()))
    embedding.register_forward_pre_hook(count)
    assert told(made)
    assert embedding.calls == 3


# ---- steps that end early


class StopInStep(hf.TrainerCallback):
    """Ends a step early, after two of its batches."""

    def __init__(self, what: str, step: int = 1) -> None:
        self.what, self.step, self.batches = what, step, 0

    def on_substep_end(self, args, state, control, **kwargs):
        self.batches += 1
        if state.global_step == self.step and self.batches % 3 == 2:
            self.step = -1
            if self.what == "raise":
                raise KeyError("stop")
            setattr(control, f"should_{self.what}_stop", True)


def stopping(folder, what: str, step: int = 1, **options: Any) -> hf.Trainer:
    return accumulated.made(folder, of_trainer={"callbacks": [StopInStep(what, step)]}, **options)


def test_a_step_that_a_callback_ends_early_is_that_of_the_trainer(tmp_path):
    """transformers leaves its gradients to nobody where the training is to end."""
    options = {"max_steps": -1, "num_train_epochs": 2, "data": ragged(24)}
    runs = [stopping(tmp_path, "training", 0, l2l_merge_accumulation=value, **options) for value in ("auto", "off")]
    for made in runs:
        train(made)
    folded, apart = runs
    assert folded.state.global_step == apart.state.global_step
    assert_folded(folded, apart)
    left = [{n: p.grad for n, p in t.model.named_parameters()} for t in runs]
    assert any(g is not None for g in left[1].values())
    for name, gradient in left[1].items():
        assert (left[0][name] is None) == (gradient is None)
        assert gradient is None or torch.allclose(left[0][name], gradient, rtol=1e-4, atol=1e-7)


def test_nothing_of_an_interrupted_training_is_in_the_next(tmp_path):
    made = stopping(tmp_path, "raise")
    with pytest.raises(KeyError):
        made.train()
    made.model.load_state_dict(tiny_llama().state_dict())
    made.optimizer = made.lr_scheduler = None
    hf.set_seed(made.args.seed)
    assert told(made)
    fresh = accumulated.made(tmp_path)
    train(fresh)
    assert_same_run(made, fresh)


def test_gradients_of_a_step_that_was_given_up_outlive_the_comparison_of_a_later_one(tmp_path):
    """The next epoch begins with them, and with the first step whose batches have different lengths, which is compared
    as the first one is."""
    runs = []
    for value in ("auto", "off"):
        calls = []

        def collate(rows, calls=calls):
            calls.append(1)
            longer = len(calls) > 8 and len(calls) % 2 == 1
            filler = {"input_ids": accumulated.PAD, "attention_mask": 0, "labels": -100}
            return {k: nn.functional.pad(v, (0, longer), value=filler[k]) for k, v in padded(rows).items()}

        of_trainer = {"callbacks": [StopInStep("epoch")], "data_collator": collate}
        options = {"max_steps": -1, "num_train_epochs": 2, "data": ragged(24, longest=5, shortest=5)}
        made = accumulated.made(tmp_path, l2l_merge_accumulation=value, of_trainer=of_trainer, **options)
        runs.append(made)
        seen = forwards(made)
        train(made)
        if value == "auto":
            # Compared, one step, two batches that are given up; a step that is not compared, compared, two steps.
            assert seen == [*ONE_STEP, 8, 8, 4, *ONE_STEP, *ONE_STEP, 8, 8, 8]
    assert_folded(*runs)


def test_a_lack_of_room_that_costs_gradients_names_the_remedy(tmp_path):
    made = accumulated.made(tmp_path, **EAGER)
    OutOfRoom(made, "backward", 1)
    with pytest.raises(torch.OutOfMemoryError) as error, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.train()
    assert any("l2l_merge_accumulation='off'" in note for note in error.value.__notes__)
