"""Loss and gradients under L2L are those of the plain model on the CPU, whatever is split, frozen, or asked of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from devices import DEVICE
from memory_switches import forced_copies
from models import (
    FAMILIES,
    ROWS,
    TOLERANCE,
    assert_bits_of_plain,
    attached,
    batch_for,
    bert,
    gradients,
    has_bits_of_plain,
    reference,
    relative_error,
    train_once,
)
from runs import UPDATED_BY, assert_same_run, train
from tiers import combinations, more

FLOAT64, FLOAT32 = torch.float64, torch.float32


@pytest.fixture(params=["copies", *(["views"] if DEVICE == "cpu" else [])])
def copies(request: pytest.FixtureRequest) -> Iterator[None]:
    """On the CPU, an upload is a view of the masters, or else a copy as on any other device."""
    with forced_copies() if request.param == "copies" else nullcontext():
        yield


# ---- parts that are frozen: parameters of these names train


def nothing_frozen(name: str) -> bool:
    return True


def first_layer_frozen(name: str) -> bool:
    return ".0." not in name


def last_layer_frozen(name: str) -> bool:
    return ".1." not in name


def embeddings_frozen(name: str) -> bool:
    return not any(part in name for part in ("embed", "shared", "wte", "wpe"))


def all_but_a_few_frozen(name: str) -> bool:
    """As LoRA does: a few parameters inside layers train, and no input of a layer needs a gradient."""
    return ".1." in name and ("bias" in name or "norm" in name)


def check_family(
    family: str,
    ubatch_size: int | None,
    *,
    stash: str = "host",
    dtype: torch.dtype = FLOAT64,
    masked: bool = True,
    trains: Callable[[str], bool] = nothing_frozen,
) -> None:
    model = FAMILIES[family]().to(dtype)
    for name, p in model.named_parameters():
        p.requires_grad_(trains(name))
    batch = batch_for(model, masked=masked)
    loss, expected = reference(model, batch)
    attached(model, device=DEVICE, ubatch_size=ubatch_size, stash=stash)
    assert abs(train_once(model, batch) - loss) <= TOLERANCE[dtype] * abs(loss)
    assert relative_error(gradients(model), expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("family", FAMILIES)
def test_ubatches_give_the_gradients_of_the_whole_batch(family):
    check_family(family, 3)


@pytest.mark.parametrize(
    ("family", "ubatch_size", "stash", "masked", "dtype"),
    combinations(FAMILIES, [1, 2, 3, 5], ["device", "host"], [True, False], [FLOAT64, FLOAT32], together=1),
)
def test_every_combination(family, ubatch_size, stash, masked, dtype, copies):
    check_family(family, ubatch_size, stash=stash, masked=masked, dtype=dtype)


@pytest.mark.parametrize(
    ("family", "trains"),
    combinations(
        ["bert", "t5", *more(*(name for name in FAMILIES if name not in ("bert", "t5")))],
        [first_layer_frozen, last_layer_frozen, embeddings_frozen, all_but_a_few_frozen],
    ),
)
def test_frozen_parts(family, trains):
    check_family(family, 3, trains=trains)


def test_an_unused_parameter_keeps_its_bits():
    """It gets no gradient, and an optimizer step does not change it."""
    model = bert()
    model.bert.encoder.layer[0].register_parameter("unused", nn.Parameter(torch.randn(3)))
    before = model.bert.encoder.layer[0].unused.detach().clone()
    attached(model, device=DEVICE, ubatch_size=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    train_once(model, batch_for(model))
    assert model.bert.encoder.layer[0].unused.grad is None
    optimizer.step()
    assert torch.equal(model.bert.encoder.layer[0].unused, before)
    assert not torch.equal(model.bert.encoder.layer[0].output.dense.bias, torch.zeros(16))


@pytest.mark.parametrize("stash", ["device", "host"])
def test_batches_that_are_discarded_joined_or_accumulated(stash, copies):
    """A forward without a backward and a backward without a step leave nothing; a loss of two forwards, as contrastive
    ones are, and gradients of several backwards are those of the plain model."""
    model = bert().double()
    first, second, third = (batch_for(model, rows=ROWS - 3 * (seed == 7), seed=seed) for seed in (1, 7, 3))

    def discard() -> None:
        model(**second)
        train_once(model, second)
        model.zero_grad()
        train_once(model, first)

    def join() -> None:
        (model.train()(**first).loss + 2 * model(**second).loss).backward()

    def accumulate() -> None:
        for batch in (first, second, third):
            train_once(model, batch)

    programs, expected = (discard, join, accumulate), []
    for program in programs:
        program()
        expected.append(gradients(model))
        model.zero_grad()
    attached(model, device=DEVICE, ubatch_size=3, stash=stash)
    for program, those in zip(programs, expected, strict=True):
        program()
        assert relative_error(gradients(model), those) <= TOLERANCE[FLOAT64], program.__name__
        model.zero_grad()


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("t5", "deberta_v2")])
def test_one_ubatch_gives_the_same_bits(family):
    """T5 and DeBERTa-v2 are left out: a tensor goes to several layers, or into a layer and past it, and a node sums
    the gradients inside a layer before those outside are added."""
    model = FAMILIES[family]()
    batch = batch_for(model)
    loss, expected = reference(model, batch)
    with forced_copies():
        attached(model, device=DEVICE)
        assert has_bits_of_plain(train_once(model, batch), loss)
    assert_bits_of_plain(gradients(model), expected)


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("mode", UPDATED_BY)
def test_what_travels_ahead_changes_no_bit(stash, mode):
    same = {"stash": stash, "eps_update": mode, "accumulation": 2, "steps": 2}
    with forced_copies():
        expected = train(**same)
        for options in ({"prefetch": False}, {"gradient_slots": 1}, {"prefetch": False, "gradient_slots": 1}):
            assert_same_run(train(**same, **options), expected)
