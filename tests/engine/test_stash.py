"""What a layer was given is kept exactly as long as the graph, and the recompute uses what the forward used."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from devices import DEVICE
from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.stash import spill
from hf_l2l.stash.stash import Stash
from memory_switches import forced_copies
from models import TOLERANCE, Toy, batch_for, gradients, relative_error
from runs import config_for
from tiers import combinations, cpu_suffices

FORMS = ["views", "copies"] if DEVICE == "cpu" else ["copies"]
PLACES = ({"stash": "device"}, {"stash": "host", "ubatch_size": 3}, {"stash": "disk", "ubatch_size": 3})


@pytest.fixture
def apart():
    """Tensors are copied on the CPU, too, as on a device with memory of its own."""
    with copies_if("copies"):
        yield


def copies_if(form: str) -> Any:
    return forced_copies() if form == "copies" and DEVICE == "cpu" else nullcontext()


@pytest.fixture(autouse=True)
def _on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of tests count as such, wherever they are."""
    monkeypatch.setattr(spill, "is_in_memory", lambda folder: False)


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
    if DEVICE != "cpu":
        torch.get_device_module(DEVICE).synchronize()
    return sum(not each.expired() for each in memory)


@cpu_suffices
@pytest.mark.parametrize("options", PLACES, ids=str)
def test_they_live_as_long_as_the_graph(options, apart, monkeypatch, tmp_path):
    """Freed by the backward that used them, with a batch that is thrown away, and after an error in a later layer;
    kept for a second backward."""
    if options["stash"] == "disk":
        options = {**options, "spill_dir": tmp_path}
    model = Toy(2)
    attach_l2l(model.eval(), config_for(model, device=DEVICE, **options))
    batch = batch_for(model, masked=False)
    with watched(monkeypatch) as memory:
        loss = model(**batch).loss
        loss.backward(retain_graph=True)
        assert alive(memory) == len(memory)
        once = gradients(model)
        loss.backward()
        assert alive(memory) == 0 and loss.grad_fn is not None
        memory.clear()
        for name, gradient in gradients(model).items():
            assert torch.equal(gradient, 2 * once[name]), name
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()

        out = model(**batch)
        assert alive(memory) == len(memory)
        del out
        assert alive(memory) == 0
        memory.clear()

        def fail(*args: object) -> None:
            raise KeyError("from the user's hook")

        model.blocks[1].down.register_forward_hook(fail)
        try:
            model(**batch)
        except KeyError as error:
            error.__traceback__ = None
        assert alive(memory) == 0


@pytest.mark.parametrize("options", PLACES[1:], ids=str)
def test_a_graph_outlives_the_engine(options, tmp_path):
    model = Toy(2, dropout=0.0)
    if options["stash"] == "disk":
        options = {**options, "spill_dir": tmp_path}
    attach_l2l(model, config_for(model, device=DEVICE, **options))
    batch = batch_for(model, masked=False)
    loss = model(**batch).loss
    detach_l2l(model)
    assert not list(tmp_path.iterdir())
    loss.backward()
    found = gradients(model)
    model.zero_grad()
    model(**batch).loss.backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(found[name].cpu(), gradient)


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


def stacked(model: nn.Module | None = None, **options: Any) -> nn.Module:
    model = Stacked().double() if model is None else model
    attach_l2l(model, L2LConfig(device=DEVICE, layer_classes=("Block",), **options))
    return model


@pytest.mark.parametrize("stash", ["device", "host"])
def test_an_input_changed_in_place_is_found_out_unless_its_copy_is_on_the_host(stash, apart):
    model, x = stacked(stash=stash), torch.randn(5, 4).double()
    model(x)[0].backward()
    expected = gradients(model)
    model.zero_grad()
    loss, given = model(x)
    with torch.no_grad():
        given.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace") if stash == "device" else nullcontext():
        loss.backward()
    if stash == "host":
        assert relative_error(gradients(model), expected) <= TOLERANCE[torch.float64]


def test_weights_that_change_are_found_out_and_training_goes_on():
    """Whether the program writes to them, or an optimizer that is not wrapped."""
    model, x = stacked(ubatch_size=2), torch.randn(5, 4).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def write() -> None:
        with torch.no_grad():
            model.blocks[1].linear.bias.add_(1)

    model(x)[0].backward()
    for change in (optimizer.step, write):
        loss, _ = model(x)
        change()
        with pytest.raises(RuntimeError, match=r"a Block was changed in place"):
            loss.backward()
    model.zero_grad()
    plain = Stacked().double()
    plain.load_state_dict(model.state_dict())
    for each in (plain, model):
        each(x)[0].backward()
    assert relative_error(gradients(model), gradients(plain)) <= TOLERANCE[torch.float64]


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


@pytest.mark.parametrize(
    ("ubatch_size", "frozen", "stash", "form"),
    combinations([None, 2], [False, True], ["device", "host"], FORMS, together=2),
)
def test_a_layer_that_overwrites_its_input_is_refused_in_training(ubatch_size, frozen, stash, form):
    """Whether the input needs a gradient or not."""
    plain, x = Overwritten().double(), torch.randn(5, 4).double()
    if frozen:
        plain.embed.requires_grad_(False)
        plain.blocks[0].requires_grad_(False)
    # The simulated accelerator finds that the input is being downloaded.
    with copies_if(form), pytest.raises(RuntimeError, match="in.?place|write-after-read race"):
        ours = stacked(copy.deepcopy(plain), stash=stash, ubatch_size=ubatch_size)
        loss = ours(x)[0]
        torch.testing.assert_close(loss.cpu(), plain(x)[0])
        loss.backward()
