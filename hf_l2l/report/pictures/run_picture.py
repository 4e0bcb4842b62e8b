"""The picture of a run: its memory by name, its time by cause, its loss."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
"""Names with a smaller part of their tier are drawn as one bar."""
_FEWEST_ROWS = 10
"""Of the panel of memory, so that bars do not become thick."""
_MARKED = 40
"""A line of fewer points has a mark at each."""


def draw_run(log: RunLog, asked: str, given: object, otherwise: str) -> Figure:
    """Draw three panels; see `new_figure` for what else is given.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    bars = 0 if log.memory is None else sum(3 + len(_drawn(names)) for names in _tiers(log.memory).values())
    figure = new_figure(asked, given, 15, max(4.8, 1.5 + 0.24 * bars), otherwise)
    panels = figure.subplots(1, 3, width_ratios=(1.25, 1, 1))
    title, below = log.facts.lines()
    figure.suptitle(f"{title}\n{below}" if below else title, fontsize="large")
    for axes, name, draw in zip(panels, ("memory", "time", "loss"), (_memory, _time, _loss), strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        if name in log.missing:
            _say(axes, name, log.missing[name])
        else:
            draw(axes, log)
    return figure


def _say(axes: Any, name: str, why: str) -> None:
    axes.set_title(name)
    axes.set_axis_off()
    text = textwrap.fill(why, 36)
    axes.text(0.5, 0.5, text, ha="center", va="center", color="#555555", transform=axes.transAxes)


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
    notes += ["layers ran in host memory: there is no other"] if list(tiers) == ["host"] else []
    for note in notes:
        axes.text(0, len(labels), f" {note}", va="center", color="#555555", size="small")
        labels.append("")
    named = [(place, label) for place, label in enumerate(labels) if label]
    axes.set_yticks([place for place, _ in named], [label for _, label in named])
    axes.set(title="memory by name", xlabel=unit, xlim=(0, 1.25 * max(most, 1) / scale))
    axes.set_ylim(max(len(labels), _FEWEST_ROWS), -0.7)
    axes.tick_params(axis="y", left=False)


def _time(axes: Any, log: RunLog) -> None:
    causes = [cause for cause in _CAUSES if all(getattr(each, cause) is not None for each in log.times)]
    edges, gaps = [log.times[0].after], []
    values: dict[str, list[float]] = {cause: [] for cause in causes}
    for each in log.times:
        if each.after > edges[-1]:  # steps without times, of another run
            edges.append(each.after)
            gaps.append(len(values["upload"]))
            for of_cause in values.values():
                of_cause.append(0.0)
        edges.append(each.step)
        for cause, of_cause in values.items():
            of_cause.append(getattr(each, cause))
    below = [0.0] * (len(edges) - 1)
    for cause in causes:
        label, colour = _CAUSES[cause]
        top = [low + value for low, value in zip(below, values[cause], strict=True)]
        axes.stairs(top, edges, baseline=below, fill=True, color=colour, label=label)
        below = top
    simulated = log.facts.device.startswith("sim")
    title = "time by cause" + (" (simulated device: its speed says nothing)" if simulated else "")
    highest = max(below) or 1.0
    axes.set(
        title=title, xlabel="step", ylabel="seconds per step", xlim=(edges[0], edges[-1]), ylim=(0, 1.4 * highest)
    )
    if simulated:
        axes.title.set_fontsize("medium")
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], loc="upper left", frameon=False, fontsize="small")
    if "compute" not in causes:
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
    if log.why_no_training_loss:
        note = textwrap.fill(log.why_no_training_loss, 36)
        axes.text(0.02, 0.02, note, transform=axes.transAxes, va="bottom", color="#555555", size="small")
    axes.set(title="loss", xlabel="step", ylabel="loss")
    axes.locator_params(axis="x", integer=True)
    axes.legend(frameon=False, fontsize="small")
