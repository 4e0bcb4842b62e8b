"""Gradients under L2L on the simulated accelerator are those of the plain model on the CPU."""

from __future__ import annotations

import pytest
import torch

import parity_cases as cases
from models import FAMILIES

FLOAT64, FLOAT32 = torch.float64, torch.float32


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_ubatches_give_the_gradients_of_the_whole_batch(family):
    cases.check_family(family, "sim", 3, "host", FLOAT64)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32], ids=str)
@pytest.mark.parametrize("masked", [True, False], ids=["ragged", "unmasked"])
@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("ubatch_size", [1, 2, 3, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_combination(family, ubatch_size, stash, masked, dtype):
    cases.check_family(family, "sim", ubatch_size, stash, dtype, masked=masked)


@pytest.mark.parametrize("change", cases.CHANGES)
@pytest.mark.parametrize("family", [f if f == "bert" else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES])
def test_frozen_parts(family, change):
    cases.check_family(family, "sim", 3, "device", FLOAT64, change=cases.CHANGES[change])


def test_unused_parameter_keeps_its_bits():
    cases.check_unused_parameter("sim")


@pytest.mark.parametrize("stash", ["device", "host"])
def test_discarded_batch_leaves_nothing(stash):
    cases.check_discarded_batch("sim", stash)


@pytest.mark.parametrize("stash", ["device", "host"])
def test_two_forwards_before_one_backward(stash):
    cases.check_two_forwards("sim", stash)


def test_gradients_accumulate():
    cases.check_accumulation("sim")
