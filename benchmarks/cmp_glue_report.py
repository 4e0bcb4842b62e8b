"""What `cmp_glue.py` prints: the table, and the document around it. All of it is in the JSON, too."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.environment import description
from hf_l2l.runtime.tensors import size_text

HEAD = (
    "task",
    "precision",
    "seeds",
    "accuracy",
    "mean",
    "eval loss",
    "mean",
    "training loss, last log",
    "skipped steps; loss scale at the end",
    "device bytes, peak",
    "seconds",
)
MEASURES = {"accuracy": ("accuracy", 4), "eval_loss": ("eval loss", 4)}
"""Name in a run -> what people call it, and digits."""

Runs = list[dict[str, Any]]


def grouped(runs: Runs) -> dict[tuple[str, str], Runs]:
    """The runs of each task and precision, by task, in the order in which they are first met."""
    found: dict[tuple[str, str], Runs] = {}
    for task in dict.fromkeys(run["task"] for run in runs):
        for run in runs:
            if run["task"] == task:
                found.setdefault((task, run["precision"]), []).append(run)
    return found


def mean(runs: Runs, name: str) -> float:
    """Over the seeds."""
    return statistics.fmean(run[name] for run in runs)


def row(task: str, precision: str, runs: Runs) -> str:
    """A row of the table: one task in one precision, seed by seed."""
    scaled = runs[0]["loss_scale"] is not None
    cells = (
        task,
        precision,
        ", ".join(str(run["seed"]) for run in runs),
        ", ".join(f"{run['accuracy']:.4f}" for run in runs),
        f"{mean(runs, 'accuracy'):.4f}",
        ", ".join(f"{run['eval_loss']:.4f}" for run in runs),
        f"{mean(runs, 'eval_loss'):.4f}",
        ", ".join(f"{run['losses'][-1]:.4f}" for run in runs),
        ", ".join(f"{run['skipped']}; {run['loss_scale']:g}" for run in runs) if scaled else "-",
        size_text(max(run["device_bytes"] for run in runs)),
        ", ".join(f"{run['seconds']:.0f}" for run in runs),
    )
    return f"| {' | '.join(cells)} |"


def table(runs: Runs) -> str:
    """The result for people, in markdown."""
    rows = (row(*key, group) for key, group in grouped(runs).items())
    return "\n".join((f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|", *rows))


def verdicts(runs: Runs) -> list[str]:
    """For each task, how far the seeds of fp32 are apart; for each other precision, whether its mean is among them."""
    groups, said = grouped(runs), []
    for (task, precision), group in groups.items():
        base = groups.get((task, "fp32"))
        if base is None or [run["seed"] for run in base] != [run["seed"] for run in group]:
            said.append(f"{task}, {precision}: there is no fp32 with these seeds to compare with.")
            continue
        parts = []
        for name, (title, digits) in MEASURES.items():
            low, high = (pick(run[name] for run in base) for pick in (min, max))
            spread, found = f"{low:.{digits}f}..{high:.{digits}f}", mean(group, name)
            if precision == "fp32":
                parts.append(f"{title} {spread}")
                continue
            where = "above" if found > high else "below" if found < low else "within"
            most = max(abs(ours[name] - theirs[name]) for ours, theirs in zip(group, base, strict=True))
            parts.append(
                f"mean {title} {found:.{digits}f} is {where} {spread}, at most {most:.{digits}f} off at a seed"
            )
        kind = "spread of the seeds" if precision == "fp32" else "against the spread of fp32"
        said.append(f"{task}, {precision}, {kind}: {'; '.join(parts)}.")
    return said


def words(settings: dict[str, Any]) -> str:
    """The settings, in a sentence."""
    rows = ", ".join(f"{count:,} for {task}" for task, count in settings["rows"].items())
    cut = "" if settings["capped"] is None else f" and at most {settings['capped']:,} of validation"
    return (
        f"{settings['model']}, the same for all precisions: {settings['num_train_epochs']} epoch, device batch "
        f"{settings['per_device_train_batch_size']}, `ubatch_size={settings['ubatch_size']}`, rows of at most "
        f"{settings['max_length']} tokens, grouped by length; learning rate {settings['learning_rate']:g}, "
        f"{settings['lr_scheduler_type']} schedule without warm-up, weight decay {settings['weight_decay']:g}, "
        f"max_grad_norm {settings['max_grad_norm']}. Training rows, from the top of the file, at most: {rows}{cut}."
    )


def document(result: dict[str, Any]) -> str:
    """The table, with what one needs to know about it."""
    found, runs = result["environment"], result["runs"]
    is_simulated = found["device"] == "simulated accelerator"
    counts = {(run["task"], run["train_rows"], run["eval_rows"], run["steps"]) for run in runs}
    sizes = "; ".join(
        f"{task}: {train:,} rows, {steps} steps, {validation:,} rows of validation"
        for task, train, validation, steps in sorted(counts)
    )
    lines = (
        f"# CMP and fp32 on GLUE data, on {'the ' if is_simulated else ''}{found['device']}",
        *(("", "Not measured on a GPU.") if is_simulated else ()),
        *("", "## Environment", "", description(found)),
        *("", "## Settings", "", words(result["settings"]), "", f"{sizes}."),
        *("", "## Result", "", table(runs), "", *(f"- {said}" for said in verdicts(runs)), ""),
        "Accuracy, losses and loss scale are of each seed, in the order of the seeds. The last log of the training "
        "loss is its mean over the last fifth of the steps. Peak bytes are of training; seconds are of a whole run"
        + (", of a simulated device, and tell nothing about a real one." if is_simulated else "."),
        *("", "## To reproduce", "", "```bash", found["command"], "```", ""),
    )
    return "\n".join(lines)
