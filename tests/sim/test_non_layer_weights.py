"""Weights of the non-layer modules: each is uploaded on the lane, in the order of use, before its first use."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from families import assert_same_bits, gradients
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.engine.shell import _Uploads
from hf_l2l.engine.slots import WeightSlots
from hf_l2l.testing import Costs, virtual_clock

WIDTH, VOCAB = 8, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Decoder(nn.Module):
    """An embedding, layers, a norm between them, a head, and a module that is never used."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed, self.unused = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                x = self.norm(x)
        return self.head(x * self.scale).logsumexp(-1).mean()


IDS = torch.arange(6)


def decoder(**options: Any) -> tuple[nn.Module, nn.Module]:
    """A model under L2L, and the same in plain torch."""
    torch.manual_seed(0)
    plain = Decoder()
    model = copy.deepcopy(plain)
    attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), **options))
    return model, plain


@pytest.fixture
def uploaded(monkeypatch):
    """The names of what is uploaded, in order."""
    found: list[str] = []
    begin, fill = _Uploads.begin, WeightSlots._fill

    def began(uploads: _Uploads, number: int, leaf: torch.Tensor) -> None:
        if number not in uploads._ends:
            found.append(uploads._unit.masters[number].name)
        begin(uploads, number, leaf)

    def filled(slots: WeightSlots, unit: Any) -> Any:
        found.append(unit.name)
        return fill(slots, unit)

    monkeypatch.setattr(_Uploads, "begin", began)
    monkeypatch.setattr(WeightSlots, "_fill", filled)
    return found


def test_weights_travel_in_the_order_of_use_and_the_head_after_the_layers(uploaded):
    model, _ = decoder()
    model(IDS).backward()
    model.zero_grad()
    uploaded.clear()
    model(IDS)
    assert uploaded == [
        *("blocks.0", "embed.weight", "blocks.1", "norm.weight", "norm.bias", "blocks.2", "blocks.3"),
        *("scale", "head.weight"),
    ]


def test_a_weight_that_is_not_used_does_not_travel(uploaded):
    model, plain = decoder()
    for _ in range(2):
        for each in (model, plain):
            each.zero_grad()
            each(IDS).backward()
    assert_same_bits(gradients(model), gradients(plain))
    assert uploaded.count("unused.weight") == 1  # in the first call, nothing is known of the order


@pytest.mark.parametrize("options", [{}, {"prefetch": False}, {"eps_update": "deferred"}], ids=str)
def test_steps_are_those_of_plain_torch(options):
    model, plain = decoder(**options)
    eps = attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), **options))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain)]
    eps.wrap(optimizers[0])
    for _ in range(4):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            each(IDS).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_bits(dict(model.named_parameters()), dict(plain.named_parameters()))


class Keeping(Decoder):
    """Returns a weight that it has not used."""

    def forward(self, ids: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(ids), self.unused.weight


def test_a_weight_that_is_used_after_the_call_has_its_values():
    torch.manual_seed(0)
    plain = Keeping()
    model = copy.deepcopy(plain)
    attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",)))
    for _ in range(2):
        for each in (model, plain):
            each.zero_grad()
            loss, weight = each(IDS)
            (loss + weight.square().sum()).backward()
    assert_same_bits(gradients(model), gradients(plain))


def test_nothing_of_a_call_stays_on_the_device():
    model, _ = decoder()
    model(IDS).backward()
    held = torch.sim.memory_allocated()
    for _ in range(2):
        model(IDS).backward()
        assert torch.sim.memory_allocated() == held


def test_the_upload_of_a_head_is_under_the_layers():
    """A head that travels as long as two layers compute delays nothing."""
    model, _ = decoder()
    model(IDS).backward()
    layer, head = WIDTH * WIDTH * 4, VOCAB * WIDTH * 4
    flops = 2 * 6 * WIDTH * WIDTH
    with virtual_clock(Costs(link_bytes_per_s=layer, flop_per_s=flops / 8, host_bytes_per_s=1e9)) as clock:
        with torch.no_grad():
            model(IDS)
    uploads = [task for task in clock.tasks if task.lane == "upload" and task.end - task.start >= head / layer]
    computed = [task for task in clock.tasks if task.lane == "compute" and task.end - task.start >= 8.0]
    assert len(uploads) == 2  # the embedding, which is as large, and the head
    head_upload, last_layer = uploads[-1], computed[-2]
    assert head_upload.end <= last_layer.end
