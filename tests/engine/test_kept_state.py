"""Layers that keep tensors in themselves between calls: refused if they read them, put back if they do not."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from families import TOLERANCE, attached, gradients, relative_error
from memory_switches import forced_copies

ROWS, WIDTH = 7, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.last = None

    def forward(self, x):
        return self.linear(x).tanh()


class Reading(Block):
    """Adds what its last call returned."""

    def forward(self, x):
        found = super().forward(x)
        result = found if self.last is None else found + self.last.sum()
        self.last = found.detach()
        return result


class Writing(Block):
    """Stores its result for someone to look at."""

    def forward(self, x):
        self.last = found = super().forward(x)
        self.later = found.detach()
        return found


class Resetting(Block):
    """Reads what it kept, and multiplies it by zero."""

    def forward(self, x):
        found = super().forward(x)
        result = found if self.last is None else found + 0 * self.last
        self.last = found
        return result


class Sharing(Block):
    """Passes a tensor to the next layer through a container of both."""

    shared: dict[str, torch.Tensor] = {}

    def __init__(self):
        super().__init__()
        self.kept = self.shared

    def forward(self, x):
        found = super().forward(x) + self.kept.get("x", 0)
        self.kept["x"] = found
        return found


class Stacked(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.blocks = nn.ModuleList([kind(), kind()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.fixture(autouse=True)
def _nothing_shared():
    Sharing.shared.clear()


@pytest.mark.parametrize(("kind", "name"), [(Reading, "Reading.last"), (Sharing, "Sharing.kept")])
@pytest.mark.parametrize("ubatch_size", [None, 2])
def test_tensors_that_are_read_later_are_refused(kind, name, ubatch_size):
    model = attached(Stacked(kind), layer_classes=("Block",), ubatch_size=ubatch_size)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ubatch_size=2 has no effect")  # its rows influence each other
        with pytest.raises(ValueError, match=rf"must not keep tensors for a later call.*{name}\)"):
            model(torch.randn(ROWS, WIDTH))


@pytest.mark.parametrize("kind", [Writing, Resetting])
@pytest.mark.parametrize("ubatch_size", [None, 2, 3])
def test_tensors_that_are_not_read_are_put_back(kind, ubatch_size):
    torch.manual_seed(0)
    model = Stacked(kind).double()
    batches = [torch.randn(rows, WIDTH, dtype=torch.float64) for rows in (ROWS, ROWS, 5)]
    with forced_copies():
        ours = attached(copy.deepcopy(model), layer_classes=("Block",), ubatch_size=ubatch_size)
        for batch in batches:
            plain = copy.deepcopy(model)
            plain(batch).backward()
            ours.zero_grad()
            ours(batch).backward()
            assert relative_error(gradients(ours), gradients(plain)) < TOLERANCE[torch.float64]
            assert all(block.last is None for block in ours.blocks)
            if kind is Writing:  # what was not there before is left for the program to look at
                assert all(hasattr(block, "later") for block in ours.blocks)


def test_evaluation_keeps_what_a_layer_keeps():
    """As for generation; of all rows, so the batch is not split."""
    model, x = Stacked(Reading), torch.randn(ROWS, WIDTH)
    plain = copy.deepcopy(model)
    attached(model, layer_classes=("Block",), ubatch_size=2)
    with torch.no_grad(), pytest.warns(UserWarning, match=r"it keeps tensors of all rows .*\(Reading.last\)"):
        for _ in range(3):
            torch.testing.assert_close(model(x), plain(x))
    assert torch.equal(model.blocks[0].last, plain.blocks[0].last)
