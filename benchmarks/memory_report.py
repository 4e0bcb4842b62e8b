"""The document and the picture of `memory.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.environment import description

MIB = 2**20
NAMES = {"plain": "plain", "checkpointing": "activation checkpointing", "l2l": "L2L"}
COLOURS = {"plain": "#d55e00", "checkpointing": "#e69f00", "l2l": "#0072b2"}


SIMULATED = "The device is simulated: its memory is counted exactly, its speed means nothing. Not measured on a GPU."

SETTINGS = """## Settings

A Llama with random weights in fp32, an embedding and a head of their own, heads of 32 entries, an MLP four times
as wide as the model, causal fused attention; its other sizes are above each table. A step is forward, backward,
clipping and AdamW. *Plain* has weights, gradients and both moments on the device, as plain `Trainer`; L2L has
`stash="host"`, `boundary="host"` and deferred updates. Bytes are the peak of the second step (plain has its
moments from then on), in MiB. *Formula* is the peak of L2L at the first size, and from there bytes for each
further unit; *off* is the measured peak over the formula. *Weights* are `device_bytes` of `hf_l2l.estimate`: what
does not depend on the batch."""


def document(result: Mapping[str, Any], questions: Mapping[str, Any]) -> str:
    """All tables, with how they were made."""
    environment = result["environment"]
    parts = [
        "# Device memory against depth, device batch, vocabulary and sequence length",
        SIMULATED if environment["device"].startswith("sim") else f"Measured on {environment['device']}.",
        f"## Environment\n\n{description(environment)}",
        SETTINGS,
        *(_section(questions[name], rows) for name, rows in result["rows"].items()),
        f"## To reproduce\n\n```bash\n{environment['command']}\n```\n",
    ]
    return "\n\n".join(parts)


def _section(question: Any, rows: list[dict[str, Any]]) -> str:
    first = rows[0]
    sizes = ", ".join(_fixed(question, first))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    head = [question.title.lower(), *(NAMES[way] for way in ways), "L2L, first step", "weights", "formula", "off"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cells) + " |" for cells in _cells(rows, ways)]
    return (
        f"## {question.title}\n\n{sizes}. Formula: {question.formula} ({first['slope']:,.0f} here).\n\n"
        + "\n".join(lines)
    )


def _fixed(question: Any, row: Mapping[str, Any]) -> list[str]:
    """The sizes of model and batch that do not grow."""
    fixed = {
        "layers": "layers",
        "hidden": "hidden size",
        "vocab": "vocabulary",
        "rows": "rows",
        "tokens": "tokens each",
        "ubatch": "rows of a micro-batch",
    }
    return [f"{text} {row[name]:,}" for name, text in fixed.items() if name != question.grows]


def by_size(rows: list[dict[str, Any]]) -> dict[int, dict[str, dict[str, Any]]]:
    """The rows of a question: of each size, by way."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["size"], {})[row["way"]] = row
    return found


def formula(rows: list[dict[str, Any]]) -> dict[int, float]:
    """Bytes of L2L by the formula, by size: what was measured at the first one, and the slope from there."""
    ours = [row for row in rows if row["way"] == "l2l"]
    return {row["size"]: ours[0]["peaks"][-1] + row["slope"] * (row["size"] - ours[0]["size"]) for row in ours}


def _cells(rows: list[dict[str, Any]], ways: list[str]) -> Iterator[list[str]]:
    expected = formula(rows)
    for size, each in by_size(rows).items():
        ours = each["l2l"]
        off = ours["peaks"][-1] / expected[size] - 1
        yield [
            f"{size:,}",
            *(f"{each[way]['peaks'][-1] / MIB:,.2f}" for way in ways),
            *(f"{b / MIB:,.2f}" for b in (ours["peaks"][0], ours["shell"] + ours["slots"], expected[size])),
            f"{100 * off:+.2f} %".replace("-0.00", "0.00").replace("+0.00", "0.00"),
        ]


def picture(rows: Mapping[str, list[dict[str, Any]]], questions: Mapping[str, Any], device: str, file: Path) -> Any:
    """Write a png, and return the figure: a panel for each question. Both axes are logarithmic, so that what grows in
    proportion is a straight line."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(10, 2 + 3.4 * ((len(rows) + 1) // 2)), facecolor="white", layout="constrained")
    where = f"{device}, a simulated device" if device.startswith("sim") else device
    figure.suptitle(f"A Llama in fp32, trained with AdamW on {where}")
    panels = figure.subplots((len(rows) + 1) // 2, 2, squeeze=False).flat
    for (name, found), axes in zip(rows.items(), panels, strict=False):  # leaves panels without a question
        for way in dict.fromkeys(row["way"] for row in found):
            drawn = [row for row in found if row["way"] == way]
            sizes, peaks = [row["size"] for row in drawn], [row["peaks"][-1] / MIB for row in drawn]
            axes.plot(sizes, peaks, marker="o", color=COLOURS[way], label=NAMES[way])
        expected = formula(found)
        axes.plot(
            list(expected), [b / MIB for b in expected.values()], color="black", linestyle=":", label="L2L, formula"
        )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(list(expected), [f"{size:,}" for size in expected], rotation=30)
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        title, sizes = questions[name].title, _fixed(questions[name], found[0])
        half = (len(sizes) + 1) // 2
        axes.set_title(f"{title}\n{', '.join(sizes[:half])},\n{', '.join(sizes[half:])}", size="medium")
        axes.set(xlabel=title.lower(), ylabel="device peak (MiB)")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels:
        axes.axis("off")
    figure.axes[0].legend(frameon=False)
    figure.savefig(file, dpi=110, format="png")
    return figure
