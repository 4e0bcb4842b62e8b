"""Layers that keep tensors in themselves between calls: refused if they read them, told of if gradients are lost."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from memory_switches import forced_copies
from models import TOLERANCE, attached, gradients, relative_error

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

    def __init__(self):
        super().__init__()
        self.later = 0.0

    def forward(self, x):
        found = super().forward(x)
        self.last = self.later = found.detach()
        return found


class Auxiliary(Block):
    """Keeps a loss of its own, which the model adds to its loss."""

    def forward(self, x):
        found = super().forward(x)
        self.last = found.square().mean()
        return found


class RecurrentGemmaRglru(nn.Module):
    """Reads what it kept, and multiplies it by zero where a sequence begins."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.recurrent_states = None

    def forward(self, x):
        found = self.linear(x).tanh()
        result = found if self.recurrent_states is None else found + 0 * self.recurrent_states
        self.recurrent_states = found
        return result


class Resetting(Block):
    def __init__(self):
        super().__init__()
        self.unit = RecurrentGemmaRglru()
        del self.linear

    def forward(self, x):
        return self.unit(x)


class InAnObject(Block):
    """Reads what its last call left in an object."""

    def __init__(self):
        super().__init__()
        self.memory = SimpleNamespace(inner=[None])

    def forward(self, x):
        found = super().forward(x)
        result = found if self.memory.inner[0] is None else found + self.memory.inner[0].sum()
        self.memory.inner[0] = found.detach()
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


@pytest.mark.parametrize(
    ("kind", "name"), [(Reading, "Reading.last"), (Sharing, "Sharing.kept"), (InAnObject, "InAnObject.memory")]
)
@pytest.mark.parametrize("ubatch_size", [None, 2])
def test_tensors_that_are_read_later_are_refused(kind, name, ubatch_size):
    model = attached(Stacked(kind), layer_classes=("Block",), ubatch_size=ubatch_size)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ubatch_size=2 has no effect")  # its rows influence each other
        with pytest.raises(ValueError, match=rf"must not keep tensors for a later call.*{name}\)"):
            model(torch.randn(ROWS, WIDTH))


@pytest.mark.parametrize("kind", [Writing, Resetting])
@pytest.mark.parametrize("ubatch_size", [None, 2, 3])
def test_tensors_that_are_not_read(kind, ubatch_size):
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
            if kind is Writing:  # it is left for the program to look at
                assert all(block.later is block.last is not None for block in ours.blocks)
            else:
                assert all(block.unit.recurrent_states is None for block in ours.blocks)


@pytest.mark.parametrize("kept_graphs", [0, 2])
def test_a_loss_that_a_layer_keeps_is_told_of(kept_graphs):
    """The forward finds its value, but no gradient would flow from it."""
    model = Stacked(Auxiliary)
    plain = copy.deepcopy(model)
    attached(model, layer_classes=("Block",), kept_graphs=kept_graphs)
    x = torch.randn(ROWS, WIDTH)
    expected, found = (each(x) + sum(block.last for block in each.blocks) for each in (plain, model))
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    with pytest.raises(RuntimeError, match="a backward must go through the outputs of a layer"):
        found.backward()
    model(x).backward()


def test_results_that_are_no_numbers_are_equal():
    class Padded(Writing):
        def forward(self, x):
            return super().forward(x).masked_fill(torch.arange(len(x))[:, None] == 0, torch.nan)

    model = attached(Stacked(Padded), layer_classes=("Block",))
    model(torch.randn(ROWS, WIDTH))


def test_evaluation_keeps_what_a_layer_keeps():
    """As for generation; of all rows, so the batch is not split."""
    model, x = Stacked(Reading), torch.randn(ROWS, WIDTH)
    plain = copy.deepcopy(model)
    attached(model, layer_classes=("Block",), ubatch_size=2)
    with torch.no_grad(), pytest.warns(UserWarning, match=r"it keeps tensors of all rows .*\(Reading.last\)"):
        for _ in range(3):
            torch.testing.assert_close(model(x), plain(x))
    assert torch.equal(model.blocks[0].last, plain.blocks[0].last)
