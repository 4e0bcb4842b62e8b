"""The loss scale: how it changes with the vote, what a checkpoint keeps of it, and how gradients are scaled."""

from __future__ import annotations

import torch
from torch import nn

from hf_l2l.optim.loss_scale import LossScale, with_gradients_times


def test_it_is_never_0_and_may_be_fixed():
    scale = LossScale(initial=16.0, growth=2.0, backoff=0.25, interval=2)
    for _ in range(300):
        scale.vote(finite=False)
    assert 0.0 < scale.value < 1e-29 and scale.get_scale() == scale.value and scale.is_enabled()
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


def test_gradients_of_outputs_are_multiplied_by_the_factor_of_the_backward():
    x, factor = torch.ones(2, requires_grad=True), [2.0]
    found = with_gradients_times(lambda: factor[0], {"loss": x.sum(), "ids": torch.ones(2, dtype=torch.long)})
    factor[0] = 8.0
    found["loss"].backward()
    assert x.grad.tolist() == [8.0, 8.0] and not found["ids"].requires_grad
    with torch.no_grad():
        assert with_gradients_times(lambda: 2.0, x) is x
