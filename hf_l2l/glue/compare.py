"""Two training runs side by side: plain `Trainer` and `L2LTrainer` on the same arguments.

`compare` makes the runs, each in a process of its own; the folders that they leave behind become a table, a JSON
document, and a picture.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from hf_l2l.glue.messages import NO_MEMORY, NO_MEMORY_FILE, REFUSED, logger, stop
from hf_l2l.hf.training_args import OWN_OPTIONS
from hf_l2l.runtime.tensors import size_text

NAMES = {"hf": "Trainer", "l2l": "L2LTrainer"}
"""The trainers by the value of the option that chooses them, in the order of the columns."""

_BYTES = {
    "train_device_bytes": "device bytes, peak",
    "train_host_bytes": "host bytes: weights, gradients, moments",
    "train_process_bytes": "process bytes, peak",
}
_SPEED = {"train_samples_per_second": "training samples/s"}
_SIMULATED_SPEED = "speed: that of a simulated accelerator says nothing about a real one, so that it is not compared"
_NOT_COMPARED = ("runtime", "per_second", "samples", "_time")
"""Parts of the names of metrics that say nothing about the model."""


SECRETS = ("token", "hub_token")
"""Options that are not written into files."""


@dataclass(frozen=True)
class Run:
    """What one training run left behind."""

    out_of_memory: bool
    metrics: dict[str, float]
    """What was saved by `Trainer.save_metrics`; empty for a run that ran out of memory."""
    losses: dict[int, float]
    """Training loss by optimizer step, as logged."""
    has_dropout: bool = False
    """Whether the config of its model has a dropout above 0."""


def read_run(folder: Path) -> Run:
    """Read the metrics and the log that a run saved in `folder` (`Trainer.save_metrics`, `Trainer.save_state`)."""
    metrics = json.loads((folder / "all_results.json").read_text(encoding="utf-8"))
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    losses = {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}
    config = folder / "config.json"
    has_dropout = config.is_file() and _has_dropout(json.loads(config.read_text(encoding="utf-8")))
    return Run(False, metrics, losses, has_dropout)


def _has_dropout(config: Any) -> bool:
    """Whether a part of a model's config is a dropout above 0: "hidden_dropout_prob", "attn_pdrop" and the like."""
    if isinstance(config, dict):
        return any(
            value > 0 if "drop" in name and isinstance(value, int | float) else _has_dropout(value)
            for name, value in config.items()
        )
    return isinstance(config, list) and any(map(_has_dropout, config))


OUT_OF_MEMORY = Run(True, {}, {})


def comparison(
    runs: dict[str, Run], device: str, *, batch_rows: int = 0, is_simulated: bool = False
) -> dict[str, Any]:
    """The two runs as one document, of what JSON knows: `rows` are those of the table.

    A row's `difference` is L2L's value less plain Trainer's; its `ratio` is the one over the other. `same_losses` says
    whether every logged training loss is the same number on both sides, to the last bit. `notes` are what else is to
    be known. On a device that `is_simulated`, speeds are left out. `batch_rows` are those of a device batch.
    """
    hf, l2l = (runs[name] for name in NAMES)
    rows = []
    for name, label in _labels({**hf.metrics, **l2l.metrics}).items():
        means_nothing = is_simulated and name in _SPEED
        theirs, ours = (None if means_nothing else side.metrics.get(name) for side in (hf, l2l))
        both = theirs is not None and ours is not None
        rows.append(
            {
                "name": name,
                "label": label,
                "hf": _finite(theirs),
                "l2l": _finite(ours),
                "difference": _finite(ours - theirs) if both else None,  # type: ignore[operator]
                "ratio": _finite(ours / theirs) if both and theirs else None,  # type: ignore[operator]
            }
        )
    losses = {name: [[step, _finite(loss)] for step, loss in runs[name].losses.items()] for name in NAMES}
    same_losses = losses["hf"] == losses["l2l"] if losses["hf"] and losses["l2l"] else None
    notes = [_SIMULATED_SPEED] if is_simulated and any(row["name"] in _SPEED for row in rows) else []
    rows_at_once = l2l.metrics.get("train_ubatch_size", batch_rows)
    if l2l.has_dropout and rows_at_once < batch_rows and same_losses is False:
        notes.append(
            f"dropout draws differ: L2LTrainer draws for {rows_at_once:g} rows at a time (--ubatch_size), and Trainer "
            f"for all {batch_rows} of a batch, so that losses differ by chance; --ubatch_size {batch_rows} draws alike"
        )
    return {
        "device": device,
        "same_losses": same_losses,
        "out_of_memory": [name for name in NAMES if runs[name].out_of_memory],
        "rows": rows,
        "losses": losses,
        "notes": notes,
    }


def _labels(metrics: dict[str, float]) -> dict[str, str]:
    """What is compared, in the order of the table: name -> words."""
    quality = [
        name
        for name in metrics
        if (name == "train_loss" or name.startswith("eval_")) and not any(part in name for part in _NOT_COMPARED)
    ]
    words = {
        name: name.replace("_", " ")
        for name in sorted(quality, key=lambda name: (name != "train_loss", "loss" not in name))
    }
    return {**words, **{name: label for name, label in {**_SPEED, **_BYTES}.items() if name in metrics}}


def _finite(value: float | None) -> float | None:
    """JSON has no nan."""
    return value if value is not None and math.isfinite(value) else None


def table(document: dict[str, Any]) -> str:
    """The rows for people."""
    lines = [("", *NAMES.values(), "difference")]
    for row in document["rows"]:
        cells = [_cell(row, side, side in document["out_of_memory"]) for side in NAMES]
        lines.append((row["label"], *cells, _difference(row)))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    lines.insert(1, ("-" * widths[0], *("-" * width for width in widths[1:])))
    text = [
        "  ".join((line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))))
        for line in lines
    ]
    notes = [f"note: {note}" for note in document["notes"]]
    return "\n".join((f"on: {document['device']}", *text, *notes, _verdict(document)))


def _cell(row: dict[str, Any], side: str, out_of_memory: bool) -> str:
    value = row[side]
    if value is None:
        return "out of memory" if out_of_memory else "-"
    if row["name"] in _BYTES:
        return size_text(value)
    return f"{value:.1f}" if row["name"] in _SPEED else f"{value:.6f}"


def _difference(row: dict[str, Any]) -> str:
    if row["name"] in _BYTES or row["name"] in _SPEED:
        return "-" if row["ratio"] is None else f"x {row['ratio']:.2f}"
    if row["difference"] is None:
        return "-"
    return "0" if row["difference"] == 0 else f"{row['difference']:+.2g}"


def _verdict(document: dict[str, Any]) -> str:
    if document["out_of_memory"]:
        names = " and ".join(NAMES[side] for side in document["out_of_memory"])
        return f"{names} ran out of memory"
    if document["same_losses"] is None:
        return "no training loss was logged; set --logging_steps"
    hf, l2l = (dict(document["losses"][side]) for side in NAMES)
    if document["same_losses"]:
        return f"training loss: the same, to the last bit, at {_logged(len(hf))}"
    both = [(hf[step], l2l[step]) for step in hf if step in l2l]
    apart = [abs(a - b) for a, b in both if a is not None and b is not None]
    odd = sum((a is None) != (b is None) for a, b in both)
    said = [f"at most {max(apart):.2g} apart at {_logged(len(apart))}"] if apart else []
    said += [f"a number on one side only at {_logged(odd)}"] if odd else []
    said += [f"logged on one side only at {_logged(len(hf.keys() ^ l2l.keys()))}"] if hf.keys() != l2l.keys() else []
    return f"training loss: {'; '.join(said)}"


def _logged(steps: int) -> str:
    return f"{steps} logged step{'s' if steps != 1 else ''}"


def draw(document: dict[str, Any], file: Path) -> None:
    """Draw the loss curves and the memory of both runs into a PNG file."""
    # Without pyplot: it would ask for a display, and could change figures of the program.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained", facecolor="white")  # opaque: legible on a dark page, too
    FigureCanvasAgg(figure)
    curves, bars = figure.subplots(1, 2)
    colours = {"hf": "#e69f00", "l2l": "#0072b2"}  # told apart by colour-blind eyes, and by lightness
    styles: dict[str, dict[str, Any]] = {"hf": {"linewidth": 4, "alpha": 0.6}, "l2l": {"linewidth": 1.5}}
    for side, points in document["losses"].items():
        steps = [step for step, _ in points]
        losses = [math.nan if loss is None else loss for _, loss in points]
        marker = "o" if len(steps) == 1 else None
        curves.plot(steps, losses, color=colours[side], label=NAMES[side], marker=marker, **styles[side])
    curves.set(title="Training loss", xlabel="optimizer step", ylabel="loss")
    curves.xaxis.get_major_locator().set_params(integer=True)
    curves.legend()
    _draw_bars(bars, document, colours)
    figure.savefig(file, dpi=150)


def _draw_bars(axes: Any, document: dict[str, Any], colours: dict[str, str]) -> None:
    words = {"train_device_bytes": "device, peak", "train_host_bytes": "host: weights,\ngradients, moments"}
    rows = [row for row in document["rows"] if row["name"] in words]
    largest = max((row[side] or 0 for row in rows for side in NAMES), default=0)
    unit, size = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20) if largest >= 2**20 else ("KiB", 2**10)
    for place, side in enumerate(NAMES):
        at = [index + (place - 0.5) * 0.4 for index in range(len(rows))]
        heights = [(row[side] or 0) / size for row in rows]
        drawn = axes.bar(at, heights, width=0.38, color=colours[side], label=NAMES[side])
        gone = side in document["out_of_memory"]
        axes.bar_label(drawn, ["out of memory" if gone else f"{height:.1f}" for height in heights], fontsize=9)
    axes.set_xticks(range(len(rows)), [words[row["name"]] for row in rows])
    axes.set(title=f"Memory ({document['device']})", ylabel=unit)
    axes.margins(y=0.12)
    axes.legend()


def compare(
    given: dict[str, Any], training_args: TrainingArguments, script: str, token: str | None, versions: dict[str, str]
) -> dict[str, Any]:
    """Run both trainers on the same options, and write and print how they differ; returns the document.

    Each has a process of its own, one after the other: what one holds in memory is not counted with the other, and
    both begin with the same seeds.

    Args:
        given: the options that were given, by name.
        training_args: what was made of them.
        script: the file to run, which takes a file of options.
        token: for the Hub; it is passed on, and written nowhere.
        versions: of packages, for the document.
    """
    folder = Path(training_args.output_dir)
    given = {name: value for name, value in given.items() if name not in ("compare", *SECRETS)}
    if training_args.device.type == "cpu" and not given.get("use_cpu") and "simulate" not in given:
        logger.warning(
            "there is no accelerator: both run on a simulated one, whose memory is counted as on a real one and whose "
            "speed tells nothing about one; --use_cpu compares them on the CPU"
        )
        given["simulate"] = "unlimited"
    is_simulated = "simulate" in given
    device = f"simulated accelerator, {given['simulate']}" if is_simulated else training_args.device.type
    runs = {side: run_apart(script, side, given, folder, token) for side in NAMES}
    compared = comparison(runs, device, batch_rows=training_args.train_batch_size, is_simulated=is_simulated)
    document = {**compared, "options": given, "versions": versions}
    (folder / "compare.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    draw(document, folder / "compare.png")
    print(table(document))
    print(f"in {folder}: compare.json, compare.png, and a folder for each run")
    return document


def run_apart(script: str, side: str, given: dict[str, Any], folder: Path, token: str | None) -> Run:
    """Run one trainer in a process of its own; its output is shown as it comes."""
    own = folder / side
    options = {**given, "trainer": side, "output_dir": str(own)}
    if side == "hf":
        options = {name: value for name, value in options.items() if name not in OWN_OPTIONS}
    environment = dict(os.environ)
    if token is not None:
        environment["HF_TOKEN"] = token
    if "TENSORBOARD_LOGGING_DIR" in environment:
        environment["TENSORBOARD_LOGGING_DIR"] += f"/{side}"
    is_new = not own.exists()
    own.mkdir(parents=True, exist_ok=True)
    (own / "all_results.json").unlink(missing_ok=True)  # the Trainer adds to one that is there
    out_of_memory = own / "out_of_memory.txt"
    out_of_memory.unlink(missing_ok=True)
    environment[NO_MEMORY_FILE] = str(out_of_memory)
    file = folder / f"{side}.json"
    file.write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")
    logger.info("%s: %s", NAMES[side], file)
    code = subprocess.run([sys.executable, script, str(file)], env=environment, check=False).returncode
    if code == NO_MEMORY or out_of_memory.exists():
        return OUT_OF_MEMORY
    if code == REFUSED and is_new:
        file.unlink()
        with suppress(OSError):  # something is in it
            own.rmdir()
    if code != 0:
        stop(f"the run of {NAMES[side]} failed (exit code {code}); what it said is above", code)
    return read_run(own)
