"""A module of the model may be compiled in place, a layer or another one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hf_l2l import L2LConfig, attach_l2l
from models import assert_same_bits, gradients

WIDTH, VOCAB = 8, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x).logsumexp(-1).mean()


# torch says what it cannot trace, of which there is much in a hooked module.
@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["embed", "head", "blocks.1"])
def test_a_compiled_module_trains(name):
    torch.manual_seed(0)
    plain = Decoder()
    model = copy.deepcopy(plain)
    torch._dynamo.reset()
    model.get_submodule(name).compile(backend="eager")
    attach_l2l(model, L2LConfig(device="cpu", layer_classes=("Block",)))
    for _ in range(4):
        for each in (model, plain):
            each.zero_grad()
            each(torch.arange(6)).backward()
        assert_same_bits(gradients(model), gradients(plain))
