"""Comparisons of the compatibility check see what is wrong."""

from __future__ import annotations

import torch

from hf_l2l.verify.comparisons import (
    SMALL,
    compare_gradients,
    compare_loss,
    compare_states,
    compare_tensors,
)
from hf_l2l.verify.mixed import GRADIENT_ERROR, LOSS_ERROR, OF_PLAIN, compare_errors
from hf_l2l.verify.results import OK

INF, NAN = float("inf"), float("nan")


def test_gradients_are_compared_and_those_of_the_plain_model_must_be_finite_and_not_all_zero():
    expected = {"a": torch.tensor([1.0]), "b": None}
    assert compare_gradients(expected, expected, 1e-5) == OK
    for wrong in (
        {"a": torch.tensor([1.0 + 1e-3]), "b": None},
        {"a": torch.tensor([NAN]), "b": None},
        {"a": None, "b": None},
        {"a": torch.tensor([1.0]), "b": torch.tensor([0.0])},
        {"a": torch.ones(2), "b": None},
    ):
        assert compare_gradients(wrong, expected, 1e-5).status == "red", wrong
    for value in (0.0, NAN, INF):
        gradients = {"a": torch.tensor([value])}
        assert compare_gradients(gradients, gradients, 1e-5).status == "red"


def test_a_tensor_is_compared_with_its_own_largest_entry():
    """Or with a small part of the largest of all, if it may hold nothing but rounding. The error is a part of the one
    or the other."""
    for size, error, status in (
        (0.01, 1e-4, "red"),
        (0.01, 1e-6, "ok"),
        (SMALL / 10, 1e-3, "ok"),
        (SMALL / 10, 1.0, "red"),
        (0.0, 1e-3, "ok"),
    ):
        expected = {"large": torch.ones(2, dtype=torch.float64), "b": torch.full((2,), size, dtype=torch.float64)}
        found = {**expected, "b": expected["b"] + error * (size if size >= SMALL else SMALL / 10)}
        tolerance = 1e-3 if size < SMALL else 1e-5
        assert compare_tensors(found, expected, tolerance, "gradient").status == status, (size, error)


def test_entries_that_are_not_finite_hide_nothing():
    expected = {"a": torch.tensor([1.0, -INF])}
    assert compare_tensors(expected, expected, 1e-5, "output") == OK
    for wrong in ([2.0, -INF], [1.0, 0.0], [1.0, INF], [1.0, NAN], [1.0]):
        assert compare_tensors({"a": torch.tensor(wrong)}, expected, 1e-5, "output").status == "red", wrong
    same = {"a": torch.tensor([1.0, NAN])}
    assert compare_tensors(same, same, 1e-5, "output").status == "red"


def test_tensors_of_any_dtype_losses_and_states_are_compared():
    for dtype in (torch.bool, torch.int64, torch.complex64):
        one = {"a": torch.ones(2, dtype=dtype)}
        assert compare_tensors(one, one, 0.0, "buffer") == OK
        assert "the buffer a is wrong" in compare_tensors({"a": torch.zeros(2, dtype=dtype)}, one, 0.0, "buffer").text
        assert "another set of buffers" in compare_tensors({}, one, 0.0, "buffer").text
    for found, status in ((2.0, "ok"), (2.1, "red"), (NAN, "red")):
        assert compare_loss(torch.tensor(found), torch.tensor(2.0), 1e-3).status == status
    state = {"a": torch.ones(1)}
    assert compare_states(state, state, "loaded") == OK
    assert "differs in a" in compare_states({"a": torch.zeros(1)}, state, "loaded").text
    assert "other names" in compare_states({}, state, "loaded").text


def test_errors_in_bf16_are_compared_with_those_of_the_plain_model():
    for found, of_plain, status in (
        ((LOSS_ERROR, GRADIENT_ERROR), None, "ok"),
        ((2 * LOSS_ERROR, 0.0), None, "red"),
        ((0.0, 2 * GRADIENT_ERROR), None, "red"),
        ((0.0, NAN), None, "red"),
        ((NAN, 0.0), (1.0, 1.0), "red"),
        ((0.0, 2 * GRADIENT_ERROR), (0.0, 2 * GRADIENT_ERROR), "ok"),
        ((0.0, 4 * OF_PLAIN * GRADIENT_ERROR), (0.0, 2 * GRADIENT_ERROR), "red"),
    ):
        assert compare_errors(found, of_plain).status == status, (found, of_plain)
