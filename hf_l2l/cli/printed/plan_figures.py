"""The picture of `hf-l2l plan --plot FILE`: figures 4 and 7 of arXiv:2106.02679 for any hardware, and the model there.

With nodes of any size it is figure 5, over a slow network figure 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_l2l.cli.command import count_text
from hf_l2l.cli.printed.drawing import new_figure, save
from hf_l2l.scale.curves import Curves, curves
from hf_l2l.scale.hardware import GIB
from hf_l2l.scale.planner import DAY_S

if TYPE_CHECKING:
    from hf_l2l.scale import Cluster, Plan, TransformerShape

# Told apart by colour-blind eyes, by lightness and by dashes.
_STYLES = ({"color": "#e69f00", "ls": "--"}, {"color": "#0072b2", "ls": "-."}, {"color": "#000000", "ls": "-"})
_LIMIT: dict[str, Any] = {"color": "#888888", "lw": 0.8}


def draw(
    file: str,
    model: str,
    shape: TransformerShape,
    cluster: Cluster,
    found: list[tuple[str, Plan]],
    steps: int,
) -> None:
    """Draw what the fastest trainings of the family take on `cluster`, and the first of the plans that were `found`.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if the file cannot be written.
    """
    figure = new_figure(file, 12, 7)
    panels = figure.subplots(2, 3)
    lines = curves(cluster)
    hardware = cluster.hardware
    for axes, values, plan, title in zip(panels[0], _values(lines, steps), _marks(found), _TITLES, strict=True):
        for (name, points), style in zip(values.items(), _STYLES, strict=True):
            axes.plot(lines.parameters, points, label=name, **style)
        if plan is not None:
            axes.plot(shape.parameters, plan, "*", color="#d55e00", ms=12, label=f"{model}: first plan of the table")
        axes.set(title=title)
    for axes in panels[0][:2]:
        _limit(axes, hardware.memory_gib, f"{hardware.memory_gib:g} GiB ({hardware.name})")
    for days, text in ((30, "one month"), (365, "one year")):
        _limit(panels[0][2], days, text)
    _offload(panels[1], lines, cluster)
    for axes in (*panels[0], *panels[1][:2]):
        axes.set(xscale="log", yscale="log", xlabel="parameters")
        axes.axvline(shape.parameters, color="#d55e00", lw=0.8, ls=":")
        axes.grid(alpha=0.2)
    _legend(panels, model, shape, cluster, steps)
    save(figure, file)


_TITLES = ("memory that must be on a device (GiB)", "memory that may be offloaded (GiB)", "training time (days)")


def _values(lines: Curves, steps: int) -> list[dict[str, list[float]]]:
    """What the upper panels show: for each of them, name of a curve -> values."""
    return [
        {name: [usage.memory.resident / GIB for usage in usages] for name, usages in lines.usages.items()},
        {name: [usage.memory.offloadable / GIB for usage in usages] for name, usages in lines.usages.items()},
        {name: [usage.seconds(steps) / DAY_S for usage in usages] for name, usages in lines.usages.items()},
    ]


def _marks(found: list[tuple[str, Plan]]) -> list[float | None]:
    if not found:
        return [None, None, None]
    plan = found[0][1]
    memory = plan.usage.memory
    return [memory.resident / GIB, memory.offloadable / GIB, plan.seconds / DAY_S]


def _limit(axes: Any, value: float, text: str, right: float = 0.99) -> None:
    """A level line; its text ends at a part of the panel's width."""
    axes.axhline(value, **_LIMIT)
    place = {"ha": "right", "va": "bottom", "transform": axes.get_yaxis_transform()}
    axes.text(right, value, text, fontsize=8, color="#555555", **place)


def _offload(panels: Any, lines: Curves, cluster: Cluster) -> None:
    hardware = cluster.hardware
    links = {
        "CPU-GPU": hardware.cpu_gpu,
        "network": cluster.network or hardware.network,
        **{
            name: hardware.peak_flops / value / GIB for name, value in hardware.intensities().items() if "Disk" in name
        },
    }
    for (name, values), style in zip(lines.offload_intensities().items(), _STYLES, strict=True):
        panels[0].plot(lines.parameters, values, label=name, **style)
        panels[1].plot(lines.parameters, [hardware.peak_flops / value / GIB for value in values], label=name, **style)
    for number, (name, gib_per_s) in enumerate(links.items()):
        right = 0.99 - 0.25 * (number % 2)  # links may be nearly as fast as each other
        _limit(panels[0], hardware.intensity(gib_per_s), name, right)
        _limit(panels[1], gib_per_s, name, right)
    panels[0].set(title="arithmetic intensity of offload (flop/byte)")
    panels[1].set(title="bandwidth that hides offload (GiB/s)")


def _legend(panels: Any, model: str, shape: TransformerShape, cluster: Cluster, steps: int) -> None:
    last = panels[1][2]
    last.axis("off")
    for axes, height, title in ((panels[0][0], 1.0, "Above"), (panels[1][0], 0.63, "Left")):
        handles, labels = axes.get_legend_handles_labels()
        place = {"loc": "upper left", "bbox_to_anchor": (0.0, height), "alignment": "left", "frameon": False}
        legend = last.legend(handles, labels, title=title, **place)
        last.add_artist(legend)  # the next one would replace it
    last.get_legend().remove()
    text = (
        f"{model}: {count_text(shape.parameters)} parameters (dotted line)\n"
        f"{cluster.hardware.name}, {cluster.network or cluster.hardware.network:g} GiB/s to other nodes, both ways,\n"
        f"tensor parallelism within {cluster.largest_tensor:,} devices\n"
        f"{steps:,} steps at the critical batch; models X_[x]\nand formulas of arXiv:2106.02679"
    )
    last.text(0.02, -0.1, text, va="bottom", fontsize=9, transform=last.transAxes)
