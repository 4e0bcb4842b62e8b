"""Tensors whose values are still to come, and in which order those of parameters come."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from hf_l2l.compat import without_interception
from hf_l2l.eps import masters as masters_module
from hf_l2l.eps.masters import Master, Masters
from hf_l2l.eps.pending import Pending, hold, let_go, pending_of, settle
from hf_l2l.model.precision import Precision


class Counting(Pending):
    def __init__(self, *, lets_go: bool = False) -> None:
        self.values = self.grads = 0
        self.lets_go = lets_go

    def before_values(self, tensor: torch.Tensor) -> None:
        self.values += 1
        if self.lets_go:
            let_go(tensor, self)

    def before_grad(self, tensor: torch.Tensor) -> None:
        self.grads += 1


@pytest.fixture(params=[nn.Parameter, torch.Tensor], ids=["parameter", "tensor"])
def kind(request):
    return request.param


def made(kind: type[torch.Tensor]) -> torch.Tensor:
    values = torch.arange(6.0).reshape(2, 3)
    return nn.Parameter(values) if kind is nn.Parameter else values


USES = {
    "arithmetic": lambda t: t + 1,
    "as second argument": lambda t: torch.ones(2, 3).add(t),
    "in a list": lambda t: torch.cat([torch.ones(2, 3), t]),
    "in place": lambda t: t.detach().mul_(2),
    "view": lambda t: t.view(6),
    "index": lambda t: t[0],
    "item": lambda t: t[0, 0].item(),
    "numpy": lambda t: t.detach().numpy(),
    "to": lambda t: t.to(torch.float64),
    "data": lambda t: t.data,
    "text": repr,
    "deepcopy": copy.deepcopy,
    "save": lambda t: torch.save(t, io.BytesIO()),
    "copy": lambda t: torch.empty(2, 3).copy_(t.detach()),
    "address": lambda t: t.data_ptr(),
    "module": lambda t: nn.functional.linear(torch.ones(1, 3), t),
}

NO_USES = {
    "shape": lambda t: (t.shape, t.size(), t.dim(), t.numel(), len(t), t.stride()),
    "kind": lambda t: (t.dtype, t.device, t.layout, t.is_floating_point(), t.is_leaf, t.itemsize),
    "requires_grad": lambda t: t.requires_grad,
    "hash": hash,
    "class": lambda t: isinstance(t, torch.Tensor),
}


def test_a_use_is_announced(kind):
    for name, use in USES.items():
        tensor, pending = made(kind), Counting(lets_go=True)
        hold(tensor, pending)
        assert isinstance(tensor, kind)
        use(tensor)
        assert pending.values == 1 and pending.grads == 0, name
        assert type(tensor) is kind and pending_of(tensor) is None, "ordinary again"


def test_what_reads_no_values_is_not(kind):
    tensor, pending = made(kind), Counting()
    hold(tensor, pending)
    for name, read in NO_USES.items():
        read(tensor)
        assert pending.values == pending.grads == 0, name
    assert pending_of(tensor) is pending
    with without_interception():
        tensor.sum()
    assert pending.values == 0
    settle(tensor)
    assert pending.values == 1


def test_the_gradient_is_announced_by_itself():
    p, pending = nn.Parameter(torch.ones(3)), Counting()
    hold(p, pending)
    assert p.grad is None
    p.grad = torch.ones(3)
    del p.grad
    assert (pending.grads, pending.values) == (3, 0)


def test_only_its_own_is_let_go_of():
    tensor, first, second = made(nn.Parameter), Counting(), Counting()
    hold(tensor, first)
    hold(tensor, second)
    let_go(tensor, first)
    assert pending_of(tensor) is second
    let_go(tensor)
    assert pending_of(tensor) is None


# ---- updates that are pending


def test_other_threads_wait_for_an_update_until_its_parameters_are_ordinary(monkeypatch):
    parameter = nn.Parameter(torch.zeros(2))
    master = Master(parameter, Precision(nn.Linear(1, 1)))
    master.update, seen = object(), []
    hold(parameter, master)
    let_go_all = masters_module.let_go_all

    def watched(pairs):
        let_go_all(pairs)
        seen.append((master.update is not None, pending_of(parameter)))

    monkeypatch.setattr(masters_module, "let_go_all", watched)
    Master.end_update([master])
    assert seen == [(True, None)] and master.update is None and type(parameter) is nn.Parameter


def test_updates_are_in_the_order_in_which_the_next_forward_needs_them():
    """Small parameters of non-layer modules first; a large one before the layer that follows its first use."""
    model = nn.Module()
    model.head = nn.Linear(1024, 1024, bias=False)
    model.bias, model.norm = nn.Parameter(torch.ones(2)), nn.LayerNorm(2)
    model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    model.embed = nn.Embedding(1024, 1024)
    masters = Masters(model, list(model.layers))
    masters.of(model.head.weight).first_use = 2
    assert [(name, [m.name for m in group]) for name, group in masters.parts(masters.all())] == [
        ("non-layer modules", ["bias", "norm.weight", "norm.bias"]),
        ("embed.weight", ["embed.weight"]),
        ("layers.0", ["layers.0.weight", "layers.0.bias"]),
        ("layers.1", ["layers.1.weight", "layers.1.bias"]),
        ("head.weight", ["head.weight"]),
        ("layers.2", ["layers.2.weight", "layers.2.bias"]),
    ]
