"""Tokens per second and peak memory: `Trainer` with the model on the device, `L2LTrainer` in each mode of updating.

Models are made from a configuration with random weights, data are random tokens in memory: nothing is downloaded. An
optimizer step is one device batch for L2L, cut into micro-batches; plain `Trainer`, with activation checkpointing,
accumulates over batches of that size. Both compute under bf16 autocast on CUDA, and in fp32 elsewhere.

The first steps are not counted. At the end of each step the device is waited for, on both sides, and an update in the
background is not: it belongs to the time of the next step, as in training. Peak memory is the device's own counter
over the whole run. Where there is none (CPU), it says "accounted": bytes of weights, gradients and moments by their
shapes, without activations.

    python benchmarks/throughput.py --model bert-large [--tokens 8192 32768 65536] [--modes trainer serial deferred
        eager] [--steps 5] [--ubatch-size N] [--stash host] [--out FILE]
    python benchmarks/throughput.py --tiny    # seconds, on any machine

A markdown table; with --out into that file, too, after every row.
"""

from __future__ import annotations

import argparse
import copy
import gc
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import hf_l2l
from hf_l2l import L2LTrainer, L2LTrainingArguments, detach_l2l
from hf_l2l.config import size_text
from hf_l2l.estimate import estimate
from hf_l2l.measure import MemoryCallback

MODES = ("trainer", "serial", "deferred", "eager")
UBATCH_TOKENS = 8192
"""Of a micro-batch, where the option does not say how many rows it has."""

# transformers 5.23 renamed it.
CHECKPOINTING = (
    "activation_checkpointing"
    if "activation_checkpointing" in transformers.TrainingArguments.__dataclass_fields__
    else "gradient_checkpointing"
)


def sizes(hidden: int, layers: int, heads: int, inner: int) -> dict[str, Any]:
    """What the configurations of both models call alike."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return dict(zip(names, (hidden, layers, heads, inner), strict=True))


LLAMA = {"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True, "use_cache": False}
MODELS: dict[str, tuple[type[nn.Module], dict[str, Any], int]] = {
    "bert-large": (transformers.BertForSequenceClassification, sizes(1024, 24, 16, 4096), 512),
    "llama-1b": (transformers.LlamaForCausalLM, {**sizes(2048, 16, 32, 8192), **LLAMA}, 1024),
}
"""Name -> class, what its configuration sets (of BERT-large, of Llama-3.2-1B), and tokens of a row."""

TINY = {**sizes(32, 2, 4, 64), "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 100}


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; one message and the end of the program for those that make no sense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--modes", choices=MODES, nargs="+", default=list(MODES))
    parser.add_argument("--tokens", type=int, nargs="+", help="per optimizer step")
    parser.add_argument("--ubatch-size", type=int, help=f"rows of a micro-batch (default: {UBATCH_TOKENS} tokens)")
    parser.add_argument("--stash", choices=("device", "host"), default="device")
    parser.add_argument("--steps", type=int, help="measured steps")
    parser.add_argument("--warmup", type=int, help="steps before those")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few tokens: shows that it runs")
    parser.add_argument("--out", type=Path, help="markdown file for the result")
    options = parser.parse_args(arguments)
    small = options.tiny
    options.tokens = options.tokens or ([64, 128] if small else [8192, 32768, 65536])
    options.steps = options.steps if options.steps is not None else (2 if small else 5)
    options.warmup = options.warmup if options.warmup is not None else (1 if small else 3)
    for name in ("steps", "warmup", "ubatch_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1 (got {value})")
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


def made(name: str, options: argparse.Namespace) -> nn.Module:
    """The model, with random weights."""
    torch.manual_seed(0)
    kind, sizes, _ = MODELS[name]
    config = kind.config_class(**sizes)  # type: ignore[operator]
    if options.tiny:
        for size in TINY.keys() & config.to_dict().keys():
            setattr(config, size, TINY[size])
    return kind(config)


class RandomTokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of random tokens, all of one length: labelled with themselves for a decoder, else with a class."""

    def __init__(self, model: nn.Module, rows: int, tokens: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(5, model.config.vocab_size, (rows, tokens), generator=generator)
        self.is_decoder = isinstance(model, transformers.LlamaForCausalLM)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self.ids[index]
        return {"input_ids": ids, "labels": ids if self.is_decoder else int(ids[0]) % 2}


class StepTimes(transformers.TrainerCallback):  # type: ignore[misc]
    """When each step ended, on the device and on the host."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the device, and look at the clock."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.ends.append(time.perf_counter())


def trainer_for(
    model: nn.Module, name: str, mode: str, tokens: int, options: argparse.Namespace, folder: str, callbacks: list[Any]
) -> transformers.Trainer:
    """The trainer of one row of the table."""
    rows, ubatch = tokens // row_of(name, options), ubatch_of(name, options)
    common: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": options.warmup + options.steps,
        "max_grad_norm": 0.0 if mode == "eager" else 1.0,
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
        args = L2LTrainingArguments(**common, **l2l)
    kind = transformers.Trainer if mode == "trainer" else L2LTrainer
    trainer = kind(model=model, args=args, train_dataset=data, callbacks=callbacks)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def measured(model: nn.Module, name: str, mode: str, tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """One row of the table. `failure` says in words why there are no figures."""
    row: dict[str, Any] = {"model": name, "mode": mode, "tokens": tokens, "failure": None}
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
    found, need = memory.metrics(), estimate(model)
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


def table(rows: list[dict[str, Any]]) -> str:
    """The result for people, in markdown; the third column says how much of plain Trainer's speed a row reaches."""
    base = {(row["model"], row["tokens"]): row.get("tokens_per_s") for row in rows if row["mode"] == "trainer"}
    lines = [
        "| model | tokens per step | trainer | max_grad_norm | tokens/s | of `Trainer` | step, s: fastest, slowest "
        "| device bytes, peak | host bytes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        mode = row["mode"]
        who = "`Trainer`, checkpointing" if mode == "trainer" else f"`L2LTrainer`, {mode}"
        clips = "0: eager cannot clip" if mode == "eager" else "1.0"
        start = f"| {row['model']} | {row['tokens']:,} | {who} | {clips} "
        if row["failure"]:
            lines.append(f"{start}| {row['failure']} | - | - | - | - |")
            continue
        theirs = base.get((row["model"], row["tokens"]))
        share = f"{row['tokens_per_s'] / theirs:.1%}" if theirs else "-"
        label = "measured" if row["is_measured"] else "accounted"
        lines.append(
            f"{start}| {row['tokens_per_s']:,.0f} | {share} | {row['fastest_s']:.3f}, {row['slowest_s']:.3f} "
            f"| {size_text(row['device_bytes'])} ({label}) | {size_text(row['host_bytes'])} |"
        )
    return "\n".join(lines)


def document(rows: list[dict[str, Any]], options: argparse.Namespace, arguments: Sequence[str]) -> str:
    """The table, with what one needs to know about it."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else str(device)
    ubatches = ", ".join(f"{m} {ubatch_of(m, options)} x {row_of(m, options)}" for m in options.model)
    return "\n".join(
        (
            f"# Throughput on {name}{', tiny models' if options.tiny else ''}",
            "",
            f"Python {platform.python_version()}, torch {torch.__version__}, transformers "
            f"{transformers.__version__}, hf_l2l {hf_l2l.__version__}; random weights and tokens; "
            f"{'bf16 autocast' if torch.cuda.is_available() else 'fp32'}; micro-batches (rows x tokens): {ubatches}; "
            f"stash on the {options.stash}; {options.steps} steps after {options.warmup}.",
            "",
            table(rows),
            "",
            f"    python benchmarks/throughput.py {shlex.join(arguments)}",
            "",
        )
    )


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measure, print, and return the rows."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parsed(arguments)
    rows: list[dict[str, Any]] = []
    for name in options.model:
        model = made(name, options)
        for tokens in options.tokens:
            for mode in options.modes:
                rows.append(measured(copy.deepcopy(model), name, mode, tokens, options))
                forget()
                print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
                if options.out is not None:
                    options.out.write_text(document(rows, options, arguments), encoding="utf-8")
    print(document(rows, options, arguments))
    return rows


if __name__ == "__main__":
    main()
