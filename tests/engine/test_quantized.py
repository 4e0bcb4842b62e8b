"""A frozen base of quantized weights, which travel as they are packed, is trained through."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from devices import DEVICE
from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.runtime.flat_memory import Layout
from hf_l2l.runtime.tensors import parts_of
from hf_l2l.testing import Costs, page_lock_limit, page_locked_bytes, virtual_clock
from memory_switches import forced_copies
from models import assert_same_bits, attached, batch_for, gradients, llama, relative_error, train_once
from tiers import on_sim
from toy_quantized import ToyInt8, quantize_linears
from training import tiny_bert


def int8_bert(layers: int = 2, *, nested: bool = True) -> nn.Module:
    return quantize_linears(tiny_bert(dropout=0.0, layers=layers), nested=nested)


def compare(model: nn.Module, plain: nn.Module, seed: int = 1, tolerance: float = 1e-6) -> None:
    for each in (model, plain):
        each.zero_grad()
        train_once(each, batch_for(each, seed=seed))
    assert relative_error(gradients(model), gradients(plain)) < tolerance


@pytest.mark.parametrize(
    ("nested", "options"),
    [
        (True, {}),
        (False, {"ubatch_size": 3, "stash": "host"}),
        (True, {"ubatch_size": 3, "cmp": "bf16"}),
    ],
)
def test_gradients_are_those_of_plain_torch(nested, options):
    """On the host, to the bit if the batch is whole."""
    plain = int8_bert(nested=nested)
    model = attached(copy.deepcopy(plain), device=DEVICE, **options)
    for seed in range(2):
        compare(model, plain, seed, tolerance=2e-2 if "cmp" in options else 1e-6)
        if DEVICE == "cpu" and not options:
            assert_same_bits(gradients(model), gradients(plain))
    assert all((p.grad is not None) == p.requires_grad for p in model.bert.encoder.parameters())


def test_written_parts_are_uploaded_again():
    plain = int8_bert()
    model = copy.deepcopy(plain)
    with forced_copies():
        attached(model, device=DEVICE)
        for change in (1, -3):
            for each in (model, plain):
                each.bert.encoder.layer[-1].output.dense.weight.values.add_(change)
            compare(model, plain)


def test_a_quantized_weight_outside_the_layers():
    plain = llama()
    plain.requires_grad_(False)
    quantize_linears(plain.lm_head)
    plain.model.layers.requires_grad_(True)
    model = copy.deepcopy(plain)
    with forced_copies():
        attached(model, device=DEVICE)
        compare(model, plain)
    assert type(model.lm_head.weight) is ToyInt8


def test_the_detached_model_and_its_copies_are_as_before():
    model = int8_bert()
    before, objects = copy.deepcopy(model), list(model.parameters())
    attached(model, device=DEVICE)
    train_once(model, batch_for(model))
    copied = copy.deepcopy(model)
    detach_l2l(model)
    assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
    for each in (model, copied):
        for p, own in zip(each.parameters(), before.parameters(), strict=True):
            assert type(p) is type(own)
            assert all(torch.equal(a, b) for a, b in zip(parts_of(p), parts_of(own), strict=True))
        assert list(each.state_dict()) == list(before.state_dict())


@on_sim
def test_packed_bytes_are_uploaded_and_gradients_of_trained_weights_downloaded():
    layers = 4
    model = int8_bert(layers)
    eps = attach_l2l(model, L2LConfig(device="sim"))
    optimizer = eps.wrap(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    for _ in range(2):
        train_once(model, batch_for(model))
        optimizer.step()
    eps.synchronize()
    with virtual_clock(Costs(link_bytes_per_s=1.0, flop_per_s=1e9, host_bytes_per_s=1e9)) as clock:
        train_once(model, batch_for(model))
    moved = {"upload": [], "download": []}
    for task in clock.tasks:
        if task.lane in moved and task.stream != "the default stream":
            moved[task.lane].append(round(task.end - task.start))
    unit = eps.masters.layer_units[0]
    packed = [part.nbytes for p in unit.parameters if isinstance(p, ToyInt8) for part in parts_of(p)]
    assert sum(packed) < 0.5 * sum(4 * p.numel() for p in unit.parameters if isinstance(p, ToyInt8))
    # A layer is one copy, whose pieces begin at a multiple of 256 bytes, and two stay in their slots between sweeps.
    assert unit.layout.num_bytes < sum(packed) + 256 * len(unit.parts) + 2 * sum(p.numel() for p in unit.parameters)
    assert moved["upload"].count(unit.layout.num_bytes) == layers + layers - 2
    sums = Layout([p for p in unit.parameters if p.requires_grad]).num_bytes
    trained = [p for p in model.parameters() if p.requires_grad]
    shell = sum(p.nbytes for p in trained if eps.masters.of(p).layer_number == 0)
    assert moved["download"].count(sums) == layers
    assert sum(moved["download"]) == layers * sums + shell + 4 * len(trained)  # and their norms


@on_sim
def test_parts_are_page_locked_as_long_as_the_model_is_attached():
    model = int8_bert()
    values = model.bert.encoder.layer[0].output.dense.weight.values
    address, content = values.data_ptr(), values.clone()
    attached(model, device="sim")
    moved = values.data_ptr()
    assert page_locked_bytes() > 0 and moved != address and torch.equal(values, content)
    train_once(model, batch_for(model))
    assert model.bert.encoder.layer[0].output.dense.weight.values is values and values.data_ptr() == moved
    detach_l2l(model)
    assert values.data_ptr() != moved and torch.equal(values, content)


@on_sim
@pytest.mark.filterwarnings("ignore:.*could be page-locked")
def test_parts_that_are_not_page_locked_are_uploaded_one_by_one():
    plain = int8_bert()
    with page_lock_limit(0):
        model = attached(copy.deepcopy(plain), device="sim")
        compare(model, plain)
        detach_l2l(model)
