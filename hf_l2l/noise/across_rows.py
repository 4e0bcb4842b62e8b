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
from hf_l2l.runtime import compute_state


def is_sum_over_rows(step: Step, batch: Mapping[str, Any], loss_items: Any, items: Sequence[int]) -> bool | None:
    """Compare the loss of `batch` with those of two parts of it, in evaluation mode and without gradients.

    Args:
        step: the parts of a step.
        batch: the inputs of the model; each tensor has the rows first.
        loss_items: what the Trainer divides the losses of the step by; None if it does not. Some models ignore it.
        items: what the loss counts in each row.

    Returns:
        Whether the losses of the parts add up to the whole. Otherwise it is their mean. None if this batch does not
        tell, since a single row has items, or the loss is not finite.

    Raises:
        ValueError: if it is neither.
    """
    with_items = [row for row, count in enumerate(items) if count]
    if len(with_items) < 2:
        return None
    cut = with_items[len(with_items) // 2]
    with _as_it_was(step), torch.no_grad():
        whole = float(step.loss(dict(batch), loss_items)[0])
        added = mean = 0.0
        for part in (slice(0, cut), slice(cut, len(items))):
            of_part = {
                name: value[part] if isinstance(value, torch.Tensor) else value for name, value in batch.items()
            }
            loss = float(step.loss(of_part, loss_items)[0])
            added += loss
            mean += loss * sum(items[part]) / sum(items)
    if not isfinite(whole):
        return None  # the step will tell
    tolerance = half_of_the_digits(step) * abs(whole)
    for is_sum, found in ((True, added), (False, mean)):
        if abs(found - whole) <= tolerance:
            return is_sum
    raise ValueError(
        "l2l_noise_scale=True needs a loss that is a sum or a mean over rows or tokens (got "
        f"{whole:.6g} for a batch, and for two parts of it {added:.6g} as a sum and {mean:.6g} as a mean); leave it "
        "out"
    )


@contextmanager
def _as_it_was(step: Step) -> Iterator[None]:
    mode = step.model.training
    # Parts of a batch are no merged batches, of whatever the whole consists.
    parts = step.cuts.between(())
    with parts, compute_state.all_rng_states_kept(step.device), buffers_kept(list(step.model.modules())):
        try:
            step.model.eval()
            yield
        finally:
            step.model.train(mode)
