"""Compares a step whose batches run as one with the same step batch by batch, and leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hf_l2l.accumulation.merging import Batch, Merged
from hf_l2l.accumulation.step import NO_ROOM, Step
from hf_l2l.engine.splitting import ERRORS_OF_MODELS, buffers_kept
from hf_l2l.model.batch_dims import NotCut
from hf_l2l.runtime import compute_state


def disagreement(step: Step, batches: Sequence[Batch], merged: Merged, items: Any) -> str | None:
    """What differs if `batches` run as `merged`; "" if nothing does but rounding, None if this step cannot tell.

    Loss and gradients of both are compared; a model that draws random numbers is compared in evaluation mode, where
    it draws none. Random numbers, buffers and gradients (there are none before) are then what they were.
    Of the second run, the gradients are subtracted from those of the first: so the host needs no second room for them.

    Raises:
        NotCut: if `merged` cannot be cut between its batches.
    """
    parameters = {name: p for name, p in step.model.named_parameters() if p.requires_grad}
    with _as_it_was(step):
        total, reason = _batch_by_batch(step, batches, items)
        if reason is not None:
            return reason
        expected = {name: _norm(p.grad) for name, p in parameters.items()}
        try:
            with step.cuts.between(merged.rows):
                loss, _ = step.loss(merged.inputs, items)
                step.backward(-loss)
        except NotCut:
            raise
        except torch.OutOfMemoryError:
            return NO_ROOM
        except (*ERRORS_OF_MODELS, MemoryError, OSError) as error:
            return f"all rows at once cannot be run ({error})"
        rest = {name: _norm(p.grad) for name, p in parameters.items()}
        found = loss.detach()
    tolerance = half_of_the_digits(step)
    norms, differences = torch.tensor(list(expected.values())), torch.tensor(list(rest.values()))
    if not all(bool(numbers.isfinite().all()) for numbers in (total, found, norms, differences)):
        return None  # as a first step in fp16, whose loss scale is still too large
    if abs(float(total - found)) > tolerance * abs(float(total)):
        return (
            f"the loss of all rows at once is {float(found):.6g}, and that of the batches one by one is "
            f"{float(total):.6g} (transformers adds losses that are means of their batches, and does not average them)"
        )
    # A gradient that is zero but for rounding (of the bias of keys, for example) is compared with all of them.
    excess = differences - tolerance * (norms + 0.01 * norms.norm())
    if norms.numel() and bool(excess.max() > 0):
        worst = int(excess.argmax())
        return (
            f"the gradient of {list(parameters)[worst]} would differ by {float(differences[worst]):.2g} from that "
            f"batch by batch, whose norm is {float(norms[worst]):.2g}"
        )
    return ""


def _batch_by_batch(step: Step, batches: Sequence[Batch], items: Any) -> tuple[torch.Tensor, str | None]:
    """Run each batch forward and backward. The sum of their losses, and why they cannot be compared."""
    before = compute_state.get_rng_state(step.device)
    loss, has_aux_loss = step.loss(batches[0], items)
    if has_aux_loss:
        return loss, "the model adds an auxiliary loss (aux_loss of its outputs), a mean over each batch"
    step.backward(loss)
    if compute_state.get_rng_state(step.device) != before:
        step.model.zero_grad()
        step.model.eval()
        loss, _ = step.loss(batches[0], items)
        step.backward(loss)
    total = loss.detach()
    for batch in batches[1:]:
        loss, _ = step.loss(batch, items)
        step.backward(loss)
        total = total + loss.detach()
    return total, None


@contextmanager
def _as_it_was(step: Step) -> Iterator[None]:
    """Train in the block; what it changes is as before it, but for the modes of modules, which each step sets."""
    with (
        compute_state.all_rng_states_kept(step.device),
        buffers_kept(list(step.model.modules())),
        step.eps.accumulate(),  # no layer is updated in these backwards
    ):
        try:
            step.model.train()
            yield
        finally:
            step.model.zero_grad()


def _norm(gradient: torch.Tensor | None) -> float:
    if gradient is None:
        return 0.0
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return float(torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32)))


def half_of_the_digits(step: Step) -> float:
    """The tolerance: half the digits of the least precise dtype, since kernels add other numbers of rows in another
    order."""
    precision = step.eps.masters.precision
    dtypes = {p.dtype for p in step.model.parameters() if p.is_floating_point()} | {precision.dtype or torch.float32}
    if step.autocast or precision.gradients == "16bit":
        dtypes.add(torch.bfloat16)
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    if torch.get_float32_matmul_precision() != "highest":
        eps = max(eps, 2.0**-11)  # of TF32
    return float(eps**0.5)
