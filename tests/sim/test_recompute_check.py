"""A recompute that gives other outputs than its forward is found, whatever the cause."""

from __future__ import annotations

import random
import warnings
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.model.layer_state import LayerState
from hf_l2l.testing import enable_simulated_accelerator
from impure_layers import CHANGING, DRAWING, ROWS, WIDTH, Block, Drops, made
from models import batch_for, bert, llama, t5
from training import settled_memory

PATTERN = "the recompute of a layer must give the outputs of its forward"
CALLS = [0]


class ReadsAGlobal(Block):
    def scale(self, h: torch.Tensor) -> Any:
        CALLS[0] += 1
        return 1.0 + CALLS[0]


class ReadsItsList(Block):
    """A list that it changes in place is the same list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def scale(self, h: torch.Tensor) -> Any:
        self.seen.append(0)
        return 1.0 + len(self.seen)


class DrawsFromAHiddenGenerator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generators = [random.Random(1)]

    def scale(self, h: torch.Tensor) -> Any:
        return self.generators[0].random()


class ChangesLate(Block):
    """Reads a global from its call number 50 on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = [0]

    def scale(self, h: torch.Tensor) -> Any:
        CALLS[0] += 1
        self.calls[0] += 1
        return 1.0 + CALLS[0] % 7 / 10 if self.calls[0] > 50 else 1.0


HIDDEN = (ReadsAGlobal, ReadsItsList, DrawsFromAHiddenGenerator)


def step(net: nn.Module, **options: Any) -> Any:
    """One step layer to layer; returns what makes another."""
    eps = attach_l2l(net, L2LConfig(**options))
    optimizer: Any = eps.wrap(torch.optim.SGD(net.parameters(), lr=0.01))
    x = torch.randn(ROWS, 5, WIDTH, generator=torch.Generator().manual_seed(1))

    def once(between: Any = None) -> None:
        net.train()
        loss = net(x)
        if between is not None:
            between(net)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return once


@pytest.mark.filterwarnings("ignore:ubatch_size=2 has no effect")
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("options", [{}, {"ubatch_size": 2, "stash": "host"}, {"eps_update": "eager"}], ids=str)
@pytest.mark.parametrize("kind", HIDDEN, ids=lambda kind: kind.__name__)
def test_what_cannot_be_put_back_is_found_in_the_first_step(kind, options, device):
    once = step(made(kind), device=device, **options)
    with pytest.raises(RuntimeError, match=rf"{PATTERN}.*layers\.0 \(a {kind.__name__}\) and 2 more"):
        once()


@contextmanager
def hooked(net: Any) -> Any:
    handles = [layer.a.register_forward_hook(lambda module, args, out: 2 * out) for layer in net.layers]
    yield
    for handle in handles:
        handle.remove()


def evaluates(net: Any) -> None:
    net.eval()


def changes_a_number(net: Any) -> None:
    for layer in net.layers:
        layer.factor += 1.0


@pytest.fixture
def restored_by_nobody(monkeypatch):
    """Recomputes find what is there."""
    monkeypatch.setattr(LayerState, "put_back", lambda self, collecting=False: nullcontext())
    monkeypatch.setattr(LayerState, "set_generators", lambda self, turn: None)


@pytest.mark.usefixtures("restored_by_nobody")
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize(
    ("kind", "between"),
    [*((kind, None) for kind in (*DRAWING, *CHANGING)), (Drops, evaluates), (Block, changes_a_number)],
    ids=lambda each: getattr(each, "__name__", "nothing"),
)
def test_it_finds_whatever_else_is_put_back(kind, between, device):
    once = step(made(kind), device=device)
    with pytest.raises(RuntimeError, match=PATTERN):
        once(between)


@pytest.mark.usefixtures("restored_by_nobody")
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_it_finds_hooks_that_are_gone(device):
    net = made(Block)
    attach_l2l(net, L2LConfig(device=device))
    with hooked(net):
        loss = net(torch.ones(ROWS, 5, WIDTH))
    with pytest.raises(RuntimeError, match=PATTERN):
        loss.backward()


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_it_warns_once_or_is_off(device):
    once = step(made(ReadsAGlobal), device=device, check_recompute="warn")
    with pytest.warns(UserWarning, match=PATTERN) as caught:
        once()
        once()
    assert len(caught) == 1
    once = step(made(ReadsAGlobal), device=device, check_recompute="off")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        once()


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_one_call_in_a_hundred_is_compared_later(device):
    once = step(made(ChangesLate), device=device)
    for _ in range(100):
        once()
    with pytest.raises(RuntimeError, match=PATTERN):
        once()


@pytest.fixture
def two_devices():
    """The program has two simulated devices."""
    enable_simulated_accelerator(devices=2)
    yield
    enable_simulated_accelerator()


@pytest.mark.filterwarnings("ignore:ubatch_size=2 has no effect")
@pytest.mark.usefixtures("two_devices")
def test_a_difference_is_found_on_each_of_several_devices():
    once = step(made(ReadsAGlobal), device=["sim:0", "sim:1"], ubatch_size=2)
    with pytest.raises(RuntimeError, match=rf"{PATTERN}.*and 2 more"):
        once()


@pytest.mark.parametrize("family", [bert, llama, t5], ids=lambda each: each.__name__)
@pytest.mark.parametrize("options", [{}, {"ubatch_size": 3}, {"cmp": "bf16", "stash": "host"}], ids=str)
def test_real_layers_pass_with_dropout_and_keep_a_few_bytes(family, options):
    kept = {}
    for check in ("raise", "off"):
        model = family().train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
        attach_l2l(model, L2LConfig(device="sim", check_recompute=check, **options))
        batch = batch_for(model)
        loss = model(**batch).loss
        kept[check] = settled_memory()
        loss.backward()
        del loss
        with torch.no_grad():
            model(**batch)  # raises what was found
        del model
        settled_memory()
    # Two numbers for each output of four layers, of at most two micro-batches.
    assert 0 < kept["raise"] - kept["off"] <= 4 * 2 * 3 * 2 * 4


class Scaled(nn.Embedding):
    """Reads an attribute, and what `calls` returns."""

    factor = 1.0
    calls: Any = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.factor * (1.0 if self.calls is None else self.calls())


def with_scaled_embedding() -> Any:
    torch.manual_seed(0)
    model: Any = llama().train()
    old = model.get_input_embeddings()
    embedding = Scaled(*old.weight.shape)
    embedding.load_state_dict(old.state_dict())
    model.set_input_embeddings(embedding)
    return model


BY_ROWS = {"stash": "host", "boundary": "host", "ubatch_size": 3}


def test_an_embedding_by_rows_is_computed_again_as_in_the_forward():
    gradients = []
    for options in (None, BY_ROWS):
        model = with_scaled_embedding()
        if options is not None:
            attach_l2l(model, L2LConfig(device="sim", **options))
        embedding = model.get_input_embeddings()
        embedding.factor = 2.0
        loss = model(**batch_for(model)).loss
        embedding.factor = 5.0
        loss.backward()
        assert embedding.factor == 5.0
        gradients.append(embedding.weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_an_embedding_by_rows_that_is_computed_otherwise_is_found():
    model = with_scaled_embedding()
    eps = attach_l2l(model, L2LConfig(device="sim", **BY_ROWS))
    optimizer: Any = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.01))
    factors = [2.0]
    model.get_input_embeddings().calls = lambda: factors[0]
    loss = model(**batch_for(model)).loss
    factors[0] = 5.0
    loss.backward()
    with pytest.raises(RuntimeError, match=rf"{PATTERN}.*Scaled"):
        optimizer.step()
