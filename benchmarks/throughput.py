"""Tokens per second and peak memory: `Trainer` with the model on the device, `L2LTrainer` in each mode of updating.

Models are made from a configuration with random weights, data are random tokens in memory: nothing is downloaded. An
optimizer step is one device batch for L2L, cut into micro-batches; plain `Trainer`, with activation checkpointing,
accumulates over batches of that size. Both compute under bf16 autocast on CUDA, and in fp32 elsewhere; with --cmp,
L2L by cross mixed precision instead.

The first steps are not counted. At the end of each step the device is waited for, on both sides, and an update in the
background is not: it belongs to the time of the next step, as in training. Peak memory is the device's own counter
over the whole run. Where there is none (CPU), it says "accounted": bytes of weights, gradients and moments by their
shapes, without activations.

Before that, tiny instances of the same models are trained: serial and deferred must log the same loss and grad_norm to
the bit, plain `Trainer` the same within a tolerance; else nothing is measured.

    python benchmarks/throughput.py --model bert-large [--tokens 8192 32768 65536] [--modes trainer serial deferred
        eager] [--steps 10] [--ubatch-size N] [--stash host] [--out FILE]
    python benchmarks/throughput.py --tiny    # seconds, on any machine

A document with a markdown table, with --out into that file, too, after every row; then one JSON document as the last
line, with everything that is in the table.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from hf_l2l import L2LConfig, L2LTrainer, L2LTrainingArguments, detach_l2l
from hf_l2l.measure import MemoryCallback
from hf_l2l.report.memory_estimate import estimate
from hf_l2l.runtime.tensors import size_text

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.environment import environment
from benchmarks.throughput_models import MODELS, RandomTokens, made
from benchmarks.throughput_report import document, line, with_shares

MODES = ("trainer", "serial", "deferred", "eager")
CHECKED_STEPS = 4
UBATCH_TOKENS = 8192
"""Of a micro-batch, where the option does not say how many rows it has."""

# transformers 5.23 renamed it.
CHECKPOINTING = (
    "activation_checkpointing"
    if "activation_checkpointing" in transformers.TrainingArguments.__dataclass_fields__
    else "gradient_checkpointing"
)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; one message and the end of the program for those that make no sense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--modes", choices=MODES, nargs="+", default=list(MODES))
    parser.add_argument("--tokens", type=int, nargs="+", help="per optimizer step")
    parser.add_argument("--ubatch-size", type=int, help=f"rows of a micro-batch (default: {UBATCH_TOKENS} tokens)")
    parser.add_argument("--stash", choices=("device", "host"), default="device")
    parser.add_argument("--cmp", choices=("auto", "bf16", "fp16"), help="L2L's cross mixed precision")
    parser.add_argument("--steps", type=int, help="measured steps")
    parser.add_argument("--warmup", type=int, help="steps before those")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few tokens: shows that it runs")
    parser.add_argument("--out", type=Path, help="markdown file for the result")
    options = parser.parse_args(arguments)
    small = options.tiny
    options.tokens = options.tokens or ([64, 128] if small else [8192, 32768, 65536])
    options.steps = options.steps if options.steps is not None else (2 if small else 10)
    options.warmup = options.warmup if options.warmup is not None else (1 if small else 3)
    for name in ("steps", "warmup", "ubatch_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1 (got {value})")
    # Plain Trainer first: as soon as another row is there, so is what it is compared with.
    options.modes = [mode for mode in MODES if mode in options.modes]
    for name in options.model:
        unit = row_of(name, options) * ubatch_of(name, options)
        for tokens in options.tokens:
            if tokens < unit or tokens % unit:
                parser.error(
                    f"--tokens must be a multiple of {unit} for {name}, {ubatch_of(name, options)} rows of "
                    f"{row_of(name, options)} (got {tokens})"
                )
    if options.out is not None and not options.out.parent.is_dir():
        parser.error(f"--out must be in a folder that exists (got {options.out})")
    return options


def row_of(name: str, options: argparse.Namespace) -> int:
    """Tokens of a row."""
    return 16 if options.tiny else MODELS[name][2]


def ubatch_of(name: str, options: argparse.Namespace) -> int:
    """Rows of a micro-batch."""
    if options.ubatch_size is not None:
        return int(options.ubatch_size)
    return 2 if options.tiny else UBATCH_TOKENS // row_of(name, options)


class StepTimes(transformers.TrainerCallback):  # type: ignore[misc]
    """When each step ended, on the device and on the host."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the device, and look at the clock."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.ends.append(time.perf_counter())


def clipping_of(mode: str) -> float:
    """Its max_grad_norm."""
    return 0.0 if mode == "eager" else 1.0


def trainer_for(
    model: nn.Module, name: str, mode: str, tokens: int, options: argparse.Namespace, folder: str, callbacks: list[Any]
) -> transformers.Trainer:
    """The trainer of one row of the table."""
    rows, ubatch = tokens // row_of(name, options), ubatch_of(name, options)
    common: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": options.warmup + options.steps,
        "max_grad_norm": clipping_of(mode),
        "optim": "adamw_torch_fused",
        "bf16": torch.cuda.is_available(),
        "use_cpu": not torch.accelerator.is_available(),
        "dataloader_pin_memory": torch.cuda.is_available(),
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    data = RandomTokens(model, rows * common["max_steps"], row_of(name, options))
    if mode == "trainer":
        batch = {"per_device_train_batch_size": ubatch, "gradient_accumulation_steps": rows // ubatch}
        args = transformers.TrainingArguments(**common, **batch, **{CHECKPOINTING: True})
    else:
        l2l = {"per_device_train_batch_size": rows, "ubatch_size": ubatch, "stash": options.stash, "eps_update": mode}
        if options.cmp is not None:
            l2l |= {"cmp": options.cmp, "bf16": False}
        args = L2LTrainingArguments(**{**common, **l2l})
    kind = transformers.Trainer if mode == "trainer" else L2LTrainer
    trainer = kind(model=model, args=args, train_dataset=data, callbacks=callbacks)
    if not data.is_decoder:
        # The classifier takes num_items_in_batch and does not divide by it, so that Trainer would add the losses of
        # the batches that it accumulates. May go with https://github.com/huggingface/transformers/issues/47688.
        trainer.model_accepts_loss_kwargs = False
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def measured(model: nn.Module, name: str, mode: str, tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """One row of the table. `failure` says in words why there are no figures."""
    row: dict[str, Any] = {"model": name, "mode": mode, "tokens": tokens, "max_grad_norm": clipping_of(mode)}
    row["failure"] = None
    times, memory = StepTimes(), MemoryCallback()
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer_for(model, name, mode, tokens, options, folder, [times, memory]).train()
    except torch.OutOfMemoryError:
        row["failure"] = "out of memory"
    except MemoryError:
        row["failure"] = "out of host memory"
    finally:
        if mode != "trainer":
            detach_l2l(model)
    if row["failure"] is not None:
        return row
    ends = times.ends[options.warmup - 1 :]
    steps = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    row["tokens_per_s"] = tokens * len(steps) / sum(steps)
    row["fastest_s"], row["slowest_s"] = min(steps), max(steps)
    found, need = memory.metrics(), estimate(model, L2LConfig(cmp=options.cmp))
    row["is_measured"] = "train_device_bytes" in found
    # What gradients the host holds depends on when one looks, if they are used in the background: by shapes, then.
    row["host_bytes"] = found["train_host_bytes"] if mode == "trainer" else need.host_bytes
    accounted = row["host_bytes"] if mode == "trainer" else need.device_bytes
    row["device_bytes"] = found.get("train_device_bytes", accounted)
    return row


def forget() -> None:
    """Let go of what a run has left on the device, also one that failed half-way."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        left = torch.accelerator.memory_allocated()
        if left > 2**20:
            print(f"{size_text(left)} are still on the device before the next run", file=sys.stderr)


@contextmanager
def fixed_order() -> Iterator[None]:
    """Kernels that sum in a fixed order, where there are such."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def logged(name: str, mode: str, stash: str) -> list[tuple[float, float]]:
    """Loss and grad_norm of every step of a tiny model, two micro-batches a step, without dropout."""
    options = parsed(["--tiny", "--model", name, "--stash", stash, "--steps", str(CHECKED_STEPS - 1)])
    model = made(name, options.tiny, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    try:
        with tempfile.TemporaryDirectory() as folder, fixed_order():
            trainer = trainer_for(model, name, mode, 64, options, folder, [])
            trainer.args.logging_strategy, trainer.args.logging_steps = transformers.IntervalStrategy.STEPS, 1
            trainer.train()
    finally:
        if mode != "trainer":
            detach_l2l(model)
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [(float(step["loss"]), float(step["grad_norm"])) for step in steps]


def check(options: argparse.Namespace) -> dict[str, float]:
    """Stop unless the trainers compute the same; else name -> the largest relative difference from plain Trainer."""
    found: dict[str, float] = {}
    for name in options.model:
        plain, serial, deferred = (logged(name, mode, options.stash) for mode in MODES[:3])
        if serial != deferred or len(serial) != CHECKED_STEPS:
            sys.exit(f"nothing is measured: serial and deferred log other bits ({name}, tiny): {serial}, {deferred}")
        pairs = [(a, b) for ours, theirs in zip(serial, plain, strict=True) for a, b in zip(ours, theirs, strict=True)]
        found[name] = max(abs(a - b) / abs(b) for a, b in pairs)
        if not all(abs(a - b) <= tolerance(options) * abs(b) for a, b in pairs):  # also if one is not a number
            sys.exit(f"nothing is measured: L2L and plain Trainer differ ({name}, tiny): {serial}, {plain}")
        forget()
    return found


def tolerance(options: argparse.Namespace) -> float:
    """How far loss and grad_norm may be from plain Trainer's, relatively: sums are in another order."""
    return 2e-2 if torch.cuda.is_available() or options.cmp is not None else 1e-5


def settings(options: argparse.Namespace, differences: dict[str, float]) -> dict[str, Any]:
    """What was measured and how, for the document and the JSON."""
    return {
        **vars(options),
        "out": str(options.out) if options.out is not None else None,
        "precision": ("bf16 autocast" if torch.cuda.is_available() else "fp32")
        + ("" if options.cmp is None else f", and L2L by cmp={options.cmp!r}"),
        "ubatches": {name: (ubatch_of(name, options), row_of(name, options)) for name in options.model},
        "differences": differences,
        "check": f"loss and grad_norm of {CHECKED_STEPS} steps, serial and deferred to the bit; plain `Trainer` "
        f"within {tolerance(options):g}, found {max(differences.values()):.1e}",
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Check, measure, print, and return what was printed as the last line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parsed(arguments)
    rows: list[dict[str, Any]] = []
    result = {
        "environment": environment("throughput.py", arguments),
        "settings": settings(options, check(options)),
        "rows": rows,
    }
    for name in options.model:
        model = made(name, options.tiny)
        for tokens in options.tokens:
            for mode in options.modes:
                rows.append(measured(copy.deepcopy(model), name, mode, tokens, options))
                forget()
                print(line(with_shares(rows)[-1]), file=sys.stderr, flush=True)
                if options.out is not None:
                    options.out.write_text(document(result), encoding="utf-8")
    print(document(result))
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
