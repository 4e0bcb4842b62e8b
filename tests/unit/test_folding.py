"""Accumulated batches as one: what is padded and what is not merged; what is compared, and steps that end early."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accumulated
from accumulated import PAD, forwards, padded, ragged, tiny_llama, train
from folded import EAGER, ONE_STEP, OutOfRoom, assert_folded, pair, told
from hf_l2l.accumulation.merging import CannotMerge, merge
from plain import Streamed
from runs import assert_same_run
from tiers import nightly

IDS = torch.tensor([[4, 5, 6], [7, 8, 9]])
LONGER = torch.tensor([[4, 5, 6, 7]])
TOKENS = st.lists(st.integers(1, 50), min_size=1, max_size=7)


@nightly
@given(st.lists(st.lists(TOKENS, min_size=1, max_size=4), min_size=1, max_size=5), st.sampled_from(["left", "right"]))
def test_rows_are_what_they_were_and_then_padding(rows, side):
    batches = [padded([{"input_ids": ids, "labels": [-100] + ids[1:]} for ids in each], side) for each in rows]
    copies = [{name: value.clone() for name, value in batch.items()} for batch in batches]
    found = merge(batches, PAD)
    assert found.rows == tuple(map(len, rows))
    widths = [batch["input_ids"].shape[1] for batch in batches]
    assert found.is_padded == (len(set(widths)) > 1)
    parts = {name: value.split(found.rows) for name, value in found.inputs.items()}
    for number, (batch, width) in enumerate(zip(batches, widths, strict=True)):
        for name, value in batch.items():
            part = parts[name][number]
            assert part.dtype == value.dtype
            assert torch.equal(part[:, :width], value)
            assert part[:, width:].eq({"input_ids": PAD, "attention_mask": 0, "labels": -100}[name]).all()
            assert torch.equal(value, copies[number][name])


def test_known_inputs_are_padded_and_a_decoder_has_lengths_of_its_own():
    masks = [torch.ones_like(IDS), torch.ones_like(LONGER)]
    for name in ("token_type_ids", "position_ids", "decoder_attention_mask", "shift_labels"):
        batches = [{"attention_mask": mask, name: ids} for mask, ids in zip(masks, (IDS, LONGER), strict=True)]
        found = merge(batches, None)
        assert found.inputs[name][:2, 3].tolist() == 2 * [-100 if "labels" in name else 0], name
        assert torch.equal(found.inputs[name][2:], LONGER)
        assert found.inputs["attention_mask"].sum() == 10
    one = {"input_ids": IDS, "attention_mask": masks[0], "labels": LONGER.repeat(2, 1)}
    two = {"input_ids": LONGER, "attention_mask": masks[1], "labels": IDS[:1]}
    found = merge([one, two], PAD)
    assert found.inputs["input_ids"].shape == found.inputs["labels"].shape == (3, 4)
    assert found.inputs["labels"][2].tolist() == [4, 5, 6, -100]
    batches = [{"input_ids": IDS, "return_loss": True, "extra": None, "kind": "a"} for _ in range(2)]
    found = merge(batches, None)
    assert (found.inputs["return_loss"], found.inputs["extra"], found.inputs["kind"]) == (True, None, "a")
    assert found.rows == (2, 2) and not found.is_padded


def masked(name: str) -> list[dict[str, Any]]:
    """Two batches of different lengths, which end where their masks do."""
    return [{name: ids, "attention_mask": torch.ones_like(ids)} for ids in (IDS, LONGER)]


REFUSED = [
    ([[1, 2], [3]], "a batch is a list, and no dict of tensors"),
    ([{"input_ids": IDS}, {"input_ids": IDS, "labels": IDS}], "its batches have different inputs"),
    ([{"input_ids": IDS[:1], "cu_seq_lens_q": torch.tensor([0, 2, 3])}] * 2, "sequences packed into one row"),
    ([{"input_ids": IDS, "position_ids": IDS}] * 2, "position_ids without an attention_mask"),
    ([{"input_ids": IDS, "scale": torch.tensor(1.0)}] * 2, r"no common number of rows \(input_ids \[2,"),
    ([{"input_ids": IDS, "bias": IDS[:1]}] * 2, r"no common number of rows .*bias \[1, 3\]"),
    ([{"return_loss": True}] * 2, r"no common number of rows \(no tensors\)"),
    ([{"input_ids": IDS, "texts": ["a", "b"]}] * 2, "texts is a list, whose rows are unknown"),
    ([{"input_ids": IDS, "flag": flag} for flag in (True, False)], "flag is a bool, whose rows are unknown"),
    ([{"labels": IDS}, {"labels": IDS.float()}], "labels has not the same dtype and device in all batches"),
    ([{"input_ids": IDS}, {"input_ids": LONGER}], "no attention_mask says where they end"),
    (masked("input_ids"), "no padding token is known"),
    (masked("weights"), r"weights is \[1, 4\] and \[2, 3\] in its batches, and what it has for padding is unknown"),
    ([{"labels": IDS.float()}, {"labels": LONGER.float()}], "what it has for padding is unknown"),
    ([{"pixel_values": torch.zeros(1, 3, size, size)} for size in (4, 8)], "what it has for padding is unknown"),
    ([{"attention_mask": torch.zeros(1, 1, size, size)} for size in (4, 8)], "what it has for padding is unknown"),
]


def test_what_may_mean_something_else_is_refused():
    for batches, reason in REFUSED:
        with pytest.raises(CannotMerge, match=reason):
            merge(batches, None)


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


@nightly
@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_last_step_of_an_epoch_may_have_fewer_batches_and_rows(tmp_path, is_streamed):
    """Where the data end within a step, its gradients are left to the next epoch."""
    options = {"data": Streamed(ragged(12))} if is_streamed else {"data": ragged(14), "max_steps": -1}
    folded, apart = pair(tmp_path, num_train_epochs=2, **options)
    seen = forwards(folded)
    assert told(folded) or is_streamed
    assert is_streamed or sum(seen) == 2 * 14 + 16, "every row in both epochs, and the first step twice more"
    assert folded.state.global_step == apart.state.global_step == (3 if is_streamed else 4)
    assert_folded(folded, apart)


@nightly
def test_the_comparison_leaves_buffers_as_they_are(tmp_path):
    def count(module: nn.Module, _: object) -> None:
        module.calls += 1

    made = accumulated.made(tmp_path)
    embedding = made.model.model.embed_tokens
    embedding.register_buffer("calls", torch.zeros(()))
    embedding.register_forward_pre_hook(count)
    assert told(made)
    assert embedding.calls == 3


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


def test_a_step_that_a_callback_ends_early_is_that_of_the_trainer(tmp_path):
    """transformers leaves its gradients to nobody where the training is to end."""
    runs, left = [], []
    for value in ("auto", "off"):
        options = {"max_steps": -1, "num_train_epochs": 2, "data": ragged(24), "l2l_merge_accumulation": value}
        runs.append(accumulated.made(tmp_path, of_trainer={"callbacks": [StopInStep("training", 0)]}, **options))
        train(runs[-1])
        left.append({name: p.grad for name, p in runs[-1].model.named_parameters() if p.grad is not None})
    assert runs[0].state.global_step == runs[1].state.global_step
    assert_folded(*runs)
    assert left[1]
    torch.testing.assert_close(*left, rtol=1e-4, atol=1e-7)


@nightly
def test_nothing_of_an_interrupted_training_is_in_the_next(tmp_path):
    made = accumulated.made(tmp_path, of_trainer={"callbacks": [StopInStep("raise")]})
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
