"""Quantized weights are taken apart and rebuilt, counted by parts, and refused if none can train with them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.model.precision import Precision
from hf_l2l.model.quantized import refuse_quantized
from hf_l2l.model.units import LayerUnit
from hf_l2l.runtime.tensors import on_meta, parts_of, rebuilt, sharing_memory, tensor_bytes
from toy_quantized import ToyInt8, quantize_linears, quantized
from training import tiny_bert


class State:
    """What a library keeps beside the packed values; `nested` may be another such object."""

    def __init__(self, absmax: torch.Tensor, code: torch.Tensor, nested: State | None = None) -> None:
        self.absmax, self.code, self.offset, self.state2 = absmax, code, None, nested


class Params4bit(nn.Parameter):
    """Stands for the class of this name, for which the package has an adapter."""

    quant_state: State
    module: nn.Module | None


def packed() -> Params4bit:
    parameter = Params4bit(torch.arange(6, dtype=torch.uint8), requires_grad=False)
    parameter.quant_state = State(torch.tensor([1, 2]), torch.rand(4), State(torch.rand(2), torch.rand(3)))
    parameter.module = nn.Linear(2, 2)
    return parameter


KINDS: list[tuple[Callable[[], Any], list[torch.dtype]]] = [
    (lambda: nn.Parameter(torch.rand(3, 4)), [torch.float32]),
    (lambda: quantized(torch.rand(3, 4)), [torch.int8, torch.float16, torch.float32]),
    (packed, [torch.uint8, torch.int64, *[torch.float32] * 3]),
]


def test_a_tensor_is_rebuilt_from_copies_of_its_parts():
    for make, dtypes in KINDS:
        before = make()
        parts = parts_of(before)
        assert [part.dtype for part in parts] == dtypes
        assert all(again is part for again, part in zip(parts_of(before), parts, strict=True)), "no copies"
        copies = [part.detach().as_subclass(torch.Tensor).clone() for part in parts]
        remaining = iter([*copies, torch.zeros(0)])
        after = rebuilt(before, remaining)
        assert len(list(remaining)) == 1, "it takes what belongs to it"
        for own, part, of_before in zip(parts_of(after), copies, parts, strict=True):
            assert own.data_ptr() == part.data_ptr() != of_before.data_ptr() and torch.equal(own, of_before)
        assert len(parts) == 1 or type(after) is type(before)
        assert all(again is part for again, part in zip(parts_of(before), parts, strict=True)), "it keeps its own"
        assert after.shape == before.shape and after.dtype == before.dtype
        if isinstance(before, Params4bit):
            assert before.module is not None and after.module is None, "it refers to no module"


def test_bytes_and_units_are_those_of_the_parts():
    weight = quantized(torch.rand(3, 4))
    assert tensor_bytes([weight]) == 12 + 3 * 2 + 4
    assert on_meta(weight, torch.float32).shape == (3, 4)
    values = parts_of(weight)[0]
    assert sharing_memory([weight, values.view(-1)]) and not sharing_memory([weight, quantized(torch.rand(3, 4))])
    module = nn.Linear(4, 3)
    module.weight = quantized(module.weight)
    unit = LayerUnit(module, module.modules(), "a layer", Precision(module, torch.bfloat16))
    assert unit.owners == [0, 0, 0, 1] and unit.part_numbers == [range(3), range(3, 4)]
    # With cmp, ordinary weights travel in 16 bits, and the parts of a quantized one as they are.
    assert unit.dtypes == [torch.int8, torch.float16, torch.float32, torch.bfloat16]
    assert [piece.dtype for piece in unit.layout.pieces] == unit.dtypes and unit.trained == [1]
    versions = unit.versions()
    unit.parts[1].mul_(2)
    assert unit.versions() != versions, "writes to a part are seen"


class Int8Params(nn.Parameter):
    """A quantized class without an adapter."""


class Untrainable(ToyInt8):
    """Its library has no backward."""

    def dequantized(self) -> torch.Tensor:
        raise NotImplementedError("no kernel")


def _trained(linear: nn.Linear) -> None:
    linear.weight.requires_grad_(True)


def _unknown(linear: nn.Linear) -> None:
    linear.weight = Int8Params(torch.zeros(16, 24, dtype=torch.int8), requires_grad=False)


def _no_kernel(linear: nn.Linear) -> None:
    parts = [getattr(linear.weight, name) for name in ToyInt8.PARTS]
    linear.weight = nn.Parameter(Untrainable(*parts, shape=torch.Size([16, 24]), dtype=torch.float32), False)


REFUSED = [
    (_trained, r"must be frozen \(got bert.encoder.layer.1.output.dense.weight, a ToyInt8"),
    (_unknown, r"\(got bert.encoder.layer.1.output.dense.weight, a Int8Params\)"),
    (_no_kernel, r"got NotImplementedError: .*, a Linear with a Unt"),
]


def test_what_cannot_be_trained_with_is_refused_by_name():
    for change, names in REFUSED:
        model = quantize_linears(tiny_bert())
        change(model.bert.encoder.layer[1].output.dense)
        kinds = [type(p) for p in model.parameters()]
        with pytest.raises(ValueError, match=names):
            attach_l2l(model, L2LConfig(device="cpu"))
        assert [type(p) for p in model.parameters()] == kinds


def test_weights_that_a_model_keeps_elsewhere_are_refused_unless_their_file_alone_was_quantized():
    """A model loaded from GGUF says that it is quantized, and has ordinary parameters."""
    model = tiny_bert()
    model.is_quantized = True
    with pytest.raises(ValueError, match="got none in a model quantized with an unknown"):
        attach_l2l(model, L2LConfig(device="cpu"))
    model.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method="gguf"))
    refuse_quantized(model)
    model.hf_quantizer.quantization_config.quant_method = "awq"
    with pytest.raises(ValueError, match="got none in a model quantized with awq"):
        refuse_quantized(model)
