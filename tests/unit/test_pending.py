"""Tensors whose values are still to come."""

from __future__ import annotations

import copy
import io
import threading

import pytest
import torch
from torch import nn

from hf_l2l.compat import without_interception
from hf_l2l.eps.pending import Pending, can_hold, hold, let_go, pending_of, settle


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
def tensor(request):
    made = torch.arange(6.0).reshape(2, 3)
    return nn.Parameter(made) if request.param is nn.Parameter else made


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


@pytest.mark.parametrize("use", USES)
def test_a_use_is_announced(tensor, use):
    pending = Counting(lets_go=True)
    kind = type(tensor)
    hold(tensor, pending)
    assert isinstance(tensor, kind)
    USES[use](tensor)
    assert pending.values == 1 and pending.grads == 0
    assert type(tensor) is kind and pending_of(tensor) is None, "ordinary again"


@pytest.mark.parametrize("use", NO_USES)
def test_what_reads_no_values_is_not(tensor, use):
    pending = Counting()
    hold(tensor, pending)
    NO_USES[use](tensor)
    assert pending.values == pending.grads == 0
    assert pending_of(tensor) is pending


def test_the_gradient_is_announced_by_itself():
    p, pending = nn.Parameter(torch.ones(3)), Counting()
    hold(p, pending)
    assert p.grad is None
    p.grad = torch.ones(3)
    del p.grad
    assert (pending.grads, pending.values) == (3, 0)


def test_other_threads_are_announced():
    p, pending = nn.Parameter(torch.ones(3)), Counting(lets_go=True)
    hold(p, pending)
    thread = threading.Thread(target=lambda: p.sum())
    thread.start()
    thread.join()
    assert pending.values == 1 and type(p) is nn.Parameter


def test_results_are_ordinary_and_graphs_are_those_of_the_parameter():
    p = nn.Parameter(torch.ones(3))
    hold(p, Counting())
    result = p * 2
    assert type(result) is torch.Tensor
    result.sum().backward()
    let_go(p)
    assert torch.equal(p.grad, torch.full((3,), 2.0))
    copied = copy.deepcopy(p)
    assert type(copied) is nn.Parameter and copied.requires_grad


def test_a_module_with_held_parameters_is_copied_and_saved_as_any():
    module = nn.Linear(2, 2)
    for p in module.parameters():
        hold(p, Counting())
    other = copy.deepcopy(module)
    assert all(type(p) is nn.Parameter and p.requires_grad for p in other.parameters())
    assert dict(module.named_parameters()).keys() == {"weight", "bias"}
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True).keys() == {"weight", "bias"}


def test_without_interception_uses_them_as_they_are(tensor):
    pending = Counting()
    hold(tensor, pending)
    with without_interception():
        tensor.sum()
    assert pending.values == 0
    settle(tensor)
    assert pending.values == 1


def test_only_its_own_is_let_go_of(tensor):
    first, second = Counting(), Counting()
    hold(tensor, first)
    hold(tensor, second)
    let_go(tensor, first)
    assert pending_of(tensor) is second
    let_go(tensor)
    assert pending_of(tensor) is None


def test_other_classes_of_tensors_cannot_be_held():
    class Own(torch.Tensor):
        pass

    assert not can_hold(torch.ones(1).as_subclass(Own))
    assert can_hold(torch.ones(1)) and can_hold(nn.Parameter(torch.ones(1)))
