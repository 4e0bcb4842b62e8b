"""The picture of a run: its memory by name, its time by cause, its loss."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_l2l.memory.ledger import OTHER
from hf_l2l.memory.memory_report import TOTAL, Bytes
from hf_l2l.report.pictures.canvas import new_figure
from hf_l2l.report.pictures.run_log import RunLog
from hf_l2l.runtime.tensors import size_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Told apart by colour-blind eyes, and by lightness.
_TIERS = {"host": "#e69f00"}
_DEVICE = "#0072b2"
_CAUSES = {
    "compute": ("computation, and all else", "#0072b2"),
    "upload": ("waits for uploads", "#009e73"),
    "download": ("waits for downloads", "#e69f00"),
    "eps": ("waits for updates on the host", "#cc79a7"),
}
_LOSSES = ("#d55e00", "#009e73", "#cc79a7", "#56b4e9")
_LEAST = 0.01
"""Names with a smaller part of their tier are drawn as one bar, and waits with a smaller part of the time with the
computation."""
_FEWEST_ROWS = 10
"""Of the panel of memory, so that bars do not become thick."""
_MARKED = 40
"""A line of fewer points has a mark at each."""


def draw_run(log: RunLog, asked: str, given: object, otherwise: str) -> Figure:
    """Draw a panel for each of memory, time and loss that was logged, and say below why others are not there; see
    `new_figure` for what else is given.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    shown = [name for name in _PANELS if name not in log.missing]
    bars = 0 if log.memory is None else sum(3 + len(_drawn(names)) for names in _tiers(log.memory).values())
    widths = [_PANELS[name].width for name in shown] or [_WIDTH]
    figure = new_figure(asked, given, sum(widths), max(4.8, 1.5 + 0.24 * bars) if shown else 2, otherwise)
    title, below = log.facts.lines()
    figure.suptitle(f"{title}\n{below}" if below else title, fontsize="large")
    if shown:
        for name, axes in zip(
            shown, figure.subplots(1, len(shown), width_ratios=widths, squeeze=False)[0], strict=True
        ):
            axes.spines[["top", "right"]].set_visible(False)
            _PANELS[name].draw(axes, log)
    reasons: dict[str, list[str]] = {}
    for name, why in log.missing.items():
        reasons.setdefault(why, []).append(name)
    if "loss" in shown and not log.losses:
        reasons.setdefault(log.why_no_training_loss, []).append("training loss")
    if reasons:
        columns = round(sum(widths) * _LETTERS)
        notes = [textwrap.fill(f"{', '.join(names)}: {why}", columns) for why, names in reasons.items()]
        figure.supxlabel("\n".join(notes), fontsize="small", color="#555555")
    return figure


def _tiers(memory: Mapping[str, Mapping[str, Bytes]]) -> dict[str, Mapping[str, Bytes]]:
    """Those whose names add up: not "of which"."""
    return {tier: names for tier, names in memory.items() if TOTAL in names}


def _drawn(names: Mapping[str, Bytes]) -> list[tuple[str, int]]:
    """Names and bytes at the peak, the largest first; small ones together. What is of no training is left out."""
    sizes = [(name, size["peak"]) for name, size in names.items() if name not in (TOTAL, OTHER)]
    sizes.sort(key=lambda each: -each[1])
    total = sum(size for _, size in sizes)
    large = [each for each in sizes if each[1] >= _LEAST * total]
    small = sizes[len(large) :]
    together = sum(size for _, size in small)
    return large if not together else [*large, (f"{len(small)} smaller" if len(small) > 1 else small[0][0], together)]


def _memory(axes: Any, log: RunLog) -> None:
    assert log.memory is not None, "else it is missing"
    tiers = _tiers(log.memory)
    most = max((size for names in tiers.values() for _, size in _drawn(names)), default=0)
    unit, scale = next(((u, s) for u, s in (("GiB", 2**30), ("MiB", 2**20)) if most >= s), ("KiB", 2**10))
    labels: list[str] = []
    for tier, names in tiers.items():
        colour = _TIERS.get(tier, _DEVICE)
        # On the device all names are of one moment; on the host each has a peak of its own.
        what = "each name's peak" if tier == "host" else f"{size_text(names[TOTAL]['peak'])} at the peak"
        if labels:
            labels.append("")
        axes.text(0, len(labels), f" {tier}: {what}", va="center", color=colour, weight="bold")
        labels.append("")
        for name, size in _drawn(names):
            axes.barh(len(labels), size / scale, color=colour, height=0.75)
            axes.text(size / scale, len(labels), f" {size_text(size)}", va="center", size="small")
            labels.append(name)
    notes = [f"besides, {size_text(names[OTHER]['peak'])} for {OTHER}" for names in tiers.values() if OTHER in names]
    for note in notes:
        axes.text(0, len(labels), f" {note}", va="center", color="#555555", size="small")
        labels.append("")
    named = [(place, label) for place, label in enumerate(labels) if label]
    axes.set_yticks([place for place, _ in named], [label for _, label in named])
    axes.set(title="memory by name", xlabel=unit, xlim=(0, 1.25 * max(most, 1) / scale))
    axes.set_ylim(max(len(labels), _FEWEST_ROWS), -0.7)
    axes.tick_params(axis="y", left=False)


def _time(axes: Any, log: RunLog) -> None:
    known = [cause for cause in _CAUSES if all(getattr(each, cause) is not None for each in log.times)]
    sums = {cause: sum(getattr(each, cause) for each in log.times) for cause in known}
    # Waits that are too short to be seen, as all are on the CPU, belong to all else.
    least = _LEAST * sum(sums.values()) if "compute" in known else 0
    causes = [cause for cause in known if cause == "compute" or sums[cause] > least]
    rest = [cause for cause in known if cause not in causes]
    edges = [log.times[0].after]
    values: dict[str, list[float]] = {cause: [] for cause in causes}
    for each in log.times:
        if each.after > edges[-1]:  # steps without times, of another run
            edges.append(each.after)
            for of_cause in values.values():
                of_cause.append(0.0)
        edges.append(each.step)
        for cause, of_cause in values.items():
            of_cause.append(getattr(each, cause) + (cause == "compute") * sum(getattr(each, other) for other in rest))
    below = [0.0] * (len(edges) - 1)  # of the areas that are stacked on it
    for cause in causes:
        label, colour = _CAUSES[cause]
        top = [low + value for low, value in zip(below, values[cause], strict=True)]
        axes.stairs(top, edges, baseline=below, fill=True, color=colour, label=label)
        below = top
    simulated = log.facts.device.startswith("sim")
    is_parted = causes != ["compute"]
    title = ("time by cause" if is_parted else "time per step") + (
        " (simulated device: its speed says nothing)" if simulated else ""
    )
    highest = max(below) or 1.0
    axes.set(
        title=title, xlabel="step", ylabel="seconds per step", xlim=(edges[0], edges[-1]), ylim=(0, 1.4 * highest)
    )
    if simulated:
        axes.title.set_fontsize("medium")
    handles, names = axes.get_legend_handles_labels()
    if handles and is_parted:
        axes.legend(handles[::-1], names[::-1], loc="upper left", frameon=False, fontsize="small")
    if any(each.compute is None for each in log.times):
        axes.text(0.98, 0.98, "step time\nnot logged", transform=axes.transAxes, ha="right", va="top", size="small")


def _loss(axes: Any, log: RunLog) -> None:
    lines = {"training": log.losses, **{name: log.evaluations[name] for name in sorted(log.evaluations)}}
    colours = (_DEVICE, *_LOSSES)
    for number, (name, points) in enumerate(lines.items()):
        if points:
            marker = "o" if len(points) < _MARKED else None
            steps, losses = zip(*points, strict=True)
            colour = colours[number % len(colours)]
            axes.plot(steps, losses, color=colour, marker=marker, markersize=4, label=name.replace("_", " "))
    names = [line.get_label() for line in axes.lines]
    axes.set(title="training loss" if names == ["training"] else "loss", xlabel="step", ylabel="loss")
    axes.locator_params(axis="x", integer=True)
    if names != ["training"]:
        axes.legend(frameon=False, fontsize="small")


class _Panel(NamedTuple):
    draw: Callable[[Any, RunLog], None]
    width: float
    """Inches."""


_WIDTH, _LETTERS = 4.6, 14
"""Inches of a panel, and letters of small text in an inch."""
_PANELS = {"memory": _Panel(_memory, 1.25 * _WIDTH), "time": _Panel(_time, _WIDTH), "loss": _Panel(_loss, _WIDTH)}
"""By the names of `RunLog.missing`."""
