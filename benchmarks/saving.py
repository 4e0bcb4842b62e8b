"""What a checkpoint costs a training: `Trainer`, `L2LTrainer`, and `L2LTrainer` with `l2l_async_save`, in turns.

A training stands still from the end of the step before a checkpoint to the beginning of the next one; with
`l2l_async_save` later steps may take longer, too, while the values are written. So both are measured: the time between
the two steps, and the time of all steps from one checkpoint to the next over as many steps without one.

    python benchmarks/saving.py [--rounds 4] [--layers 8] [--hidden 512] [--between 4]

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
from benchmarks import environment
from hf_l2l import L2LTrainer, L2LTrainingArguments

VOCAB = 8000


class Moments(hf.TrainerCallback):
    """When steps begin and end."""

    def __init__(self) -> None:
        self.begins: list[float] = []
        self.ends: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begins.append(time.perf_counter())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4, help="trainings of each kind; the first is warmup")
    parser.add_argument("--between", type=int, default=4, help="steps from one checkpoint to the next")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args(arguments)
    if options.between < 2 or options.rounds < 2:
        parser.error(f"--between and --rounds must be at least 2 (got {options.between} and {options.rounds})")
    return options


def model_of(options: argparse.Namespace) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    config = hf.BertConfig(
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.hidden // 64),
        intermediate_size=4 * options.hidden,
        vocab_size=VOCAB,
    )
    return hf.BertForSequenceClassification(config)


def one_training(kind: str, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds: between the steps around a checkpoint, and what the checkpoint costs in all."""
    between = options.between
    steps = 3 * between  # without a checkpoint, with one at the beginning, and the last step is left out
    ids = torch.randint(5, VOCAB, (4 * options.batch, options.tokens))
    moments = Moments()

    class SaveOnce(hf.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = state.global_step == 2 * between - 1

    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "output_dir": folder,
            "per_device_train_batch_size": options.batch,
            "max_steps": steps,
            "report_to": "none",
            "save_strategy": "no",
            "logging_strategy": "no",
            "disable_tqdm": True,
            "dataloader_pin_memory": torch.accelerator.is_available(),
        }
        args: Any = hf.TrainingArguments(**common)
        if kind != "Trainer":
            later = kind.endswith("l2l_async_save")
            args = L2LTrainingArguments(**common, eps_update="deferred", l2l_async_save=later)
        trainer = (hf.Trainer if kind == "Trainer" else L2LTrainer)(
            model=model_of(options),
            args=args,
            train_dataset=[{"input_ids": row, "labels": row[0] % 2} for row in ids],
            callbacks=[moments, SaveOnce()],
        )
        trainer.train()
        size = sum(file.stat().st_size for file in Path(folder).rglob("checkpoint-*/*"))
    last = 2 * between - 2  # the step before the checkpoint
    held = moments.begins[last + 1] - moments.ends[last]
    usual = moments.ends[last] - moments.ends[last - between + 1]
    with_it = moments.ends[last + between - 1] - moments.ends[last]
    return {
        "held_ms": 1e3 * held,
        "cost_ms": 1e3 * (with_it - usual),
        "step_ms": 1e3 * usual / (between - 1),
        "mib": size / 2**20,
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure; returns the document."""
    options = parsed(arguments)
    hf.logging.set_verbosity_error()
    kinds = ("Trainer", "L2LTrainer", "L2LTrainer, l2l_async_save")
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for turn in range(options.rounds):
        for kind in kinds:
            measured = one_training(kind, options)
            if turn:  # the first one loads what later ones find
                found[kind].append(measured)
    medians = {k: {name: statistics.median(each[name] for each in v) for name in v[0]} for k, v in found.items()}
    result = {
        "kinds": medians,
        "options": {name: str(value) for name, value in vars(options).items()},
        "environment": environment.environment("saving.py", sys.argv[1:] if arguments is None else arguments),
    }
    for kind, values in medians.items():
        print(
            f"{kind:28} checkpoint {values['mib']:8.1f} MiB   stands still {values['held_ms']:8.1f} ms   "
            f"costs in all {values['cost_ms']:8.1f} ms   step {values['step_ms']:8.1f} ms"
        )
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
