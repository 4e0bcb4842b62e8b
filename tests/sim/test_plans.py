"""Plans for budgets, trained on a device that has no more memory, and their time, on the virtual clock."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.plan.planner import BudgetError, Plan, make_plan, needed, time_of
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.plan.step_time import Rates
from hf_l2l.testing import Costs, enable_simulated_accelerator, engine_on_clock, virtual_clock
from models import bert
from tiers import more, nightly
from training import settled_memory


@pytest.fixture(autouse=True)
def _no_limit_afterwards() -> Iterator[None]:
    yield
    enable_simulated_accelerator()


# ---- the time of a step, by the cost model and on the clock on which the engine itself runs

ADAM_BYTES = 28
"""Per parameter that is updated on the host: gradient 4, weight 8, two moments 16."""


def rates(link: float, flops: float, adamw: float) -> Rates:
    """The virtual clock counts no operations of the optimizer on the device."""
    return Rates(flops=flops, link_up=link, link_down=link, adamw=adamw, device_adamw=math.inf)


COMPUTE, LINK, HOST = rates(1e12, 1e9, 1e12), rates(1e8, 1e13, 1e12), rates(1e10, 1e13, 1e7)
BALANCED = rates(1e9, 2e11, 1e9)
ON_HOST = {"stash": "host", "boundary": "host"}
CASES: dict[str, tuple[Rates, dict[str, Any]]] = {
    "compute": (COMPUTE, {}),
    "link": (LINK, {}),
    "kept weights": (LINK, {"kept_weights": 3}),
    "host": (HOST, {}),
    "resident layers, host": (HOST, {"resident": "shell", "resident_layers": 3}),
    "balanced": (BALANCED, {}),
    "boundary on the host": (BALANCED, ON_HOST),
    "bf16": (BALANCED, {"cmp": "bf16"}),
    "whole batch": (BALANCED, {"ubatch_size": None}),
}


def deep(layers: int) -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=500)).train()


def encoder(layers: int) -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "max_position_embeddings": 128}
    return bert(**sizes, num_hidden_layers=layers, vocab_size=500).train()


def inputs(rows: int, tokens: int = 64) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 490, (rows, tokens), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), foreach=False)


def run_shapes(model: nn.Module, config: L2LConfig, rows: int) -> RunShapes:
    return RunShapes(model, config, inputs(rows), optimizer=adamw(model))


def virtual_seconds(config: L2LConfig, given: Rates, *, layers: int, rows: int) -> float:
    """Of a step after two others, from the end of one `optimizer.step()` to the end of the next."""
    model, batch = deep(layers), inputs(rows)
    eps = attach_l2l(model, config)
    optimizer = eps.wrap(adamw(model))

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # learns the order of the layers
    eps.synchronize()
    speeds = Costs(link_bytes_per_s=given.link_up, flop_per_s=given.flops, host_bytes_per_s=ADAM_BYTES * given.adamw)
    ends = []
    with virtual_clock(speeds) as clock, engine_on_clock(clock, eps):
        for _ in range(3):
            step()
            ends.append(clock.now)
    return ends[-1] - ends[-2]


@nightly
@pytest.mark.parametrize("name", ["resident layers, host", *more(*(n for n in CASES if n != "resident layers, host"))])
def test_steps_take_the_time_of_the_model(name):
    given, options = CASES[name]
    config = L2LConfig(**{"stash": "device", "ubatch_size": 2, **options})
    found = virtual_seconds(config, given, layers=4, rows=8)
    assert time_of(run_shapes(deep(4), config, 8), config, given).seconds == pytest.approx(found, rel=0.02)


@nightly
@pytest.mark.parametrize(("given", "share"), [(HOST, 1.5), *more((COMPUTE, 1.0), (BALANCED, 2.5))])
def test_no_other_options_are_faster_on_the_clock(given, share):
    """The plan, among options that fit: here those of one size of micro-batch."""
    base = L2LConfig(stash="device", ubatch_size=2)
    run = run_shapes(deep(3), base, 4)
    some = [
        replace(base, resident=shell, resident_layers=resident, kept_graphs=graphs)
        for shell, resident, graphs in product(("none", "shell"), (0, 3), (0, *more(1, 3)))
    ]
    sizes = [needed(run, each) for each in some]
    budget = int(share * min(sizes))
    run = RunShapes(deep(3), base, inputs(4), optimizer=adamw(deep(3)), given=("stash", "boundary", "ubatch_size"))
    plan = make_plan(run, budget, given)
    fitting = [each for each, size in zip(some, sizes, strict=True) if size <= budget]
    fastest = min(virtual_seconds(each, given, layers=3, rows=4) for each in fitting)
    assert virtual_seconds(plan.config, given, layers=3, rows=4) <= 1.02 * fastest


# ---- the memory of a plan


def least(run: RunShapes, rates: Rates) -> Plan:
    """The plan for the smallest budget that can be met."""
    with pytest.raises(BudgetError) as caught:
        make_plan(run, 1, rates)
    return make_plan(run, caught.value.smallest, rates)


def train(model: nn.Module, batch: dict[str, torch.Tensor], config: L2LConfig, capacity: float) -> None:
    """Two steps on a device of this capacity."""
    enable_simulated_accelerator(settled_memory() + int(capacity))
    try:
        eps = attach_l2l(model, config)
        optimizer = eps.wrap(adamw(model))
        for _ in range(2):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        eps.synchronize()
    finally:
        detach_l2l(model)


@pytest.mark.parametrize(
    ("make", "tokens", "options", "share"),  # where the budget lies: from the least, 0, to what needs no plan, 1
    [
        (deep, 33, {"cmp": "bf16", "grad_dtype": "16bit"}, 0.2),
        *more((deep, 128, {}, 0.0), (deep, 8, {}, 0.5), (deep, 64, {"chunked_loss": "off"}, 0.1)),
        *more((encoder, 33, {}, 0.0), (encoder, 128, {"cmp": "bf16"}, 0.4), (encoder, 8, {}, 0.8)),
    ],
)
def test_a_plan_trains_on_a_device_of_its_budget_and_none_on_less_than_the_smallest(make, tokens, options, share):
    models = [make(3) for _ in range(2)]
    ids = inputs(4, tokens)["input_ids"]
    batch = {"input_ids": ids, "labels": ids[:, 0] % 2 if make is encoder else ids.clone()}
    run = RunShapes(models[0], L2LConfig(**options), batch, optimizer=adamw(models[0]))
    smallest = least(run, BALANCED)
    everything = L2LConfig(**options, resident="all", kept_graphs=len(run.layers))
    most = max(smallest.budget, sum(run.peak(everything)[1].values()))
    plan = make_plan(run, int(smallest.budget + share * (most - smallest.budget)), BALANCED)
    train(models[0], batch, plan.config, plan.budget)
    with pytest.raises(torch.OutOfMemoryError):
        train(models[1], batch, smallest.config, 0.95 * smallest.peak_bytes)
