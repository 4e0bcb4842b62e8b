"""The check of training in bfloat16, against fp32 and against what bfloat16 does to the plain model."""

from __future__ import annotations

import copy
import math
import tempfile
from typing import Any

import torch
from torch import nn

from hf_l2l.verify.cases import ROWS, UBATCH, Case, attached, gradients_of, train
from hf_l2l.verify.comparisons import Gradients, compare_presence, gradient_error, loss_error
from hf_l2l.verify.family import Family, class_named
from hf_l2l.verify.results import OK, Caught, Result, note, red, worst
from hf_l2l.verify.splits import recomputes, told

LOSS_ERROR, GRADIENT_ERROR = 5e-3, 0.05
"""Relative errors that are rounding to bfloat16: of the loss, and, in norm, of all gradients together."""

OF_PLAIN = 1.5
"""Where the plain model has larger errors when it is loaded in bfloat16, as many times these are rounding, too."""

Errors = tuple[float, float]
"""Of the loss, and of the gradients."""


def check_bf16(case: Case) -> Result:
    """With cmp="bf16" the loss and the gradients of a model in fp32 are near the plain ones, and what is split without
    `cmp` is split."""
    family, model = case.family, case.family.build(torch.float32)
    batch, plain = family.batch(model, ROWS), copy.deepcopy(model)
    expected = train(family, plain, batch)
    mixed = attached(model, ubatch_size=UBATCH, cmp="bf16")
    with (caught := Caught(refused=family.refused)):
        found = train(family, mixed, batch)
    if caught.result is not None:
        return _failure(caught, family, model)
    in_fp32, in_bf16 = gradients_of(plain), gradients_of(mixed)
    presence = compare_presence(in_bf16, in_fp32)
    if presence is not OK:
        return presence
    errors = loss_error(found, expected), gradient_error(in_bf16, in_fp32)
    compared = compare_errors(errors, None)
    if compared is not OK:
        short = _PlainInBf16(family, model)
        compared = compare_errors(errors, short.errors(expected, in_fp32))
    reasons = dict(recomputes(family, model, batch, ubatch_size=UBATCH, cmp="bf16").reasons)
    for name in recomputes(family, model, batch, ubatch_size=UBATCH).reasons:
        reasons.pop(name, None)
    return worst(compared, told(reasons))


def compare_errors(found: Errors, of_plain: Errors | None) -> Result:
    """Whether errors are rounding, given those of the plain model in bfloat16; None if it does not train there."""
    theirs = of_plain or (0.0, 0.0)
    limits = max(LOSS_ERROR, OF_PLAIN * theirs[0]), max(GRADIENT_ERROR, OF_PLAIN * theirs[1])
    if found[0] <= limits[0] and found[1] <= limits[1]:  # nan is not
        return OK
    return red(
        f"in bf16, the loss is wrong by {found[0]:.1e} of that in fp32, and the gradients by {found[1]:.1e} of their "
        f"norm; {limits[0]:.1e} and {limits[1]:.1e} is rounding"
    )


def _failure(caught: Caught, family: Family, model: nn.Module) -> Result:
    """The result of a training in bfloat16 that failed: no fault of L2L if the plain model fails so, too."""
    assert caught.result is not None
    if caught.result.status != "red":
        return caught.result
    plainly = _PlainInBf16(family, model).caught
    if type(plainly.error) is type(caught.error) and plainly.result is not None:
        return note(f"fails in bf16 {plainly.result.text}")
    return caught.result


class _PlainInBf16:
    """A training of plain transformers with a model that has been saved, and loaded in bf16."""

    def __init__(self, family: Family, model: nn.Module) -> None:
        save: Any = model.save_pretrained
        with (caught := Caught(plain=True)), tempfile.TemporaryDirectory() as folder:
            save(folder)
            short = class_named(family.model_class).from_pretrained(folder, dtype=torch.bfloat16)
            self.loss = train(family, short.train(model.training), family.batch(short, ROWS))
            self.gradients = gradients_of(short)
        self.caught = caught

    def errors(self, loss: torch.Tensor, gradients: Gradients) -> Errors | None:
        """Its errors against this loss and these gradients; None if it failed, or gave something that is not
        finite."""
        if self.caught.result is not None:
            return None
        found = loss_error(self.loss, loss), gradient_error(self.gradients, gradients)
        return found if all(map(math.isfinite, found)) else None
