"""The cost model: literal times of small steps, what bounds them, and the rates of one layer by a clock of tests;
and the planner: budgets, what binds a plan, the fastest plan of all that fit, and the curve of times by budgets."""

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
from torch.overrides import TorchFunctionMode

from benchmarks import budget_curve
from hf_l2l import L2LConfig
from hf_l2l.memory.device_memory import HEAD
from hf_l2l.optim import one_pass
from hf_l2l.option_names import options_of_the_trainer
from hf_l2l.plan.layer_probe import with_layer_rates
from hf_l2l.plan.planner import BudgetError, make_plan, needed, parse_budget, time_of
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.plan.step_time import Cost, Rates, step_time
from hf_l2l.probe.figures import HardwareFigures
from hf_l2l.shapes.inputs import example_inputs
from models import FAMILIES
from tiers import more, nightly

RATES = Rates(flops=1.0, link_up=1.0, link_down=1.0, update=1.0, device_adamw=1.0)


NOTHING, SHELL = Cost(), Cost(forward_flops=1, backward_flops=2)
ALONE = Cost(forward_flops=2, backward_flops=6)
UPLOADED = [Cost(forward_flops=4, backward_flops=8, forward_up=3, backward_up=up) for up in (3, 0, 0)]
UPDATED = Cost(forward_flops=10, backward_flops=10, forward_up=1, parameters=5)
LONG_UPDATE, SHORT_UPDATE = replace(UPDATED, parameters=50), replace(UPDATED, parameters=20)
SUMMED = Cost(forward_flops=1, backward_flops=4, backward_down=3)
RESIDENT = Cost(forward_flops=10, backward_flops=10, on_device=1)


@pytest.mark.parametrize(
    ("layers", "shell", "link_up", "forward", "backward", "bound"),
    [
        ([ALONE] * 3, SHELL, 1.0, 1 + 6, 2 + 18, "compute"),
        # The first upload is waited for, the others are hidden: the backward has the last two layers in their slots.
        (UPLOADED, NOTHING, 1.0, 3 + 12, 24, "compute"),
        (UPLOADED, NOTHING, 0.1, 3 * 30 + 4, 8 + 30 + 8, "upload"),
        # Updates run under the forward, layer by layer in its order: the first waits for its update and its upload.
        ([UPDATED] * 4, NOTHING, 1.0, 5 + 1 + 40, 40, "compute"),
        ([LONG_UPDATE] * 4, NOTHING, 1.0, 4 * 50 + 1 + 10, 40, "update"),
        # With two slots for sums, the tail of a backward is one download; a slow link bounds the sweep.
        ([SUMMED] * 3, NOTHING, 1.0, 3, 3 * 4 + 3, "compute"),
        ([replace(SUMMED, backward_down=40)] * 3, NOTHING, 1.0, 3, 4 + 3 * 40, "download"),
        # What is resident computes while the others are updated, and is updated on the device.
        ([RESIDENT] * 2 + [SHORT_UPDATE] * 2, NOTHING, 1.0, 2 * 20 + 1 + 10, 40 + 2, "compute"),
    ],
)
def test_the_time_of_a_step(layers, shell, link_up, forward, backward, bound):
    found = step_time(layers, shell, replace(RATES, link_up=link_up))
    assert (found.seconds, found.forward, found.backward) == (forward + backward, forward, backward)
    assert found.bound == bound


def test_without_overlap_every_upload_is_waited_for():
    assert step_time(UPLOADED, NOTHING, RATES, prefetches=False).seconds == 3 * (3 + 4) + 3 + 3 * 8


def test_steps_repeat():
    layers = [Cost(forward_flops=3, backward_flops=5, forward_up=2, backward_up=2, backward_down=3, parameters=7)] * 5
    shell = Cost(forward_flops=1, backward_flops=2, forward_up=4, backward_down=4, parameters=3)
    late = [step_time(layers, shell, RATES, steps=steps).seconds for steps in (4, 5, 8)]
    assert late[0] == late[1] == late[2]


# ---- one layer, measured


def shapes_of(kind: str, rows: int, **options: Any) -> RunShapes:
    with torch.device("meta"):
        model = FAMILIES[kind]()
    inputs = example_inputs(model, rows, None if kind == "vit" else 16)
    return RunShapes(model, L2LConfig(), inputs, device=torch.device("cuda"), **options)


def test_updates_take_the_time_of_what_they_keep():
    threads = {1: 1e9, 2: 2e9}
    figures = HardwareFigures("a card", None, 1e9, 1e9, None, None, 1e11, threads, {"fp32": 1e12})

    def update(**options: Any) -> float:
        return Rates.of(figures, None, L2LConfig(**options)).update

    rates = [update(), update(cmp="bf16"), update(cmp="bf16", moment_dtype="bf16")]
    assert rates == sorted(rates, reverse=True) and len(set(rates)) == 3
    assert update(cmp="bf16") < update(cmp="bf16", host_copies="per_sweep") == update()
    assert update(grad_dtype="16bit") > update()
    assert update() == pytest.approx(2 * update(num_threads=1)) == 2e9 / one_pass.BYTE_TIMES[torch.float32]


def layer_rates(run: RunShapes, seconds: list[float]) -> Rates:
    given = iter(seconds)
    return with_layer_rates(replace(RATES, link_up=2.0), run, torch.device("cpu"), lambda work: next(given))


def flops_of(run: RunShapes, rows: int) -> int:
    layer = run.traced(rows).calls[0].layer
    return layer.forward_flops + layer.backward_flops


def test_operations_are_told_from_what_comes_besides():
    """A layer that takes 3 ms besides, and computes 10 GFLOP/s; and one whose time tells nothing of that."""
    run = shapes_of("llama", 8)
    found = layer_rates(run, [3e-3 + flops_of(run, rows) / 1e10 for rows in (1, 8)])
    assert found.flops == pytest.approx(1e10) and found.per_call == pytest.approx(1.5e-3)
    assert (found.link_up, found.link_down, found.update, found.device_adamw) == (2.0, 1.0, 1.0, 1.0)
    for rows, seconds in ((1, [0.5]), (8, [0.5, 0.5]), (8, [0.6, 0.5])):
        found = layer_rates(shapes_of("llama", rows), seconds)
        assert found.flops == pytest.approx(flops_of(run, rows) / seconds[-1]) and found.per_call == 0


@pytest.mark.parametrize(("kind", "autocast"), [("llama", torch.bfloat16), ("vit", None), *more(("t5", None))])
def test_layers_of_many_kinds_run(kind, autocast):
    """Forward and backward, of one row and of all, under the autocast of the training; the model stays without
    values."""
    run = shapes_of(kind, 4, autocast=autocast)
    seen: list[torch.dtype] = []
    turns: list[Any] = []

    class Sees(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if func is torch.nn.functional.linear:
                seen.append(found.dtype)
            return found

    def measure(work: Any) -> float:
        with Sees():
            work()
        turns.append(work)
        return float(len(turns))

    assert with_layer_rates(RATES, run, torch.device("cpu"), measure).flops > 0
    assert len(turns) == 2 and set(seen) == {autocast or torch.float32}
    assert {p.device.type for p in run.model.parameters()} == {"meta"}


# ---- plans


ROWS = 4
BY_BOUND = {
    "link": Rates(flops=1e13, link_up=1e9, link_down=1e9, update=1e10, device_adamw=1e10),
    "update": Rates(flops=1e13, link_up=1e11, link_down=1e11, update=1e8, device_adamw=1e10),
    "compute": Rates(flops=1e11, link_up=1e10, link_down=1e10, update=1e9, device_adamw=1e10),
    "calls": Rates(flops=1e13, link_up=1e10, link_down=1e10, update=1e9, device_adamw=1e10, per_call=1e-4),
}
LINK = BY_BOUND["link"]


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


def test_a_budget_that_no_choice_meets_names_the_smallest():
    run = run_of()
    with pytest.raises(BudgetError) as caught:
        make_plan(run, 1000, LINK)
    smallest = caught.value.smallest
    plan = make_plan(run, smallest, LINK)
    assert plan.peak_bytes <= smallest and plan.config.ubatch_size == 1
    with options_of_the_trainer(), pytest.raises(BudgetError, match="ubatch_size=1"):
        make_plan(run, smallest - 1, LINK)


def test_options_that_are_set_bind_the_plan():
    run = run_of(ubatch_size=2, stash="host", resident_layers=1)
    plan = make_plan(run, 10**9, BY_BOUND["compute"])
    assert "plan for 953.7 MiB" in str(plan) and str(plan).endswith(f"bound by {plan.time.bound}")
    assert not {"ubatch_size", "stash", "resident_layers"} & set(plan.chosen)
    assert (plan.config.ubatch_size, plan.config.stash, plan.config.resident_layers) == (2, "host", 1)


def all_options(run: RunShapes) -> Iterator[L2LConfig]:
    """Every combination that a plan may choose."""
    counts = range(len(run.layers) + 1)
    places = [("host", "host"), ("host", "device"), ("device", "auto")]
    names = ("resident", "resident_layers", "kept_graphs", "kept_weights", "device_stash", "ubatch_size")
    values = (("none", "shell"), counts, counts, counts, counts, (1, 2, 4))
    for (stash, boundary), gradient_slots, *chosen in product(places, (1, 2), *values):
        made = dict(zip(names, chosen, strict=True))
        is_kept_once = made["kept_weights"] <= len(run.layers) - made["resident_layers"]
        if is_kept_once and not (stash == "device" and made["device_stash"]):
            yield replace(run.config, stash=stash, boundary=boundary, gradient_slots=gradient_slots, **made)


@pytest.mark.parametrize("rates", ["link", *more("compute", "update", "calls")])
def test_no_other_choice_is_faster(rates):
    run = run_of()
    known = [(needed(run, each), time_of(run, each, BY_BOUND[rates]).seconds) for each in all_options(run)]
    smallest = min(size for size, _ in known)
    for share in (1.0, 1.3, *more(1.8, 2.5, 4.0)):
        budget = int(share * smallest)
        best = min(seconds for size, seconds in known if size <= budget)
        assert make_plan(run, budget, BY_BOUND[rates]).time.seconds <= 1.02 * best, share


def test_the_gradients_of_the_head_leave_while_the_last_layer_computes():
    phases = dict(run_of(layers=3).on_device(L2LConfig(ubatch_size=2, stash="host", boundary="host")).phases())
    first, second, last = (phases[f"backward of layer {number}"][HEAD] for number in (1, 2, 3))
    assert last > second == first


def test_tokens_from_which_transfers_and_updates_are_hidden():
    """With twice the link, half of them; resident layers need none."""
    run = run_of()
    slow, fast = (replace(LINK, link_up=link) for link in (1e9, 2e9))
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
    make_plan(run, 3 * needed(run, L2LConfig(stash="host", boundary="host", ubatch_size=1)), LINK)
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
        plan = make_plan(run, budget, LINK)
        assert plan.config.state_tier == "disk" and plan.config.resident != "all"
        assert plan.peak_bytes <= budget
        # The time of the disk is told by `estimate --disk`.
        assert str(plan).endswith(", if the disk with masters and moments keeps up")


def test_the_curve_falls_from_l2l_to_plain_training():
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    run = budget_curve.run_of(hf.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=500), 2, 64)
    rates = Rates(flops=1e12, link_up=1e9, link_down=1e9, update=1e8, device_adamw=1e11)
    points = budget_curve.curve(run, rates, 4)
    budget_curve.check(run, rates, points)
    streamed, plain = budget_curve.ends(run)
    assert (points[0].budget, points[-1].budget) == (needed(run, streamed), needed(run, plain))
    assert points[-1].config == plain
    assert time_of(run, plain, rates).seconds < points[0].seconds
    with pytest.raises(ValueError, match="must fall with the budget"):
        budget_curve.check(run, rates, [*points, replace(points[0], budget=2 * points[-1].budget)])
