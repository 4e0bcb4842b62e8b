"""Whether a model fits a device and a host, and how fast a step is, by the options for the host's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hf_l2l.config import L2LConfig
from hf_l2l.memory.ledger import OTHER
from hf_l2l.memory.memory_estimate import MemoryEstimate
from hf_l2l.option_names import option
from hf_l2l.plan.estimate import report_of
from hf_l2l.plan.phases import phases_of_l2l
from hf_l2l.plan.planner import BudgetError, Plan, make_plan
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.plan.step_time import Cost, Rates, step_time
from hf_l2l.probe.disk import DiskRates
from hf_l2l.probe.figures import HardwareFigures
from hf_l2l.sizing.capacity import LORA, lora_bytes, settings_of
from hf_l2l.sizing.disk import disk_seconds
from hf_l2l.sizing.machine import rates_of

ON_DISK = "the same, with masters and moments on disk"
"""The last of the settings with `l2l_state_tier="disk"`."""
_IN_MEMORY: dict[str, Any] = {"state_tier": "host", "state_dir": None, "state_window": 4}
"""The options for state on disk, of the settings without it."""
_STREAMED: dict[str, Any] = {"resident": "none", "resident_layers": 0, "resident_update": "device"}


@dataclass(frozen=True)
class Fit:
    """What one setting takes."""

    host_bytes: int
    """The most of loading, attaching, steps, saving and resuming, this process with its libraries among them."""
    fits: bool
    """Whether the host has so much, and the device what a step needs."""
    device_bytes: int | None = None
    """At the peak, with the options that were chosen for the device, or at least, if the budget is too small; None
    without a budget."""
    seconds_per_step: float | None = None
    """By the cost model, and of the disk where state is there; None without figures of a machine or a disk."""
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
    *,
    disk: DiskRates | None = None,
    plan: Plan | None = None,
) -> Fits:
    """What each of `settings_of` an optimizer, the last one with state on disk, and LoRA take of the host, and with a
    budget the time.

    Args:
        run: the model and its device batch.
        config: the options of the user; those of a setting take the place of theirs, all others stay. With `cmp`,
            "fp32" is no setting.
        host_memory: bytes.
        budget: bytes of the device, for which the fastest options are chosen; None chooses none.
        figures: those of the machine, which a budget needs.
        disk: the rates of a disk, for the time of state there.
        plan: that of `run`, if it was made before.

    Raises:
        BudgetError: if no setting is within the budget.
    """
    sixteen = "bf16" if figures is None or "bf16" in figures.flops else "fp16"
    able = settings_of(run.optimizer)
    chosen = {name: each for name, each in able.items() if each["cmp"] or config.cmp is None}
    settings = {name: {**each, "cmp": each["cmp"] and (config.cmp or sixteen)} for name, each in chosen.items()}
    settings[ON_DISK] = {**settings[list(settings)[-1]], "state_tier": "disk"}
    known: dict[str | None, _Planned] = {}
    first = next(iter(settings.values()))
    # The plan that was made is that of the first setting, if the user has set nothing else in its options.
    if plan is not None and figures is not None and all(getattr(config, key) == first[key] for key in first):
        known[config.cmp] = _Planned(run, plan, rates_of(figures, run, config, measures=False))
    found: dict[str, Fit] = {}
    for name, options in settings.items():
        if options["cmp"] not in known:
            known[options["cmp"]] = _planned(run, replace(config, **_IN_MEMORY | options), budget, figures)
        found[name] = _fit(known[options["cmp"]], config, options, host_memory, disk)
    errors = [each.plan for each in known.values() if isinstance(each.plan, BudgetError)]
    if len(errors) == len(known):
        raise errors[-1]
    taken = lora_bytes(run, config)
    seconds = next((_seconds_of_lora(each) for each in reversed(known.values())), None)
    found[LORA] = Fit(taken, taken <= host_memory, None, seconds)
    tokens = run.inputs.get("input_ids")
    return Fits(host_memory, budget, None if tokens is None else tokens.numel(), found)


@dataclass(frozen=True)
class _Planned:
    """A run in one dtype, and what was chosen for it."""

    run: RunShapes
    plan: Plan | BudgetError | None
    rates: Rates | None


def _planned(run: RunShapes, config: L2LConfig, budget: int | None, figures: HardwareFigures | None) -> _Planned:
    def run_of(chunk_memory: int | None) -> RunShapes:
        return RunShapes(
            run.model,
            config,
            run.inputs,
            optimizer=run.optimizer,
            device=run.device,
            device_memory=run.device_memory,
            chunk_memory=chunk_memory,
            given=run.given,
            batches=run.batches,
            accumulates=run.accumulates,
            autocast=None if config.cmp else run.autocast,
            devices=len(run.turns),
        )

    if budget is None or figures is None:
        return _Planned(run_of(None), None, None)
    found = None
    for memory in (budget, 0):  # as `planner.run_within`
        its = run_of(memory)
        rates = rates_of(figures, its, config, measures=False)
        try:
            return _Planned(its, make_plan(its, budget, rates), rates)
        except BudgetError as error:
            found = _Planned(its, error, rates)
        if config.chunked_loss != "auto":
            break
    assert found is not None, "it returns, or there was an error"
    return found


def _fit(
    planned: _Planned, config: L2LConfig, options: dict[str, Any], host_memory: int, disk: DiskRates | None
) -> Fit:
    run, plan = planned.run, planned.plan
    # Masters on disk are those of the host.
    own = {name: getattr(config, name) for name in ("state_dir", "state_window")}
    on_disk = _STREAMED | own if options.get("state_tier") == "disk" else {}
    asked = replace(plan.config if isinstance(plan, Plan) else run.config, **options | on_disk)
    state, report, _ = report_of(run, asked)
    phases = phases_of_l2l(run, asked, state, report)
    taken = max(phase.host for phase in phases.values()) + report["host"][OTHER]["peak"]
    told = {option(key): value for key, value in options.items() if value != getattr(L2LConfig(), key)}
    if isinstance(plan, BudgetError):
        return Fit(taken, False, plan.smallest, None, told)
    if plan is None:
        return Fit(taken, taken <= host_memory, None, None, told)
    return Fit(taken, taken <= host_memory, run.most(asked), _seconds(plan, state, disk), told)


def _seconds(plan: Plan, state: MemoryEstimate, disk: DiskRates | None) -> float | None:
    """Of a step: what state on disk takes there runs beside the rest."""
    if not state.on_disk:
        return plan.time.seconds
    return None if disk is None else max(plan.time.seconds, disk_seconds(state, disk))


def _seconds_of_lora(planned: _Planned) -> float | None:
    """Of a step in which weights are frozen: they have no gradients, and nothing but adapters is updated."""
    if not isinstance(planned.plan, Plan) or planned.rates is None:
        return None
    config = replace(planned.plan.config, **_STREAMED)
    costs = planned.run.costs(config)
    return step_time(
        [_frozen(cost) for cost in costs.layers],
        _frozen(costs.shell),
        planned.rates,
        ubatches=costs.ubatches,
        gradient_slots=config.gradient_slots,
        prefetches=config.prefetch,
        defers=config.eps_update != "serial",
    ).seconds


def _frozen(cost: Cost) -> Cost:
    """Gradients of weights take as many operations as a forward."""
    backward = max(0, cost.backward_flops - cost.forward_flops)
    return replace(cost, backward_flops=backward, backward_down=0, parameters=0, on_device=0)
