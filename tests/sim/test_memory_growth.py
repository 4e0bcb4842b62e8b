"""What device memory grows with under L2L, and by how much: the formulas of `benchmarks/memory.py`, at small sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import memory, memory_report
from benchmarks.memory_runs import Case, measured
from tiers import nightly

TINY = Case("l2l", layers=2, hidden=32, vocab=200, rows=8, tokens=16, ubatch=2)
LONG = replace(memory.LONG, hidden=32)
SIM = torch.device("sim")


def peaks(case: Case, grows: str, sizes: tuple[int, ...]) -> list[list[int]]:
    """Bytes of the first and the second step, of each size."""
    return [measured(replace(case, **{grows: size}), SIM)["peaks"] for size in sizes]


@nightly
@pytest.mark.parametrize("sizes", [(2, 8), (6, 48)], ids=str)
def test_depth_costs_nothing(sizes):
    # The comparison of recomputes has some numbers for each layer.
    found = peaks(replace(TINY, options={"check_recompute": "off"}), "layers", sizes)
    assert all(found[0] == each for each in found), "in the first step and in the second one"


@nightly  # of one model: tests/sim/test_long_rows.py
@pytest.mark.parametrize("sizes", [(24, 32), (32, 64, 256)], ids=str)
def test_the_device_batch_costs_ids_labels_and_losses(sizes):
    """Once its tokens fill a few chunks of logits: while one is computed, the hidden states of others travel."""
    first, *others = (each[-1] for each in peaks(TINY, "rows", sizes))
    for rows, found in zip(sizes[1:], others, strict=True):
        assert (found - first) / (rows - sizes[0]) == pytest.approx(memory.per_row(TINY, SIM), rel=0.01)


@nightly  # one chunk: tests/sim/test_logit_chunks.py
@pytest.mark.parametrize(("hidden", "sizes"), [(32, (600, 1800)), (128, (1000, 16000, 128000))], ids=str)
def test_vocabulary_costs_weights_gradients_and_one_chunk_of_logits(hidden, sizes):
    case = replace(TINY, hidden=hidden)
    first, *others = (each[-1] for each in peaks(replace(case, rows=24), "vocab", sizes))
    for vocab, found in zip(sizes[1:], others, strict=True):
        assert (found - first) / (vocab - sizes[0]) == pytest.approx(memory.per_word(case, SIM), rel=0.05)


@nightly  # in proportion: tests/sim/test_long_rows.py
@pytest.mark.parametrize("sizes", [(512, 1024, 2048), (2**13, 2**15, 2**16)], ids=str)
def test_tokens_of_a_row_cost_what_one_layer_takes(sizes):
    """In proportion: attention that is fused keeps nothing for pairs of tokens."""
    found = [each[-1] for each in peaks(LONG, "tokens", sizes)]
    slopes = [(b - a) / (m - n) for a, b, n, m in zip(found, found[1:], sizes, sizes[1:], strict=False)]
    assert slopes[0] == pytest.approx(slopes[1], rel=0.01)
    assert slopes[0] == pytest.approx(memory.per_token(LONG, SIM), rel=0.05)


@nightly
def test_without_l2l_all_of_them_cost():
    """The same cases with the model on the device: activation checkpointing takes activations away, and no weights."""
    for way in ("plain", "checkpointing"):
        case = replace(TINY, way=way)
        shallow, deep = (each[-1] for each in peaks(case, "layers", (2, 8)))
        few, many = (each[-1] for each in peaks(case, "rows", (8, 24)))
        parameters = 4 * 32 * 32 + 3 * 32 * 128 + 2 * 32
        assert deep - shallow >= 6 * 16 * parameters, "weight, gradient and two moments"
        assert many - few >= 16 * 16 * 4 * (2 * 32 + 2 * 200), "inputs of both layers, and logits"


def test_the_formula_starts_at_the_first_size():
    rows = [
        {"way": way, "size": size, "slope": 3.0, "peaks": [1, peak]}
        for way, size, peak in (("plain", 2, 50), ("l2l", 2, 10), ("plain", 4, 90), ("l2l", 4, 17))
    ]
    assert memory_report.formula(rows) == {2: 10, 4: 16}
