"""Graphs that layers keep on the CPU, where they save the recompute: the gradients of plain torch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_l2l import L2LConfig, attach_l2l
from models import FAMILIES, TOLERANCE, attached, batch_for, gradients, reference, relative_error, train_once
from update_cases import assert_same, raw_loop, toy


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_gradients_of_plain_torch(family):
    torch.manual_seed(0)
    model = FAMILIES[family]()
    plain, batch = copy.deepcopy(model), batch_for(model)
    loss, expected = reference(plain, batch)
    for rows in (None, 3):
        kept = copy.deepcopy(model)
        attached(kept, device="cpu", ubatch_size=rows, kept_graphs=2)
        torch.testing.assert_close(train_once(kept, batch), loss, rtol=1e-5, atol=1e-6)
        assert relative_error(gradients(kept), expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("options", [{}, {"cmp": "bf16"}, {"stash": "disk"}], ids=str)
def test_they_train_as_recomputed_ones(options):
    same = {"steps": 3, "accumulation": 2, "max_norm": 0.5, **options}
    expected = raw_loop("cpu", "serial", "AdamW", **same)
    for kept in (1, 3):
        assert_same(raw_loop("cpu", "serial", "AdamW", **same, kept_graphs=kept), expected)


def test_a_layer_with_checkpoints_of_its_own():
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda each: self.linear(each).tanh(), x, use_reentrant=False)

    found = []
    for options in (None, {}, {"kept_graphs": 3}):
        model = toy().eval()
        model.blocks[2].down = nn.Sequential(model.blocks[2].down, Inner())
        torch.nn.init.eye_(model.blocks[2].down[1].linear.weight), model.blocks[2].down[1].linear.bias.data.zero_()
        if options is not None:
            attach_l2l(model, L2LConfig(device="cpu", layer_classes=("Block",), **options))
        model(**batch_for(model, masked=False)).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found, strict=True))


def test_gradients_of_inputs_alone():
    """`torch.autograd.grad` for an input of a layer adds none to its weights."""
    model = toy().eval()
    attach_l2l(model, L2LConfig(device="cpu", layer_classes=("Block",), kept_graphs=3))
    x = torch.randn(3, 4, 8, requires_grad=True)
    out = model.blocks[2](x)
    gradient = torch.autograd.grad(out.sum(), x)[0]
    plain = toy().eval().blocks[2]
    y = x.detach().clone().requires_grad_()
    plain(y).sum().backward()
    assert torch.equal(gradient, y.grad)
    assert all(p.grad is None for p in model.parameters())
