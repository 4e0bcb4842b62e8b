"""Step time on the CPU: L2L over transformers' activation checkpointing.

There is no bus to hide on a CPU, so this measures what the engine itself costs. Both run the same model on the same
batch, one step each in turn, so that a machine that slows down slows both. A step is forward, backward, clipping and
update.

    python benchmarks/step_time_cpu.py [--pairs 30] [--ubatch-size N] [--threads 2] [--profile]

A table for people, then one JSON document as the last line.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import json
import platform
import pstats
import statistics
import time
from typing import Any

import torch
import transformers
from torch import nn

import hf_l2l
from hf_l2l import L2LConfig, attach_l2l


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30, help="measured pairs of steps")
    parser.add_argument("--warmup", type=int, default=3, help="pairs before that")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--ubatch-size", type=int, default=None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="print where L2L's steps spend their time")
    return parser.parse_args()


def bert(options: argparse.Namespace) -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 32,
        intermediate_size=4 * options.hidden,
        vocab_size=8000,
    )
    return transformers.BertForSequenceClassification(config).train()


class Steps:
    """A model, its optimizer, and its step."""

    def __init__(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
        self.model = model
        self.batch = batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        self.milliseconds: list[float] = []

    def step(self) -> None:
        start = time.perf_counter()
        self.model(**self.batch).loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.model.zero_grad()
        self.milliseconds.append((time.perf_counter() - start) * 1e3)


def percentiles(values: list[float]) -> dict[str, float]:
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return {"median": statistics.median(values), "p10": deciles[0], "p90": deciles[-1]}


def main() -> None:
    options = parsed()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = bert(options)
    ids = torch.randint(5, 8000, (options.batch, options.tokens))
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.randint(0, 2, (options.batch,)),
    }
    checkpointed = copy.deepcopy(model)
    # transformers 5.23 renamed it.
    named = "activation_checkpointing_enable"
    getattr(checkpointed, named if hasattr(checkpointed, named) else "gradient_checkpointing_enable")()
    theirs = Steps(checkpointed, batch)
    attach_l2l(model, L2LConfig(ubatch_size=options.ubatch_size, device="cpu"))
    ours = Steps(model, batch)
    profile = cProfile.Profile()
    for pair in range(options.warmup + options.pairs):
        # The second run finds the caches filled by the first: alternate the order, too.
        for steps in (theirs, ours) if pair % 2 else (ours, theirs):
            if options.profile and steps is ours and pair >= options.warmup:
                profile.runcall(steps.step)
            else:
                steps.step()
    report(options, theirs.milliseconds[options.warmup :], ours.milliseconds[options.warmup :])
    if options.profile:
        pstats.Stats(profile).sort_stats("cumulative").print_stats(40)


def report(options: argparse.Namespace, theirs: list[float], ours: list[float]) -> None:
    result: dict[str, Any] = {
        "ratio": percentiles([a / b for a, b in zip(ours, theirs, strict=True)]),
        "l2l_ms": percentiles(ours),
        "activation_checkpointing_ms": percentiles(theirs),
    }
    for name, values in result.items():
        print(f"{name:30} " + "  ".join(f"{key} {value:9.3f}" for key, value in values.items()))
    result["options"] = vars(options)
    result["versions"] = {
        "hf_l2l": hf_l2l.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
