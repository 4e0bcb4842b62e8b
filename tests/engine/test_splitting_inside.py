"""Micro-batches of layers whose rows are not those of the model's own inputs, but of a call nested in the model's."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from models import EXACT, attached, gradients, relative_error

ROWS, TOKENS, WIDTH = 6, 5, 4
FLOAT64 = torch.float64


class Block(nn.Module):
    """Counts with how many rows, or packed tokens, it is called."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.rows: list[int] = []

    def forward(self, x, **extras):
        self.rows.append(len(x))
        return x + self.linear(x).tanh()


class Turned(Block):
    """Its positions have the rows in their second dimension."""

    def forward(self, x, positions, **extras):
        return super().forward(x + positions.to(x.dtype).mean(0)[:, :, None])


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Turned(), Turned()])

    def forward(self, x, positions):
        for block in self.blocks:
            x = block(x, positions)
        return x


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, patches, sizes):
        for block in self.blocks:
            patches = block(patches, cu_seqlens=sizes.cumsum(0))
        return patches


class Both(nn.Module):
    """Puts packed images into rows of text; it does not run with more text than images."""

    def __init__(self):
        super().__init__()
        self.vision, self.language = Vision(), Language()
        self.embed = nn.Embedding(10, WIDTH)

    def forward(self, ids, sizes, patches):
        images = self.vision(patches, sizes)
        x = self.embed(ids).masked_scatter(ids[:, :, None] == 0, images)
        if int((ids == 0).sum()) != len(images):
            raise ValueError("the images do not fit the text")
        positions = torch.arange(TOKENS).expand(3, len(ids), TOKENS)
        return self.language(x, positions).square().mean()


def text_and_images():
    torch.manual_seed(0)
    ids = torch.randint(1, 10, (ROWS, TOKENS))
    ids[:, :2] = 0
    return ids, torch.full((ROWS,), 2), torch.randn(2 * ROWS, WIDTH, dtype=FLOAT64)


def compare(model, *inputs, ubatch_size=2):
    """Loss and gradients are those of the plain model; returns what was warned of."""
    plain = copy.deepcopy(model)
    expected = plain(*inputs)
    expected.backward()
    attached(model, ubatch_size=ubatch_size, layer_classes=("Block",))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            model.zero_grad()
            for block in (m for m in model.modules() if isinstance(m, Block)):
                block.rows.clear()
            found = model(*inputs)
            found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=EXACT)
    assert relative_error(gradients(model), gradients(plain)) < EXACT
    return [str(each.message) for each in said]


def test_rows_of_the_nearest_enclosing_call():
    model = Both().double()
    said = compare(model, *text_and_images())
    assert [set(block.rows) for block in model.language.blocks] == [{2}, {2}]
    assert [set(block.rows) for block in model.vision.blocks] == [{2 * ROWS}] * 2
    [only] = said
    assert "calls of Block: it is given sequences packed into one (cu_seqlens)" in only


class InParts(nn.Module):
    """A loss that calls its model for a few rows at a time, as losses with cached gradients do."""

    def __init__(self):
        super().__init__()
        self.model = Columns()

    def forward(self, x):
        return torch.cat([self.model(part) for part in x.split(4)]).square().mean()


class Columns(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("rows", [8, 12])
def test_a_model_that_is_called_in_parts(rows):
    model = InParts().double()
    assert compare(model, torch.randn(rows, 3, dtype=FLOAT64)) == []
    assert [set(block.rows) for block in model.model.blocks] == [{2}, {2}]


class Mixing(Block):
    """Its rows influence each other in training only, and it draws random numbers."""

    def forward(self, x, **extras):
        x = super().forward(x)
        if self.training:
            x = x - x.mean(0)
        return F.dropout(F.scaled_dot_product_attention(x, x, x, None, 0.0), 0.0, self.training)


def test_rows_that_influence_each_other_in_training_only():
    model = Columns().double()
    model.blocks = nn.ModuleList([Mixing(), Mixing()]).double()
    [only] = compare(Loss(model), torch.randn(ROWS, TOKENS, 3, dtype=FLOAT64))
    assert "calls of Mixing: its rows give different results in ubatches than all at once" in only


class Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).square().mean()
