"""Forward hooks inside layers do what they do in plain torch, also in the recompute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from impure_layers import WIDTH, Block, assert_trained_alike, attach, batch, made, trained
from tiers import cpu_suffices

OPTIONS: list[dict[str, Any]] = [{}, {"ubatch_size": 2, "stash": "host"}, {"eps_update": "eager"}]
pytestmark = pytest.mark.filterwarnings("ignore:ubatch_size=2 has no effect")


def writes_in_place(layer: Any) -> None:
    layer.a.register_forward_hook(lambda module, args, out: (out.mul_(0.5), None)[1])


def adds_an_adapter(layer: Any) -> None:
    """Whose weights are in the layer."""
    layer.a.adapter = nn.Linear(WIDTH, WIDTH)
    nn.init.eye_(layer.a.adapter.weight)
    nn.init.zeros_(layer.a.adapter.bias)
    layer.a.register_forward_hook(lambda module, args, out: out + module.adapter(args[0]))


def sets_what_the_layer_reads(layer: Any) -> None:
    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        layer.factor = 1.0 + out.shape[-1] / 10

    layer.a.register_forward_hook(hook)


def pushes_and_pops(layer: Any, under_way: Any = []) -> None:  # noqa: B006
    """As timers and ranges of profilers."""

    def pop(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        assert under_way.pop() is module

    layer.a.register_forward_pre_hook(lambda module, args: under_way.append(module))
    layer.a.register_forward_hook(pop)


def changes_arguments(layer: Any) -> None:
    layer.a.register_forward_pre_hook(lambda module, args, kwargs: ((3 * args[0],), kwargs), with_kwargs=True)


def changes_gradients(layer: Any) -> None:
    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda gradient: 2 * gradient)

    layer.b.register_forward_hook(hook)


def removes_itself(layer: Any) -> None:
    """Beside one that stays."""
    handles: list[Any] = []
    handles.append(layer.a.register_forward_hook(lambda module, args, out: handles.pop().remove()))
    layer.a.register_forward_hook(lambda module, args, out: 1.1 * out)


# Torch crashes if a hook writes to a view, and another one asks for its gradient: these are two groups.
HOOKS = (
    (changes_gradients, adds_an_adapter, pushes_and_pops, removes_itself),
    (writes_in_place, changes_arguments, sets_what_the_layer_reads),
)


@pytest.mark.parametrize(
    ("hooks", "options"),
    [(HOOKS[0], OPTIONS[1]), (HOOKS[1], OPTIONS[0]), (HOOKS[0], OPTIONS[2]), (HOOKS[1], OPTIONS[1])],
)
def test_hooks_do_what_they_do_in_plain_torch(hooks, options):
    plain, ours = made(), made()
    for net in (plain, ours):
        for each in hooks:
            for layer in net.layers:
                each(layer)
    assert_trained_alike(trained(ours, options), trained(plain))


def scales(net: Any, factor: float) -> list[Any]:
    """What goes into modules, and what comes out of them."""

    def of_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (factor * args[0],), kwargs

    handles = [layer.b.register_forward_hook(lambda module, args, out: factor * out) for layer in net.layers]
    return handles + [layer.a.register_forward_pre_hook(of_inputs, with_kwargs=True) for layer in net.layers]


@pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
def test_the_recompute_has_the_hooks_of_the_forward_and_not_those_of_the_backward(options):
    def run(options: dict[str, Any] | None = None) -> Any:
        net, factors = made(), iter([3.0, 0.5])
        handles = scales(net, 2.0)

        def between(net: Any) -> None:
            for handle in handles:
                handle.remove()
            handles[:] = scales(net, next(factors))

        return trained(net, options, between=between)

    assert_trained_alike(run(options), run())


class ForOneCall(nn.Module):
    """Puts hooks on its layers that know the batch, for one call, and removes them where that returns."""

    def __init__(self) -> None:
        super().__init__()
        self.net = made()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factors = torch.linspace(1, 2, len(x), device=x.device)[:, None, None]
        layers = self.net.layers
        handles = [each.a.register_forward_pre_hook(lambda module, args: (args[0] * factors,)) for each in layers]
        loss = self.net(x)
        for handle in handles:
            handle.remove()
        return loss


@cpu_suffices
@pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
def test_hooks_for_one_call_that_know_the_batch(options):
    """Also where the call is begun once more, to find out how to split it, and ends with an exception."""
    assert_trained_alike(trained(ForOneCall(), options), trained(ForOneCall()))


@cpu_suffices
def test_a_hook_that_asks_for_a_gradient_has_it():
    """As those do that show what a model has looked at."""
    gradients = []
    for is_plain in (True, False):
        net = made()
        if not is_plain:
            attach(net)
        kept: dict[str, torch.Tensor] = {}

        def hook(module: nn.Module, args: Any, out: torch.Tensor, kept: Any = kept) -> None:
            if out.requires_grad:
                out.retain_grad()
            kept["out"] = out

        net.layers[0].a.register_forward_hook(hook)
        net(batch()).backward()
        gradients.append(kept["out"].grad.cpu())
    torch.testing.assert_close(*gradients)


AUXILIARY: list[torch.Tensor] = []


class LeavesItsLossInAGlobal(Block):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        out = super().forward(h)
        AUXILIARY.append(out.square().mean())
        return out


class LeavesWhatItWasGiven(Block):
    """A sum of its input: no node of it keeps a tensor."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        AUXILIARY.append(h.sum())
        return super().forward(h)


@pytest.mark.parametrize(("kind", "options"), [(LeavesItsLossInAGlobal, {}), (LeavesWhatItWasGiven, OPTIONS[1])])
def test_a_loss_that_a_layer_leaves_elsewhere_is_refused_in_the_first_step(kind, options):
    net = made(kind)
    attach(net, **options)
    AUXILIARY.clear()
    loss = net(batch())
    with pytest.raises(RuntimeError, match="a backward must go through the outputs of a layer"):
        (loss + sum(AUXILIARY)).backward()
    AUXILIARY.clear()
