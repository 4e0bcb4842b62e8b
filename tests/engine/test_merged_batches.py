"""A batch that was merged of several is cut between them, whatever their numbers of rows."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hf_l2l.hf.attach import attachment_of
from hf_l2l.model.batch_dims import NotCut, RowCuts
from models import (
    EXACT,
    FAMILIES,
    assert_bits_of_plain,
    assert_same_bits,
    attached,
    batch_for,
    gradients,
    reference,
    relative_error,
    train_once,
)
from tiers import combinations, cpu_suffices


@cpu_suffices
@given(st.lists(st.integers(1, 9), max_size=6), st.none() | st.integers(1, 4), st.integers(1, 20))
def test_cuts_are_at_the_borders_and_after_so_many_rows(merged, size, rows):
    cuts = RowCuts(size)
    rows = sum(merged) or rows
    with cuts.between(merged):
        parts = cuts.of(rows)
    assert [row for start, stop in parts for row in range(start, stop)] == list(range(rows))
    borders = {sum(merged[:i]) for i in range(len(merged) + 1)} | {0, rows}
    assert borders <= {0} | {stop for _, stop in parts}
    assert all(stop - start <= (size or rows) for start, stop in parts)
    fewest = sum(-(-count // (size or count)) for count in merged or [rows])
    assert len(parts) == fewest
    assert len(RowCuts(None).of(rows)) == 1


@pytest.mark.parametrize(
    ("rows", "sizes"), [(9, [2, 1, 1, 1, 1, 1, 1, 1]), (8, [1] * 8), (3, [1] * 3), (20, [3] * 4 + [2] * 4)]
)
def test_without_a_size_there_are_as_many_ubatches_as_asked_for(rows, sizes):
    cuts = RowCuts(None, RowCuts.parts_for(4)).of(rows)
    assert [stop - start for start, stop in cuts] == sizes and (cuts[0][0], cuts[-1][1]) == (0, rows)


def test_what_is_cut_after_the_block_is_not_merged():
    cuts = RowCuts(None)
    with pytest.raises(KeyError), cuts.between((2, 3)):
        raise KeyError
    assert cuts.of(5) == [(0, 5)]


def test_a_call_with_other_rows_is_not_cut():
    cuts = RowCuts(2)
    with cuts.between((2, 3)), pytest.raises(NotCut, match="called with 6 rows for a batch of 5"):
        cuts.of(6)


def rows_seen(model: nn.Module) -> list[int]:
    """Collects with how many rows a module inside the last layer is called."""
    seen: list[int] = []
    named = reversed(list(model.named_modules()))
    inside = next(m for name, m in named if ".1." in name and type(m).__name__ in ("Linear", "Conv1D"))
    inside.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
    return seen


@pytest.mark.parametrize(
    ("family", "options", "merged"),
    combinations(
        ["llama", "bert", "t5", "gpt2"],
        [{}, {"stash": "host"}, {"stash": "host", "boundary": "host"}],
        [(1, 3, 2, 2), (5, 3), (2, 6)],
        together=1,
    ),
)
def test_gradients_are_those_of_the_whole_batch(family, options, merged):
    model = FAMILIES[family]().double()
    batch = batch_for(model)
    loss, expected = reference(model, batch)
    attached(model, **options)
    seen = rows_seen(model)
    for _ in range(2):  # with what was just learned, and with what is known
        model.zero_grad()
        seen.clear()
        with attachment_of(model).cuts.between(merged):
            assert abs(train_once(model, batch) - loss) <= EXACT * abs(loss)
        assert relative_error(gradients(model), expected) <= EXACT
    if family != "t5":  # its last layers get several tensors with rows
        assert seen == 2 * list(merged)


def test_the_size_cuts_the_batches_too():
    model = FAMILIES["llama"]()
    batch = batch_for(model)
    expected = reference(copy.deepcopy(model).double(), batch)[1]
    attached(model, ubatch_size=2)
    seen = rows_seen(model)
    with attachment_of(model).cuts.between((3, 5)):
        train_once(model, batch)
    assert seen[-5:] == [2, 1, 2, 2, 1]
    assert relative_error({n: g.double() for n, g in gradients(model).items()}, expected) <= 1e-5


@cpu_suffices
def test_it_has_the_bits_of_ubatches_of_that_size():
    runs = []
    for merged, size in (((), 2), ((2, 2, 2, 2), None), ((4, 4), 2)):
        torch.manual_seed(1)
        model = attached(FAMILIES["llama"](), ubatch_size=size)
        with attachment_of(model).cuts.between(merged):
            train_once(model, batch_for(model))
        runs.append(gradients(model))
    assert_same_bits(runs[1], runs[0])
    assert_same_bits(runs[2], runs[0])


class Centered(nn.Module):
    """Its rows influence each other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x - x.mean(0))
        return out


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x)
        return out


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (Centered, "its rows give different results in ubatches than all at once"),
        (Normed, r"it normalizes over the rows of the batch \(a BatchNorm1d\)"),
    ],
)
def test_what_cannot_be_cut_is_refused_each_time_and_leaves_no_gradient(block, reason):
    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([block(), block()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for each in self.blocks:
                x = each(x)
            return x.square().mean()

    model = Stacked()
    expected = copy.deepcopy(model)
    attached(model, layer_classes=(block.__name__,))
    x = torch.randn(6, 3)
    with attachment_of(model).cuts.between((2, 4)):
        for _ in range(2):  # the second time, it is known
            with pytest.raises(NotCut, match=f"calls of {block.__name__} cannot be cut into micro-batches: {reason}"):
                model(x)
    assert all(p.grad is None for p in model.parameters())
    for each in (model, expected):  # and afterwards it runs whole, without a warning, since nobody has asked for cuts
        each(x).backward()
    assert_bits_of_plain(gradients(model), gradients(expected))
