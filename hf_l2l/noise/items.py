"""What the loss counts in each micro-batch: its weight in the gradient of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_l2l.model.batch_dims import Ubatch
from hf_l2l.noise.estimate import Measured

IGNORED = -100
"""The label of what no loss of transformers counts."""


def rows_of(batch: Mapping[str, Any]) -> int:
    """The rows of a batch: the common first dimension of its tensors.

    Raises:
        ValueError: if they have none.
    """
    sizes = {value.shape[:1] for value in batch.values() if isinstance(value, torch.Tensor)}
    if len(sizes) != 1 or () in sizes:
        found = ", ".join(f"{name} {list(v.shape)}" for name, v in batch.items() if isinstance(v, torch.Tensor))
        raise ValueError(
            "l2l_noise_scale=True needs inputs of the model whose first dimension is the rows of the batch (got "
            f"{found or 'no tensors'}); leave it out"
        )
    return int(next(iter(sizes))[0])


def items_of_rows(batch: Mapping[str, Any], *, shifts: bool) -> list[int]:
    """What the loss counts in each row: labels that are not -100, or 1 without labels.

    Args:
        batch: the inputs of the model, with labels of shape (rows, ...).
        shifts: whether the first label of a row is not predicted, as by a causal language model.
    """
    rows, labels = rows_of(batch), batch.get("shift_labels")
    if labels is None:
        labels = batch.get("labels")
        if shifts and isinstance(labels, torch.Tensor):
            labels = labels[..., 1:]
    if not isinstance(labels, torch.Tensor):
        return [1] * rows
    counts: list[int] = labels.ne(IGNORED).reshape(rows, -1).sum(1).tolist()
    return counts


def measured(items: Sequence[int], ubatches: Sequence[Ubatch | None], *, is_sum: bool) -> Measured:
    """What the micro-batches of a batch weigh, with `items` of each row.

    Args:
        is_sum: whether losses are sums over items, so that each item of a step weighs the same; otherwise each
            batch does.
    """
    counts = [sum(items[slice(*ubatch)] if ubatch is not None else items) for ubatch in ubatches]
    whole = 1 if is_sum else sum(counts)
    weights = [count / whole for count in counts] if whole else []
    return Measured(
        weight=sum(weights),
        weight_squares=sum(weight**2 for weight in weights),
        variance=sum(weight**2 / count for weight, count in zip(weights, counts, strict=False) if count),
        items=sum(counts),
        rows=len(items),
    )
