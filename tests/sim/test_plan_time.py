"""The time of a step by the cost model against the virtual clock, on which the engine itself runs."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.plan.planner import make_plan, needed, time_of
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.plan.step_time import Rates
from hf_l2l.testing import Costs, engine_on_clock, virtual_clock

ADAM_BYTES = 28
"""Per parameter that is updated on the host: gradient 4, weight 8, two moments 16."""


def rates(link: float, flops: float, adamw: float) -> Rates:
    """The virtual clock counts no operations of the optimizer on the device."""
    return Rates(flops=flops, link_up=link, link_down=link, adamw=adamw, device_adamw=math.inf)


COMPUTE, LINK, HOST = rates(1e12, 1e9, 1e12), rates(1e8, 1e13, 1e12), rates(1e10, 1e13, 1e7)
BALANCED, SLOW_UPDATE = rates(1e9, 2e11, 1e9), rates(1e9, 2e11, 1e8)
ON_HOST = {"stash": "host", "boundary": "host"}
CASES: dict[str, tuple[Rates, dict[str, Any]]] = {
    "compute": (COMPUTE, {}),
    "kept graphs": (COMPUTE, {"kept_graphs": 3}),
    "link": (LINK, {}),
    "kept weights": (LINK, {"kept_weights": 3}),
    "resident layers, link": (LINK, {"resident": "shell", "resident_layers": 3}),
    "host": (HOST, {}),
    "resident layers, host": (HOST, {"resident": "shell", "resident_layers": 3}),
    "balanced": (BALANCED, {}),
    "one gradient slot": (BALANCED, {"gradient_slots": 1}),
    "serial updates": (SLOW_UPDATE, {"eps_update": "serial"}),
    "no prefetching": (SLOW_UPDATE, {"eps_update": "serial", "prefetch": False}),
    "boundary on the host": (BALANCED, ON_HOST),
    "stash on the host": (BALANCED, {"stash": "host", "boundary": "device"}),
    "boundary on the host, one slot": (BALANCED, {**ON_HOST, "gradient_slots": 1}),
    "bf16": (BALANCED, {"cmp": "bf16"}),
    "whole batch": (BALANCED, {"ubatch_size": None}),
}
FAST = ("kept weights", "resident layers, host")


def llama(layers: int) -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=500)).train()


def inputs(rows: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 490, (rows, 64), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), foreach=False)


def run_shapes(model: nn.Module, config: L2LConfig, rows: int) -> RunShapes:
    return RunShapes(model, config, inputs(rows), optimizer=adamw(model))


def virtual_seconds(config: L2LConfig, given: Rates, *, layers: int, rows: int) -> float:
    """Of a step after two others, from the end of one `optimizer.step()` to the end of the next."""
    model, batch = llama(layers), inputs(rows)
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


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in CASES])
def test_steps_take_the_time_of_the_model(name):
    given, options = CASES[name]
    config = L2LConfig(**{"stash": "device", "ubatch_size": 2, **options})
    run = run_shapes(llama(6), config, 8)
    assert time_of(run, config, given).seconds == pytest.approx(
        virtual_seconds(config, given, layers=6, rows=8), rel=0.02
    )


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in ("on the device", "on the host")])
def test_rows_that_a_slow_link_carries(name):
    """With nothing but the link, the order of its copies decides: of those that are ready together, the model knows
    only some."""
    options = {"stash": "host", "boundary": "host" if "host" in name else "device", "ubatch_size": 2}
    config = L2LConfig(**options)
    run = run_shapes(llama(6), config, 8)
    assert time_of(run, config, LINK).seconds == pytest.approx(
        virtual_seconds(config, LINK, layers=6, rows=8), rel=0.06
    )


@pytest.mark.at_most(3)
@pytest.mark.parametrize(
    ("given", "share"),
    [(given, share) for given in (COMPUTE, HOST, BALANCED) for share in (1.0, 1.5, 2.5)],
)
@pytest.mark.slow
def test_no_other_options_are_faster_on_the_clock(given, share):
    """The plan, among options that fit: here those of one size of micro-batch."""
    base = L2LConfig(stash="device", ubatch_size=2)
    run = run_shapes(llama(3), base, 4)
    some = [
        replace(base, resident=shell, resident_layers=resident, kept_graphs=graphs, gradient_slots=slots)
        for shell, resident, graphs, slots in product(("none", "shell"), (0, 1, 3), (0, 1, 3), (1, 2))
    ]
    sizes = [needed(run, each) for each in some]
    budget = int(share * min(sizes))
    run = RunShapes(llama(3), base, inputs(4), optimizer=adamw(llama(3)), given=("stash", "boundary", "ubatch_size"))
    plan = make_plan(run, budget, given)
    fitting = [each for each, size in zip(some, sizes, strict=True) if size <= budget]
    fastest = min(virtual_seconds(each, given, layers=3, rows=4) for each in fitting)
    assert virtual_seconds(plan.config, given, layers=3, rows=4) <= 1.02 * fastest
