"""Whether a model fits a device and a host, and how fast a step is, by the options for the host's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hf_l2l.config import L2LConfig
from hf_l2l.memory import memory_estimate
from hf_l2l.option_names import option
from hf_l2l.plan.estimate import host_bytes
from hf_l2l.plan.planner import Plan, make_plan
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.probe.figures import HardwareFigures
from hf_l2l.sizing.capacity import LORA, SETTINGS, lora_bytes, run_with
from hf_l2l.sizing.machine import rates_of

ON_DISK = "the same, with masters and moments on disk"
"""The last of the settings with `l2l_state_tier="disk"`: what a step then takes depends on the disk."""


@dataclass(frozen=True)
class Fit:
    """What one setting takes."""

    host_bytes: int
    """At the peak, this process with its libraries among them."""
    fits: bool
    """Whether the host has so much."""
    device_bytes: int | None = None
    """At the peak, with the options that were chosen for the device; None without a budget."""
    seconds_per_step: float | None = None
    """By the cost model; None without figures of a machine, and where it does not say."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the setting, as the user types them, those that do not have their defaults."""


@dataclass(frozen=True)
class Fits:
    """What all settings take."""

    host_memory: int
    """Bytes that the host has."""
    budget: int | None
    """Bytes of the device for which options were chosen."""
    tokens: int | None
    """Of a step; None if the inputs are not tokens."""
    by_setting: dict[str, Fit]


def fits(
    run: RunShapes,
    config: L2LConfig,
    host_memory: int,
    budget: int | None,
    figures: HardwareFigures | None,
) -> Fits:
    """What each of `SETTINGS`, the last one with state on disk, and LoRA take of the host, and with a budget the time.

    Args:
        run: the model and its device batch.
        config: the options; those of the settings take the place of theirs.
        host_memory: bytes.
        budget: bytes of the device, for which the fastest options are chosen; None chooses none.
        figures: those of the machine, which a budget needs.

    Raises:
        BudgetError: if no setting is within the budget.
    """
    cmp = "bf16" if figures is None or "bf16" in figures.flops else "fp16"
    settings = {name: {**options, "cmp": options["cmp"] and cmp} for name, options in SETTINGS.items()}
    settings[ON_DISK] = {**settings[list(SETTINGS)[-1]], "state_tier": "disk"}
    found: dict[str, Fit] = {}
    runs: dict[str | None, tuple[RunShapes, Plan | None]] = {}
    for name, options in settings.items():
        if options["cmp"] not in runs:
            its = run_with(run, config, options)
            plan = None
            if budget is not None and figures is not None:
                plan = make_plan(its, budget, rates_of(figures, its, config, measures=False))
            runs[options["cmp"]] = its, plan
        its, plan = runs[options["cmp"]]
        # State on disk is of masters on the host, and there the disk may bound a step.
        on_disk: dict[str, Any] = {"resident": "none", "resident_layers": 0} if name == ON_DISK else {}
        asked = replace(its.config if plan is None else plan.config, **options, **on_disk)
        state = memory_estimate.estimate(its.model, asked, its.optimizer, its.device)
        taken = sum(size["peak"] for size in host_bytes(its, asked, state).values())
        found[name] = Fit(
            taken,
            taken <= host_memory,
            None if plan is None else its.most(asked),
            None if plan is None or on_disk else plan.time.seconds,
            {option(key): value for key, value in options.items() if value != getattr(L2LConfig(), key)},
        )
    taken = lora_bytes(run, config)
    found[LORA] = Fit(taken, taken <= host_memory)
    tokens = run.inputs.get("input_ids")
    return Fits(host_memory, budget, None if tokens is None else tokens.numel(), found)
