"""Merges batches along their rows; shorter ones are padded with what changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

Batch = Mapping[str, Any]

_PADDING = {
    "attention_mask": 0,
    "decoder_attention_mask": 0,
    "token_type_ids": 0,
    "position_ids": 0,
    "labels": -100,
    "shift_labels": -100,
}
"""Input of transformers' models, of shape (rows, tokens) -> what it has where there is no token."""

_TOKENS = ("input_ids", "decoder_input_ids")
"""Inputs that have the id of the padding token there."""


class CannotMerge(ValueError):
    """Batches cannot be merged into one that means the same; the text gives the reason."""


@dataclass(frozen=True)
class Merged:
    """Several batches as one."""

    inputs: dict[str, Any]
    """The inputs of the model, with the rows of all batches in order."""
    rows: tuple[int, ...]
    """The rows of each batch."""
    is_padded: bool
    """Whether some batches were shorter than others."""


def merge(batches: Sequence[Batch], pad_token: int | None) -> Merged:
    """One batch with the rows of all `batches`, on the device they are on; they are not changed.

    Shorter rows are padded at their ends, on whichever side others are padded already: so no token changes its
    position.

    Args:
        batches: inputs of a model: tensors whose first dimension is the rows.
        pad_token: the id of the padding token; None if it is not known.

    Raises:
        CannotMerge: if that is not certain to be the same as batch by batch, but for rounding.
    """
    if not all(isinstance(batch, Mapping) for batch in batches):
        raise CannotMerge(f"a batch is a {type(batches[0]).__name__}, and no dict of tensors")
    if len({frozenset(batch) for batch in batches}) > 1:
        raise CannotMerge("its batches have different inputs")
    rows = tuple(_rows(batch) for batch in batches)
    longer = {name for name in batches[0] if _widths_differ([batch[name] for batch in batches])}
    if "input_ids" in longer and "attention_mask" not in longer:
        raise CannotMerge("its batches have rows of different lengths, and no attention_mask says where they end")
    inputs = {name: _joined(name, [batch[name] for batch in batches], pad_token) for name in batches[0]}
    return Merged(inputs, rows, is_padded=bool(longer))


def _rows(batch: Batch) -> int:
    """The number of rows that all tensors of a batch have."""
    if any(name.startswith("cu_seq") for name in batch):
        raise CannotMerge("its batches are sequences packed into one row")
    if "position_ids" in batch and batch.get("attention_mask") is None:
        # Models take positions that begin anew for packed sequences, some of them only in a batch of one row.
        raise CannotMerge("its batches have position_ids without an attention_mask, so rows may be packed sequences")
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    sizes = {name: value.shape[0] if value.dim() else None for name, value in tensors.items()}
    if len(set(sizes.values())) != 1 or None in sizes.values():
        found = ", ".join(f"{name} {list(value.shape)}" for name, value in tensors.items())
        raise CannotMerge(f"its inputs have no common number of rows ({found or 'no tensors'})")
    return int(next(iter(tensors.values())).shape[0])


def _widths_differ(values: Sequence[Any]) -> bool:
    """Whether these are tensors of which some are longer than others."""
    return all(isinstance(v, torch.Tensor) for v in values) and len({v.shape[1:] for v in values}) > 1


def _joined(name: str, values: Sequence[Any], pad_token: int | None) -> Any:
    """The input `name` of all batches as one."""
    first = values[0]
    if not isinstance(first, torch.Tensor):
        is_one = isinstance(first, bool | int | float | str | None) and all(
            type(v) is type(first) and v == first for v in values
        )
        if not is_one:
            raise CannotMerge(f"{name} is a {type(first).__name__}, whose rows are unknown")
        return first
    if len({(type(v), getattr(v, "dtype", None), getattr(v, "device", None)) for v in values}) > 1:
        raise CannotMerge(f"{name} has not the same dtype and device in all batches")
    if not _widths_differ(values):
        return torch.cat(list(values))
    padding = pad_token if name in _TOKENS else _PADDING.get(name)
    if name in _TOKENS and padding is None:
        raise CannotMerge(
            "its batches have rows of different lengths, and no padding token is known (set pad_token_id of the "
            "processing class or of the model's config)"
        )
    if padding is None or first.is_floating_point() or any(v.dim() != 2 for v in values):
        shapes = " and ".join(sorted({str(list(v.shape)) for v in values}))
        raise CannotMerge(f"{name} is {shapes} in its batches, and what it has for padding is unknown")
    width = max(v.shape[1] for v in values)
    return torch.cat([F.pad(v, (0, width - v.shape[1]), value=padding) for v in values])
