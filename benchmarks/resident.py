"""Step time of a model that fits whole: `L2LTrainer` with `device_memory_budget` over `Trainer`, in turns.

Both train the same BERT on the same rows, one short training each in turn, so that a machine that slows down slows
both. A step is what the Trainer does from one batch to the next: forward, backward, clipping, update. Without a device
that has memory of its own, the simulated accelerator takes its place. Its operations take the host's time, so that the
planner would give the host's idle threads part of the work: that everything is resident is asked for there.

    python benchmarks/resident.py [--pairs 8] [--steps 20] [--layers 12] [--hidden 256] [--rows FILE.jsonl]

A table for people, then one JSON document as the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import environment, gpu_rows
from hf_l2l import L2LTrainer, L2LTrainingArguments

VOCAB = 8000


class StepTimes(hf.TrainerCallback):
    """Seconds from the beginning of a step to its end, the device's work included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        torch.accelerator.synchronize()
        self._start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        torch.accelerator.synchronize()
        self.seconds.append(time.perf_counter() - self._start)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=8, help="measured pairs of trainings")
    parser.add_argument("--steps", type=int, default=20, help="steps of a training; the first quarter is warmup")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--budget", default="auto", help="device_memory_budget")
    parser.add_argument("--rows", type=Path, help="file to which the result is added as a line of JSON")
    return parser.parse_args(arguments)


def trainer_of(kind: type[hf.Trainer], options: argparse.Namespace, folder: str, times: StepTimes) -> hf.Trainer:
    """A trainer of a kind, on the same weights and rows."""
    torch.manual_seed(0)
    config = hf.BertConfig(
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.hidden // 64),
        intermediate_size=4 * options.hidden,
        vocab_size=VOCAB,
    )
    ids = torch.randint(5, VOCAB, (4 * options.batch, options.tokens))
    rows = [{"input_ids": row, "labels": row[0] % 2} for row in ids]
    common: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": options.batch,
        "max_steps": options.steps,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    if kind is L2LTrainer:
        is_simulated = torch.accelerator.current_accelerator().type == "sim"
        whole = {"l2l_resident": "all", "l2l_kept_graphs": options.layers} if is_simulated else {}
        args: Any = L2LTrainingArguments(**common, **whole, device_memory_budget=options.budget)
    else:
        args = hf.TrainingArguments(**common)
    return kind(model=hf.BertForSequenceClassification(config), args=args, train_dataset=rows, callbacks=[times])


def milliseconds(kind: type[hf.Trainer], options: argparse.Namespace, folder: str) -> tuple[float, str]:
    """The median step of one training, and the plan that it had."""
    times = StepTimes()
    trainer = trainer_of(kind, options, folder, times)
    trainer.train()
    plan = trainer._l2l_plan.plan if isinstance(trainer, L2LTrainer) else None
    measured = times.seconds[len(times.seconds) // 4 :]
    return 1e3 * statistics.median(measured), "" if plan is None else str(plan.chosen)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure; returns the document."""
    options = parsed(arguments)
    hf.logging.set_verbosity_error()
    if not torch.accelerator.is_available():
        from hf_l2l.testing import enable_simulated_accelerator

        enable_simulated_accelerator("64GiB")
    found: dict[str, list[float]] = {"Trainer": [], "L2LTrainer": []}
    plan = ""
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(options.pairs + 1):
            for kind in (hf.Trainer, L2LTrainer) if pair % 2 else (L2LTrainer, hf.Trainer):
                taken, chosen = milliseconds(kind, options, folder)
                plan = chosen or plan
                if pair:  # the first one loads what later ones find
                    found[kind.__name__].append(taken)
    ratios = [ours / theirs for ours, theirs in zip(found["L2LTrainer"], found["Trainer"], strict=True)]
    result = {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "milliseconds": {name: statistics.median(values) for name, values in found.items()},
        "plan": plan,
        "options": {name: str(value) for name, value in vars(options).items()},
        "environment": environment.environment("resident.py", sys.argv[1:] if arguments is None else arguments),
    }
    for name, values in found.items():
        print(f"{name:12} median {statistics.median(values):9.2f} ms  from {min(values):9.2f} to {max(values):9.2f}")
    print(f"{'ratio':12} median {result['ratio']:9.4f}     from {min(ratios):9.4f} to {max(ratios):9.4f}")
    print(f"plan: {plan}")
    gpu_rows.append(options.rows, "resident", **result)
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
