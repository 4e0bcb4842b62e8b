"""Layers that compute with more than their arguments, weights and torch's generators: the recompute finds it again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from impure_layers import (
    CHANGING,
    COMPUTING_WEIGHTS,
    DRAWING,
    WIDTH,
    Block,
    Drops,
    Net,
    assert_trained_alike,
    attach,
    batch,
    made,
    trained,
)
from tiers import combinations, cpu_suffices

ALL = (*DRAWING, *CHANGING, *COMPUTING_WEIGHTS)


@pytest.mark.parametrize(
    "options",
    [{"eps_update": "serial"}, {"eps_update": "deferred", "stash": "host"}, {"eps_update": "eager"}],
    ids=lambda options: options["eps_update"],
)
def test_the_whole_batch_trains_as_plain_torch(options):
    assert_trained_alike(trained(Net(*ALL), options), trained(Net(*ALL)))


@cpu_suffices
def test_layers_that_change_with_each_call_run_whole():
    with pytest.warns(UserWarning) as warned:
        found = trained(Net(*CHANGING), {"ubatch_size": 2})
    texts = [str(each.message) for each in warned]
    for kind in CHANGING:
        assert sum(f"ubatch_size=2 has no effect on calls of {kind.__name__}:" in text for text in texts) == 1
    assert_trained_alike(found, trained(Net(*CHANGING)))


def test_ubatches_draw_in_the_recompute_what_they_drew():
    """As layers that keep their graphs, and recompute nothing."""
    options = {"ubatch_size": 2}
    assert_trained_alike(trained(Net(*DRAWING), options), trained(Net(*DRAWING), {**options, "kept_graphs": 3}))


def runs_in_evaluation(net: Any) -> None:
    net.eval()
    with torch.no_grad():
        net(torch.ones(2, 5, WIDTH))


def changes_attributes(net: Any) -> None:
    for layer in net.layers:
        layer.factor += 1.0
        layer.name = "new"


@cpu_suffices
@pytest.mark.parametrize(
    ("options", "between"),
    combinations(
        [{"eps_update": "deferred"}, {"ubatch_size": 2}], [runs_in_evaluation, changes_attributes], together=1
    ),
)
def test_what_the_program_changes_before_the_backward(options, between, device):
    """As layers that keep their graphs; and for the whole batch on the CPU, as plain torch."""
    nets = [Net(Drops, Block, Drops) for _ in range(3)]
    found = trained(nets[0], options, between=between)
    kept = trained(nets[1], {**options, "kept_graphs": 3}, between=between)
    assert_trained_alike(found, kept)
    if device == "cpu" and "ubatch_size" not in options:
        assert_trained_alike(found, trained(nets[2], between=between))
    for attribute in ("training", "factor"):
        ours, theirs = ([getattr(layer, attribute) for layer in net.layers] for net in nets[:2])
        assert ours == theirs


class HasParts(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((WIDTH,), 2.0))
        self.part = nn.ReLU()

    def scale(self, h: torch.Tensor) -> Any:
        return self.mean * self.part(h)


def writes_to_a_buffer(net: Any) -> None:
    for layer in net.layers:
        layer.mean.mul_(3.0)


def replaces_a_part(net: Any) -> None:
    for layer in net.layers:
        layer.part = nn.Tanh()


@pytest.mark.parametrize(
    ("change", "match"),
    [(writes_to_a_buffer, r"HasParts\.mean was changed in place"), (replaces_a_part, "the same submodules")],
)
def test_buffers_and_parts_that_change_before_the_backward_are_refused_in_each_step(change, match):
    net = made(HasParts)
    attach(net)
    net(batch()).backward()
    loss = net(batch())
    change(net)
    with pytest.raises(RuntimeError, match=match):
        loss.backward()


def test_a_buffer_that_was_replaced_is_that_of_the_forward_in_the_recompute():
    plain = made(HasParts)
    ours = copy.deepcopy(plain)
    attach(ours)
    for net in (plain, ours):
        for _ in range(2):
            net.zero_grad()
            loss = net(batch())
            for layer in net.layers:
                layer.mean = 3 * layer.mean
            now = net.layers[0].mean
            loss.backward()
            assert net.layers[0].mean is now
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)
