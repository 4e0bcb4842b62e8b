"""Step time against the budget of device memory, computed for the shape of Llama-8B: nothing here is measured.

For each budget, from the least that training layer to layer needs to all weights, states and graphs on the device, the
options that the planner's search finds, their bytes, and the time of a step by the cost model.

    python benchmarks/budget_curve.py --picture docs/budget_curve.png --out docs/budget_curve.md
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from hf_l2l import L2LConfig
from hf_l2l.plan.planner import make_plan, needed, time_of
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.plan.step_time import Rates
from hf_l2l.probe.cards import card_named
from hf_l2l.probe.figures import HardwareFigures
from hf_l2l.shapes.inputs import example_inputs

GIB = 2**30


MACHINES = {"H200, PCIe 5": card_named("h200"), "RTX 4090, PCIe 4": card_named("rtx4090")}
"""Assumed figures, those of `hf-l2l estimate --card`."""
SOURCES = (
    "All rates are assumed: layers reach 60 % of the dense bf16 peaks of the data sheets, which are 989 TFLOP/s of an "
    "H200 and 165 of a 4090; links 55 and 25 GB/s each way, of 64 and 32 (PCIe 5 and 4, x16); host memory 150 and "
    "70 GB/s, of which AdamW moves 36 bytes per parameter; device memory the 4.8 and 1.0 TB/s of the data sheets. "
    "`hf-l2l estimate MODEL --probe` takes the rates of a machine. The last budget would hold all weights, states and "
    "graphs of the device batch, as plain Trainer does."
)


@dataclass(frozen=True)
class Point:
    """What was found for one budget."""

    budget: int
    peak: int
    seconds: float
    bound: str
    config: L2LConfig


def known_bytes(machine: HardwareFigures) -> int:
    """Of the device's memory."""
    assert machine.device_memory_bytes is not None
    return machine.device_memory_bytes


def llama_8b() -> Any:
    """Llama-3 8B's configuration."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    return hf.LlamaConfig(**sizes, num_hidden_layers=32, vocab_size=128256)


def run_of(config: Any, rows: int, tokens: int) -> RunShapes:
    """Shapes alone."""
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config)
    options = L2LConfig(cmp="bf16", chunked_loss=1024)  # one number for all budgets
    return RunShapes(
        model, options, example_inputs(model, rows, tokens), device=torch.device("cuda"), device_memory=10**15
    )


def ends(run: RunShapes) -> tuple[L2LConfig, L2LConfig]:
    """L2L with all layers streamed, and all on the device with no recompute, as plain Trainer trains."""
    streamed = replace(run.config, stash="host", boundary="host", ubatch_size=1, gradient_slots=1)
    return streamed, replace(run.config, stash="device", resident="all", kept_graphs=len(run.layers))


def curve(run: RunShapes, rates: Rates, count: int) -> list[Point]:
    """Points for budgets in equal ratios, the ends included. What fits a budget fits a larger one, too."""
    low, high = (needed(run, end) for end in ends(run))
    budgets = [int(low * (high / low) ** (n / (count - 1))) for n in range(count - 1)] + [high]
    found: list[Point] = []
    for budget in budgets:
        plan = make_plan(run, budget, rates)
        point = Point(budget, plan.peak_bytes, plan.time.seconds, plan.time.bound, plan.config)
        if found and found[-1].seconds < point.seconds:
            point = replace(found[-1], budget=budget)
        found.append(point)
    return found


def check(run: RunShapes, rates: Rates, points: Sequence[Point]) -> None:
    """The curve never rises, keeps within its budgets, and has the two ends: a model that fits whole is trained as by
    plain Trainer, if that takes at most 3 % longer.

    Raises:
        ValueError: if not.
    """
    streamed, plain = ends(run)
    seconds = [point.seconds for point in points]
    first, last = (time_of(run, config, rates).seconds for config in (streamed, plain))
    falls = all(after <= before for before, after in zip(seconds, seconds[1:], strict=False))
    fits = all(point.peak <= point.budget for point in points)
    if not (falls and fits and seconds[0] <= first and seconds[-1] <= 1.03 * last):
        raise ValueError(
            f"the step time must fall with the budget, from that of L2L ({first:.3g} s) to that of plain training "
            f"({last:.3g} s) (got {', '.join(f'{each:.3g}' for each in seconds)}); look at the planner"
        )


def table(points: Sequence[Point], machine: HardwareFigures) -> str:
    """A row for each budget."""
    lines = ["| budget, GiB | seconds per step | bound by | options |", "|---|---|---|---|"]
    names = ("ubatch_size", "stash", "boundary", "gradient_slots", "resident")
    names += ("resident_layers", "kept_weights", "kept_graphs", "device_stash")
    for point in points:
        chosen = {name: getattr(point.config, name) for name in names}
        told = ", ".join(f"{name}={value}" for name, value in chosen.items() if value not in (0, "none", None))
        beyond = " (beyond the card)" if point.budget > known_bytes(machine) else ""
        lines.append(f"| {point.budget / GIB:.1f}{beyond} | {point.seconds:.2f} | {point.bound} | {told} |")
    return "\n".join(lines)


def picture(curves: dict[str, list[Point]], file: Path) -> None:
    """A line for each machine, dashed beyond its memory. Both axes are logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), facecolor="white", layout="constrained")
    axes = figure.subplots()
    for (name, points), colour in zip(curves.items(), ("#0072b2", "#d55e00"), strict=True):
        memory = known_bytes(MACHINES[name])
        inside = [point for point in points if point.budget <= memory]
        beyond = [*inside[-1:], *(point for point in points if point.budget > memory)]
        for drawn, style, label in ((inside, "-", name), (beyond, "--", f"{name}, beyond its memory")):
            sizes, seconds = [point.budget / GIB for point in drawn], [point.seconds for point in drawn]
            axes.plot(sizes, seconds, style, marker="o", markersize=3, color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(title="Llama-8B, 8 rows of 4,096 tokens, bf16, AdamW: computed, not measured")
    axes.set(xlabel="budget of device memory (GiB)", ylabel="seconds per step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=110, format="png")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables; write them, and the picture, where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=13, help="budgets for each machine")
    parser.add_argument("--out", type=Path, help="file for the tables")
    parser.add_argument("--picture", type=Path, help="file for the picture (png)")
    options = parser.parse_args(arguments)
    run = run_of(llama_8b(), 8, 4096)
    curves: dict[str, list[Point]] = {}
    parts = ["# Step time against the budget of device memory", "Computed by the cost model; nothing was measured."]
    for name, machine in MACHINES.items():
        curves[name] = curve(run, Rates.of(machine, torch.bfloat16, run.config), options.points)
        check(run, Rates.of(machine, torch.bfloat16, run.config), curves[name])
        parts += [f"## {name}", table(curves[name], machine)]
    parts += ["## The machines", SOURCES, "`python benchmarks/budget_curve.py` computes it again."]
    text = "\n\n".join(parts)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    if options.picture is not None:
        picture(curves, options.picture)


if __name__ == "__main__":
    main()
