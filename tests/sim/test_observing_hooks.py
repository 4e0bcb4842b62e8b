"""Forward hooks inside layers observe what they do in plain torch: whole batches, once, with gradients."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from families import batch_for, bert, gradients, llama
from hf_l2l import L2LConfig, attach_l2l
from impure_layers import ROWS, WIDTH, Block, made

OPTIONS: list[dict[str, Any]] = [
    {},
    {"ubatch_size": 2},
    {"ubatch_size": 3, "stash": "host", "boundary": "host"},
    {"eps_update": "eager", "ubatch_size": 2},
    {"kept_graphs": 1, "kept_weights": 1},
]


def run(model: nn.Module, hooks: Any, options: dict[str, Any] | None, steps: int = 2) -> Any:
    """Losses and gradients of some steps, and what the hooks have counted, plain or layer to layer."""
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if options is not None:
        optimizer = attach_l2l(model, L2LConfig(**options)).wrap(optimizer)
    torch.manual_seed(1)
    x = torch.randn(ROWS, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    losses, counts = [], []
    for _ in range(steps):
        features: list[Any] = []
        handles = hooks(model, features)
        loss = model(x)
        for handle in handles:
            handle.remove()
        counts.append([each.shape for each in features])
        loss = loss + sum(each.to(loss.device).square().mean() for each in features)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, counts, {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(found: Any, expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1] == expected[1]
    for name, value in expected[2].items():
        torch.testing.assert_close(found[2][name], value, rtol=1e-4, atol=1e-6, msg=name)


def outputs(net: Any, features: list[Any]) -> list[Any]:
    return [layer.a.register_forward_hook(lambda module, args, out: features.append(out)) for layer in net.layers]


def inputs_and_keywords(net: Any, features: list[Any]) -> list[Any]:
    def hook(module: nn.Module, args: Any, kwargs: Any, out: torch.Tensor) -> None:
        features.extend([args[0], *kwargs.values(), out + 1])

    return [layer.b.register_forward_hook(hook, with_kwargs=True) for layer in net.layers]


class Keeps:
    """A hook that is an object."""

    def __init__(self, features: list[Any]) -> None:
        self.features = features

    def __call__(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        self.features.append(out)


def objects(net: Any, features: list[Any]) -> list[Any]:
    return [layer.a.register_forward_hook(Keeps(features)) for layer in net.layers]


def partials(net: Any, features: list[Any]) -> list[Any]:
    def keep(into: list[Any], module: nn.Module, args: Any, out: torch.Tensor) -> None:
        into.append(out)

    return [layer.a.register_forward_hook(functools.partial(keep, features)) for layer in net.layers]


def doubles_and_observes(net: Any, features: list[Any]) -> list[Any]:
    """One changes the output, and another one sees the changed one."""
    twice = [layer.a.register_forward_hook(lambda module, args, out: 2 * out) for layer in net.layers]
    return twice + outputs(net, features)


ALL = (outputs, inputs_and_keywords, objects, partials, doubles_and_observes)


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("hooks", ALL, ids=lambda each: each.__name__)
def test_features_have_all_rows_and_gradients(hooks, options, device):
    found = run(made(Block), hooks, {"device": device, **options})
    assert_same(found, run(made(Block), hooks, None))


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_hooks_see_evaluation_as_without_l2l(device):
    """Also of layers that a backward does not reach, and in the middle of training."""
    shapes = {}
    for options in (None, {"device": device, "ubatch_size": 2}):
        net = made(Block)
        if options is not None:
            attach_l2l(net, L2LConfig(**options))
        x = torch.ones(ROWS, 5, WIDTH)
        net(x).backward()
        features: list[Any] = []
        handles = outputs(net, features)
        with torch.no_grad():
            net(x)
        for handle in handles:
            handle.remove()
        shapes[options is None] = [(each.shape, each.requires_grad) for each in features]
    assert shapes[True] == shapes[False]


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("options", [{}, {"ubatch_size": 3}, {"cmp": "bf16"}], ids=str)
@pytest.mark.parametrize("family", [bert, llama], ids=lambda each: each.__name__)
def test_a_distillation_of_real_models(family, options, device):
    """Features of the inner modules of one model are a part of its loss."""
    results = {}
    for with_l2l in (True, False):
        torch.manual_seed(0)
        model = family().train()
        kind = nn.Linear
        inner = [m for name, m in model.named_modules() if isinstance(m, kind) and "layer" in name][::3]
        if with_l2l:
            attach_l2l(model, L2LConfig(device=device, **options))
        features: list[Any] = []
        handles = [m.register_forward_hook(lambda module, args, out, into=features: into.append(out)) for m in inner]
        loss = model(**batch_for(model)).loss
        loss = loss + sum(each.to(loss.device).float().square().mean() for each in features)
        loss.backward()
        for handle in handles:
            handle.remove()
        results[with_l2l] = loss.item(), len(features), gradients(model)
    assert results[True][1] == results[False][1]
    rough = {"rtol": 0.1, "atol": 0.02} if "cmp" in options else {"rtol": 1e-4, "atol": 1e-6}
    assert results[True][0] == pytest.approx(results[False][0], rel=0.02 if "cmp" in options else 1e-5)
    for name, gradient in results[False][2].items():
        torch.testing.assert_close(results[True][2][name], gradient, msg=name, **rough)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_hook_may_change_outputs_only_sometimes(device):
    """From then on it runs inside, also where it changes nothing."""
    losses = {}
    for options in (None, {"device": device}):
        net = made(Block)
        if options is not None:
            attach_l2l(net, L2LConfig(**options))
        factors: list[Any] = [None, None, 2.0, None, 3.0]
        calls = [0]

        def hook(module: nn.Module, args: Any, out: torch.Tensor, calls=calls, factors=factors) -> Any:
            factor = factors[calls[0]]
            return None if factor is None else factor * out

        net.layers[1].a.register_forward_hook(hook)
        found = []
        for number in range(5):
            calls[0] = number
            net.zero_grad()
            loss = net(torch.ones(ROWS, 5, WIDTH))
            loss.backward()
            found += [loss.item(), *(p.grad.sum().item() for p in net.parameters())]
        losses[options is None] = found
    assert losses[False] == pytest.approx(losses[True], rel=1e-5)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_hook_on_the_gradient_of_an_output(device):
    """It reads, or changes, the gradient that arrives in the backward."""
    found = {}
    for options in (None, {"device": device}):
        net = made(Block)
        if options is not None:
            attach_l2l(net, L2LConfig(**options))
        norms: list[float] = []

        def hook(module: nn.Module, args: Any, out: torch.Tensor, norms=norms) -> None:
            if out.requires_grad:
                out.register_hook(lambda gradient: norms.append(gradient.norm().item()) or 2 * gradient)

        net.layers[1].a.register_forward_hook(hook)
        with torch.no_grad():
            net(torch.ones(ROWS, 5, WIDTH))
        net(torch.ones(ROWS, 5, WIDTH)).backward()
        found[options is None] = [*norms, *(p.grad.sum().item() for p in net.parameters())]
    assert found[False] == pytest.approx(found[True], rel=1e-5)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_gradient_that_is_to_be_kept_is_refused(device):
    net = made(Block)
    attach_l2l(net, L2LConfig(device=device))
    features: list[Any] = []
    outputs(net, features)
    loss = net(torch.ones(ROWS, 5, WIDTH))
    features[1].retain_grad()
    with pytest.raises(RuntimeError, match="cannot be kept.*put a hook on the tensor"):
        (loss + features[1].sum()).backward()


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_hooks_that_change_outputs_come_first_when_they_are_new(device):
    net = made(Block)
    attach_l2l(net, L2LConfig(device=device))
    features: list[Any] = []
    outputs(net, features)
    net.layers[0].b.register_forward_hook(lambda module, args, out: 2 * out)
    x = torch.ones(ROWS, 5, WIDTH)
    with pytest.raises(RuntimeError, match="must be called before those that observe.*call the model again"):
        net(x)
    features.clear()
    net(x).backward()
    assert len(features) == 3


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
