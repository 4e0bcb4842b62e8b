"""Tensors that forward hooks inside layers collect, for a loss that uses them: features for distillation."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.runtime import stream, wait_reasons
from impure_layers import ROWS, WIDTH, Block, made
from memory_switches import land_the_rest

OPTIONS: list[dict[str, Any]] = [
    {},
    {"ubatch_size": 2, "stash": "host"},
    {"ubatch_size": 3, "boundary": "host", "stash": "host"},
    {"ubatch_size": 2, "eps_update": "eager"},
    {"resident": "all", "ubatch_size": 4},
    {"kept_graphs": 3, "ubatch_size": 4},
]
FEATURES: list[torch.Tensor] = []
LAST: Any = None


class Pair(nn.Module):
    """Returns two tensors, of which the layer uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> Any:
        out = self.one(h)
        return out, out.square(), None


class Layer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return super().forward(h) + self.pair(h)[0]


def in_a_list(net: Any) -> Any:
    features: list[torch.Tensor] = []
    for layer in net.layers:
        layer.a.register_forward_hook(lambda module, args, out: features.append(out))
    return lambda: [features.pop() for _ in range(3)]


def in_a_dict_by_name(net: Any) -> Any:
    features: dict[str, torch.Tensor] = {}

    def hook_of(name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            features[name] = out

        return hook

    for number, layer in enumerate(net.layers):
        layer.a.register_forward_hook(hook_of(f"layer {number}"))
    return lambda: [features[f"layer {number}"] for number in range(3)]


def of_what_a_module_is_given(net: Any) -> Any:
    """The layer's own argument, too."""
    features = defaultdict(list)
    for number, layer in enumerate(net.layers):
        for part in (layer.a, layer.b):
            part.register_forward_pre_hook(lambda module, args, number=number: features[number].append(args[0]))

    def taken() -> list[torch.Tensor]:
        found = [each for values in features.values() for each in values]
        features.clear()
        return found

    return taken


def computed_by_the_hook(net: Any) -> Any:
    features: dict[int, torch.Tensor] = {}

    def pooled(out: torch.Tensor) -> torch.Tensor:
        return out.float().tanh().mean(1)

    for number, layer in enumerate(net.layers):

        def hook(module: nn.Module, args: Any, out: torch.Tensor, number: int = number) -> None:
            features[number] = pooled(out)

        layer.a.register_forward_hook(hook)
    return lambda: [features[number] for number in range(3)]


class Store:
    def __init__(self) -> None:
        self.last: Any = None
        self.all: dict[Any, Any] = {}

    def save(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        self.last = out
        self.put("first", out[:, :1])

    def put(self, name: str, value: torch.Tensor) -> None:
        self.all.setdefault("found", {})[name] = value


def in_an_object(net: Any) -> Any:
    stores = [Store() for _ in net.layers]
    for store, layer in zip(stores, net.layers, strict=True):
        layer.b.register_forward_hook(store.save)
    return lambda: [each for store in stores for each in (store.last, store.all["found"]["first"])]


def in_global_variables(net: Any) -> Any:
    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        global LAST
        LAST = out
        FEATURES.append(out)

    for layer in net.layers:
        layer.a.register_forward_hook(hook)

    def taken() -> list[torch.Tensor]:
        global LAST
        last, LAST = LAST, None  # it would have the model until the next test
        return [last, *(FEATURES.pop() for _ in range(3))]

    return taken


def all_that_a_module_returns(net: Any) -> Any:
    features: dict[int, Any] = {}
    for number, layer in enumerate(net.layers):
        layer.pair.register_forward_hook(lambda module, args, out, number=number: features.update({number: out}))
    return lambda: [features[number][1] for number in range(3)]


def on_the_host(net: Any) -> Any:
    features: list[torch.Tensor] = []
    for layer in net.layers:
        layer.a.register_forward_hook(lambda module, args, out: features.append(out.cpu()))
    return lambda: [features.pop() for _ in range(3)]


def of_one_layer(net: Any) -> Any:
    features: list[torch.Tensor] = []
    net.layers[1].a.register_forward_hook(lambda module, args, out: features.append(out))
    return lambda: [features.pop()]


def in_lists_that_stay(net: Any) -> Any:
    """Made by the first call; of each, the last one is used."""
    features = defaultdict(list)
    for number, layer in enumerate(net.layers):
        layer.a.register_forward_hook(lambda module, args, out, n=number: features[n, "a"].append(out))
        layer.b.register_forward_hook(lambda module, args, out, n=number: features[n, "b"].append(out))
    return lambda: [each[-1] for each in features.values()]


class Log:
    """Writes in some calls only."""

    def __init__(self) -> None:
        self.calls, self.norms = 0, []

    def write(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        self.calls += 1
        if self.calls % 4 == 0:
            self.norms.append(out.detach().norm())


def beside_a_log(net: Any) -> Any:
    """Which comes first, and writes in one micro-batch of several."""
    for layer in net.layers:
        layer.a.register_forward_hook(Log().write)
    return in_a_list(net)


def beside_other_values(net: Any) -> Any:
    """Names, and a tensor in two places."""
    features: list[Any] = []
    by_name: dict[str, Any] = {}

    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        by_name["last"] = out
        features.append(("a", out, None))

    net.layers[0].a.register_forward_hook(hook)

    def taken() -> list[torch.Tensor]:
        [(name, feature, _)] = features
        assert name == "a" and feature is by_name["last"]
        features.clear()
        return [feature]

    return taken


def weights_of_the_layer(net: Any) -> Any:
    features: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(net.layers):
        layer.a.register_forward_hook(lambda module, args, out, n=number: features.update({n: module.weight}))
    return lambda: [*features.values()]


class Counting:
    """Collects in each other call."""

    def __init__(self) -> None:
        self.calls, self.found = 0, []

    def __call__(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        self.calls += 1
        if self.calls % 2:
            self.found.append(out)


def of_each_other_call(net: Any) -> Any:
    """Of a module that is called once."""
    counting = Counting()
    net.layers[0].a.register_forward_hook(counting)

    def taken() -> list[torch.Tensor]:
        found, counting.found = counting.found, []
        return found

    return taken


COLLECTING = (
    in_a_list,
    in_a_dict_by_name,
    of_what_a_module_is_given,
    computed_by_the_hook,
    in_an_object,
    in_global_variables,
    all_that_a_module_returns,
    on_the_host,
    of_one_layer,
    in_lists_that_stay,
    beside_a_log,
    beside_other_values,
    weights_of_the_layer,
)


def trained(collecting: Any, options: dict[str, Any] | None, *, own_loss: bool = True) -> Any:
    net = made(Layer)
    taken = collecting(net)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.05)
    if options is not None:
        optimizer = attach_l2l(net, L2LConfig(**options)).wrap(optimizer)
    x = torch.randn(ROWS, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    losses, shapes = [], []
    for _ in range(3):
        loss = net(x)
        found = taken()
        shapes.append([each.shape for each in found])
        of_features = sum((each - 0.5).square().mean().to(loss.device) for each in found)
        loss = loss + of_features if own_loss else of_features
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, shapes, {name: value.detach().cpu().clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("collecting", COLLECTING, ids=lambda each: each.__name__)
def test_features_are_part_of_a_loss(collecting, options, device):
    """In each step, whole and put together of micro-batches, once for each call of the model."""
    expected = trained(collecting, None)
    losses, shapes, weights = trained(collecting, {"device": device, **options})
    assert losses == pytest.approx(expected[0], rel=1e-5)
    assert shapes == expected[1]
    for name, value in expected[2].items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=name)


def once(net: Any) -> Any:
    features: list[torch.Tensor] = []
    handles: list[Any] = []

    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        features.append(out)
        handles.pop().remove()

    handles.append(net.layers[1].a.register_forward_hook(hook))
    return lambda: [features.pop()] if features else []


def of_a_difference(net: Any) -> Any:
    """Reads what it has left in the call before."""
    features: dict[str, torch.Tensor] = {}

    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        features["difference"] = out - features.get("last", 0.0)
        features["last"] = out.detach()

    net.layers[1].a.register_forward_hook(hook)
    return lambda: [features["difference"]]


def through_the_last_of_all(net: Any) -> Any:
    """In the variables of a function around, and by the method of a list."""
    total: Any = 0.0
    features: list[torch.Tensor] = []

    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        nonlocal total
        total = total + out.square().mean()

    net.layers[0].a.register_forward_hook(hook)
    for layer in net.layers:
        layer.b.register_forward_hook(partial(passes_on, features.append))

    def taken() -> list[torch.Tensor]:
        nonlocal total
        found, total = [total, *features], 0.0
        features.clear()
        return found

    return taken


def passes_on(callback: Any, module: nn.Module, args: Any, out: torch.Tensor) -> None:
    callback(out)


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize(
    "collecting", [once, of_each_other_call, of_a_difference, through_the_last_of_all], ids=lambda each: each.__name__
)
def test_hooks_that_read_what_is_there(collecting, device):
    """The recompute finds what they have found in the forward."""
    expected = trained(collecting, None)
    losses, shapes, weights = trained(collecting, {"device": device})
    assert losses == pytest.approx(expected[0], rel=1e-5)
    assert shapes == expected[1]
    for name, value in expected[2].items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_features_alone_are_a_loss(options, device):
    """The outputs of the layers get no gradient from elsewhere."""
    expected = trained(of_one_layer, None, own_loss=False)
    losses, _, weights = trained(of_one_layer, {"device": device, **options}, own_loss=False)
    assert losses == pytest.approx(expected[0], rel=1e-5)
    for name, value in expected[2].items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=name)


class Closed:
    """Nothing finds what is in it."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held: list[torch.Tensor] = []


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_features_that_hooks_leave_elsewhere_are_no_part_of_a_loss(options, device):
    """Not those of the first step, and not those of later ones."""
    net = made(Block)
    eps = attach_l2l(net, L2LConfig(device=device, **options))
    x = torch.randn(ROWS, 5, WIDTH)
    optimizer: Any = eps.wrap(torch.optim.SGD(net.parameters(), lr=0.01))
    net(x).backward()
    optimizer.step()
    closed = Closed()
    for layer in net.layers:
        layer.a.register_forward_hook(lambda module, args, out: closed.held.append(out))
    loss = net(x)
    with pytest.raises(RuntimeError, match="a backward must go through the outputs of a layer.*forward hook"):
        (loss + sum(each.square().mean() for each in closed.held)).backward()


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_numbers_of_a_micro_batch_stay_as_hooks_write_them(device):
    """Beside features in another container, which are put together. They get no gradient."""
    net = made(Block)
    attach_l2l(net, L2LConfig(device=device, ubatch_size=3))
    norms: list[float] = []
    sums: list[torch.Tensor] = []
    features: list[torch.Tensor] = []

    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        norms.append(out.norm().item())
        sums.append(out.sum())
        features.append(out)

    net.layers[0].a.register_forward_hook(hook)
    loss = net(torch.randn(ROWS, 5, WIDTH))
    assert (len(norms), len(sums), len(features)) == (3, 3, 1)
    assert features[0].sum().item() == pytest.approx(sum(each.item() for each in sums), rel=1e-5)
    (loss + features[0].sum()).backward(retain_graph=True)
    assert (len(sums), len(features)) == (3, 1)
    with pytest.raises(RuntimeError, match="a backward must go through the outputs of a layer"):
        (loss + sum(sums)).backward()
    features.clear()  # the graph that was retained has the model, which has the hook


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_features_of_an_evaluation(options, device):
    """They have all rows, once; what a hook has detached needs no gradient in training either."""
    x = torch.randn(ROWS, 5, WIDTH)
    plain, ours = made(Block), made(Block)
    attach_l2l(ours, L2LConfig(device=device, **options))
    found = {}
    for name, net in (("plain", plain), ("ours", ours)):
        features = found[name] = in_a_list(net)
        net.layers[2].b.register_forward_hook(
            lambda module, args, out, name=name: found.update({f"{name}, detached": out.detach().cpu().numpy()})
        )
        with torch.no_grad():
            net.eval()(x)
        found[name] = [each.cpu() for each in features()]
        net.train()(x).backward()
        features()
    torch.testing.assert_close(found["ours"], found["plain"])
    last = found["ours, detached"]
    assert len(last) == (ROWS if not options else 1)  # an array is none of torch's tensors


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_hooks_that_are_gone_in_the_backward_have_collected(options, device):
    """A hook for one call, and one that is switched off."""
    x = torch.randn(ROWS, 5, WIDTH)
    gradients = []
    for of in (None, {"device": device, **options}):
        net = made(Block)
        if of is not None:
            attach_l2l(net, L2LConfig(**of))
        features: dict[str, torch.Tensor] = {}
        handle = net.layers[0].a.register_forward_hook(lambda module, args, out, f=features: f.update(a=out))
        loss = net(x)
        handle.remove()
        (loss + features.pop("a").square().sum()).backward()
        assert not features
        gradients.append([p.grad for p in net.parameters()])
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_features_that_nobody_uses_may_be_others_in_the_recompute(device):
    """Nothing asks for their gradients."""
    net = made(Block)
    attach_l2l(net, L2LConfig(device=device))
    features: list[torch.Tensor] = []
    switch = {"is_on": True}
    net.layers[0].a.register_forward_hook(lambda module, args, out: features.append(out) if switch["is_on"] else None)
    loss = net(torch.ones(ROWS, 5, WIDTH))
    switch["is_on"] = False
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a layer must return the same number of tensors"):
        (loss + features[0].sum()).backward()
    features.clear()


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_hooks_that_compute_with_what_changes_before_the_backward_are_found(options, device):
    """In each call: it need not be in the first one."""
    net = made(Block)
    attach_l2l(net, L2LConfig(device=device, **options))
    target: dict[str, Any] = {"value": 0.0}
    features: dict[str, torch.Tensor] = {}
    net.layers[0].a.register_forward_hook(lambda module, args, out: features.update(f=out - target["value"]))
    x = torch.randn(ROWS, 5, WIDTH)
    for _ in range(2):
        (net(x) + features.pop("f").square().mean()).backward()
    loss = net(x) + features.pop("f").square().mean()
    target["value"] = 1.0
    with pytest.raises(RuntimeError, match="the recompute of a layer must give the outputs of its forward"):
        loss.backward()


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_hook_that_asks_for_a_gradient_has_it(device):
    """As those do that show what a model has looked at."""
    x = torch.randn(ROWS, 5, WIDTH)
    gradients = []
    for of in (None, device):
        net = made(Block)
        if of is not None:
            attach_l2l(net, L2LConfig(device=of))
        kept: dict[str, torch.Tensor] = {}

        def hook(module: nn.Module, args: Any, out: torch.Tensor, kept: Any = kept) -> None:
            if out.requires_grad:
                out.retain_grad()
            kept["out"] = out

        net.layers[0].a.register_forward_hook(hook)
        net(x).backward()
        gradients.append(kept["out"].grad.cpu())
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_what_cannot_be_put_together_stays_as_it_is(options, device):
    net = made(Block)
    attach_l2l(net, L2LConfig(device=device, **options))
    found: list[Any] = []
    itself: dict[str, Any] = {}

    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        itself.update(tensor=out, itself=itself)
        found.append(out.detach().cpu().relu().to_sparse())

    net.layers[0].a.register_forward_hook(hook)
    with torch.no_grad():
        net(torch.randn(ROWS, 5, WIDTH))
    assert all(each.is_sparse for each in found) and sum(len(each) for each in found) == ROWS


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_features_with_several_backwards(device):
    x = torch.randn(ROWS, 5, WIDTH)
    plain, ours = made(Block), made(Block)
    attach_l2l(ours, L2LConfig(device=device, ubatch_size=2))
    for net in (plain, ours):
        features = in_a_list(net)
        loss, found = net(x), features()
        loss.backward(retain_graph=True)
        sum(each.square().sum() for each in found).backward()
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other.grad.cpu(), one.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_the_memory_of_features_is_free_when_nobody_has_them(device):
    net = made(Block)
    attach_l2l(net, L2LConfig(device=device))
    features = in_a_list(net)
    gc.disable()
    try:
        loss = net(torch.ones(ROWS, 5, WIDTH))
        found = features()
        seen = [weakref.ref(each) for each in found]
        del loss, found
        assert all(each() is None for each in seen)
    finally:
        gc.enable()


def test_a_layer_that_uses_what_a_hook_has_collected_of_another_one_is_refused():
    net = made(Block)
    attach_l2l(net, L2LConfig(device="cpu"))
    features: list[torch.Tensor] = []
    net.layers[0].a.register_forward_hook(lambda module, args, out: features.append(out))
    net.layers[2].a.register_forward_hook(lambda module, args, out: out + features[0])
    with pytest.raises(
        RuntimeError, match="must get what needs a gradient as an argument.*another layer has computed"
    ):
        net(torch.ones(ROWS, 5, WIDTH)).backward()
    features.clear()


def copying_in_the_background(net: Any) -> Any:
    features: list[torch.Tensor] = []
    for layer in net.layers:
        layer.a.register_forward_hook(lambda module, args, out: features.append(out.to("cpu", non_blocking=True)))
    return lambda: [features.pop() for _ in range(3)]


def test_copies_that_a_hook_has_begun_are_waited_for(monkeypatch):
    options = {"device": "sim", "ubatch_size": 2}
    assert trained(copying_in_the_background, options)[0] == pytest.approx(trained(on_the_host, None)[0], rel=1e-5)
    wait, found = stream.wait, set()

    def without(event: Any, why: str, **more: Any) -> None:
        found.add(why)
        if why != wait_reasons.COLLECTED_DOWNLOADED:
            wait(event, why, **more)

    monkeypatch.setattr(stream, "wait", without)
    with pytest.raises(RuntimeError, match="sim stream|not finite"):
        trained(copying_in_the_background, options)
    assert wait_reasons.COLLECTED_DOWNLOADED in found
    land_the_rest()


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("where", ["on a layer", "inside a layer"])
def test_features_of_a_step_that_is_over_do_not_keep_the_model(where, device):
    """They are in the closure of a hook of the model: together with a graph that has it, they would stay for good."""
    net = made(Block)
    features: dict[str, torch.Tensor] = {}
    module = net.layers[1] if where == "on a layer" else net.layers[1].a
    module.register_forward_hook(lambda module, args, out, features=features: features.update(out=out))
    eps = attach_l2l(net, L2LConfig(device=device))
    (net(torch.ones(ROWS, 5, WIDTH)) + features["out"].sum()).backward()
    seen = weakref.ref(net), weakref.ref(eps)
    del net, eps, module, features
    gc.collect()
    assert [each() for each in seen] == [None, None]
