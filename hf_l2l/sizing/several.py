"""What several devices, or ranks, are worth for a training."""

from __future__ import annotations

import math
from typing import Any

from hf_l2l.config import L2LConfig
from hf_l2l.pipeline.ranks import HostBytes, ranks_time
from hf_l2l.pipeline.times import step_time
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.plan.step_time import Rates, pipelined
from hf_l2l.runtime.tensors import size_text


def several_ranks(run: RunShapes, config: L2LConfig, rates: Rates | None, dram: float | None, count: int) -> list[str]:
    """What ranks of one host take, each with a device and these rows: host memory, and time if rates are known.

    Args:
        run: the model, and the batch of one rank.
        config: the options.
        rates: of the machine.
        dram: bytes per second that the host reads and writes.
        count: how many ranks there are.
    """
    costs = run.costs(config)
    landing = 2 * max((cost.backward_down for cost in costs.layers), default=0)
    notes = [
        f"{count} ranks share the host's memory above, and each has {size_text(landing)} more for gradients that it "
        "sends, beside what a process takes (about 0.3 GiB with torch and transformers)."
    ]
    if rates is None or dram is None:
        return notes
    options: dict[str, Any] = {"launch": rates.per_call, "defers": config.eps_update != "serial", "dram": dram}
    layers, outside = [pipelined(cost, rates) for cost in costs.layers], pipelined(costs.shell, rates)
    moved = [
        HostBytes(cost.forward_up + cost.backward_up, cost.backward_down, cost.parameters)
        for cost in (*costs.layers, costs.shell)
    ]
    found = ranks_time(layers, outside, moved, count, ubatches=costs.ubatches, **options)
    notes.append(
        f"A step of {count} ranks takes {found.seconds:.3g} s, with {found.times_as_many:.1f} times the rows per "
        f"second of one; what takes longest is {found.bound}. {size_text(found.host_bytes)} pass through host memory "
        "in a step."
    )
    return notes


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
    notes = [
        f"{count} devices run the layers in turn, with {costs.ubatches} micro-batches: a step takes "
        f"{found.seconds:.3g} s where one takes {one.seconds:.3g} s, {one.seconds / found.seconds:.1f} times as long; "
        f"they are idle for {found.idle:.0%} of the sweeps. Each link carries one part in {count} of the weights.",
        f"As many devices with all layers each (data parallel, not in one process) would take {parallel.seconds:.3g} "
        "s and the time of adding their gradients.",
    ]
    if rates.per_call:
        slowest = max(layer.forward for layer in layers) / costs.ubatches
        tokens = run.rows * run.tokens_per_row / costs.ubatches
        least = math.ceil(tokens * count * rates.per_call / slowest)
        notes.append(f"One thread launches for all: micro-batches pay from {least:,} tokens on (now {tokens:,.0f}).")
    return notes
