"""Layers that compute with more than their arguments, weights and torch's generators: the recompute finds it again, or
is found to give other outputs than its forward. Layers that are recurrent, or keep something, or write into what they
are given."""

from __future__ import annotations

import copy
import random
from collections import UserDict, deque
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from devices import DEVICE
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.model.layer_state import LayerState
from hf_l2l.testing import enable_simulated_accelerator
from impure_layers import (
    CHANGING,
    COMPUTING_WEIGHTS,
    DRAWING,
    ROWS,
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
from models import TOLERANCE, assert_same_bits, batch_for, gradients, llama, relative_error, t5
from tiers import combinations, cpu_suffices, nightly, on_a_device, on_sim, on_the_host
from training import settled_memory


def of_each_layer(net: Any, **attributes: Any) -> None:
    for layer in net.layers:
        for name, value in attributes.items():
            setattr(layer, name, value)


# ---- layers that train as in plain torch


class Recurs(Block):
    def prepare(self) -> None:
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.recurrent(h)[0]


class GivenSizes(Block):
    """Is given sizes of parts of the batch, which are a tensor of any length."""

    def forward(self, h: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return torch.cat([super(GivenSizes, self).forward(part) for part in h.split(sizes.tolist())])


class GivingSizes(Net):
    def __init__(self) -> None:
        super().__init__(GivenSizes, GivenSizes)

    def run(self, layer: nn.Module, h: torch.Tensor) -> torch.Tensor:
        return layer(h, torch.tensor([3, 2, 2] if len(h) == ROWS else [7, 4, 3]))


class Conditioned(Block):
    condition: Any = None

    def scale(self, h: torch.Tensor) -> Any:
        return self.condition


class SetsConditions(Net):
    """Gives its layers a condition by their attributes."""

    def __init__(self, *, detaches: bool = False) -> None:
        super().__init__(Conditioned, Conditioned)
        self.condition, self.detaches = nn.Linear(WIDTH, WIDTH), detaches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        condition = self.condition(x.mean((0, 1)))
        of_each_layer(self, condition=condition.detach() if self.detaches else condition)
        return super().forward(x)


class Leaving(Block):
    """Leaves something in all containers that it is given."""

    def forward(self, h: torch.Tensor, listed: Any, queue: Any, numbers: Any, nested: Any) -> torch.Tensor:
        middle = torch.tanh(self.a(h))
        listed.append(middle)
        queue.append(middle.square())
        numbers["n"] = numbers.get("n", 0) + 1
        inner = nested[0]["inner"]
        inner["last"], inner["before"] = middle, inner.pop("last", None)
        return h + self.b(middle) * (1 + 0.1 * float(numbers["n"]))


class Containing(Net):
    """Its loss depends on what the layers have left: features, numbers, and what is deep inside. A dict of the program
    is written into, and returned."""

    def __init__(self) -> None:
        super().__init__(Leaving, Leaving, Leaving)

    def forward(self, given: Any) -> Any:
        listed, queue, numbers, inner = [], deque(), {}, {}
        h = self.embed(given if isinstance(given, torch.Tensor) else given["x"])
        for layer in self.layers:
            h = layer(h, listed, queue, numbers, ({"inner": inner},))
        if isinstance(given, torch.Tensor):
            assert len(listed) == len(queue) == numbers["n"] == 3
            features = [*listed, *(2 * each for each in queue), inner["last"] * inner["before"]]
            left = float(numbers["n"]) + sum(each.mean(-1, keepdim=True) for each in features)
            return (self.head(h) + left).square().mean()
        given["features"], given["extra"]["layers"] = h.mean(1), listed
        del given["unused"]
        return given


ALL = (*DRAWING, *CHANGING, *COMPUTING_WEIGHTS)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (GivingSizes, {}),
        (Containing, {"ubatch_size": 2, "stash": "host", "eps_update": "eager"}),
        (partial(Net, *ALL), {"eps_update": "serial"}),
        (partial(Net, *ALL), {"eps_update": "deferred", "stash": "host"}),
        (partial(Net, *ALL), {"eps_update": "eager"}),
        (Containing, {"kept_graphs": 2, "ubatch_size": 3, "eps_update": "deferred"}),
        (partial(made, Recurs), {"ubatch_size": 3}),
        # The tensor is that of its own batch, and not of the trial that finds out how calls are split.
        (partial(SetsConditions, detaches=True), {"ubatch_size": 3}),
    ],
    ids=[
        *("sizes of parts", "what layers leave in containers", "all that change and draw", "deferred", "eager"),
        *("what is left in kept graphs", "LSTM, micro-batches", "a tensor without a graph in an attribute"),
    ],
)
def test_they_train_as_in_plain_torch(make, options):
    assert_trained_alike(trained(make(), options), trained(make()))


@cpu_suffices
@pytest.mark.parametrize(
    ("make", "kinds", "reason"),
    [
        (partial(Net, *CHANGING), CHANGING, ""),
        (GivingSizes, [GivenSizes], "it does not run with some of its rows"),
    ],
    ids=["they change with each call", "sizes of parts"],
)
def test_layers_that_run_whole_say_so_once(make, kinds, reason):
    with pytest.warns(UserWarning) as warned:
        found = trained(make(), {"ubatch_size": 2})
    for kind in kinds:
        text = f"ubatch_size=2 has no effect on calls of {kind.__name__}: {reason}"
        assert sum(text in str(each.message) for each in warned) == 1
    assert_trained_alike(found, trained(make()))


def test_ubatches_draw_in_the_recompute_what_they_drew():
    """As layers that keep their graphs, and recompute nothing."""
    options = {"ubatch_size": 2}
    assert_trained_alike(trained(Net(*DRAWING), options), trained(Net(*DRAWING), {**options, "kept_graphs": 3}))


# Torch says what it cannot trace, of which there is much in a hooked module.
@on_the_host  # torch.compile does not know the simulated accelerator, and other devices may lack a compiler
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_module_trains():
    plain = made()
    model = copy.deepcopy(plain)
    torch._dynamo.reset()
    model.embed.compile(backend="eager")
    attach(model)
    for _ in range(3):
        for each in (model, plain):
            each.zero_grad()
            each(batch()).backward()
        assert_same_bits(gradients(model), gradients(plain))


# ---- what programs change before the backward


def runs_in_evaluation(net: Any) -> None:
    net.eval()
    with torch.no_grad():
        net(torch.ones(2, 5, WIDTH))


def changes_attributes(net: Any) -> None:
    for layer in net.layers:
        layer.factor, layer.name = layer.factor + 1.0, "new"


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
    def prepare(self) -> None:
        self.register_buffer("mean", torch.full((WIDTH,), 2.0))
        self.part = nn.ReLU()

    def scale(self, h: torch.Tensor) -> Any:
        return self.mean * self.part(h)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda net: net.layers[1].mean.mul_(3.0), r"HasParts\.mean was changed in place"),
        (lambda net: of_each_layer(net, part=nn.Tanh()), "the same submodules"),
    ],
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
            now = 3 * net.layers[0].mean
            of_each_layer(net, mean=now)
            loss.backward()
            assert net.layers[0].mean is now
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)


# ---- what is refused


class Hides(Block):
    hidden: Any = ()

    def scale(self, h: torch.Tensor) -> Any:
        return self.hidden[0](h)


def hiding() -> Any:
    """Layers that call a module outside of them."""
    net = made(Hides)
    net.shared = nn.Linear(WIDTH, WIDTH)
    of_each_layer(net, hidden=(net.shared,))
    return net


class Reading(Block):
    """Adds what its last call returned."""

    last: Any = None

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        found, last = super().forward(h), self.last
        self.last = found.detach()
        return found if last is None else found + last.sum()


class InAnObject(Block):
    """Reads what its last call left in an object."""

    def prepare(self) -> None:
        self.memory = SimpleNamespace(inner=[None])

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        found, last = super().forward(h), self.memory.inner[0]
        self.memory.inner[0] = found.detach()
        return found if last is None else found + last.sum()


class Sharing(Block):
    """Passes a tensor to the next layer through a container of both."""

    def __init__(self, kept: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.kept["x"] = super().forward(h) + self.kept.get("x", 0)
        return self.kept["x"]


PATTERN = "the recompute of a layer must give the outputs of its forward"
CALLS = [0]


class ReadsAGlobal(Block):
    def scale(self, h: torch.Tensor) -> Any:
        CALLS[0] += 1
        return 1.0 + CALLS[0]


class ReadsItsList(Block):
    """A list that it changes in place is the same list. The output changes by little, from a call on."""

    since = 0

    def prepare(self) -> None:
        self.seen = [0]

    def scale(self, h: torch.Tensor) -> Any:
        self.seen.append(0)
        return 1.0 + 0.01 * max(0, len(self.seen) - self.since)


class DrawsFromAHiddenGenerator(Block):
    def prepare(self) -> None:
        self.generators = [random.Random(1)]

    def scale(self, h: torch.Tensor) -> Any:
        return self.generators[0].random()


ELSEWHERE = r"has tensors of another graph in Conditioned\.condition"
OUTSIDE = r"got a call of a Linear in layers\.2"
KEPT = "must not keep tensors for a later call.*"


@pytest.mark.filterwarnings("ignore:ubatch_size=2 has no effect")
@pytest.mark.parametrize(
    ("make", "options", "kind", "message"),
    [
        (SetsConditions, {}, ValueError, ELSEWHERE),
        (SetsConditions, {"ubatch_size": 3}, ValueError, ELSEWHERE),
        (hiding, {"eps_update": "eager"}, ValueError, OUTSIDE),
        (hiding, {"ubatch_size": 3}, ValueError, OUTSIDE),
        (partial(made, Reading), {"ubatch_size": 2}, ValueError, rf"{KEPT}Reading.last\)"),
        (lambda: made(partial(Sharing, {})), {}, ValueError, rf"{KEPT}Sharing.kept\)"),
        (partial(made, InAnObject), {"ubatch_size": 2}, ValueError, rf"{KEPT}InAnObject.memory\)"),
        *(
            (partial(made, kind), options, RuntimeError, rf"{PATTERN}.*layers\.0 \(a {kind.__name__}\) and 2 more")
            for kind, options in (
                (ReadsAGlobal, {}),
                (ReadsItsList, {"ubatch_size": 2, "stash": "host"}),
                (DrawsFromAHiddenGenerator, {"eps_update": "eager"}),
            )
        ),
    ],
)
def test_what_cannot_be_put_back_is_refused_in_the_first_step(make, options, kind, message):
    model = make()
    with pytest.raises(kind, match=message):
        trained(model, options)
    for layer in model.layers:  # the graph of a condition has the weights of the model, and so the model
        vars(layer).pop("condition", None)


# ---- what layers keep in themselves between calls, and nothing reads


class Writing(Block):
    """Stores its result for someone to look at; its first row is no number."""

    last: Any = None
    later: Any = 0.0

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        found = super().forward(h)
        first = torch.arange(len(h), device=h.device)[:, None, None] == 0
        self.last = self.later = found.detach().masked_fill(first, torch.nan)
        return found


class RecurrentGemmaRglru(nn.Linear):
    """Reads what it kept, and multiplies it by zero where a sequence begins."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        found, last = super().forward(h).tanh(), self.recurrent_states
        self.recurrent_states = found
        return found if last is None else found + 0 * last


class Resetting(Block):
    def prepare(self) -> None:
        self.a = RecurrentGemmaRglru(WIDTH, WIDTH)
        self.a.recurrent_states = None


@cpu_suffices
@pytest.mark.parametrize(("kind", "ubatch_size"), [(Writing, None), (Writing, 2), (Resetting, 3)])
def test_tensors_that_are_not_read(kind, ubatch_size):
    model = made(kind)
    ours = copy.deepcopy(model)
    attach(ours, ubatch_size=ubatch_size)
    for x in (batch(), batch(), batch()[:5]):
        plain = copy.deepcopy(model)
        plain(x).backward()
        ours.zero_grad()
        ours(x).backward()
        assert relative_error(gradients(ours), gradients(plain)) < TOLERANCE[torch.float32]
        if kind is Writing:  # it is left for the program to look at
            assert all(block.later is block.last is not None for block in ours.layers)
        else:
            assert all(block.a.recurrent_states is None for block in ours.layers)


def test_evaluation_keeps_what_a_layer_keeps():
    """As for generation; of all rows, so the batch is not split."""
    model = made(Reading)
    plain = copy.deepcopy(model)
    attach(model, ubatch_size=2)
    with torch.no_grad(), pytest.warns(UserWarning, match=r"it keeps tensors of all rows .*\(Reading.last\)"):
        for _ in range(3):
            torch.testing.assert_close(model(batch()).cpu(), plain(batch()))
    torch.testing.assert_close(model.layers[0].last.cpu(), plain.layers[0].last)


# ---- the comparison of recomputes with their forwards


class Hooked(Block):
    def prepare(self) -> None:
        self.a.register_forward_hook(lambda module, args, out: 2 * out)


@cpu_suffices
def test_it_finds_whatever_else_is_put_back(monkeypatch):
    """If recomputes find what is there."""
    monkeypatch.setattr(LayerState, "put_back", lambda self, collecting=False: nullcontext())
    monkeypatch.setattr(LayerState, "set_generators", lambda self, turn: None)
    removes_hooks = lambda net: [layer.a._forward_hooks.clear() for layer in net.layers]  # noqa: E731
    changes = [(Drops, lambda net: net.eval()), (Block, changes_attributes), (Hooked, removes_hooks)]
    for kind, between in (*((kind, None) for kind in (*DRAWING, *CHANGING)), *changes):
        with pytest.raises(RuntimeError, match=PATTERN):
            trained(made(kind), {}, between=between)


@cpu_suffices
def test_it_warns_once_or_is_off():
    with pytest.warns(UserWarning, match=PATTERN) as caught:
        trained(made(ReadsAGlobal), {"check_recompute": "warn"})
    assert len(caught) == 1
    trained(made(ReadsAGlobal), {"check_recompute": "off"})


@nightly
@cpu_suffices
def test_one_call_in_a_hundred_is_compared_later():
    net = made(ReadsItsList)
    of_each_layer(net, since=50)
    trained(net, {})  # two steps
    for _ in range(97):
        net(batch())
    net(batch()).backward()
    with pytest.raises(RuntimeError, match=PATTERN):
        net(batch()).backward()


@on_sim
@pytest.mark.filterwarnings("ignore:ubatch_size=2 has no effect")
def test_a_difference_is_found_on_each_of_several_devices():
    enable_simulated_accelerator(devices=2)
    try:
        with pytest.raises(RuntimeError, match=rf"{PATTERN}.*and 2 more"):
            trained(made(ReadsAGlobal), {"device": ["sim:0", "sim:1"], "ubatch_size": 2})
    finally:
        enable_simulated_accelerator()


@cpu_suffices
@pytest.mark.parametrize(("family", "options"), [(llama, {"ubatch_size": 3}), (t5, {"cmp": "bf16", "stash": "host"})])
def test_real_layers_pass_with_dropout_and_keep_a_few_bytes(family, options, device):
    kept = {}
    for check in ("raise", "off"):
        model = family().train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
        attach_l2l(model, L2LConfig(device=device, check_recompute=check, **options))
        loss = model(**batch_for(model)).loss
        kept[check] = settled_memory() if device == "sim" else 0
        loss.backward()  # which raises what was found
        del loss, model
    if device == "sim":  # two numbers for each output of four layers, of at most three micro-batches
        assert 0 < kept["raise"] - kept["off"] <= 4 * 2 * 3 * 2 * 4


class Scaled(nn.Embedding):
    """Multiplies by an attribute, and by what is in a list."""

    factor = 1.0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.factor * self.listed[-1]


def loss_of_scaled(*, by_rows: bool, change: Any) -> tuple[Scaled, Any]:
    """Of a model with such an embedding, and the optimizer of it; after a backward before which it was changed."""
    torch.manual_seed(0)
    model: Any = llama().train()
    embedding = Scaled(*model.get_input_embeddings().weight.shape)
    embedding.listed = [2.0]
    model.set_input_embeddings(embedding)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    if by_rows:
        config = L2LConfig(stash="host", boundary="host", ubatch_size=3, device=DEVICE)
        optimizer = attach_l2l(model, config).wrap(optimizer)
    loss = model(**batch_for(model)).loss
    change(embedding)
    loss.backward()
    return embedding, optimizer


@cpu_suffices
def test_an_embedding_by_rows_is_computed_again_as_in_the_forward():
    change = lambda embedding: setattr(embedding, "factor", 5.0)  # noqa: E731
    (plain, _), (ours, _) = (loss_of_scaled(by_rows=by_rows, change=change) for by_rows in (False, True))
    assert ours.factor == 5.0
    torch.testing.assert_close(ours.weight.grad, plain.weight.grad)


@nightly
@on_a_device  # the host keeps the graph of an embedding
def test_an_embedding_by_rows_that_is_computed_otherwise_is_found_by_the_step():
    _, optimizer = loss_of_scaled(by_rows=True, change=lambda embedding: embedding.listed.append(5.0))
    with pytest.raises(RuntimeError, match=rf"{PATTERN}.*Scaled"):
        optimizer.step()


# ---- a dict of the program that is written into


@pytest.mark.parametrize(
    ("kind", "options", "close"),
    [(dict, {"ubatch_size": 2, "stash": "host"}, 1e-5), (UserDict, {"cmp": "bf16"}, 0.1)],
    ids=["micro-batches", "bf16, another kind of mapping"],
)
def test_the_dict_of_the_program_is_written_into(kind, options, close):
    """What is written by 16 bits is fp32."""
    plain, ours = Containing(), Containing()
    attach(ours, **options)
    for _ in range(2):
        for net in (ours, plain):
            x, extra = batch(), {}
            written = kind({"x": x, "unused": x, "extra": extra})
            assert net(written) is written and written["extra"] is extra
            assert written["x"] is x and set(written) == {"x", "features", "extra"}
            found = [written["features"], torch.stack(extra["layers"])]
            assert {each.dtype for each in found} == {torch.float32}
            sum(each.square().mean() for each in found).backward()
    assert relative_error(gradients(ours), gradients(plain)) < close
    with torch.no_grad():
        ours.eval()(kind({"x": batch(), "unused": None, "extra": extra}))
