"""The curve of step times against budgets, for a tiny shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
import transformers as hf

from benchmarks.budget_curve import check, curve, ends, run_of
from hf_l2l.plan.planner import needed, time_of
from hf_l2l.plan.step_time import Rates

RATES = Rates(flops=1e12, link_up=1e9, link_down=1e9, adamw=1e8, device_adamw=1e11)


def test_the_curve_falls_from_l2l_to_plain_training():
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    run = run_of(hf.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=500), 2, 64)
    points = curve(run, RATES, 4)
    check(run, RATES, points)
    streamed, plain = ends(run)
    assert (points[0].budget, points[-1].budget) == (needed(run, streamed), needed(run, plain))
    assert points[-1].config == plain
    assert time_of(run, plain, RATES).seconds < points[0].seconds
    with pytest.raises(ValueError, match="must fall with the budget"):
        check(run, RATES, [*points, replace(points[0], budget=2 * points[-1].budget)])
