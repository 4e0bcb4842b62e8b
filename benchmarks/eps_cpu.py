"""The EPS's update on the CPU: layer by layer in the background, over one flat step of the same optimizer.

The model has the parameters of BERT-large and never runs: random numbers are its gradients. Ours is
`optimizer.step()` with eps_update="deferred" and the wait for its last layer; flat is `AdamW(fused=True).step()`. Both
update the same weights with the same gradients and moments, so that they find the same memory, and with as many
threads, one step each in turn, so that a machine that slows down slows both.

In the second case ours also multiplies the gradients by the factor of clipping and writes a bf16 copy of each layer
that it has updated; the flat step does neither. The norm is no part of it: an accelerator takes that itself.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python benchmarks/eps_cpu.py [--pairs 30] [--threads 2]
        [--layers 24] [--hidden 1024]

A table for people, then one JSON document as the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import hf_l2l
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.eps.pending import clip
from hf_l2l.memory.host_limits import available_host_bytes
from hf_l2l.runtime.tensors import size_text

NORM = 1.01
"""What the gradients are said to have, to be clipped to 1: the factor is so near to 1 that they never become too small
to be normal numbers, which the processor would be slow with."""

CASES = {"update alone": 1.1, "with clipping and 16-bit copy": 1.75}
"""Case -> the ratio that it should not exceed."""


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; one message and the end of the program for those that make no sense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30, help="measured pairs of steps")
    parser.add_argument("--warmup", type=int, default=3, help="pairs before that")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument(
        "--hidden", type=int, default=1024, help="a multiple of 64; layers are four times as wide inside"
    )
    parser.add_argument("--vocab", type=int, default=30522, help="rows of the embedding")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    for name, least in {"pairs": 2, "warmup": 1, "layers": 1, "hidden": 64, "vocab": 1, "threads": 1}.items():
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least} (got {getattr(options, name)})")
    if options.hidden % 64:
        parser.error(f"--hidden must be a multiple of 64, the width of a head (got {options.hidden})")
    need, have = 18 * parameters_of(options), available_host_bytes()
    if need > have:
        parser.error(f"this takes {size_text(need)}, and {size_text(have)} can be had; use fewer --layers")
    return options


def bert(options: argparse.Namespace) -> nn.Module:
    """A model with the parameters of BERT-large, or of what the options say."""
    config = transformers.BertConfig(
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        intermediate_size=4 * options.hidden,
        vocab_size=options.vocab,
    )
    return transformers.BertForSequenceClassification(config)


def parameters_of(options: argparse.Namespace) -> int:
    """Their number, without making them."""
    with torch.device("meta"):
        return sum(p.numel() for p in bert(options).parameters())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The fused AdamW, with the two groups that transformers' Trainer makes."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-5, fused=True)


class Updates:
    """One model, and two ways to update it."""

    def __init__(self, model: nn.Module, threads: int) -> None:
        self.masters = list(model.parameters())
        self.gradients = [torch.randn_like(p, requires_grad=False).mul_(1e-3) for p in self.masters]
        self.copies = {p.data_ptr(): torch.empty_like(p, dtype=torch.bfloat16) for p in self.masters}
        self.eps = attach_l2l(model, L2LConfig(device="cpu", eps_update="deferred", num_threads=threads))
        self.optimizer = self.eps.wrap(adamw(model))
        self.plain = adamw(model)
        self.plain.state = self.optimizer.state

    def timed(self, update: Callable[[], None]) -> float:
        """Milliseconds of one update, for which the gradients are there."""
        for p, gradient in zip(self.masters, self.gradients, strict=True):
            p.grad = gradient
        start = time.perf_counter()
        update()
        return (time.perf_counter() - start) * 1e3

    def flat(self) -> None:
        """The optimizer's own step, over all parameters at once."""
        self.plain.step()

    def layered(self) -> None:
        """The step in the background, to its end."""
        self.optimizer.step()
        self.eps.synchronize()

    def layered_and_more(self) -> None:
        """The same, with gradients that are to be clipped, and a copy of the weights in 16 bits."""
        # Torch runs such hooks after every step of any optimizer: here, on the thread of the update, after each layer.
        hook = register_optimizer_step_post_hook(self._copy)
        clip(self.eps.masters.parameters, torch.tensor(NORM), 1.0, later=True)
        self.layered()
        hook.remove()

    @torch.no_grad()
    def _copy(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if optimizer is self.optimizer:  # whose own step finds nothing to do
            return
        for group in optimizer.param_groups:
            for p in group["params"]:
                self.copies[p.data_ptr()].copy_(p)


def measured(updates: Updates, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """For each case the quantiles of ours, of the flat step, and of the ratio within a pair."""
    found: dict[str, dict[str, Any]] = {}
    for (case, target), ours in zip(CASES.items(), (updates.layered, updates.layered_and_more), strict=True):
        sides: dict[Callable[[], None], list[float]] = {ours: [], updates.flat: []}
        for pair in range(options.warmup + options.pairs):
            # The second run finds the caches filled by the first: alternate the order, too.
            for side in list(sides) if pair % 2 else reversed(sides):
                sides[side].append(updates.timed(side))
        layered, flat = (times[options.warmup :] for times in sides.values())
        found[case] = {
            "ratio": percentiles([a / b for a, b in zip(layered, flat, strict=True)]),
            "layered_ms": percentiles(layered),
            "flat_ms": percentiles(flat),
            "target": target,
        }
    return found


def percentiles(values: list[float]) -> dict[str, float]:
    """The middle, and what a tenth of the values is below and above of."""
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return {"median": statistics.median(values), "p10": deciles[0], "p90": deciles[-1]}


def table(cases: dict[str, dict[str, Any]]) -> str:
    """The result for people, in markdown."""
    lines = ["| case | ratio, median | p10 | p90 | target | layered, ms | flat, ms |", "|---|---|---|---|---|---|---|"]
    for case, found in cases.items():
        ratio = found["ratio"]
        lines.append(
            f"| {case} | {ratio['median']:.3f} | {ratio['p10']:.3f} | {ratio['p90']:.3f} | at most {found['target']} "
            f"| {found['layered_ms']['median']:.1f} | {found['flat_ms']['median']:.1f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, and return what was printed as the last line."""
    options = parsed(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    load = os.getloadavg()[0]
    model = bert(options)
    result = {
        "cases": measured(Updates(model, options.threads), options),
        "parameters": sum(p.numel() for p in model.parameters()),
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "options": vars(options),
        "versions": {
            "hf_l2l": hf_l2l.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
    print(table(result["cases"]))
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
