"""A frozen base of quantized weights is trained through: gradients are those of plain torch."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch

from hf_l2l import detach_l2l
from hf_l2l.runtime.tensors import parts_of
from memory_switches import forced_copies
from models import assert_same_bits, attached, batch_for, gradients, llama, relative_error, train_once
from toy_quantized import ToyInt8, quantize_linears
from training import tiny_bert

MEMORY = pytest.mark.parametrize("memory", [nullcontext, forced_copies], ids=["views", "copies"])


@pytest.mark.one_in(2)
@MEMORY
@pytest.mark.parametrize("nested", [False, True])
def test_gradients_have_the_bits_of_plain_torch(nested, memory):
    plain = quantize_linears(tiny_bert(dropout=0.0), nested=nested)
    model = copy.deepcopy(plain)
    with memory():
        attached(model, device="cpu")
        for seed in range(3):
            losses = [train_once(each, batch_for(each, seed=seed)) for each in (model, plain)]
            assert torch.equal(*losses)
            assert_same_bits(gradients(model), gradients(plain))
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        assert all((p.grad is not None) == p.requires_grad for p in plain.bert.encoder.parameters())


@pytest.mark.one_in(2)
@MEMORY
@pytest.mark.parametrize("cmp", [None, "bf16"])
def test_micro_batches_differ_by_rounding(cmp, memory):
    model = quantize_linears(tiny_bert(dropout=0.0))
    plain = copy.deepcopy(model)
    train_once(plain, batch_for(plain))
    with memory():
        attached(model, device="cpu", ubatch_size=3, cmp=cmp)
        train_once(model, batch_for(model))
    assert relative_error(gradients(model), gradients(plain)) < (1e-6 if cmp is None else 2e-2)


@MEMORY
def test_written_parts_are_uploaded_again(memory):
    plain = quantize_linears(tiny_bert(dropout=0.0))
    model = copy.deepcopy(plain)
    with memory():
        attached(model, device="cpu")
        for change in (1, -3):
            for each in (model, plain):
                each.zero_grad()
                each.bert.encoder.layer[-1].output.dense.weight.values.add_(change)
                train_once(each, batch_for(each))
            assert_same_bits(gradients(model), gradients(plain))


def test_a_quantized_weight_outside_the_layers():
    plain = llama()
    plain.requires_grad_(False)
    quantize_linears(plain.lm_head)
    for p in plain.model.layers.parameters():
        p.requires_grad_(True)
    model = copy.deepcopy(plain)
    with forced_copies():
        attached(model, device="cpu")
        for each in (model, plain):
            train_once(each, batch_for(each))
    assert type(model.lm_head.weight) is ToyInt8
    assert_same_bits(gradients(model), gradients(plain))


def test_the_detached_model_and_its_copies_are_as_before():
    model = quantize_linears(tiny_bert(dropout=0.0))
    before = copy.deepcopy(model)
    objects = list(model.parameters())
    attached(model, device="cpu")
    train_once(model, batch_for(model))
    copied = copy.deepcopy(model)
    detach_l2l(model)
    assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
    for each in (model, copied):
        for p, own in zip(each.parameters(), before.parameters(), strict=True):
            assert type(p) is type(own)
            assert all(torch.equal(a, b) for a, b in zip(parts_of(p), parts_of(own), strict=True))
        assert list(each.state_dict()) == list(before.state_dict())
