"""What device memory grows with under L2L, and by how much: the formulas of `benchmarks/memory.py`, at small sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import memory
from benchmarks.memory_runs import Case, measured
from tiers import ALL, more, nightly

TINY = Case("l2l", layers=2, hidden=32, vocab=200, rows=8, tokens=16, ubatch=4)
SIM = torch.device("sim")


def peaks(case: Case, grows: str, sizes: tuple[int, ...]) -> list[Any]:
    """Bytes of the first and the second step, of each size."""
    return [measured(replace(case, **{grows: size}), SIM)["peaks"] for size in sizes]


def test_depth_costs_nothing():
    # The comparison of recomputes has some numbers for each layer.
    found = peaks(replace(TINY, options={"check_recompute": "off"}), "layers", (6, 48) if ALL else (2, 4))
    assert found[0] == found[1], "in the first step and in the second one"


@nightly
@pytest.mark.parametrize(
    ("grows", "slope", "sizes", "rel"),
    [
        # Once tokens fill a few chunks of logits: while one is computed, the hidden states of others travel.
        ("rows", memory.per_row, (32, 64, 256) if ALL else (24, 32), 0.01),
        ("vocab", memory.per_word, (1000, 16000, 128000) if ALL else (600, 1800), 0.05),
        *more(("tokens", memory.per_token, (2**13, 2**15, 2**16), 0.05)),
    ],
)
def test_device_memory_grows_as_the_formula_says(grows, slope, sizes, rel):
    """A row costs its ids, labels and losses, a word its weights, gradients and one chunk of logits, and a token what
    one layer takes."""
    hidden = 128 if ALL and grows == "vocab" else 32
    case = replace(memory.LONG if grows == "tokens" else replace(TINY, rows=24), hidden=hidden)
    first, *others = (each[-1] for each in peaks(case, grows, sizes))
    for size, found in zip(sizes[1:], others, strict=True):
        assert (found - first) / (size - sizes[0]) == pytest.approx(slope(case, SIM), rel=rel)
