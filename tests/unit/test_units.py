"""What is known of a unit is right as long as `is_current` says so; and what layers collect for transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_l2l.model.captured_outputs import CapturedOutputs
from hf_l2l.model.precision import Precision
from hf_l2l.model.units import LayerUnit


class Pair(nn.Module):
    """Two linear modules with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)


def unit_of(module: nn.Module) -> LayerUnit:
    return LayerUnit(module, module.modules(), "a layer", Precision(module))


def test_what_travels_has_the_dtype_of_the_device():
    module = Pair()
    unit = LayerUnit(module, module.modules(), "a layer", Precision(module, torch.bfloat16))
    assert unit.dtypes == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]  # norms keep theirs
    assert [piece.dtype for piece in unit.layout.pieces] == unit.dtypes


CHANGES: dict[str, Callable[[Pair], Any]] = {
    "grow": lambda module: setattr(module.first.weight, "data", torch.zeros(4, 3)),
    "replace a parameter": lambda module: setattr(module.first, "weight", nn.Parameter(torch.zeros(3, 3))),
    "replace a module": lambda module: setattr(module, "second", nn.Linear(3, 3, bias=False)),
    "add a module": lambda module: setattr(module.first, "adapter", nn.Identity()),
    "remove a parameter": lambda module: setattr(module.first, "bias", None),
    "freeze": lambda module: module.first.bias.requires_grad_(False),
    "shorten": lambda module: setattr(module.first.bias, "data", module.first.bias.data.half()),
    "add a buffer": lambda module: module.first.register_buffer("later", torch.zeros(1)),
}


def test_a_unit_that_was_changed_is_not_current():
    for name, change in CHANGES.items():
        module = Pair()
        unit = unit_of(module)
        assert unit.is_current()
        change(module)
        assert not unit.is_current(), name
        assert unit_of(module).is_current()


def test_without_transformers_no_outputs_are_captured(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers.utils.output_capturing", raising=False)
    with CapturedOutputs() as captured:
        pass
    assert captured.taken == {} and captured.keys == ()
    CapturedOutputs.deliver({"attentions": [1]})
