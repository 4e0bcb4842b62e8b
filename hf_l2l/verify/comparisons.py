"""Comparisons of losses, gradients, outputs and states with those of the plain model."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from hf_l2l.verify.results import OK, Result, red

Gradients = dict[str, torch.Tensor | None]

SMALL = 1e-3
"""Tensors whose largest entry is a smaller part than this of the largest of all may hold nothing but rounding, as the
gradient of a bias to which softmax is indifferent. They are compared with this part of the largest of all."""


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of two tensors, entries that are equal, infinite ones included, aside; nan or inf if
    shapes differ or one of them is not finite where the other differs."""
    if found.shape != expected.shape:
        return math.inf
    if not found.numel():
        return 0.0
    found, expected = _widened(found), _widened(expected)
    return float((found - expected).abs().masked_fill(found == expected, 0.0).max())


def largest_of(tensor: torch.Tensor) -> float:
    """The absolute value of the largest entry that is finite; 0 without one."""
    wide = _widened(tensor)
    finite = wide[wide.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, where the plain model runs."""
    return tensor.detach().cpu().to(torch.complex128 if tensor.is_complex() else torch.float64)


def compare_tensors(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float, what: str
) -> Result:
    """Whether the tensors are there under the same names and equal.

    Args:
        found: the tensors of the model that ran layer to layer.
        expected: those of the plain model.
        tolerance: the largest difference that is rounding, as a part of the largest entry of each tensor; but see
            `SMALL`.
        what: "gradient", "output", ..., for the text of the result.
    """
    if found.keys() != expected.keys():
        return red(f"there is another set of {what}s: {sorted(found.keys() ^ expected.keys())[:3]}")
    sizes = {name: largest_of(value) for name, value in expected.items()}
    least = SMALL * max(sizes.values(), default=0.0)
    errors = {name: difference(found[name], value) for name, value in expected.items()}
    # Not `>`: nan is wrong.
    wrong = {
        n: e / (max(sizes[n], least) or 1.0) for n, e in errors.items() if not e <= tolerance * max(sizes[n], least)
    }
    if not wrong:
        return OK
    name = max(wrong, key=lambda name: math.inf if math.isnan(wrong[name]) else wrong[name])
    return red(f"the {what} {name} is wrong by {wrong[name]:.1e} of its largest entry")


def compare_gradients(found: Gradients, expected: Gradients, tolerance: float) -> Result:
    """Whether the same parameters have gradients, and these are equal, as `compare_tensors` has it."""
    missing = compare_presence(found, expected)
    if missing is not OK:
        return missing
    theirs = present(expected)
    largest = max((float(e.abs().max()) for e in theirs.values() if e.numel()), default=0.0)
    if not 0.0 < largest < math.inf:
        return red(f"the largest gradient of the plain model is {largest}")
    return compare_tensors(present(found), theirs, tolerance, "gradient")


def compare_presence(found: Gradients, expected: Gradients) -> Result:
    """Whether the same parameters have gradients."""
    wrong = [name for name, gradient in expected.items() if (gradient is None) != (found[name] is None)]
    if not wrong:
        return OK
    side = "no gradient" if found[wrong[0]] is None else "a gradient that the plain model has not"
    return red(f"{len(wrong)} parameters have {side}, the first is {wrong[0]}")


def present(gradients: Gradients) -> dict[str, torch.Tensor]:
    """The gradients that are there."""
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


def compare_loss(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> Result:
    """Whether two losses are equal within `tolerance` of the expected one."""
    told = f"the loss is {float(found):.6g} and should be {float(expected):.6g}"
    return OK if loss_error(found, expected) <= tolerance else red(told)


def loss_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The difference of two losses as a part of the expected one."""
    return abs(float(found) - float(expected)) / abs(float(expected))


def gradient_error(found: Gradients, expected: Gradients) -> float:
    """The norm of the difference of all gradients as a part of the norm of the expected ones; those that are missing
    count as zero."""
    squares = [
        (_square(e if (f := found[n]) is None else f.double() - e), _square(e)) for n, e in present(expected).items()
    ]
    return math.sqrt(sum(error for error, _ in squares) / sum(size for _, size in squares))


def _square(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().sum())


def compare_states(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], which: str) -> Result:
    """Whether two state dicts have the same names and the same bits; `which` says which one is compared."""
    if found.keys() != expected.keys():
        return red(f"the {which} state has other names: {sorted(found.keys() ^ expected.keys())[:3]}")
    wrong = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    return red(f"the {which} state differs in {wrong[0]}") if wrong else OK
