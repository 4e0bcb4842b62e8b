"""What `hf-l2l plan` prints: a table of plans, or one JSON object."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hf_l2l.cli.command import count_text, digits_text, print_json
from hf_l2l.scale.hardware import GIB

if TYPE_CHECKING:
    from hf_l2l.cli.printed.plan_measured import Beside
    from hf_l2l.scale import Cluster, Plan, TransformerShape

COLUMNS = (
    "parallelism",
    "method",
    "devices",
    "data",
    "pipe",
    "tensor",
    "batch",
    "ubatch",
    "number",
    "efficiency",
    "time",
)


def show(
    options: argparse.Namespace,
    shape: TransformerShape,
    cluster: Cluster,
    found: list[tuple[str, Plan]],
    beside: Beside | None,
) -> None:
    """Print plans, each with its kind of parallelism, or what was measured beside one."""
    if options.json:
        measured = None if beside is None else beside.as_json()
        print_json({**_as_json(options, shape, cluster, found), "measured": measured})
    else:
        lines = _plans(found) if beside is None else beside.lines()
        print("\n".join((*_head(options, shape, cluster), *lines)))


def time_text(seconds: float) -> str:
    """A time with the unit that fits, to two digits or more."""
    for unit, size in (("y", 365 * 86_400), ("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}" if seconds < 10 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.2g} s"


def _head(options: argparse.Namespace, shape: TransformerShape, cluster: Cluster) -> Iterator[str]:
    hardware = cluster.hardware
    yield (
        f"{options.model}: {count_text(shape.parameters)} parameters in {shape.layers} layers of width {shape.width}, "
        f"rows of {shape.tokens} tokens; the critical batch is {shape.critical_batch:,.0f} rows"
    )
    yield (
        f"{hardware.name}: {hardware.peak_flops / 1e12:.0f} TFLOP/s and {hardware.memory_gib:g} GiB; "
        f"{options.steps:,} steps at the critical batch, or as many rows in more steps\n"
    )


def _plans(found: list[tuple[str, Plan]]) -> Iterator[str]:
    rows = [(*COLUMNS, "device GiB", "host GiB"), *(_row(parallelism, plan) for parallelism, plan in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        texts = [row[n].ljust(w) if n < 2 else row[n].rjust(w) for n, w in enumerate(widths)]
        yield "  ".join(texts).rstrip()
    yield (
        "\nDevices and links are at their peak: a real training takes longer (arXiv:2106.02679, section 5). "
        "Parameters outside the layers are not counted."
    )


def _row(parallelism: str, plan: Plan) -> tuple[str, ...]:
    usage, to = plan.usage, plan.usage.degrees
    on_host = usage.in_host_memory
    counts = (to.devices, to.data, to.pipeline, to.tensor, to.batch, to.micro_batch, to.micro_batches)
    return (
        *(parallelism, usage.method.value),
        *(f"{count:,}" for count in counts),
        *(f"{usage.efficiency.value:.2f}", time_text(plan.seconds)),
        digits_text((usage.memory.total - on_host) / GIB),
        digits_text(on_host / GIB) if on_host else "0",
    )


def _as_json(
    options: argparse.Namespace, shape: TransformerShape, cluster: Cluster, found: list[tuple[str, Plan]]
) -> dict[str, Any]:
    plans = []
    for parallelism, plan in found:
        usage = plan.usage
        memory = usage.memory
        plans.append(
            {
                "parallelism": parallelism,
                "method": usage.method.value,
                **vars(usage.degrees),
                "batch": usage.degrees.batch,
                "devices": usage.degrees.devices,
                "efficiency": usage.efficiency.value,
                "overheads": vars(usage.efficiency),
                "seconds": plan.seconds,
                "is_offloaded": usage.is_offloaded,
                "in_host_memory": usage.in_host_memory,
                "memory": {**vars(memory), "offloadable": memory.offloadable, "resident": memory.resident},
                "offload_bandwidth": usage.offload_gib_per_s * GIB,
            }
        )
    return {
        "model": options.model,
        "shape": {**vars(shape), "parameters": shape.parameters},
        "critical_batch": shape.critical_batch,
        "hardware": vars(cluster.hardware),
        "steps": options.steps,
        "plans": plans,
    }
