"""Batches of unequal lengths as one: what is padded, with what, and what is not merged."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accumulated import PAD, padded
from hf_l2l.accumulation.merging import CannotMerge, merge

IDS = torch.tensor([[4, 5, 6], [7, 8, 9]])
LONGER = torch.tensor([[4, 5, 6, 7]])

TOKENS = st.lists(st.integers(1, 50), min_size=1, max_size=7)
BATCHES = st.lists(st.lists(TOKENS, min_size=1, max_size=4), min_size=1, max_size=5)


def batch_of(rows: list[list[int]], side: str) -> dict[str, torch.Tensor]:
    return padded([{"input_ids": ids, "labels": [-100] + ids[1:]} for ids in rows], side)


@given(BATCHES, st.sampled_from(["left", "right"]))
def test_rows_are_what_they_were_and_then_padding(rows, side):
    batches = [batch_of(each, side) for each in rows]
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


def test_values_without_rows_are_those_of_all_batches():
    batches = [{"input_ids": IDS, "return_loss": True, "extra": None, "kind": "a"} for _ in range(2)]
    found = merge(batches, None)
    assert (found.inputs["return_loss"], found.inputs["extra"], found.inputs["kind"]) == (True, None, "a")
    assert found.rows == (2, 2) and not found.is_padded


MASKS = {"attention_mask": torch.ones_like(IDS)}, {"attention_mask": torch.ones_like(LONGER)}

REFUSED = {
    "lists": ([[1, 2], [3]], "a batch is a list, and no dict of tensors"),
    "other keys": ([{"input_ids": IDS}, {"input_ids": IDS, "labels": IDS}], "its batches have different inputs"),
    "packed": (
        [{"input_ids": IDS[:1], "cu_seq_lens_q": torch.tensor([0, 2, 3])}] * 2,
        "its batches are sequences packed into one row",
    ),
    "positions": ([{"input_ids": IDS, "position_ids": IDS}] * 2, "position_ids without an attention_mask"),
    "no rows": ([{"input_ids": IDS, "scale": torch.tensor(1.0)}] * 2, r"no common number of rows \(input_ids \[2,"),
    "one row for all": ([{"input_ids": IDS, "bias": IDS[:1]}] * 2, r"no common number of rows .*bias \[1, 3\]"),
    "no tensors": ([{"return_loss": True}] * 2, r"no common number of rows \(no tensors\)"),
    "list": ([{"input_ids": IDS, "texts": ["a", "b"]}] * 2, "texts is a list, whose rows are unknown"),
    "other flags": (
        [{"input_ids": IDS, "flag": flag} for flag in (True, False)],
        "flag is a bool, whose rows are unknown",
    ),
    "dtypes": ([{"labels": IDS}, {"labels": IDS.float()}], "labels has not the same dtype and device in all batches"),
    "no mask": ([{"input_ids": IDS}, {"input_ids": LONGER}], "no attention_mask says where they end"),
    "no padding token": (
        [{"input_ids": ids, **mask} for ids, mask in zip((IDS, LONGER), MASKS, strict=True)],
        "no padding token is known",
    ),
    "unknown": (
        [{"weights": ids, **mask} for ids, mask in zip((IDS, LONGER), MASKS, strict=True)],
        r"weights is \[1, 4\] and \[2, 3\] in its batches, and what it has for padding is unknown",
    ),
    "numbers": ([{"labels": IDS.float()}, {"labels": LONGER.float()}], "what it has for padding is unknown"),
    "image sizes": (
        [{"pixel_values": torch.zeros(1, 3, size, size)} for size in (4, 8)],
        "what it has for padding is unknown",
    ),
    "four dimensions": (
        [{"attention_mask": torch.zeros(1, 1, size, size)} for size in (4, 8)],
        "what it has for padding is unknown",
    ),
}


def test_what_may_mean_something_else_is_refused():
    for batches, reason in REFUSED.values():
        with pytest.raises(CannotMerge, match=reason):
            merge(batches, None)
