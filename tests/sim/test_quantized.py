"""Quantized weights travel as they are packed: what is page-locked, uploaded and downloaded."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.runtime.flat_memory import Layout
from hf_l2l.runtime.tensors import parts_of
from hf_l2l.testing import Costs, page_lock_limit, page_locked_bytes, virtual_clock
from models import attached, batch_for, gradients, relative_error, train_once
from toy_quantized import ToyInt8, quantize_linears
from training import tiny_bert


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [{}, {"ubatch_size": 3}, {"stash": "host"}, {"cmp": "bf16"}], ids=str)
def test_gradients_are_those_of_plain_torch(options):
    plain = quantize_linears(tiny_bert(dropout=0.0))
    model = attached(copy.deepcopy(plain), device="sim", **options)
    for seed in range(2):
        for each in (model, plain):
            each.zero_grad()
            train_once(each, batch_for(each, seed=seed))
        assert relative_error(gradients(model), gradients(plain)) < (2e-2 if "cmp" in options else 1e-6)


@pytest.mark.parametrize("cmp", [None, "bf16"])
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


@pytest.mark.parametrize("cmp", [None, "bf16"])
def test_parts_are_page_locked_as_long_as_the_model_is_attached(cmp):
    model = quantize_linears(tiny_bert(dropout=0.0))
    values = model.bert.encoder.layer[0].output.dense.weight.values
    address, content = values.data_ptr(), values.clone()
    eps = attach_l2l(model, L2LConfig(device="sim", cmp=cmp))
    assert page_locked_bytes() > 0 and values.data_ptr() != address and torch.equal(values, content)
    if cmp is None:
        assert all(unit.upload_block is not None for unit in eps.masters.layer_units)
    moved = values.data_ptr()
    train_once(model, batch_for(model))
    assert model.bert.encoder.layer[0].output.dense.weight.values is values and values.data_ptr() == moved
    eps.synchronize()
    detach_l2l(model)
    assert values.data_ptr() != moved and torch.equal(values, content)
    train_once(model, batch_for(model))


@pytest.mark.filterwarnings("ignore:.*could be page-locked")
def test_parts_that_are_not_page_locked_are_uploaded_one_by_one():
    plain = quantize_linears(tiny_bert(dropout=0.0))
    with page_lock_limit(0):
        model = attached(copy.deepcopy(plain), device="sim")
        for each in (model, plain):
            train_once(each, batch_for(each))
        assert relative_error(gradients(model), gradients(plain)) < 1e-6
        detach_l2l(model)
