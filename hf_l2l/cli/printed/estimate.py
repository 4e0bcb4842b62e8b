"""What `hf-l2l estimate` prints and draws."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_l2l.cli.command import count_text, print_json
from hf_l2l.cli.printed.drawing import new_figure, save

if TYPE_CHECKING:
    from hf_l2l.plan.estimate import Estimate
    from hf_l2l.plan.planner import Plan
    from hf_l2l.plan.step_time import StepTime
    from hf_l2l.sizing.fit import Fits
    from hf_l2l.sizing.ranks import Together


@dataclass(frozen=True)
class Told:
    """What was found."""

    estimate: Estimate
    time: StepTime | None
    """Of a step, with figures of a machine."""
    plan: Plan | None
    """For a budget."""
    hidden: dict[str, int] | None
    """What runs beside the layers -> from how many tokens per step on it is hidden."""
    ranks: Together | None
    """Of several ranks."""
    fit: Fits | None
    """For bytes of host memory."""


def show(options: argparse.Namespace, told: Told) -> None:
    """Print what was estimated, as text or as one JSON object, and draw it if that was asked for."""
    from hf_l2l.runtime.tensors import size_text, two_digits

    found, time, plan, ranks = told.estimate, told.time, told.plan, told.ranks
    if options.plot:
        _plot(options.plot, found)
    if options.json:
        print_json(_as_object(options, told))
        return
    print(found)
    print(
        f"Plain training in fp32 would need {size_text(found.plain)}, {size_text(found.plain_checkpointing)} with "
        "activation checkpointing, all on the device."
    )
    _print_phases(found)
    for name, each in found.largest.items():
        size = f"{count_text(each.parameters)} parameters in {each.layers} layers" if each.layers else "no layer fits"
        print(f"The largest such model with {name}, all of its state on the host: {size}.")
    if plan is not None:
        print(plan)
    elif time is not None:
        busy = ", ".join(f"{name} {two_digits(seconds)} s" for name, seconds in time.busy.items())
        alone = " of one process alone" if ranks is not None else ""
        print(f"A step{alone} takes {two_digits(time.seconds)} s and is bound by {time.bound} (busy: {busy}).")
    if told.hidden is not None and any(told.hidden.values()):
        texts = ", ".join(f"{what} from {two_digits(count)} tokens" for what, count in told.hidden.items() if count)
        print(f"Computation hides what runs beside it: {texts} per step.")
    if told.fit is not None:
        _print_fit(told.fit)


def _as_object(options: argparse.Namespace, told: Told) -> dict[str, Any]:
    """What `--json` prints (docs/cli.md)."""
    found, time, plan, ranks, fit = told.estimate, told.time, told.plan, told.ranks, told.fit
    assert found.report is not None
    return {
        "model": options.model,
        "rows": found.rows,
        "device": found.report["device"],
        "other_devices": {
            name: sizes for name, sizes in found.report.items() if name not in ("device", "host", "of which")
        },
        "host": found.report["host"],
        "phase": found.phase,
        "notes": found.notes,
        "phases": {
            who: {phase: size._asdict() for phase, size in phases.items()} for who, phases in found.phases.items()
        },
        "plain": found.plain,
        "plain_checkpointing": found.plain_checkpointing,
        "chosen": None if plan is None else plan.chosen,
        "seconds_per_step": None if time is None else time.seconds,
        **{name: None if time is None else getattr(time, name) for name in ("bound", "busy")},
        "tokens_that_hide": told.hidden,
        "ranks": None if ranks is None else ranks.as_json(),
        "state_on_disk": {"bytes": found.on_disk, **found.state_traffic._asdict()} if found.on_disk else None,
        "fit": None if fit is None else {name: vars(each) for name, each in fit.by_setting.items()},
        "largest": {name: vars(each) for name, each in found.largest.items()} or None,
    }


def _print_fit(fit: Fits) -> None:
    """A table of what the model takes with each setting, and whether that fits."""
    from hf_l2l.runtime.tensors import size_text, two_digits

    device = "" if fit.budget is None else f" and {size_text(fit.budget)} of the device"
    print(f"Does it fit {size_text(fit.host_memory)} of host memory{device}?")
    head = ("host", "fits", *(() if fit.budget is None else ("device", "s per step", "tokens/s")))
    print(f"  {'with':<54}{''.join(f'{word:>12}' for word in head)}")
    for name, each in fit.by_setting.items():
        cells = [size_text(each.host_bytes), "yes" if each.fits else "no"]
        if fit.budget is not None:
            seconds = each.seconds_per_step
            cells.append("" if each.device_bytes is None else size_text(each.device_bytes))
            cells.append("" if seconds is None else two_digits(seconds))
            cells.append("" if seconds is None or fit.tokens is None else two_digits(fit.tokens / seconds))
        print(f"  {name:<54}{''.join(f'{cell:>12}' for cell in cells)}".rstrip())
    print(_verdict(fit))


def _verdict(fit: Fits) -> str:
    """The answer in one sentence."""
    from hf_l2l.runtime.tensors import size_text, two_digits
    from hf_l2l.sizing.capacity import LORA

    fitting = {name: each for name, each in fit.by_setting.items() if each.fits}
    if not fitting:
        least = min(each.host_bytes for each in fit.by_setting.values())
        return f"It does not fit: at least {size_text(least)} of host memory are needed, and room on the device."
    speeds = {name: each.seconds_per_step for name, each in fitting.items() if each.seconds_per_step is not None}
    name = min(speeds, key=lambda each: (each == LORA, speeds[each])) if speeds else next(iter(fitting))
    speed = f", {two_digits(speeds[name])} s per step" if name in speeds else ""
    if name in speeds and fit.tokens is not None:
        speed += f", {two_digits(fit.tokens / speeds[name])} tokens/s"
    if name == LORA:
        return f"It fits with adapters only (LoRA, the weights in 16 bits){speed}."
    flags = " ".join(f"--{key} {value}" for key, value in fitting[name].options.items())
    return f"It fits{f' with {flags}' if flags else ' with the options as they are'}{speed}."


_WHO = {"l2l": "L2L", "plain": "plain", "plain_checkpointing": "plain, checkpointing"}


def _print_phases(found: Estimate) -> None:
    """A table of what is held in each phase, and of whom."""
    from hf_l2l.runtime.tensors import size_text

    print(f"{'The most in each phase':<32}{''.join(f'{phase:>12}' for phase in found.phases['l2l'])}")
    for who, phases in found.phases.items():
        for where in ("host", "device"):
            sizes = "".join(f"{size_text(getattr(size, where)):>12}" for size in phases.values())
            print(f"{_WHO[who] + ', ' + where:<32}{sizes}")
    mapped = max(size.files for size in found.phases["l2l"].values())
    print(f"Besides, up to {size_text(mapped)} of the checkpoint's files are mapped, which the system can take back.")


def _plot(file: str, found: Estimate) -> None:
    """A bar of the device memory by name, and those of plain training."""
    assert found.report is not None
    figure = new_figure(file, 7, 4)
    axes = figure.subplots()
    below = 0.0
    for name, size in found.report["device"].items():
        if name != "total" and size["peak"]:
            axes.bar("L2L", size["peak"] / 2**30, bottom=below, label=name)
            below += size["peak"] / 2**30
    axes.bar("plain, checkpointing", found.plain_checkpointing / 2**30, color="lightgray")
    axes.bar("plain", found.plain / 2**30, color="gray")
    axes.set_ylabel("device memory at the peak (GiB)")
    axes.legend(fontsize="small")
    save(figure, file)
