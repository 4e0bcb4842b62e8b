"""A frozen base of quantized weights, which travel as they are packed, is trained through."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch

from devices import DEVICE
from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.runtime.flat_memory import Layout
from hf_l2l.runtime.tensors import parts_of
from hf_l2l.testing import Costs, page_lock_limit, page_locked_bytes, virtual_clock
from memory_switches import forced_copies
from models import assert_same_bits, attached, batch_for, gradients, llama, relative_error, train_once
from tiers import more, on_sim
from toy_quantized import ToyInt8, quantize_linears
from training import tiny_bert


@pytest.mark.parametrize(
    ("nested", "options"),
    [
        (True, {}),
        (False, {"ubatch_size": 3, "stash": "host"}),
        (True, {"ubatch_size": 3, "cmp": "bf16"}),
        *more((False, {}), (True, {"ubatch_size": 3}), (True, {"stash": "host"})),
    ],
)
def test_gradients_are_those_of_plain_torch(nested, options):
    """On the host, to the bit if the batch is whole."""
    plain = quantize_linears(tiny_bert(dropout=0.0, layers=2), nested=nested)
    model = attached(copy.deepcopy(plain), device=DEVICE, **options)
    for seed in range(2):
        for each in (model, plain):
            each.zero_grad()
            train_once(each, batch_for(each, seed=seed))
        if DEVICE == "cpu" and not options:
            assert_same_bits(gradients(model), gradients(plain))
        assert relative_error(gradients(model), gradients(plain)) < (2e-2 if "cmp" in options else 1e-6)
    assert all((p.grad is not None) == p.requires_grad for p in model.bert.encoder.parameters())


@pytest.mark.parametrize("memory", [nullcontext, forced_copies], ids=["as it is", "copies"])
def test_written_parts_are_uploaded_again(memory):
    plain = quantize_linears(tiny_bert(dropout=0.0, layers=2))
    model = copy.deepcopy(plain)
    with memory():
        attached(model, device=DEVICE)
        for change in (1, -3):
            for each in (model, plain):
                each.zero_grad()
                each.bert.encoder.layer[-1].output.dense.weight.values.add_(change)
                train_once(each, batch_for(each))
            assert relative_error(gradients(model), gradients(plain)) < 1e-6


def test_a_quantized_weight_outside_the_layers():
    plain = llama()
    plain.requires_grad_(False)
    quantize_linears(plain.lm_head)
    for p in plain.model.layers.parameters():
        p.requires_grad_(True)
    model = copy.deepcopy(plain)
    with forced_copies():
        attached(model, device=DEVICE)
        for each in (model, plain):
            train_once(each, batch_for(each))
    assert type(model.lm_head.weight) is ToyInt8
    assert relative_error(gradients(model), gradients(plain)) < 1e-6


def test_the_detached_model_and_its_copies_are_as_before():
    model = quantize_linears(tiny_bert(dropout=0.0, layers=2))
    before = copy.deepcopy(model)
    objects = list(model.parameters())
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
@pytest.mark.parametrize("cmp", [None, *more("bf16")])
def test_packed_bytes_are_uploaded_and_gradients_of_trained_weights_downloaded(cmp):
    layers = 4
    model = quantize_linears(tiny_bert(dropout=0.0, layers=layers))
    eps = attach_l2l(model, L2LConfig(device="sim", cmp=cmp))
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
    units = eps.masters.layer_units
    packed = [part.nbytes for p in units[0].parameters if isinstance(p, ToyInt8) for part in parts_of(p)]
    assert sum(packed) < 0.5 * sum(4 * p.numel() for p in units[0].parameters if isinstance(p, ToyInt8))
    flat = units[0].layout.num_bytes  # each piece begins at a multiple of 256 bytes
    assert flat < sum(packed) + 256 * len(units[0].parts) + 4 * sum(p.numel() for p in units[0].parameters) / 2
    # A layer is one copy, and two stay in their slots between the sweeps.
    assert moved["upload"].count(flat) == layers + layers - 2
    sums = Layout([p for p in units[0].parameters if p.requires_grad]).num_bytes
    assert moved["download"].count(sums) == layers
    trained = [p for p in model.parameters() if p.requires_grad]
    shell = [p for p in trained if eps.masters.of(p).layer_number == 0]
    norms = 4 * len(trained)
    assert sum(moved["download"]) == layers * sums + sum(p.nbytes for p in shell) + norms
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


@on_sim
@pytest.mark.parametrize("cmp", [None, "bf16"])
def test_parts_are_page_locked_as_long_as_the_model_is_attached(cmp):
    model = quantize_linears(tiny_bert(dropout=0.0, layers=2))
    values = model.bert.encoder.layer[0].output.dense.weight.values
    address, content = values.data_ptr(), values.clone()
    eps = attach_l2l(model, L2LConfig(device="sim", cmp=cmp))
    assert page_locked_bytes() > 0 and values.data_ptr() != address and torch.equal(values, content)
    moved = values.data_ptr()
    train_once(model, batch_for(model))
    assert model.bert.encoder.layer[0].output.dense.weight.values is values and values.data_ptr() == moved
    eps.synchronize()
    detach_l2l(model)
    assert values.data_ptr() != moved and torch.equal(values, content)
    train_once(model, batch_for(model))


@on_sim
@pytest.mark.filterwarnings("ignore:.*could be page-locked")
def test_parts_that_are_not_page_locked_are_uploaded_one_by_one():
    plain = quantize_linears(tiny_bert(dropout=0.0, layers=2))
    with page_lock_limit(0):
        model = attached(copy.deepcopy(plain), device="sim")
        for each in (model, plain):
            train_once(each, batch_for(each))
        assert relative_error(gradients(model), gradients(plain)) < 1e-6
        detach_l2l(model)
