"""Comparisons of the compatibility check see what is wrong."""

from __future__ import annotations

import math

import pytest
import torch

from hf_l2l.verify.comparisons import (
    SMALL,
    compare_gradients,
    compare_loss,
    compare_states,
    compare_tensors,
    gradient_error,
)
from hf_l2l.verify.mixed import GRADIENT_ERROR, LOSS_ERROR, OF_PLAIN, compare_errors
from hf_l2l.verify.results import OK

INF, NAN = float("inf"), float("nan")


def test_gradients_are_compared():
    for found, status in (
        ({"a": torch.tensor([1.0]), "b": None}, "ok"),
        ({"a": torch.tensor([1.0 + 1e-3]), "b": None}, "red"),
        ({"a": torch.tensor([NAN]), "b": None}, "red"),
        ({"a": None, "b": None}, "red"),
        ({"a": torch.tensor([1.0]), "b": torch.tensor([0.0])}, "red"),
        ({"a": torch.ones(2), "b": None}, "red"),
    ):
        assert compare_gradients(found, {"a": torch.tensor([1.0]), "b": None}, 1e-5).status == status


@pytest.mark.parametrize("value", [0.0, NAN, INF])
def test_gradients_of_the_plain_model_must_be_finite_and_not_all_zero(value):
    gradients = {"a": torch.tensor([value])}
    assert compare_gradients(gradients, gradients, 1e-5).status == "red"


@pytest.mark.parametrize(
    ("size", "error", "status"),
    [(0.01, 1e-4, "red"), (0.01, 1e-6, "ok"), (SMALL / 10, 1e-3, "ok"), (SMALL / 10, 1.0, "red"), (0.0, 1e-3, "ok")],
)
def test_a_tensor_is_compared_with_its_own_largest_entry(size, error, status):
    """Or with a small part of the largest of all, if it may hold nothing but rounding. `error` is a part of the one
    or the other."""
    expected = {"large": torch.ones(2, dtype=torch.float64), "b": torch.full((2,), size, dtype=torch.float64)}
    found = {**expected, "b": expected["b"] + error * (size if size >= SMALL else SMALL / 10)}
    assert compare_tensors(found, expected, 1e-3 if size < SMALL else 1e-5, "gradient").status == status


def test_entries_that_are_not_finite_hide_nothing():
    for found, expected, status in (
        ([1.0, -INF], [1.0, -INF], "ok"),
        ([2.0, -INF], [1.0, -INF], "red"),
        ([1.0, 0.0], [1.0, -INF], "red"),
        ([1.0, INF], [1.0, -INF], "red"),
        ([1.0, NAN], [1.0, NAN], "red"),
        ([1.0], [1.0, 1.0], "red"),
    ):
        compared = compare_tensors({"a": torch.tensor(found)}, {"a": torch.tensor(expected)}, 1e-5, "output")
        assert compared.status == status


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64])
def test_tensors_of_any_dtype_are_compared(dtype):
    one = {"a": torch.ones(2, dtype=dtype)}
    assert compare_tensors(one, one, 0.0, "buffer") == OK
    assert "the buffer a is wrong" in compare_tensors({"a": torch.zeros(2, dtype=dtype)}, one, 0.0, "buffer").text
    assert "another set of buffers" in compare_tensors({}, one, 0.0, "buffer").text


def test_losses_and_states_are_compared():
    for found, status in ((2.0, "ok"), (2.1, "red"), (NAN, "red")):
        assert compare_loss(torch.tensor(found), torch.tensor(2.0), 1e-3).status == status
    state = {"a": torch.ones(1)}
    assert compare_states(state, state, "loaded") == OK
    assert "differs in a" in compare_states({"a": torch.zeros(1)}, state, "loaded").text
    assert "other names" in compare_states({}, state, "loaded").text


def test_the_error_of_all_gradients_is_one_of_norms():
    expected = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0]), "c": None}
    assert gradient_error(expected, expected) == 0.0
    assert gradient_error({**expected, "b": torch.tensor([3.0])}, expected) == pytest.approx(1 / 5)
    assert gradient_error({**expected, "b": None}, expected) == pytest.approx(4 / 5)
    assert math.isnan(gradient_error({**expected, "b": torch.tensor([NAN])}, expected))


@pytest.mark.parametrize(
    ("found", "of_plain", "status"),
    [
        ((LOSS_ERROR, GRADIENT_ERROR), None, "ok"),
        ((2 * LOSS_ERROR, 0.0), None, "red"),
        ((0.0, 2 * GRADIENT_ERROR), None, "red"),
        ((0.0, NAN), None, "red"),
        ((NAN, 0.0), (1.0, 1.0), "red"),
        ((0.0, 2 * GRADIENT_ERROR), (0.0, 2 * GRADIENT_ERROR), "ok"),
        ((0.0, 4 * OF_PLAIN * GRADIENT_ERROR), (0.0, 2 * GRADIENT_ERROR), "red"),
    ],
)
def test_errors_in_bf16_are_compared_with_those_of_the_plain_model(found, of_plain, status):
    assert compare_errors(found, of_plain).status == status
