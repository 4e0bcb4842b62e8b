"""What a layer was given is kept exactly as long as the graph, and the recompute uses what the forward used."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.eps.host_memory import HostMemory
from hf_l2l.runtime.stream import HOST
from hf_l2l.stash.stash import Stash
from hf_l2l.stash.tiers import Tiers
from memory_switches import forced_copies
from models import TOLERANCE, attached, batch_for, bert, gradients, relative_error, train_once


@pytest.fixture(params=["views", "copies"])
def copies(request):
    with forced_copies() if request.param == "copies" else nullcontext():
        yield


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def host_stash(place: str = "host") -> Stash:
    return Stash(Tiers(L2LConfig(stash=place), [HOST], HostMemory(HOST, nn.Module()), layers=1), HOST)


def keep(stash: Stash, tensors: list[torch.Tensor], batched: list[bool]) -> list[torch.Tensor]:
    with stash.keeping(tensors, batched) as kept:
        return kept


# ---- which tensors travel


def test_a_layers_own_tensors_travel_and_shared_ones_stay():
    stash = host_stash()
    mask, first, second = torch.ones(4, 1), torch.randn(4, 3), torch.randn(4, 3)
    with forced_copies():
        (kept, _), (kept_later, mask_later) = (keep(stash, [x, mask], [True, True]) for x in (first, second))
    for given, away in ((first, kept), (second, kept_later)):
        assert not same_memory(away, given) and torch.equal(away, given) and not away.requires_grad
    assert mask_later is mask


def test_what_was_shared_is_forgotten_at_the_next_forward():
    stash = host_stash()
    mask = torch.ones(4, 1)
    with forced_copies():
        keep(stash, [mask], [True])
        assert keep(stash, [mask], [True])[0] is mask
        stash.start_forward()
        assert keep(stash, [mask], [True])[0] is not mask


def test_tensors_that_are_not_cut_stay():
    stash = host_stash()
    embeddings = torch.randn(4, 3)
    with forced_copies():
        assert keep(stash, [embeddings], [False])[0] is embeddings


def test_nothing_travels_within_one_memory_or_to_the_device():
    tensors = [torch.randn(4, 3)]
    assert keep(host_stash(), tensors, [True])[0] is tensors[0]
    with forced_copies():
        assert keep(host_stash("device"), tensors, [True])[0] is tensors[0]


def test_a_stashed_tensor_does_not_live_by_the_stash():
    stash, tensor = host_stash(), torch.randn(4)
    with forced_copies():
        keep(stash, [tensor], [True])
    memory = StorageWeakRef(tensor.untyped_storage())
    del tensor
    assert memory.expired()


def test_rows_are_fetched_from_where_they_are():
    kept = torch.randn(4, 3)
    assert host_stash().fetch(kept) is kept


# ---- how long they live


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StorageWeakRef]]:
    """The memory of what every layer call keeps; the garbage collector is off meanwhile."""
    found: list[StorageWeakRef] = []
    keeping = Stash.keeping

    @contextmanager
    def watch(self: Stash, tensors: list[torch.Tensor], batched: list[bool]) -> Iterator[list[torch.Tensor]]:
        with keeping(self, tensors, batched) as kept:
            found.extend(StorageWeakRef(t.untyped_storage()) for t in kept)
            yield kept

    monkeypatch.setattr(Stash, "keeping", watch)
    gc.disable()
    try:
        yield found
    finally:
        gc.enable()


def alive(memory: list[StorageWeakRef]) -> int:
    assert memory
    return sum(not m.expired() for m in memory)


PLACES = pytest.mark.parametrize("options", [{"stash": "device"}, {"stash": "host", "ubatch_size": 3}], ids=str)


@PLACES
def test_freed_by_the_backward_that_used_it(options, copies, monkeypatch):
    model = attached(bert(), **options).train()
    with watched(monkeypatch) as memory:
        loss = model(**batch_for(model, masked=False)).loss
        assert alive(memory) == len(memory)
        loss.backward()
        assert alive(memory) == 0
        assert loss.grad_fn is not None


@PLACES
def test_freed_with_a_batch_that_is_thrown_away(options, copies, monkeypatch):
    model = attached(bert(), **options).train()
    with watched(monkeypatch) as memory:
        out = model(**batch_for(model, masked=False))
        assert alive(memory) == len(memory)
        del out
        assert alive(memory) == 0


@PLACES
def test_freed_after_an_error_in_a_later_layer(options, copies, monkeypatch):
    model = attached(bert(), **options).train()
    with watched(monkeypatch) as memory:
        model(**batch_for(model)).loss.backward()
        memory.clear()

        def fail(*args: object) -> None:
            raise KeyError("from the user's hook")

        model.bert.encoder.layer[1].output.register_forward_hook(fail)
        try:
            model(**batch_for(model, masked=False))
        except KeyError as error:
            error.__traceback__ = None
        assert alive(memory) == 0


@PLACES
def test_kept_with_retain_graph(options, copies, monkeypatch):
    model = attached(bert(), **options).train()
    with watched(monkeypatch) as memory:
        loss = model(**batch_for(model)).loss
        loss.backward(retain_graph=True)
        assert alive(memory) == len(memory)
        once = gradients(model)
        loss.backward()
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, 2 * once[name]), name


def test_a_second_backward_without_retain_graph_is_refused(copies):
    model = attached(bert())
    loss = model(**batch_for(model)).loss
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


# ---- changes between the sweeps


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(x).tanh()


class Stacked(nn.Module):
    """Returns, beside its loss, what its second layer is given."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = given = self.blocks[0](self.embed(x))
        return self.blocks[1](x).square().mean(), given


def stacked(**options: object) -> nn.Module:
    model = Stacked().double()
    attach_l2l(model, L2LConfig(layer_classes=("Block",), **options))
    return model


def test_an_input_changed_in_place_is_found_out(copies):
    loss, given = stacked()(torch.randn(5, 4).double())
    with torch.no_grad():
        given.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_input_changed_in_place_does_not_reach_its_copy_on_the_host():
    model, x = stacked(stash="host"), torch.randn(5, 4).double()
    model(x)[0].backward()
    expected = gradients(model)
    model.zero_grad()
    with forced_copies():
        loss, given = model(x)
        with torch.no_grad():
            given.add_(1)
        loss.backward()
    assert relative_error(gradients(model), expected) <= TOLERANCE[torch.float64]


@pytest.mark.parametrize("options", [{}, {"ubatch_size": 2}], ids=str)
def test_a_weight_changed_in_place_is_found_out(options, copies):
    model = stacked(**options)
    loss, _ = model(torch.randn(5, 4).double())
    with torch.no_grad():
        model.blocks[1].linear.bias.add_(1)
    message = (
        r"the weights of a layer must not change between its forward and its backward \(a Block was changed in place\)"
        r"; run backward before optimizer.step\(\), load_state_dict or other writes"
    )
    with pytest.raises(RuntimeError, match=message):
        loss.backward()


def test_a_step_between_forward_and_backward_is_found_out(copies):
    model = stacked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 4).double()
    model(x)[0].backward()
    loss, _ = model(x)
    optimizer.step()
    with pytest.raises(RuntimeError, match="weights of a layer must not change"):
        loss.backward()


class Overwriting(Block):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return super().forward(x.add_(self.shift))


class Overwritten(Stacked):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Overwriting()])


@pytest.mark.parametrize("stash", ["device", "host"])
def test_a_layer_that_overwrites_its_input_is_refused_in_training(stash, copies):
    plain, x = Overwritten().double(), torch.randn(5, 4).double()
    ours = copy.deepcopy(plain)
    attach_l2l(ours, L2LConfig(layer_classes=("Block",), stash=stash))
    loss = ours(x)[0]
    assert torch.equal(loss, plain(x)[0])
    with pytest.raises(RuntimeError, match="in-?place operation"):
        loss.backward()


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("ubatch_size", [None, 2])
def test_a_layer_that_overwrites_an_input_without_gradients_is_refused(stash, ubatch_size, copies):
    model, x = Stacked(), torch.randn(5, 4).double()
    model.embed.requires_grad_(False)
    model.blocks[0] = Overwriting()
    model.double()
    attach_l2l(model, L2LConfig(layer_classes=("Block",), stash=stash, ubatch_size=ubatch_size))
    loss = model(x)[0]
    with pytest.raises(RuntimeError, match=r"must not change its arguments in place.*\(got a Overwriting that does\)"):
        loss.backward()


def test_training_goes_on_after_a_change_was_found_out(copies):
    model = stacked()
    x = torch.randn(5, 4).double()
    train = model(x)[0]
    with torch.no_grad():
        model.blocks[0].linear.weight.mul_(1)
    with pytest.raises(RuntimeError, match="weights of a layer"):
        train.backward()
    model.zero_grad()
    plain = Stacked().double()
    plain.load_state_dict(model.state_dict())
    for each in (plain, model):
        each(x)[0].backward()
    assert relative_error(gradients(model), gradients(plain)) <= TOLERANCE[torch.float64]


def test_two_graphs_at_once_keep_their_own(copies):
    model = bert().double()
    attached(model, stash="host", ubatch_size=3)
    first, second = batch_for(model), batch_for(model, seed=7)
    train_once(model, first)
    train_once(model, second)
    expected = gradients(model)
    model.zero_grad()
    losses = [model(**batch).loss for batch in (first, second)]
    for loss in losses:
        loss.backward()
    assert relative_error(gradients(model), expected) <= TOLERANCE[torch.float64]
