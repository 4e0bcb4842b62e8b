"""Layers on several devices in turn have the bits of one device: losses, norms, weights, moments, random numbers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import pipelined
from hf_l2l.testing import enable_simulated_accelerator
from pipelined import Trained, trained

MODES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"stash": "host", "boundary": "host"},
    "host stash": {"stash": "host", "boundary": "device", "eps_update": "serial"},
    "bf16": {"cmp": "bf16", "eps_update": "eager", "clips": False},
    "bf16 host": {"cmp": "bf16", "stash": "host", "boundary": "host", "grad_dtype": "16bit", "moment_dtype": "bf16"},
    "fp16": {"cmp": "fp16", "host_copies": "per_sweep"},
    "no prefetch": {"prefetch": False, "gradient_slots": 1},
    "whole batch": {"ubatch_size": 8},
    "kept": {"kept_weights": 2, "kept_graphs": 1},
    "kept inputs": {"stash": "host", "device_stash": 2, "gradient_slots": 1},
    "resident layers": {"resident_layers": 3},
    "resident layers host": {"resident_layers": 2, "resident_update": "host"},
    "all resident": {"resident": "all"},
}


@pytest.fixture(autouse=True, scope="module")
def _four() -> Iterator[None]:
    enable_simulated_accelerator(devices=4)
    yield
    enable_simulated_accelerator()


@cache
def model_of(family: str) -> nn.Module:
    torch.manual_seed(1)
    return pipelined.FAMILIES[family]()


@cache
def on_one(family: str, mode: str, steps: int) -> Trained:
    return trained(copy.deepcopy(model_of(family)), 1, steps=steps, **MODES[mode])


QUICK = {
    *(("fp16", "gpt2", 2), ("kept", "bert", 2), ("whole batch", "albert", 2)),
}
"""What there is of a mode that tests of waits, faults and heads on several devices do not have."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("mode", "family", "count"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(MODES, pipelined.FAMILIES, (2, 3, 4))
    ],
)
def test_layers_in_turn_have_the_bits_of_one_device(family, mode, count):
    if family == "albert" and mode in ("kept", "kept inputs", "resident layers", "resident layers host"):
        pytest.skip("it has one layer")
    found = trained(copy.deepcopy(model_of(family)), count, steps=3, **MODES[mode])
    assert not found.differences(on_one(family, mode, 3))


@pytest.mark.at_most(1)
@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("mode", ["device", "bf16 host"])
@pytest.mark.parametrize("family", pipelined.FAMILIES)
def test_fifty_steps_have_the_bits_of_one_device(family, mode, count):
    found = trained(copy.deepcopy(model_of(family)), count, steps=50, **MODES[mode])
    assert not found.differences(on_one(family, mode, 50))
