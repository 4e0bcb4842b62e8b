"""Layers that compute with more than their arguments, weights and torch's generators: the recompute finds it again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from hf_l2l import L2LConfig, attach_l2l
from impure_layers import CHANGING, COMPUTING_WEIGHTS, DRAWING, ROWS, WIDTH, Block, Drops, made

MODES = ({"eps_update": "serial"}, {"eps_update": "deferred", "stash": "host"}, {"eps_update": "eager"})


def trained(net: nn.Module, options: dict[str, Any] | None, between: Callable[[Any], None] | None = None) -> Any:
    """Losses, weights and buffers of three steps, plain or, with `options`, layer to layer."""
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.05)
    if options is not None:
        optimizer = attach_l2l(net, L2LConfig(**options)).wrap(optimizer)
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    x = torch.randn(ROWS, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(3):
        net.train()
        loss = net(x)
        if between is not None:
            between(net)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    drawn = random.random(), numpy.random.rand()
    return losses, {name: value.detach().clone() for name, value in net.state_dict().items()}, drawn


def assert_same(found: Any, expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert found[2] == expected[2], "what the program draws next"


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode["eps_update"])
@pytest.mark.parametrize("kind", [*DRAWING, *CHANGING, *COMPUTING_WEIGHTS], ids=lambda kind: kind.__name__)
def test_the_whole_batch_trains_as_plain_torch(kind, mode, device):
    assert_same(trained(made(kind), {"device": device, **mode}), trained(made(kind), None))


@pytest.mark.filterwarnings("ignore:ubatch_size=2 has no effect")
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("kind", CHANGING, ids=lambda kind: kind.__name__)
def test_layers_that_change_with_each_call_run_whole(kind, device):
    assert_same(trained(made(kind), {"device": device, "ubatch_size": 2}), trained(made(kind), None))


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("kind", DRAWING, ids=lambda kind: kind.__name__)
def test_ubatches_draw_in_the_recompute_what_they_drew(kind, device):
    """As layers that keep their graphs, and recompute nothing."""
    options = {"device": device, "ubatch_size": 2}
    assert_same(trained(made(kind), options), trained(made(kind), {**options, "kept_graphs": 3}))


def evaluates(net: Any) -> None:
    net.eval()


def runs_in_evaluation(net: Any) -> None:
    net.eval()
    with torch.no_grad():
        net(torch.ones(2, 5, WIDTH))


def changes_a_number(net: Any) -> None:
    for layer in net.layers:
        layer.factor += 1.0


def adds_and_removes(net: Any) -> None:
    for layer in net.layers:
        layer.name = "new"


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("options", [{}, {"ubatch_size": 2}, {"eps_update": "deferred"}], ids=str)
@pytest.mark.parametrize(
    ("kind", "between"),
    [(Drops, evaluates), (Drops, runs_in_evaluation), (Block, changes_a_number), (Block, adds_and_removes)],
    ids=lambda each: each.__name__,
)
def test_what_the_program_changes_before_the_backward(kind, between, options, device):
    """As layers that keep their graphs; and for the whole batch on the CPU, as plain torch."""
    net, other, options = made(kind), made(kind), {"device": device, **options}
    found = trained(net, options, between)
    assert_same(found, trained(other, {**options, "kept_graphs": 3}, between))
    if device == "cpu" and "ubatch_size" not in options:
        assert_same(found, trained(made(kind), None, between))
    assert [layer.training for layer in net.layers] == [layer.training for layer in other.layers]
    assert [layer.factor for layer in net.layers] == [layer.factor for layer in other.layers]


def changes_outputs(net: Any, factor: float) -> list[Any]:
    return [layer.a.register_forward_hook(lambda module, args, out: factor * out) for layer in net.layers]


def changes_arguments(net: Any, factor: float) -> list[Any]:
    """As adapters do that are chosen for one call."""

    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (factor * args[0],), kwargs

    return [layer.a.register_forward_pre_hook(hook, with_kwargs=True) for layer in net.layers]


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("options", [{}, {"ubatch_size": 2, "stash": "host"}, {"eps_update": "eager"}], ids=str)
@pytest.mark.parametrize("hooks", [changes_outputs, changes_arguments], ids=lambda each: each.__name__)
def test_hooks_of_the_forward_run_in_the_recompute(hooks, options, device):
    """And not those that are there in the backward."""

    def run(options: dict[str, Any] | None) -> Any:
        net, factors = made(Block), iter([3.0, 0.5, 1.0])
        handles = hooks(net, 2.0)

        def between(net: Any) -> None:
            for handle in handles:
                handle.remove()
            handles[:] = hooks(net, next(factors))

        return trained(net, options, between)

    assert_same(run({"device": device, **options}), run(None))
