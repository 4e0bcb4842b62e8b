"""The planner: budgets, what binds a plan, the fastest plan of all that fit, and the curve of times by budgets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import transformers as hf

from benchmarks import budget_curve
from hf_l2l import L2LConfig
from hf_l2l.option_names import options_of_the_trainer
from hf_l2l.plan.planner import BudgetError, make_plan, needed, parse_budget, time_of
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.plan.step_time import Rates
from hf_l2l.shapes.inputs import example_inputs
from tiers import more, nightly

ROWS = 4
RATES = {
    "link": Rates(flops=1e13, link_up=1e9, link_down=1e9, adamw=1e10, device_adamw=1e10),
    "update": Rates(flops=1e13, link_up=1e11, link_down=1e11, adamw=1e8, device_adamw=1e10),
    "compute": Rates(flops=1e11, link_up=1e10, link_down=1e10, adamw=1e9, device_adamw=1e10),
    "calls": Rates(flops=1e13, link_up=1e10, link_down=1e10, adamw=1e9, device_adamw=1e10, per_call=1e-4),
}


@cache
def run_of(layers: int = 2, width: int = 64, **options: Any) -> RunShapes:
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": 4}
    config = hf.LlamaConfig(**sizes, num_key_value_heads=2, num_hidden_layers=layers, vocab_size=500)
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config)
    return RunShapes(model, L2LConfig(**options), example_inputs(model, ROWS, 64))


def test_budgets_are_sizes_with_their_units():
    known = {"8GiB": 8 * 2**30, "8 GB": 8 * 10**9, "0.5GiB": 2**29, "512mib": 2**29, "9B": 9}
    assert {text: parse_budget(text) for text in known} == known
    for text in ("8", "GiB", "8 bananas", "-1GiB", "0GB", "", 8):
        with pytest.raises(ValueError, match="with its unit"):
            parse_budget(text)


def smallest_of(run: RunShapes) -> int:
    with pytest.raises(BudgetError) as caught:
        make_plan(run, 1000, RATES["link"])
    return caught.value.smallest


def test_a_budget_that_no_choice_meets_names_the_smallest():
    run = run_of()
    smallest = smallest_of(run)
    plan = make_plan(run, smallest, RATES["link"])
    assert plan.peak_bytes <= smallest and plan.config.ubatch_size == 1
    with options_of_the_trainer(), pytest.raises(BudgetError, match="ubatch_size=1"):
        make_plan(run, smallest - 1, RATES["link"])


def test_options_that_are_set_bind_the_plan():
    run = run_of(ubatch_size=2, stash="host", resident_layers=1)
    plan = make_plan(run, 10**9, RATES["compute"])
    assert "plan for 953.7 MiB" in str(plan) and str(plan).endswith(f"bound by {plan.time.bound}")
    assert not {"ubatch_size", "stash", "resident_layers"} & set(plan.chosen)
    assert (plan.config.ubatch_size, plan.config.stash, plan.config.resident_layers) == (2, "host", 1)


def all_options(run: RunShapes) -> Iterator[L2LConfig]:
    """Every combination that a plan may choose."""
    counts = range(len(run.layers) + 1)
    places = [("host", "host"), ("host", "device"), ("device", "auto")]
    for (stash, boundary), shell, resident, graphs, weights, inputs in product(
        places, ("none", "shell"), counts, counts, counts, counts
    ):
        if weights > len(run.layers) - resident or (stash == "device" and inputs):
            continue
        for ubatch_size, gradient_slots in product((1, 2, 4), (1, 2)):
            yield replace(
                run.config,
                stash=stash,
                boundary=boundary,
                resident=shell,
                resident_layers=resident,
                kept_graphs=graphs,
                kept_weights=weights,
                device_stash=inputs,
                ubatch_size=ubatch_size,
                gradient_slots=gradient_slots,
            )


@nightly
@pytest.mark.parametrize("rates", ["compute", *more("update", "link", "calls")])
def test_no_other_choice_is_faster(rates):
    run = run_of()
    known = [(needed(run, each), time_of(run, each, RATES[rates]).seconds) for each in all_options(run)]
    smallest = min(size for size, _ in known)
    for share in (1.0, 1.8, *more(1.3, 2.5, 4.0)):
        budget = int(share * smallest)
        best = min(seconds for size, seconds in known if size <= budget)
        assert make_plan(run, budget, RATES[rates]).time.seconds <= 1.02 * best, share


def test_tokens_from_which_transfers_and_updates_are_hidden():
    """With twice the link, half of them; resident layers need none."""
    run = run_of()
    slow, fast = (replace(RATES["link"], link_up=link) for link in (1e9, 2e9))
    found = [run.tokens_that_hide(L2LConfig(), rates) for rates in (slow, fast)]
    assert found[0]["upload"] == pytest.approx(2 * found[1]["upload"], abs=1)
    # 4 bytes and 2 operations per weight and token, and attention.
    assert found[0]["upload"] == pytest.approx(2 * slow.flops / slow.link_up, rel=0.2)
    assert found[0]["update"] > found[0]["update in a step"] > 0
    assert set(run.tokens_that_hide(L2LConfig(resident_layers=2), slow).values()) == {0}


@nightly
def test_searches_from_several_beginnings_share_what_they_compute(monkeypatch):
    """A training waits for its plan, so what a search has computed for some options is not computed again."""
    seen: Counter[L2LConfig] = Counter()
    counted = RunShapes.on_device

    def count(run: RunShapes, config: L2LConfig, number: int) -> Any:
        seen[config] += 1
        return counted(run, config, number)

    monkeypatch.setattr(RunShapes, "on_device", count)
    run = run_of(layers=3)
    make_plan(run, 3 * needed(run, L2LConfig(stash="host", boundary="host", ubatch_size=1)), RATES["link"])
    assert len(seen) > 50
    assert max(seen.values()) <= 2  # in the searches, and of the plan that is made


@nightly
def test_sums_over_ranks_on_the_device_are_in_the_plan():
    """What a rank gives twice, what it is sent, and its share: of the gradients of the largest layer."""
    alone, config = run_of(width=128), L2LConfig()
    ranks = RunShapes(alone.model, config, alone.inputs, ranks_add=4)
    largest = max(layer.gradients for layer in alone.weights.layers)
    assert largest > alone.weights.small.gradients
    assert alone.for_ranks == 0 and ranks.for_ranks == 3 * largest + largest // 4
    assert ranks.most(config) == alone.most(config) + ranks.for_ranks


@nightly
def test_with_state_on_disk_not_all_weights_are_resident():
    """Whatever the budget: masters on disk are those of the host."""
    run = run_of(state_tier="disk")
    whole = replace(run.config, state_tier="host", resident="all", kept_graphs=len(run.layers))
    for share in (2, 0.5):
        budget = int(share * needed(run, whole))
        plan = make_plan(run, budget, RATES["link"])
        assert plan.config.state_tier == "disk" and plan.config.resident != "all"
        assert plan.peak_bytes <= budget
        # The time of the disk is told by `estimate --disk`.
        assert str(plan).endswith(", if the disk with masters and moments keeps up")


def test_the_curve_falls_from_l2l_to_plain_training():
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    run = budget_curve.run_of(hf.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=500), 2, 64)
    rates = Rates(flops=1e12, link_up=1e9, link_down=1e9, adamw=1e8, device_adamw=1e11)
    points = budget_curve.curve(run, rates, 4)
    budget_curve.check(run, rates, points)
    streamed, plain = budget_curve.ends(run)
    assert (points[0].budget, points[-1].budget) == (needed(run, streamed), needed(run, plain))
    assert points[-1].config == plain
    assert time_of(run, plain, rates).seconds < points[0].seconds
    with pytest.raises(ValueError, match="must fall with the budget"):
        budget_curve.check(run, rates, [*points, replace(points[0], budget=2 * points[-1].budget)])
