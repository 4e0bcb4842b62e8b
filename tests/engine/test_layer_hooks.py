"""Forward hooks inside layers do what they do in plain torch, also in the recompute; a loss uses what they collect."""

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
from impure_layers import ROWS, WIDTH, Block, Net, assert_trained_alike, attach, batch, made, trained
from memory_switches import land_the_rest
from tiers import cpu_suffices, more, on_sim

UBATCHES: dict[str, Any] = {"ubatch_size": 2, "stash": "host"}
EAGER: dict[str, Any] = {"eps_update": "eager"}
ROWS_ON_HOST: dict[str, Any] = {"ubatch_size": 3, "boundary": "host", "stash": "host"}
KEPT_GRAPHS: dict[str, Any] = {"resident": "all", "ubatch_size": 4, "kept_graphs": 2}


def removes_itself(layer: Any) -> None:
    handles: list[Any] = []
    handles.append(layer.a.register_forward_hook(lambda module, args, out: handles.pop().remove()))


# Torch crashes if a hook writes to a view, and another one asks for its gradient: these are two groups.
def with_hooks_that_ask_for_gradients() -> Any:
    """And an adapter, whose weights are in the layer; what pushes and pops, as profilers do; what removes itself."""
    net, under_way = made(), []

    def changes_gradients(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda gradient: 2 * gradient)

    def pops(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        assert under_way.pop() is module

    for layer in net.layers:
        layer.b.register_forward_hook(changes_gradients)
        layer.a.adapter = nn.Linear(WIDTH, WIDTH)
        layer.a.register_forward_hook(lambda module, args, out: out + module.adapter(args[0]))
        layer.a.register_forward_pre_hook(lambda module, args: under_way.append(module))
        layer.a.register_forward_hook(pops)
        removes_itself(layer)
        layer.a.register_forward_hook(lambda module, args, out: 1.1 * out)
    return net, None


def with_hooks_that_write() -> Any:
    """In place; arguments; and what the layer reads."""
    net = made()
    for layer in net.layers:
        layer.a.register_forward_hook(lambda module, args, out: (out.mul_(0.5), None)[1])
        layer.a.register_forward_pre_hook(lambda module, args, kwargs: ((3 * args[0],), kwargs), with_kwargs=True)
        layer.a.register_forward_hook(
            lambda module, args, out, of=layer: setattr(of, "factor", 1 + out.shape[-1] / 10)
        )
    return net, None


def with_others_in_the_backward() -> Any:
    """They scale what goes into modules, and what comes out of them; the program exchanges them in between."""
    net, factors, handles = made(), iter([2.0, 3.0, 0.5]), []

    def exchange(net: Any) -> None:
        while handles:
            handles.pop().remove()
        factor = next(factors)
        scales = lambda module, args, kwargs: ((factor * args[0],), kwargs)  # noqa: E731
        for layer in net.layers:
            handles.append(layer.b.register_forward_hook(lambda module, args, out: factor * out))
            handles.append(layer.a.register_forward_pre_hook(scales, with_kwargs=True))

    exchange(net)
    return net, exchange


class ForOneCall(Net):
    """Puts hooks on its layers that know the batch, for one call; one that finds out how to split it fails."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factors = torch.linspace(1, 2, len(x), device=x.device)[:, None, None]
        handles = [each.a.register_forward_pre_hook(lambda module, args: (args[0] * factors,)) for each in self.layers]
        loss = super().forward(x)
        for handle in handles:
            handle.remove()
        return loss


def for_one_call() -> Any:
    return ForOneCall(Block, Block, Block), None


@pytest.mark.filterwarnings("ignore:ubatch_size=2 has no effect")
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (with_hooks_that_ask_for_gradients, UBATCHES),
        (with_hooks_that_ask_for_gradients, EAGER),
        (with_hooks_that_write, {}),
        (with_hooks_that_write, UBATCHES),
        *((make, options) for make in (for_one_call, with_others_in_the_backward) for options in (UBATCHES, EAGER)),
    ],
)
def test_they_train_as_in_plain_torch(make, options):
    (ours, between), (plain, other) = make(), make()
    assert_trained_alike(trained(ours, options, between=between), trained(plain, between=other))


# ---- what hooks collect, in a loss

FEATURES: list[torch.Tensor] = []
LAST: Any = None


class Pair(nn.Linear):
    """Returns two tensors, of which the layer uses one."""

    def forward(self, h: torch.Tensor) -> Any:
        out = super().forward(h)
        return out, out.square(), None


class Layer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return super().forward(h) + self.pair(h)[0]


class Store:
    """Keeps in attributes and containers of its own; and writes norms in one micro-batch of several."""

    def __init__(self) -> None:
        self.last: Any = None
        self.all: dict[Any, Any] = {}
        self.calls, self.norms = 0, []

    def save(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        self.last = out
        self.all.setdefault("found", {})["first"] = out[:, :1]

    def log(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        self.calls += 1
        if self.calls % 4 == 0:
            self.norms.append(out.detach().norm())


def in_global_variables(module: nn.Module, args: Any, out: torch.Tensor) -> None:
    global LAST
    LAST = out
    FEATURES.append(out)


Taken = Callable[[], list[torch.Tensor]]
Collecting = Callable[[Any], Taken]


def everywhere(net: Any) -> Taken:
    """Hooks on the modules of all layers that leave features in all kinds of places; returns what takes them."""
    one, stores, logs = in_a_list(net), [Store() for _ in net.layers], [Store() for _ in net.layers]
    given, staying = defaultdict(list), defaultdict(list)
    named: dict[Any, Any] = {}
    on_host: list[torch.Tensor] = []
    of_one_layer: list[torch.Tensor] = []
    for n, layer in enumerate(net.layers):
        layer.a.register_forward_hook(logs[n].log)
        for name, part in (("a", layer.a), ("b", layer.b)):
            part.register_forward_pre_hook(lambda module, args, n=n: given[n].append(args[0]))  # the layer's own, too
            part.register_forward_hook(lambda module, args, out, n=n, name=name: staying[n, name].append(out))
        layer.a.register_forward_hook(lambda module, args, out, n=n: named.update({("pooled", n): out.tanh().mean(1)}))
        layer.b.register_forward_hook(stores[n].save)
        layer.a.register_forward_hook(in_global_variables)
        layer.a.register_forward_hook(lambda module, args, out, n=n: named.update({("weight", n): module.weight}))
        layer.b.register_forward_hook(lambda module, args, out: on_host.append(out.cpu()))
        layer.pair.register_forward_hook(lambda module, args, out, n=n: named.update({("pair", n): out}))
    net.layers[1].a.register_forward_hook(lambda module, args, out: of_one_layer.append(out))

    def taken() -> list[torch.Tensor]:
        global LAST
        found = [*one(), *(each[1] if isinstance(each, tuple) else each for each in named.values()), LAST]
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


def in_a_list(net: Any, *, in_the_background: bool = False) -> Taken:
    features: list[torch.Tensor] = []
    for layer in net.layers:
        layer.a.register_forward_hook(
            lambda module, args, out: features.append(out.to("cpu", non_blocking=True) if in_the_background else out)
        )
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

    def taken(self) -> list[torch.Tensor]:
        found, self.found = self.found, []
        assert all(each[0] == "a" and each[1] is self.by_name["last"] for each in found)
        return [each[1] for each in found]


def of_each_other_call(net: Any) -> Taken:
    """Of a module that is called once."""
    counting = Counting()
    net.layers[0].a.register_forward_hook(counting)
    return counting.taken


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

    def passes_on(callback: Any, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        callback(out)

    net.layers[0].a.register_forward_hook(hook)
    for layer in net.layers:
        layer.b.register_forward_hook(partial(passes_on, features.append))

    def taken() -> list[torch.Tensor]:
        nonlocal total
        found, total = [total, *features], 0.0
        features.clear()
        return found

    return taken


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
        *((everywhere, options, True) for options in ({**UBATCHES, **EAGER}, ROWS_ON_HOST, KEPT_GRAPHS)),
        *((collecting, {}, True) for collecting in (of_each_other_call, of_a_difference, through_the_last_of_all)),
        (in_a_list, UBATCHES, False),
        *more((in_a_list, {}, False), (everywhere, {}, True)),
    ],
)
def test_features_are_part_of_a_loss(collecting, options, own_loss):
    """In each step, whole and put together of micro-batches, once for each call of the model; or all of a loss: the
    outputs of the layers get no gradient from elsewhere. The recompute finds what hooks have found in the forward."""
    assert_same_features(collecting, options, own_loss=own_loss)


@on_sim
def test_copies_that_a_hook_has_begun_are_waited_for(monkeypatch):
    copying = partial(in_a_list, in_the_background=True)
    assert_same_features(copying, {"ubatch_size": 2})
    wait, found = stream.wait, set()

    def without(event: Any, why: str, **more: Any) -> None:
        found.add(why)
        if why != wait_reasons.COLLECTED_DOWNLOADED:
            wait(event, why, **more)

    monkeypatch.setattr(stream, "wait", without)
    with pytest.raises(RuntimeError, match="sim stream|not finite"):
        with_features(copying, {"ubatch_size": 2})
    assert wait_reasons.COLLECTED_DOWNLOADED in found
    land_the_rest()


@pytest.mark.parametrize("options", [{}, UBATCHES], ids=str)
def test_features_of_an_evaluation(options):
    """They have all rows, once; what cannot be put together stays as it is: an array, and what is sparse."""
    found: list[Any] = []
    for net in (made(), made()):
        arrays: dict[str, Any] = {}
        sparse: list[torch.Tensor] = []
        itself: dict[str, Any] = {}

        def hook(module: nn.Module, args: Any, out: torch.Tensor, itself=itself, sparse=sparse, arrays=arrays) -> None:
            itself.update(tensor=out, itself=itself)
            sparse.append(out.detach().cpu().relu().to_sparse())
            arrays["last"] = out.detach().cpu().numpy()

        if found:
            attach(net, **options)
        features = in_a_list(net)
        net.layers[2].b.register_forward_hook(hook)
        with torch.no_grad():
            net.eval()(batch())
        found.append([each.cpu() for each in features()])
        assert all(each.is_sparse for each in sparse) and sum(len(each) for each in sparse) == ROWS
        sparse.clear(), itself.clear()
        net.train()(batch()).backward()
        features()
    torch.testing.assert_close(found[1], found[0])
    assert len(arrays["last"]) == (ROWS if not options else 1)


# ---- programs around hooks


def are_gone_in_the_backward(net: Any) -> list[torch.Tensor]:
    features: dict[str, torch.Tensor] = {}
    handle = net.layers[0].a.register_forward_hook(lambda module, args, out: features.update(a=out))
    loss = net(batch())
    handle.remove()
    (loss + features.pop("a").square().sum()).backward()
    assert not features
    return []


def collect_for_several_backwards(net: Any) -> list[torch.Tensor]:
    features = in_a_list(net)
    loss, found = net(batch()), features()
    loss.backward(retain_graph=True)
    sum(each.square().sum() for each in found).backward()
    return []


def ask_for_a_gradient(net: Any) -> list[torch.Tensor]:
    """As those do that show what a model has looked at."""
    kept: list[torch.Tensor] = []

    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.retain_grad()
        kept.append(out)

    net.layers[0].a.register_forward_hook(hook)
    net(batch()).backward()
    return [kept[-1].grad.cpu()]


@cpu_suffices
@pytest.mark.parametrize(
    ("hooks", "options"),
    [
        (are_gone_in_the_backward, {}),
        (are_gone_in_the_backward, ROWS_ON_HOST),
        (collect_for_several_backwards, {"ubatch_size": 2}),
        (ask_for_a_gradient, {}),
    ],
)
def test_gradients_where_hooks(hooks, options):
    plain, ours = made(), made()
    attach(ours, **options)
    expected, found = ([*hooks(net), *(p.grad.cpu() for p in net.parameters())] for net in (plain, ours))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


AUXILIARY: list[torch.Tensor] = []


class Leaves(Block):
    """Leaves a loss of its own in a global variable."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        out = super().forward(h)
        self.leave(h, out)
        return out

    def leave(self, h: torch.Tensor, out: torch.Tensor) -> None:
        AUXILIARY.append(out.square().mean())


class LeavesASumOfItsInput(Leaves):
    """No node of it keeps a tensor."""

    def leave(self, h: torch.Tensor, out: torch.Tensor) -> None:
        AUXILIARY.append(h.sum())


class LeavesItInAnAttribute(Leaves):
    def leave(self, h: torch.Tensor, out: torch.Tensor) -> None:
        self.last = out.square().mean()


def adds_what_is_in_a_global_variable(net: Any) -> Any:
    """In its first step."""
    return (net(batch()) + sum(AUXILIARY)).backward


def adds_what_is_in_attributes(net: Any) -> Any:
    """In a second step, too; one that does not is trained."""
    net(batch()).backward()
    return (net(batch()) + sum(layer.last for layer in net.layers)).backward


class Closed:
    """Nothing finds what is in it."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held: list[torch.Tensor] = []


def adds_what_hooks_left_where_nothing_finds_it(net: Any) -> Any:
    net(batch()).backward()
    closed = Closed()
    for layer in net.layers:
        layer.a.register_forward_hook(lambda module, args, out: closed.held.append(out))
    return (net(batch()) + sum(each.square().mean() for each in closed.held)).backward


def uses_features_of_another_layer(net: Any) -> Any:
    net.layers[0].a.register_forward_hook(lambda module, args, out: AUXILIARY.append(out))
    net.layers[2].a.register_forward_hook(lambda module, args, out: out + AUXILIARY[0])
    return lambda: net(batch()).backward()


def uses_features_that_the_recompute_has_not(net: Any) -> Any:
    """Those that nobody uses may be others."""
    features, switch = AUXILIARY, {"is_on": True}
    net.layers[0].a.register_forward_hook(lambda module, args, out: features.append(out) if switch["is_on"] else None)
    loss = net(batch())
    switch["is_on"] = False
    loss.backward(retain_graph=True)
    return (loss + features[0].sum()).backward


def computes_with_what_changes_before_the_backward(net: Any) -> Any:
    """In each call: it need not be in the first one."""
    target: dict[str, Any] = {"value": 0.0}
    features: dict[str, torch.Tensor] = {}
    net.layers[0].a.register_forward_hook(lambda module, args, out: features.update(f=out - target["value"]))
    for _ in range(2):
        (net(batch()) + features.pop("f").square().mean()).backward()
    loss = net(batch()) + features.pop("f").square().mean()
    target["value"] = 1.0
    return loss.backward


THROUGH = "a backward must go through the outputs of a layer"


@pytest.mark.parametrize(
    ("kind", "program", "options", "message"),
    [
        (Leaves, adds_what_is_in_a_global_variable, {}, THROUGH),
        (
            Block,
            uses_features_of_another_layer,
            {},
            "must get what needs a gradient as an argument.*another layer has",
        ),
        (Block, uses_features_that_the_recompute_has_not, {}, "a layer must return the same number of tensors"),
        (Block, adds_what_hooks_left_where_nothing_finds_it, ROWS_ON_HOST, f"{THROUGH}.*forward hook"),
        (Block, adds_what_hooks_left_where_nothing_finds_it, KEPT_GRAPHS, f"{THROUGH}.*forward hook"),
        (
            *(Block, computes_with_what_changes_before_the_backward, {"ubatch_size": 2}),
            "the recompute of a layer must give the outputs of its forward",
        ),
        (LeavesASumOfItsInput, adds_what_is_in_a_global_variable, UBATCHES, THROUGH),
        (LeavesItInAnAttribute, adds_what_is_in_attributes, {"kept_graphs": 2}, THROUGH),
        *more((Block, adds_what_hooks_left_where_nothing_finds_it, UBATCHES, f"{THROUGH}.*forward hook")),
    ],
)
def test_a_program_is_refused_that(kind, program, options, message):
    AUXILIARY.clear()
    net = made(kind)
    optimizer = attach(net, **options).wrap(torch.optim.SGD(net.parameters(), lr=0.1))
    fails = program(net)
    with pytest.raises(RuntimeError, match=message):
        fails()
    del optimizer  # which the engine refers to weakly
    AUXILIARY.clear()


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
