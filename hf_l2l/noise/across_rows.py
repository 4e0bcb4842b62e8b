"""Finds out whether a loss is a sum over rows, a mean, or couples them, from the loss of a batch and of its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any

import torch

from hf_l2l.accumulation.step import Step
from hf_l2l.accumulation.trial import half_of_the_digits
from hf_l2l.engine.splitting import buffers_kept
from hf_l2l.logits.heads import loss_alone
from hf_l2l.runtime import compute_state

_NEEDS = "l2l_noise_scale=True needs a loss that is a sum or a mean over rows or tokens"


def is_sum_over_rows(step: Step, batch: Mapping[str, Any], loss_items: Any, items: Sequence[int]) -> bool | None:
    """Compare the loss of `batch` with those of two parts of it, in evaluation mode and without gradients.

    Args:
        step: the parts of a step.
        batch: the inputs of the model; each tensor has the rows first.
        loss_items: what the Trainer divides the losses of the step by; None if it does not. Some models ignore it.
        items: what the loss counts in each row.

    Returns:
        Whether the losses of the parts add up to the whole. Otherwise it is their mean. None if this batch does not
        tell, since a single row of several has items, or the loss is not finite.

    Raises:
        ValueError: if it is neither.
    """
    with_items = [row for row, count in enumerate(items) if count]
    if not with_items or len(with_items) < min(2, len(items)):
        return None
    with _as_it_was(step), torch.no_grad():
        whole = _loss(step, dict(batch), loss_items)
        if not isfinite(whole):
            return None  # the step will tell
        tolerance = half_of_the_digits(step) * abs(whole)
        kinds = [False, True]
        if loss_items is not None:  # a sum is divided by it
            kinds = [abs(2 * _loss(step, dict(batch), 2 * loss_items) - whole) <= tolerance]
        if len(items) == 1:
            return kinds[0]
        cut = with_items[len(with_items) // 2]
        added = mean = 0.0
        for part in (slice(0, cut), slice(cut, len(items))):
            of_part = {
                name: value[part] if isinstance(value, torch.Tensor) else value for name, value in batch.items()
            }
            loss = _loss(step, of_part, loss_items)
            added += loss
            mean += loss * sum(items[part]) / sum(items)
    for is_sum in kinds:
        if abs((added if is_sum else mean) - whole) <= tolerance:
            return is_sum
    raise ValueError(
        f"{_NEEDS} (got {whole:.6g} for a batch, and for two parts of it {added:.6g} as a sum and {mean:.6g} as a "
        "mean); leave it out"
    )


def _loss(step: Step, batch: dict[str, Any], loss_items: Any) -> float:
    loss, has_aux_loss = step.loss(batch, loss_items)
    if has_aux_loss:
        raise ValueError(f"{_NEEDS} (got a model that adds a loss of its routers, which couples them); leave it out")
    return float(loss)


@contextmanager
def _as_it_was(step: Step) -> Iterator[None]:
    mode = step.model.training
    # Parts of a batch are no merged batches, of whatever the whole consists.
    parts, no_logits = step.cuts.between(()), loss_alone()  # of all tokens, for which there may be no memory
    with parts, no_logits, compute_state.all_rng_states_kept(step.device), buffers_kept(list(step.model.modules())):
        try:
            step.model.eval()
            yield
        finally:
            step.model.train(mode)
