"""Gradients under L2L on the CPU are those of the plain model."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import parity_cases as cases
from memory_switches import forced_copies
from models import FAMILIES, assert_same_bits, attached, batch_for, gradients, reference, train_once
from training import tiny_bert

FLOAT64, FLOAT32 = torch.float64, torch.float32


@pytest.fixture(params=["views", "copies"])
def copies(request: pytest.FixtureRequest):
    """Uploads as views of the masters, and as copies."""
    with forced_copies() if request.param == "copies" else nullcontext():
        yield


@pytest.mark.one_in(8)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ubatch_size", [1, 3])
def test_ubatches_give_the_gradients_of_the_whole_batch(family, ubatch_size, copies):
    cases.check_family(family, "cpu", ubatch_size, "host", FLOAT64)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32], ids=str)
@pytest.mark.parametrize("masked", [True, False], ids=["ragged", "unmasked"])
@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("ubatch_size", [1, 2, 3, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_combination(family, ubatch_size, stash, masked, dtype, copies):
    cases.check_family(family, "cpu", ubatch_size, stash, dtype, masked=masked)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["bert", "llama", "t5"])
def test_float32_and_unmasked_rows(family, copies):
    cases.check_family(family, "cpu", 5, "device", FLOAT32, masked=False)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("change", cases.CHANGES)
@pytest.mark.parametrize(
    "family", [f if f in ("bert", "t5") else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]
)
def test_frozen_parts(family, change, copies):
    cases.check_family(family, "cpu", 3, "host", FLOAT64, change=cases.CHANGES[change])


def test_unused_parameter_keeps_its_bits():
    cases.check_unused_parameter("cpu")


@pytest.mark.parametrize("stash", ["device", "host"])
def test_discarded_batch_leaves_nothing(stash, copies):
    cases.check_discarded_batch("cpu", stash)


@pytest.mark.parametrize("stash", ["device", "host"])
def test_two_forwards_before_one_backward(stash, copies):
    cases.check_two_forwards("cpu", stash)


def test_gradients_accumulate(copies):
    cases.check_accumulation("cpu")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("t5", "deberta_v2")])
def test_one_ubatch_gives_the_same_bits(family, copies):
    """T5 and DeBERTa-v2 are left out: a tensor goes to several layers, or into a layer and past it, and a node sums
    the gradients inside a layer before those outside are added."""
    model = FAMILIES[family]()
    batch = batch_for(model)
    loss, expected = reference(model, batch)
    attached(model)
    assert torch.equal(train_once(model, batch), loss)
    assert_same_bits(gradients(model), expected)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stash", ["device", "host"])
def test_what_travels_ahead_changes_no_bit(stash, accumulation):
    """Weights and gradients after two steps of AdamW with clipping, dropout on, uploads as copies."""
    found = []
    for options in ({}, {"prefetch": False}, {"gradient_slots": 1}, {"prefetch": False, "gradient_slots": 1}):
        model = tiny_bert(dropout=0.1, layers=3)
        attached(model, device="cpu", stash=stash, ubatch_size=3, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(11)
        with forced_copies():
            for _ in range(2):
                optimizer.zero_grad()
                for seed in range(accumulation):
                    train_once(model, batch_for(model, seed=seed))
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        found.append(({n: p.detach() for n, p in model.named_parameters()}, gradients(model)))
    for weights, sums in found[1:]:
        assert_same_bits(weights, found[0][0])
        assert_same_bits(sums, found[0][1])
