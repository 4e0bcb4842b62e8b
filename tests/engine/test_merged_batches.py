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
from tiers import cpu_suffices, more, nightly


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


@cpu_suffices
@pytest.mark.parametrize(("rows", "sizes"), [(9, [2, 1, 1, 1, 1, 1, 1, 1]), (3, [1] * 3), (20, [3] * 4 + [2] * 4)])
def test_without_a_size_there_are_as_many_ubatches_as_asked_for(rows, sizes):
    cuts = RowCuts(None, RowCuts.parts_for(4)).of(rows)
    assert [stop - start for start, stop in cuts] == sizes and (cuts[0][0], cuts[-1][1]) == (0, rows)


@cpu_suffices
def test_a_call_with_other_rows_is_not_cut_and_nothing_is_merged_after_the_block():
    cuts = RowCuts(None)
    with pytest.raises(NotCut, match="called with 6 rows for a batch of 5"), cuts.between((2, 3)):
        cuts.of(6)
    assert cuts.of(5) == [(0, 5)]


def rows_seen(model: nn.Module) -> list[int]:
    """Collects with how many rows a module inside the last layer is called."""
    seen: list[int] = []
    named = reversed(list(model.named_modules()))
    inside = next(m for name, m in named if ".1." in name and type(m).__name__ in ("Linear", "Conv1D"))
    inside.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
    return seen


@cpu_suffices
@pytest.mark.parametrize(
    ("family", "options", "merged", "sizes"),
    [
        ("t5", {"stash": "host", "boundary": "host"}, (1, 3, 2, 2), None),  # its last layers get several tensors
        ("llama", {"ubatch_size": 2, "stash": "host"}, (3, 5), [2, 1, 2, 2, 1]),
        *more(("bert", {}, (5, 3), [5, 3]), ("gpt2", {"stash": "host"}, (2, 6), [2, 6])),
    ],
)
def test_gradients_are_those_of_the_whole_batch(family, options, merged, sizes):
    """A size cuts the batches, too."""
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
    assert sizes is None or seen == 2 * sizes


@nightly
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


class Centered(nn.Linear):
    """Its rows influence each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0))


class Normed(nn.Module):
    def __init__(self, width: int, _: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class Stacked(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (Centered, "its rows give different results in ubatches than all at once"),
        (Normed, r"it normalizes over the rows of the batch \(a BatchNorm1d\)"),
    ],
)
def test_what_cannot_be_cut_is_refused_each_time_and_leaves_no_gradient(block, reason):
    model = Stacked(block(3, 3), block(3, 3))
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
