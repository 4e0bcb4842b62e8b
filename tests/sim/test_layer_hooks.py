"""Forward hooks inside layers do what they do in plain torch, also in the recompute."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l import L2LConfig, attach_l2l
from impure_layers import ROWS, WIDTH, Block, Net, made

OPTIONS: list[dict[str, Any]] = [{}, {"ubatch_size": 2, "stash": "host"}, {"eps_update": "eager"}]


def returns_another(net: Any) -> None:
    for layer in net.layers:
        layer.a.register_forward_hook(lambda module, args, out: 2 * out)


def writes_in_place(net: Any) -> None:
    for layer in net.layers:
        layer.a.register_forward_hook(lambda module, args, out: (out.mul_(0.5), None)[1])


def steers(net: Any) -> None:
    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        with torch.no_grad():
            out[:, -1] += 1

    for layer in net.layers:
        layer.a.register_forward_hook(hook)


def adds_an_adapter(net: Any) -> None:
    """Whose weights are in the layer."""
    for layer in net.layers:
        layer.a.adapter = nn.Linear(WIDTH, WIDTH)
        layer.a.register_forward_hook(lambda module, args, out: out + module.adapter(args[0]))


def sets_what_the_layer_reads(net: Any) -> None:
    for layer in net.layers:

        def hook(module: nn.Module, args: Any, out: torch.Tensor, layer: Any = layer) -> None:
            layer.factor = 1.0 + out.shape[-1] / 10

        layer.a.register_forward_hook(hook)


def pushes_and_pops(net: Any) -> None:
    """As timers and ranges of profilers."""
    under_way: list[nn.Module] = []

    def pop(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        assert under_way.pop() is module

    for layer in net.layers:
        layer.a.register_forward_pre_hook(lambda module, args: under_way.append(module))
        layer.a.register_forward_hook(pop)


def changes_arguments(net: Any) -> None:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (3 * args[0],), kwargs

    for layer in net.layers:
        layer.a.register_forward_pre_hook(hook, with_kwargs=True)


def changes_gradients(net: Any) -> None:
    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda gradient: 2 * gradient)

    for layer in net.layers:
        layer.a.register_forward_hook(hook)


def removes_itself(net: Any) -> None:
    """Beside one that stays."""
    for layer in net.layers:

        def hook(module: nn.Module, args: Any, out: torch.Tensor, handles: Any = {}) -> None:  # noqa: B006
            handles.pop(module).remove()

        hook.__defaults__[0][layer.a] = layer.a.register_forward_hook(hook)
        layer.a.register_forward_hook(lambda module, args, out: 2 * out)


HOOKS = (
    returns_another,
    writes_in_place,
    steers,
    adds_an_adapter,
    sets_what_the_layer_reads,
    pushes_and_pops,
    changes_arguments,
    changes_gradients,
    removes_itself,
)


def trained(net: nn.Module, options: dict[str, Any] | None) -> Any:
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.05)
    if options is not None:
        optimizer = attach_l2l(net, L2LConfig(**options)).wrap(optimizer)
    x = torch.randn(ROWS, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(3):
        loss = net(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.filterwarnings("ignore:ubatch_size=2 has no effect")
@pytest.mark.parametrize("hooks", HOOKS, ids=lambda each: each.__name__)
def test_hooks_do_what_they_do_in_plain_torch(hooks, options, device):
    plain = made(Block)
    hooks(plain)
    ours = made(Block)
    hooks(ours)
    ours.load_state_dict(plain.state_dict())
    expected = trained(plain, None)
    found = trained(ours, {"device": device, **options})
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_hook_that_was_removed_does_not_collect_again(device):
    net = made(Block)
    attach_l2l(net, L2LConfig(device=device))
    features: list[Any] = []
    handles = [layer.a.register_forward_hook(lambda module, args, out: features.append(out)) for layer in net.layers]
    loss = net(torch.ones(ROWS, 5, WIDTH))
    for handle in handles:
        handle.remove()
    loss.backward()
    assert len(features) == 3


class ForOneCall(nn.Module):
    """Puts hooks on its layers that know the batch, for one call, and removes them where that returns."""

    def __init__(self) -> None:
        super().__init__()
        self.net = made(Block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factors = torch.linspace(1, 2, len(x), device=x.device)[:, None, None]
        layers = self.net.layers
        handles = [each.a.register_forward_pre_hook(lambda module, args: (args[0] * factors,)) for each in layers]
        loss = self.net(x)
        for handle in handles:
            handle.remove()
        return loss


@pytest.mark.filterwarnings("ignore:ubatch_size=2 has no effect")
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_hooks_for_one_call_that_know_the_batch(options, device):
    """Also where the call is begun once more, to find out how to split it, and ends with an exception."""
    expected, found = trained(ForOneCall(), None), trained(ForOneCall(), {"device": device, **options})
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-6, msg=name)


def scales(net: Any) -> None:
    for layer in net.layers:
        layer.mean.mul_(3.0)


def replaces_a_part(net: Any) -> None:
    for layer in net.layers:
        layer.part = nn.Tanh()


def replaces_a_buffer(net: Any) -> None:
    for layer in net.layers:
        layer.mean = 3 * layer.mean


class HasParts(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((WIDTH,), 2.0))
        self.part = nn.ReLU()

    def scale(self, h: torch.Tensor) -> Any:
        return self.mean * self.part(h)


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize(
    ("change", "match"),
    [(scales, r"HasParts\.mean was changed in place"), (replaces_a_part, "the same submodules")],
    ids=lambda each: getattr(each, "__name__", "text"),
)
def test_buffers_and_parts_that_change_before_the_backward_are_refused_in_each_step(change, match, device):
    net = made(HasParts)
    attach_l2l(net, L2LConfig(device=device))
    x = torch.randn(ROWS, 5, WIDTH)
    for _ in range(2):
        net(x).backward()
    loss = net(x)
    change(net)
    with pytest.raises(RuntimeError, match=match):
        loss.backward()


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_buffer_that_was_replaced_is_that_of_the_forward_in_the_recompute(device):
    x = torch.randn(ROWS, 5, WIDTH)
    plain: Net = made(HasParts)
    ours = copy.deepcopy(plain)
    attach_l2l(ours, L2LConfig(device=device))
    for net in (plain, ours):
        for _ in range(2):
            net.zero_grad()
            loss = net(x)
            replaces_a_buffer(net)
            now = net.layers[0].mean
            loss.backward()
            assert net.layers[0].mean is now
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)


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


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("options", [{}, {"ubatch_size": 2, "stash": "host"}], ids=str)
@pytest.mark.parametrize("kind", [LeavesItsLossInAGlobal, LeavesWhatItWasGiven], ids=lambda kind: kind.__name__)
def test_a_loss_that_a_layer_leaves_elsewhere_is_refused_in_the_first_step(kind, options, device):
    net = made(kind)
    attach_l2l(net, L2LConfig(device=device, **options))
    AUXILIARY.clear()
    loss = net(torch.randn(ROWS, 5, WIDTH))
    with pytest.raises(RuntimeError, match="a backward must go through the outputs of a layer"):
        (loss + sum(AUXILIARY)).backward()
    AUXILIARY.clear()
