"""Tensors that forward hooks inside layers collect, for a loss that uses them: features for distillation."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l.runtime import stream, wait_reasons
from impure_layers import ROWS, WIDTH, Block, assert_trained_alike, attach, batch, made, trained
from memory_switches import land_the_rest
from tiers import cpu_suffices, more, on_sim

UBATCHES: dict[str, Any] = {"ubatch_size": 2, "stash": "host"}
OPTIONS: list[dict[str, Any]] = [
    {**UBATCHES, "eps_update": "eager"},
    {"ubatch_size": 3, "boundary": "host", "stash": "host"},
    {"resident": "all", "ubatch_size": 4, "kept_graphs": 2},
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


class Store:
    def __init__(self) -> None:
        self.last: Any = None
        self.all: dict[Any, Any] = {}

    def save(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        self.last = out
        self.put("first", out[:, :1])

    def put(self, name: str, value: torch.Tensor) -> None:
        self.all.setdefault("found", {})[name] = value


class Log:
    """Writes in some calls only: in one micro-batch of several."""

    def __init__(self) -> None:
        self.calls, self.norms = 0, []

    def write(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        self.calls += 1
        if self.calls % 4 == 0:
            self.norms.append(out.detach().norm())


def in_global_variables(module: nn.Module, args: Any, out: torch.Tensor) -> None:
    global LAST
    LAST = out
    FEATURES.append(out)


def pooled(out: torch.Tensor) -> torch.Tensor:
    return out.float().tanh().mean(1)


Taken = Callable[[], list[torch.Tensor]]
Collecting = Callable[[Any], Taken]


def everywhere(net: Any) -> Taken:
    """Hooks on the modules of all layers that leave features in all kinds of places; returns what takes them."""
    one = in_a_list(net)
    given, staying = defaultdict(list), defaultdict(list)
    computed: dict[int, torch.Tensor] = {}
    of_pair: dict[int, Any] = {}
    on_host: list[torch.Tensor] = []
    weights: dict[int, torch.Tensor] = {}
    of_one_layer: list[torch.Tensor] = []
    stores = [Store() for _ in net.layers]

    def computes(module: nn.Module, args: Any, out: torch.Tensor, number: int) -> None:
        computed[number] = pooled(out)

    for n, layer in enumerate(net.layers):
        layer.a.register_forward_hook(Log().write)
        for name, part in (("a", layer.a), ("b", layer.b)):
            part.register_forward_pre_hook(lambda module, args, n=n: given[n].append(args[0]))  # the layer's own, too
            part.register_forward_hook(lambda module, args, out, n=n, name=name: staying[n, name].append(out))
        layer.a.register_forward_hook(partial(computes, number=n))
        layer.b.register_forward_hook(stores[n].save)
        layer.a.register_forward_hook(in_global_variables)
        layer.a.register_forward_hook(lambda module, args, out, n=n: weights.update({n: module.weight}))
        layer.b.register_forward_hook(lambda module, args, out: on_host.append(out.cpu()))
        layer.pair.register_forward_hook(lambda module, args, out, n=n: of_pair.update({n: out}))
    net.layers[1].a.register_forward_hook(lambda module, args, out: of_one_layer.append(out))

    def taken() -> list[torch.Tensor]:
        global LAST
        found = [
            *one(),
            *computed.values(),
            *(each[1] for each in of_pair.values()),
            *weights.values(),
            LAST,
        ]
        found += [each for values in given.values() for each in values]
        found += [each for store in stores for each in (store.last, store.all["found"]["first"])]
        found += [each[-1] for each in staying.values()]  # of lists that stay, the last one
        for collected in (on_host, of_one_layer, FEATURES):
            found += collected
            collected.clear()
        given.clear()
        LAST = None  # it would have the model until the next test
        return found

    return taken


def in_a_list(net: Any) -> Taken:
    features: list[torch.Tensor] = []
    for layer in net.layers:
        layer.a.register_forward_hook(lambda module, args, out: features.append(out))
    return lambda: [features.pop() for _ in range(3)]


class Counting:
    """Collects in each other call; beside other values, and in two places."""

    def __init__(self) -> None:
        self.calls, self.found, self.by_name = 0, [], {}

    def __call__(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        self.calls += 1
        if self.calls % 2:
            self.by_name["last"] = out
            self.found.append(("a", out, None))


def of_each_other_call(net: Any) -> Taken:
    """Of a module that is called once."""
    counting = Counting()
    net.layers[0].a.register_forward_hook(counting)

    def taken() -> list[torch.Tensor]:
        found, counting.found = counting.found, []
        assert all(each[0] == "a" and each[1] is counting.by_name["last"] for each in found)
        return [each[1] for each in found]

    return taken


def of_a_difference(net: Any) -> Taken:
    """Reads what it has left in the call before."""
    features: dict[str, torch.Tensor] = {}

    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        features["difference"] = out - features.get("last", 0.0)
        features["last"] = out.detach()

    net.layers[1].a.register_forward_hook(hook)
    return lambda: [features["difference"]]


def through_the_last_of_all(net: Any) -> Taken:
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


READING = (of_each_other_call, of_a_difference, through_the_last_of_all)


def with_features(collecting: Collecting, options: dict[str, Any] | None = None, *, own_loss: bool = True) -> Any:
    """What a training leaves, and the shapes of the features in the loss of each step."""
    net, shapes = made(Layer), []
    taken = collecting(net)

    def loss_of(loss: torch.Tensor) -> torch.Tensor:
        found = taken()
        shapes.append([each.shape for each in found])
        of_features = sum((each - 0.5).square().mean().to(loss.device) for each in found)
        return loss + of_features if own_loss else of_features

    return trained(net, options, loss_of=loss_of), shapes


def assert_same_features(collecting: Collecting, options: dict[str, Any], *, own_loss: bool = True) -> None:
    (found, shapes), expected = (with_features(collecting, each, own_loss=own_loss) for each in (options, None))
    assert shapes == expected[1]
    assert_trained_alike(found, expected[0])


@pytest.mark.parametrize(
    ("collecting", "options", "own_loss"),
    [
        *((everywhere, options, True) for options in OPTIONS),
        *((collecting, {}, True) for collecting in READING),
        (in_a_list, UBATCHES, False),
        *more((in_a_list, {}, False), (everywhere, {}, True)),
    ],
)
def test_features_are_part_of_a_loss(collecting, options, own_loss):
    """In each step, whole and put together of micro-batches, once for each call of the model; or all of a loss: the
    outputs of the layers get no gradient from elsewhere. The recompute finds what hooks have found in the forward."""
    assert_same_features(collecting, options, own_loss=own_loss)


class Closed:
    """Nothing finds what is in it."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held: list[torch.Tensor] = []


@pytest.mark.parametrize("options", [*OPTIONS[1:], *more({}, UBATCHES)], ids=str)
def test_features_that_hooks_leave_elsewhere_are_no_part_of_a_loss(options):
    """Not those of the first step, and not those of later ones."""
    net = made()
    eps = attach(net, **options)
    optimizer: Any = eps.wrap(torch.optim.SGD(net.parameters(), lr=0.01))
    net(batch()).backward()
    optimizer.step()
    closed = Closed()
    for layer in net.layers:
        layer.a.register_forward_hook(lambda module, args, out: closed.held.append(out))
    loss = net(batch())
    with pytest.raises(RuntimeError, match="a backward must go through the outputs of a layer.*forward hook"):
        (loss + sum(each.square().mean() for each in closed.held)).backward()


@pytest.mark.parametrize("options", [{}, UBATCHES], ids=str)
def test_features_of_an_evaluation(options):
    """They have all rows, once; what cannot be put together stays as it is: an array, and what is sparse."""
    plain, ours = made(), made()
    attach(ours, **options)
    found: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    sparse: list[torch.Tensor] = []
    itself: dict[str, Any] = {}

    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        itself.update(tensor=out, itself=itself)
        sparse.append(out.detach().cpu().relu().to_sparse())

    ours.layers[0].b.register_forward_hook(hook)
    for name, net in (("plain", plain), ("ours", ours)):
        features = in_a_list(net)
        net.layers[2].b.register_forward_hook(
            lambda module, args, out, name=name: arrays.update({name: out.detach().cpu().numpy()})
        )
        with torch.no_grad():
            net.eval()(batch())
        found[name] = [each.cpu() for each in features()]
        if net is ours:
            assert all(each.is_sparse for each in sparse) and sum(len(each) for each in sparse) == ROWS
            sparse.clear(), itself.clear()
        net.train()(batch()).backward()
        features()
    torch.testing.assert_close(found["ours"], found["plain"])
    assert len(arrays["ours"]) == (ROWS if not options else 1)


@cpu_suffices
@pytest.mark.parametrize("options", [{}, OPTIONS[1]], ids=str)
def test_hooks_that_are_gone_in_the_backward_have_collected(options):
    gradients = []
    for of in (None, options):
        net = made()
        if of is not None:
            attach(net, **of)
        features: dict[str, torch.Tensor] = {}
        handle = net.layers[0].a.register_forward_hook(lambda module, args, out, f=features: f.update(a=out))
        loss = net(batch())
        handle.remove()
        (loss + features.pop("a").square().sum()).backward()
        assert not features
        gradients.append([p.grad for p in net.parameters()])
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


@cpu_suffices
def test_features_that_nobody_uses_may_be_others_in_the_recompute():
    """Nothing asks for their gradients."""
    net = made()
    attach(net)
    features: list[torch.Tensor] = []
    switch = {"is_on": True}
    net.layers[0].a.register_forward_hook(lambda module, args, out: features.append(out) if switch["is_on"] else None)
    loss = net(batch())
    switch["is_on"] = False
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a layer must return the same number of tensors"):
        (loss + features[0].sum()).backward()
    features.clear()


@cpu_suffices
def test_hooks_that_compute_with_what_changes_before_the_backward_are_found():
    """In each call: it need not be in the first one."""
    net = made()
    attach(net, ubatch_size=2)
    target: dict[str, Any] = {"value": 0.0}
    features: dict[str, torch.Tensor] = {}
    net.layers[0].a.register_forward_hook(lambda module, args, out: features.update(f=out - target["value"]))
    for _ in range(2):
        (net(batch()) + features.pop("f").square().mean()).backward()
    loss = net(batch()) + features.pop("f").square().mean()
    target["value"] = 1.0
    with pytest.raises(RuntimeError, match="the recompute of a layer must give the outputs of its forward"):
        loss.backward()


@cpu_suffices
def test_features_with_several_backwards():
    plain, ours = made(), made()
    attach(ours, ubatch_size=2)
    for net in (plain, ours):
        features = in_a_list(net)
        loss, found = net(batch()), features()
        loss.backward(retain_graph=True)
        sum(each.square().sum() for each in found).backward()
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other.grad.cpu(), one.grad, rtol=1e-4, atol=1e-5)


@cpu_suffices
def test_a_layer_that_uses_what_a_hook_has_collected_of_another_one_is_refused():
    net = made()
    attach(net)
    features: list[torch.Tensor] = []
    net.layers[0].a.register_forward_hook(lambda module, args, out: features.append(out))
    net.layers[2].a.register_forward_hook(lambda module, args, out: out + features[0])
    with pytest.raises(
        RuntimeError, match="must get what needs a gradient as an argument.*another layer has computed"
    ):
        net(batch()).backward()
    features.clear()


def copying_in_the_background(net: Any) -> Taken:
    features: list[torch.Tensor] = []
    for layer in net.layers:
        layer.a.register_forward_hook(lambda module, args, out: features.append(out.to("cpu", non_blocking=True)))
    return lambda: [features.pop() for _ in range(3)]


@on_sim
def test_copies_that_a_hook_has_begun_are_waited_for(monkeypatch):
    assert_same_features(copying_in_the_background, {"ubatch_size": 2})
    wait, found = stream.wait, set()

    def without(event: Any, why: str, **more: Any) -> None:
        found.add(why)
        if why != wait_reasons.COLLECTED_DOWNLOADED:
            wait(event, why, **more)

    monkeypatch.setattr(stream, "wait", without)
    with pytest.raises(RuntimeError, match="sim stream|not finite"):
        with_features(copying_in_the_background, {"ubatch_size": 2})
    assert wait_reasons.COLLECTED_DOWNLOADED in found
    land_the_rest()


@pytest.mark.parametrize("where", ["on a layer", "inside a layer"])
def test_features_of_a_step_that_is_over_are_free_and_do_not_keep_the_model(where):
    """They are in the closure of a hook of the model: together with a graph that has it, they would stay for good."""
    net = made()
    features: dict[str, torch.Tensor] = {}
    module = net.layers[1] if where == "on a layer" else net.layers[1].a
    module.register_forward_hook(lambda module, args, out, features=features: features.update(out=out))
    eps = attach(net)
    gc.disable()
    try:
        loss, dropped = net(batch()), weakref.ref(features.pop("out"))
        del loss
        assert dropped() is None
    finally:
        gc.enable()
    (net(batch()) + features["out"].sum()).backward()
    seen = weakref.ref(net), weakref.ref(eps)
    del net, eps, module, features
    gc.collect()
    assert [each() for each in seen] == [None, None]
