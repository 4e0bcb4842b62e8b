"""A recompute that gives other outputs than its forward is found, whatever the cause."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from devices import DEVICE
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.model.layer_state import LayerState
from hf_l2l.testing import enable_simulated_accelerator
from impure_layers import CHANGING, DRAWING, Block, Drops, batch, made, trained
from models import batch_for, llama, t5
from tiers import cpu_suffices, nightly, on_a_device, on_sim
from training import settled_memory

PATTERN = "the recompute of a layer must give the outputs of its forward"
CALLS = [0]


class ReadsAGlobal(Block):
    def scale(self, h: torch.Tensor) -> Any:
        CALLS[0] += 1
        return 1.0 + CALLS[0]


class ReadsItsList(Block):
    """A list that it changes in place is the same list. The output changes by little."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def scale(self, h: torch.Tensor) -> Any:
        self.seen.append(0)
        return 1.0 + 0.01 * len(self.seen)


class DrawsFromAHiddenGenerator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generators = [random.Random(1)]

    def scale(self, h: torch.Tensor) -> Any:
        return self.generators[0].random()


class ChangesLate(ReadsItsList):
    """Reads a global from its call number 50 on."""

    def scale(self, h: torch.Tensor) -> Any:
        CALLS[0] += 1
        super().scale(h)
        return 1.0 + CALLS[0] % 7 / 10 if len(self.seen) > 50 else 1.0


@pytest.mark.filterwarnings("ignore:ubatch_size=2 has no effect")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ReadsAGlobal, {}),
        (ReadsItsList, {"ubatch_size": 2, "stash": "host"}),
        (DrawsFromAHiddenGenerator, {"eps_update": "eager"}),
    ],
)
def test_what_cannot_be_put_back_is_found_in_the_first_step(kind, options):
    with pytest.raises(RuntimeError, match=rf"{PATTERN}.*layers\.0 \(a {kind.__name__}\) and 2 more"):
        trained(made(kind), options)


class Hooked(Block):
    def __init__(self) -> None:
        super().__init__()
        self.a.register_forward_hook(lambda module, args, out: 2 * out)


def changes_a_number(net: Any) -> None:
    for layer in net.layers:
        layer.factor += 1.0


def removes_the_hooks(net: Any) -> None:
    for layer in net.layers:
        layer.a._forward_hooks.clear()


@cpu_suffices
def test_it_finds_whatever_else_is_put_back(monkeypatch):
    """If recomputes find what is there."""
    monkeypatch.setattr(LayerState, "put_back", lambda self, collecting=False: nullcontext())
    monkeypatch.setattr(LayerState, "set_generators", lambda self, turn: None)
    changes = [(Drops, lambda net: net.eval()), (Block, changes_a_number), (Hooked, removes_the_hooks)]
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
    net = made(ChangesLate)
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
    """Reads an attribute, and what `calls` returns."""

    factor = 1.0
    calls: Any = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.factor * (1.0 if self.calls is None else self.calls())


def with_scaled_embedding() -> tuple[Any, Scaled]:
    torch.manual_seed(0)
    model: Any = llama().train()
    embedding = Scaled(*model.get_input_embeddings().weight.shape)
    model.set_input_embeddings(embedding)
    return model, embedding


BY_ROWS = {"stash": "host", "boundary": "host", "ubatch_size": 3, "device": DEVICE}


@cpu_suffices
def test_an_embedding_by_rows_is_computed_again_as_in_the_forward():
    gradients = []
    for options in (None, BY_ROWS):
        model, embedding = with_scaled_embedding()
        if options is not None:
            attach_l2l(model, L2LConfig(**options))
        embedding.factor = 2.0
        loss = model(**batch_for(model)).loss
        embedding.factor = 5.0
        loss.backward()
        assert embedding.factor == 5.0
        gradients.append(embedding.weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


@nightly
@on_a_device  # the host keeps the graph of an embedding
def test_an_embedding_by_rows_that_is_computed_otherwise_is_found_by_the_step():
    model, embedding = with_scaled_embedding()
    eps = attach_l2l(model, L2LConfig(**BY_ROWS))
    optimizer: Any = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.01))
    factors = [2.0]
    embedding.calls = lambda: factors[0]
    loss = model(**batch_for(model)).loss
    factors[0] = 5.0
    loss.backward()
    with pytest.raises(RuntimeError, match=rf"{PATTERN}.*Scaled"):
        optimizer.step()
