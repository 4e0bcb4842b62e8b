"""Weights of the non-layer modules: each is uploaded on the lane, in the order of use, before its first use."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l.compat import without_interception
from hf_l2l.engine.shell import Owner
from hf_l2l.eps import updates
from hf_l2l.eps.pending import Pending, hold
from hf_l2l.hf.attach import attachment_of
from hf_l2l.testing import Costs, virtual_clock
from models import assert_same_bits, attached, gradients
from tiers import nightly
from training import settled_memory

WIDTH, VOCAB = 8, 2**17  # embeddings and heads have so many entries that they travel by themselves


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Decoder(nn.Module):
    """An embedding, layers, a norm between them, a head, and a module that is never used."""

    has_norm = True

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed, self.unused = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1 and self.has_norm:
                x = self.norm(x)
        return self.after_layers(x)

    def after_layers(self, x: torch.Tensor) -> Any:
        return self.head(x * self.scale).logsumexp(-1).mean()


IDS = torch.arange(6)


def decoder(kind: Any = Decoder, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A model under L2L, and the same in plain torch."""
    torch.manual_seed(0)
    plain = kind()
    return attached(copy.deepcopy(plain), device="sim", layer_classes=("Block",), **options), plain


def check_steps(model: nn.Module, plain: nn.Module, loss: Any = lambda model: model(IDS)) -> None:
    """Three backwards, of which each has the gradients of plain torch."""
    for _ in range(3):
        for each in (model, plain):
            each.zero_grad()
            loss(each).backward()
        assert_same_bits(gradients(model), gradients(plain))


@nightly
def test_weights_travel_in_the_order_of_use_and_the_head_under_the_layers():
    """What is not used does not travel. A large weight travels as long as one and a half layers compute."""
    model, plain = decoder()
    check_steps(model, plain)
    large, layer, layer_s = VOCAB * WIDTH * 4, WIDTH * WIDTH * 4, 8.0
    link, flop_per_s = large / (1.5 * layer_s), 2 * len(IDS) * WIDTH * WIDTH / layer_s
    costs = Costs(link_bytes_per_s=link, flop_per_s=flop_per_s, host_bytes_per_s=1e15)
    with virtual_clock(costs) as clock, torch.no_grad():
        model(IDS)
    uploads = [task for task in clock.tasks if task.lane == "upload"]
    computed = [task for task in clock.tasks if task.lane == "compute" and task.end - task.start >= layer_s]
    num_bytes = [round((task.end - task.start) * link) for task in uploads]
    embed, head = (number for number, size in enumerate(num_bytes) if size == large)
    layers = [number for number, size in enumerate(num_bytes) if layer <= size < large]
    assert len(layers) == 4 and embed < layers[0] < layers[-1] < head
    assert min(num_bytes[:embed]) == WIDTH * 4, "small ones come first"
    assert uploads[head].end <= computed[-2].end, "when the last layer has been computed"


class Keeping(Decoder):
    """Returns a weight that it has not used."""

    def after_layers(self, x: torch.Tensor) -> Any:
        return super().after_layers(x), self.unused.weight


def test_a_weight_that_is_used_after_the_call_has_its_values_and_nothing_of_a_call_stays_on_the_device():
    def with_penalty(model: nn.Module) -> torch.Tensor:
        loss, weight = model(IDS)
        return loss + weight.square().sum()

    model, plain = decoder(Keeping)
    check_steps(model, plain, with_penalty)
    torch.sim.synchronize()
    held = settled_memory()
    for _ in range(2):
        with_penalty(model).backward()
        torch.sim.synchronize()  # the last gradients have left
        assert torch.sim.memory_allocated() == held


class Extending(Decoder):
    """Gives weights to a function in C++ that torch does not intercept: those of a module that is not called, and its
    own."""

    has_norm = False

    def after_layers(self, x: torch.Tensor) -> Any:
        for weight in (self.norm.weight, self.scale):
            with without_interception():  # stands for it
                x = x * weight
        return x.sum()


@nightly
def test_small_weights_may_be_given_to_extensions():
    check_steps(*decoder(Extending))


def test_a_gradient_of_a_large_weight_that_was_not_uploaded_is_an_error():
    """An extension alone has used it. (Kernels of the simulated accelerator are in Python, where torch intercepts.)"""
    model, _ = decoder()
    shell = model._hf_hook.runner
    unit = shell.eps.masters.unit(model)
    leaf = torch.ones(2, requires_grad=True)
    leaf.grad = torch.ones(2)
    hold(leaf, Pending())
    with pytest.raises(RuntimeError, match="got a gradient of embed.weight, which was used in another way"):
        shell.sender(Owner(shell, unit))([m.name for m in unit.masters].index("embed.weight"), leaf)


class Beside(Decoder):
    def after_layers(self, x: torch.Tensor) -> Any:
        side, main = torch.sim.Stream(), torch.sim.current_stream()
        side.wait_stream(main)
        with torch.sim.stream(side):
            first = x @ self.head.weight.T
        second = x @ self.head.weight.T  # before the streams join
        main.wait_stream(side)
        first.record_stream(main)
        return (first + second).sum()


def test_a_weight_may_be_used_in_another_stream_first():
    model, _ = decoder(Beside)
    with torch.no_grad():
        assert len({model(IDS).item() for _ in range(3)}) == 1


@nightly
def test_the_last_layer_does_not_wait_for_the_update_of_the_head(monkeypatch):
    model, _ = decoder(eps_update="deferred")
    eps = attachment_of(model).eps
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    launched, found = threading.Event(), []
    model.blocks[3].linear.register_forward_pre_hook(lambda *_: launched.set())
    carry_out = updates.carry_out

    def late(part: Any, held: Any, *rest: Any) -> None:
        if held[0].name == "head.weight":
            found.append(launched.wait(60))
        carry_out(part, held, *rest)

    for _ in range(2):  # the first forward learns the order
        model(IDS).backward()
    eps.synchronize()
    monkeypatch.setattr(updates, "carry_out", late)
    launched.clear()
    optimizer.step()
    model(IDS)
    eps.synchronize()
    assert found == [True]
