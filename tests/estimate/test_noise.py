"""The noise scale, of gradients whose noise is known and by the method of two batch sizes, and growing batches."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_l2l import L2LBatchGrowth
from hf_l2l.noise.estimate import Measured, NoiseScale, together
from hf_l2l.noise.items import items_of_rows, measured
from tiers import nightly

PARAMETERS = 4000
SIGNAL, NOISE = 2.0, 300.0
"""`|E G|^2`, and `tr S` of one item."""


def drawn(counts: list[int], generator: torch.Generator) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The parts that micro-batches with these items have in the gradient of a step, and their sum."""
    mean, spread = math.sqrt(SIGNAL / PARAMETERS), math.sqrt(NOISE / PARAMETERS)
    noises = [torch.randn(PARAMETERS, generator=generator) * spread for _ in counts]
    each = [n / sum(counts) * (mean + noise / math.sqrt(n)) for n, noise in zip(counts, noises, strict=True)]
    return each, sum(each, torch.zeros(PARAMETERS))


def step_of(counts: list[int], parts: list[torch.Tensor], *, is_sum: bool = True) -> Measured:
    found = measured(counts, [(n, n + 1) for n in range(len(counts))], is_sum=is_sum)
    return found + Measured(squares=sum(float(part.square().sum()) for part in parts))


@nightly
@pytest.mark.parametrize(("counts", "is_sum"), [([1, 3, 17, 40, 2], False), ([64, 64], True)])
def test_noise_that_is_known_is_found(counts, is_sum):
    generator, scale = torch.Generator().manual_seed(1), NoiseScale()
    for _ in range(1500):
        parts, total = drawn(counts, generator)
        scale.observe(step_of(counts, parts, is_sum=is_sum), float(total.norm()))
    assert scale.scale == pytest.approx(NOISE / SIGNAL, rel=0.05)
    assert scale.critical_batch == pytest.approx(NOISE / SIGNAL * len(counts) / sum(counts), rel=0.05)


def test_it_is_the_method_of_two_batch_sizes():
    """arXiv:1812.06162, appendix A.1, with the sizes of a micro-batch and of the step."""
    generator, scale = torch.Generator().manual_seed(2), NoiseScale()
    small, big = 8, 32
    parts, total = drawn([small] * 4, generator)
    scale.observe(step_of([small] * 4, parts), float(total.norm()))
    norm_small = sum(float((part * 4).square().sum()) for part in parts) / 4
    norm_big = float(total.square().sum())
    signal = (big * norm_big - small * norm_small) / (big - small)
    noise = (norm_small - norm_big) / (1 / small - 1 / big)
    assert scale.noise / scale.signal == pytest.approx(noise / signal, rel=1e-4)


@given(
    st.lists(st.integers(1, 50), min_size=2, max_size=12),
    st.integers(1, 4),
    st.floats(1e-6, 1e6),
    st.floats(1e-6, 1e6),
    st.booleans(),
)
def test_what_is_expected_gives_signal_and_noise(counts, ranks, signal, noise, is_sum):
    """The expectations of both norms, by definition, with the micro-batches dealt to ranks in any way."""
    shares = [counts[rank::ranks] for rank in range(ranks) if counts[rank::ranks]]
    if is_sum:
        weights = [[n / sum(counts) for n in share] for share in shares]
    else:  # each rank has a batch of its own, with a mean
        weights = [[n / sum(share) / len(shares) for n in share] for share in shares]
    pairs = [(p, n) for ps, share in zip(weights, shares, strict=True) for p, n in zip(ps, share, strict=True)]
    variance = noise * sum(p**2 / n for p, n in pairs)
    squares = signal * sum(p**2 for p, _ in pairs) + variance
    parts = [measured(share, [(n, n + 1) for n in range(len(share))], is_sum=is_sum) for share in shares]
    scale = NoiseScale()
    scale.observe(together([*parts, Measured(squares=squares)]), math.sqrt(signal + variance))
    assert scale.steps == 1
    # One is a small difference of large numbers, if the other is far larger.
    assert scale.signal == pytest.approx(0.01 * signal, rel=1e-6, abs=1e-9 * (signal + variance))
    one = sum(p**2 / n for p, n in pairs)
    assert scale.noise == pytest.approx(0.01 * noise, rel=1e-6, abs=1e-9 * (signal + variance) / one)


def test_a_step_that_tells_nothing_is_left_out():
    scale = NoiseScale()
    whole = measured([3, 4], [None], is_sum=True)
    scale.observe(whole + Measured(squares=4.0), 2.0)  # one micro-batch
    scale.observe(measured([0, 0], [(0, 1), (1, 2)], is_sum=True), 0.0)  # nothing is counted
    two = measured([3, 4], [(0, 1), (1, 2)], is_sum=True)
    scale.observe(two + Measured(squares=math.inf), 2.0)
    scale.observe(two + Measured(squares=2.0), math.nan)
    scale.observe(Measured(), 0.0)
    assert scale == NoiseScale() and scale.scale is None and scale.critical_batch is None
    one_each = measured([1, 1], [(0, 1), (1, 2)], is_sum=True)
    scale.observe(one_each + Measured(squares=2.0), 1.0)  # the parts are orthogonal: noise hides the signal
    assert scale.steps == 1 and scale.signal < 0 and scale.scale is None


def test_a_rank_that_divides_by_its_own_items_weighs_as_the_others():
    first = measured([3, 4], [(0, 1), (1, 2)], is_sum=True).of_weight_1()
    second = measured([30, 40], [(0, 1), (1, 2)], is_sum=True).of_weight_1()
    both = together([first, second]).of_weight_1()
    assert both.weight == pytest.approx(1.0) and both.items == 77 and both.rows == 4
    assert both.weight_squares == pytest.approx(2 * ((3 / 14) ** 2 + (4 / 14) ** 2))


def test_items_are_what_the_loss_counts():
    ids = torch.ones(2, 4, dtype=torch.long)
    labels = torch.tensor([[5, 5, -100, 5], [-100, -100, 5, -100]])
    assert items_of_rows({"input_ids": ids}, shifts=True) == [1, 1]
    assert items_of_rows({"input_ids": ids, "labels": torch.tensor([0, 1])}, shifts=False) == [1, 1]
    assert items_of_rows({"input_ids": ids, "labels": labels}, shifts=False) == [3, 1]
    assert items_of_rows({"input_ids": ids, "labels": labels}, shifts=True) == [2, 1]
    assert items_of_rows({"input_ids": ids, "labels": labels, "shift_labels": ids}, shifts=True) == [4, 4]
    assert items_of_rows({"input_ids": ids, "labels": torch.rand(2, 3)}, shifts=False) == [3, 3]


def test_inputs_without_rows_are_refused():
    for inputs, said in (
        ({"x": torch.ones(2, 3), "y": torch.ones(4)}, r"first dimension is the rows .*got x \[2, 3\], y \[4\]"),
        ({"x": 1}, "got no tensors"),
    ):
        with pytest.raises(ValueError, match=said):
            items_of_rows(inputs, shifts=False)


# ---- batches that grow


@given(st.integers(1, 30), st.integers(1, 6), st.integers(1, 60), st.sets(st.integers(1, 60), max_size=4))
def test_the_last_step_is_known(whole, first, end, wishes):
    """In the loop of transformers, with a wish for a larger batch after any steps."""
    growth = L2LBatchGrowth(10**6)
    args = SimpleNamespace(gradient_accumulation_steps=first, l2l_noise_scale=True, world_size=1)
    state = SimpleNamespace(global_step=0, epoch=0, max_steps=end, train_batch_size=1)
    optimizer = SimpleNamespace(param_groups=[])
    made = [0]
    scheduler = SimpleNamespace(step=lambda: made.__setitem__(0, made[0] + 1))
    known = {"optimizer": optimizer, "lr_scheduler": scheduler, "train_dataloader": range(whole)}
    growth.on_train_begin(args, state, None, **known)
    assert state.max_steps == end
    rows_used = 0
    epochs, more = divmod(end, math.ceil(whole / first))
    last = (epochs - (more == 0), math.ceil(whole / first) if more == 0 else more)  # epoch, and steps of it
    for _ in range(last[0] + 1):
        batches = 0
        while batches < whole and state.global_step < state.max_steps:
            before = args.gradient_accumulation_steps
            used = min(before, whole - batches)
            # transformers ends a step where all batches of the epoch so far are a multiple of this.
            assert all((batches + n) % before for n in range(1, used))
            batches += used
            scheduler.step()
            state.global_step += 1
            growth.wants_more = growth.wants_more or state.global_step in wishes
            growth.on_step_end(args, state, None, **known)
        rows_used += batches
        if batches == whole:
            growth.on_epoch_end(args, state, None, **known)
    assert state.global_step == state.max_steps
    least = last[0] * whole + min(last[1] * first, whole)
    assert least <= rows_used < least + growth.now
    assert made[0] >= end  # of the schedule


def test_a_wish_for_a_larger_batch_ends_with_its_reason():
    args = SimpleNamespace(gradient_accumulation_steps=1, l2l_noise_scale=True, world_size=1)
    state = SimpleNamespace(global_step=0, max_steps=8, train_batch_size=4)
    growth = L2LBatchGrowth(8)
    growth.on_train_begin(args, state, None, train_dataloader=range(8))
    found = []
    for most, critical, steps in ((8, 8.0, 100), (8, 7.0, 100), (7, 8.0, 100), (8, None, 100), (8, 8.0, 1)):
        growth.most_rows = most
        growth.look(args, state, critical, steps)
        found.append(growth.wants_more)
    assert found == [True, False, False, False, False]
    assert json.loads(json.dumps(growth.state())) == growth.state()


def test_what_is_no_bound_or_rule_is_refused():
    for arguments, said in (
        ((0,), "most_rows"),
        ((2.5,), "most_rows"),
        ((True,), "most_rows"),
        ((8, "half"), "learning_rate"),
    ):
        with pytest.raises(ValueError, match=f"{said} must be"):
            L2LBatchGrowth(*arguments)
