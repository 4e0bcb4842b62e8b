"""Eager updates know when a master has all the gradients of a step, whatever the loop does."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_l2l import L2LConfig, attach_l2l
from models import batch_for
from update_cases import Block, Run, assert_same, result, toy


class Backward(NamedTuple):
    """One micro-step."""

    forwards: int
    """Whose losses are summed before the one backward."""
    thrown_away: int
    """Forwards without a backward."""


backwards = st.builds(Backward, forwards=st.integers(1, 3), thrown_away=st.integers(0, 2))
programs = st.lists(st.lists(backwards, min_size=1, max_size=3), min_size=1, max_size=3)


class Repeated(nn.Module):
    """Calls the same layers again and again, as ALBERT does."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.inner, self.times = toy(), times
        self.inner.blocks = nn.ModuleList(Block(8) for _ in range(2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.inner.embed(input_ids)
        for _ in range(self.times):
            for block in self.inner.blocks:
                x = block(x)
        return nn.functional.cross_entropy(self.inner.head(x).flatten(0, 1), labels.flatten())


def trained(mode: str, program: list[list[Backward]], *, times: int = 1) -> Run:
    torch.manual_seed(0)
    model = Repeated(times)
    eps = attach_l2l(model, L2LConfig(device="cpu", eps_update=mode, layer_classes=("Block",)))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    batch = batch_for(model, masked=False)
    norms = []
    for step in program:
        for turn, backward in enumerate(step):
            with eps.accumulate() if turn < len(step) - 1 else nullcontext():
                losses = [model(**batch) for _ in range(backward.forwards + backward.thrown_away)]
                torch.stack(losses[: backward.forwards]).sum().backward()
        norms.append(eps.grad_norm().item())
        optimizer.step()
        model.zero_grad()
    return result(model, optimizer, norms)


@settings(max_examples=10, deadline=None)
@given(program=programs, times=st.integers(1, 3))
def test_eager_updates_have_the_bits_of_serial_ones(program, times):
    assert_same(trained("eager", program, times=times), trained("serial", program, times=times))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(program=programs, times=st.integers(1, 3))
def test_eager_updates_have_the_bits_of_serial_ones_in_more_programs(program, times):
    assert_same(trained("eager", program, times=times), trained("serial", program, times=times))


def test_all_is_updated_in_the_backward_where_nothing_is_thrown_away():
    model = Repeated(3)
    eps = attach_l2l(model, L2LConfig(device="cpu", eps_update="eager", layer_classes=("Block",)))
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    before = [p.detach().clone() for p in model.parameters()]
    batch = batch_for(model, masked=False)
    torch.stack([model(**batch), model(**batch)]).sum().backward()
    eps.synchronize()
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    after = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), after, strict=True))


def test_a_graph_that_is_thrown_away_leaves_the_update_to_the_step():
    model = Repeated(1)
    eps = attach_l2l(model, L2LConfig(device="cpu", eps_update="eager", layer_classes=("Block",)))
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    masters = list(model.inner.blocks.parameters())
    before = [p.detach().clone() for p in masters]
    batch = batch_for(model, masked=False)
    model(**batch)
    model(**batch).backward()
    assert all(torch.equal(p, old) for p, old in zip(masters, before, strict=True))
    optimizer.step()
    assert all(not torch.equal(p, old) for p, old in zip(masters, before, strict=True))


def test_a_second_backward_that_was_not_announced_is_refused():
    model = Repeated(1)
    eps = attach_l2l(model, L2LConfig(device="cpu", eps_update="eager", layer_classes=("Block",)))
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    batch = batch_for(model, masked=False)
    model(**batch).backward()
    with pytest.raises(RuntimeError, match=r"in `with eps\.accumulate\(\):`, or use eps_update='deferred'"):
        model(**batch).backward()
    assert optimizer.param_groups  # the last reference
