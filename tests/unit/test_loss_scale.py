"""The loss scale: how it changes with the vote, what a checkpoint keeps of it, and how gradients are unscaled."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_l2l import EagerParamServer
from hf_l2l.optim.loss_scale import LossScale, with_gradients_times


def test_it_grows_after_steps_in_a_row_and_shrinks_where_one_is_skipped():
    scale = LossScale(initial=16.0, growth=2.0, backoff=0.25, interval=2)
    assert [(scale.vote(finite=finite), scale.value) for finite in (True, True, True, False, True, True)] == [
        (True, 16.0),
        (True, 32.0),
        (True, 32.0),
        (False, 8.0),
        (True, 8.0),
        (True, 16.0),
    ]
    assert scale.skipped == 1 and scale.get_scale() == 16.0 and scale.is_enabled()
    for _ in range(300):
        scale.vote(finite=False)
    assert 0.0 < scale.value < 1e-29, "nothing can be divided by 0"
    fixed = LossScale(initial=1.0, growth=1.0, backoff=1.0)
    assert not fixed.is_dynamic and not fixed.vote(finite=False) and (fixed.value, fixed.skipped) == (1.0, 1)


def test_the_policy_is_that_of_torch_and_so_is_the_state():
    """Which a run may be given that scales by a number of its own, or by nothing."""
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=2)
    ours = LossScale(8.0, 3.0, 0.25, 2)
    p = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], lr=0.1)
    for finite in (True, True, False, True, False, False, True, True, True, True, True):
        theirs.scale(p.sum() * (1.0 if finite else float("inf"))).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        assert ours.vote(finite=finite) is finite and ours.value == theirs.get_scale()
    state = ours.state_dict()
    assert ours.skipped == 3
    other, fixed = LossScale(8.0, 3.0, 0.25, 2), LossScale(1.0, growth=1.0, backoff=1.0)
    other.load_state_dict(state)
    assert other.state_dict() == state and (other.value, other.skipped) == (theirs.get_scale(), 3)
    other.load_state_dict(theirs.state_dict())
    assert (other.value, other.steps, other.skipped) == (theirs.get_scale(), ours.steps, 0)
    other.vote(finite=False)
    theirs.load_state_dict(other.state_dict())
    assert theirs.get_scale() == other.value
    fixed.load_state_dict(state)
    assert (fixed.value, fixed.skipped, fixed.is_dynamic) == (1.0, 3, False)


def test_a_step_that_may_not_be_made_is_one_that_no_patch_sees():
    scale, seen = LossScale(), []
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=1.0)
    step = optimizer.step
    optimizer.step = lambda *args: (seen.append(True), step(*args))  # as Accelerate does it
    for may in (True, False):
        scale.may_step = lambda may=may: may
        p.grad = torch.ones(2) if may else None
        scale.step(optimizer)
        assert len(seen) == 1 and p.tolist() == [0.0, 0.0]
    assert scale.scale(p) is p


def test_gradients_of_outputs_are_multiplied_by_the_factor_of_the_backward():
    x, factor = torch.ones(2, requires_grad=True), [2.0]
    found = with_gradients_times(lambda: factor[0], {"loss": x.sum(), "ids": torch.ones(2, dtype=torch.long)})
    factor[0] = 8.0
    found["loss"].backward()
    assert x.grad.tolist() == [8.0, 8.0] and not found["ids"].requires_grad
    with torch.no_grad():
        assert with_gradients_times(lambda: 2.0, x) is x


class Products(TorchDispatchMode):
    """Counts products in place."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mul_, torch.ops.aten._foreach_mul_):
            self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_the_gradients_of_a_call_are_unscaled_by_one_kernel():
    module = nn.Module()
    module.table, module.wide = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3).double()
    module.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    eps = EagerParamServer(module, torch.device("cpu"), loss_scale=LossScale(initial=1000.0))
    optimizer = eps.wrap(torch.optim.SGD(module.parameters(), lr=0.1))
    scaled = {p: 1000 * torch.randn_like(p) for p in module.parameters()}
    scaled[module.table.weight] = scaled[module.table.weight].to_sparse(1)
    expected = {p: gradient * (1 / 1000) for p, gradient in scaled.items()}
    with Products() as products:
        eps.receive([(eps.masters.of(p), gradient.clone()) for p, gradient in scaled.items()])
        eps.receive([])
    assert products.found == ["_foreach_mul_"]
    for p, gradient in expected.items():
        assert p.grad.dtype == p.dtype and p.grad.is_sparse == (p is module.table.weight)
        assert torch.equal(p.grad.to_dense(), gradient.to_dense())
    assert optimizer is not None
