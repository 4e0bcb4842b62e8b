"""What several devices of one process are worth for a training."""

from __future__ import annotations

import math
from typing import Any

from hf_l2l.config import L2LConfig
from hf_l2l.pipeline.times import step_time
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.plan.step_time import Rates, pipelined
from hf_l2l.runtime.tensors import two_digits


def several_devices(run: RunShapes, config: L2LConfig, rates: Rates) -> list[str]:
    """What devices that run layers in turn are worth for this batch: against one of them, and against as many that
    each run all layers with their part of the rows (data parallel), whose weights travel to each."""
    costs, count = run.costs(config), len(run.turns)
    options: dict[str, Any] = {"launch": rates.per_call, "defers": config.eps_update != "serial"}
    layers = [pipelined(cost, rates) for cost in costs.layers if cost.forward_flops]
    outside = pipelined(costs.shell, rates)
    passed = run.own_input / costs.ubatches / rates.link_down
    found = step_time(layers, run.outside_seconds(config, rates), count, costs.ubatches, passed=passed, **options)
    one = step_time(layers, outside, 1, costs.ubatches, **options)
    part = [
        each._replace(forward=each.forward / count, backward=each.backward / count, recompute=each.recompute / count)
        for each in (outside, *layers)
    ]
    parallel = step_time(part[1:], part[0], 1, max(1, costs.ubatches // count), **options)
    times = [two_digits(each.seconds) for each in (found, one, parallel)]
    notes = [
        f"{count} devices run the layers in turn, with {costs.ubatches} micro-batches: a step takes {times[0]} s "
        f"where one takes {times[1]} s, {one.seconds / found.seconds:.1f} times as long; they are idle for "
        f"{found.idle:.0%} of the sweeps. Each link carries one part in {count} of the weights.",
        f"As many devices with all layers each (data parallel, not in one process) would take {times[2]} s and the "
        "time of adding their gradients.",
    ]
    if rates.per_call:
        slowest = max(layer.forward for layer in layers) / costs.ubatches
        tokens = run.rows * run.tokens_per_row / costs.ubatches
        least = math.ceil(tokens * count * rates.per_call / slowest)
        notes.append(f"One thread launches for all: micro-batches pay from {least:,} tokens on (now {tokens:,.0f}).")
    return notes
