"""Tokens per second and peak memory: `Trainer` with the model on the device, `L2LTrainer` in each mode of updating.

Models are made from a configuration with random weights, data are random tokens in memory: nothing is downloaded. An
optimizer step is one device batch for L2L, cut into micro-batches; plain `Trainer`, with activation checkpointing,
accumulates over batches of that size. Both compute under bf16 autocast on CUDA, and in fp32 elsewhere; mode `cmp` is
L2L by cross mixed precision, with the first of its host settings that fits; mode `resident` is the same with
`resident="shell"`; mode `fsdp2` is torch's FSDP2 on one rank
with all state in host memory (`throughput_fsdp.py`).

The first steps are not counted. At the end of each step the device is waited for, on both sides, and an update in the
background is not: it belongs to the time of the next step, as in training. Peak memory is the device's own counter
over the whole run. Where there is none (CPU), it says "accounted": bytes of weights, gradients and moments by their
shapes, without activations.

Before that, tiny instances of the same models are trained: serial and deferred must log the same loss and grad_norm to
the bit, plain `Trainer` the same within a tolerance. What is found is in the result, and measuring goes on.

    python benchmarks/throughput.py --model bert-large [--tokens 8192 32768 65536] [--modes trainer serial deferred
        eager cmp resident fsdp2] [--steps 10] [--ubatch-size N] [--stash host] [--card 24GiB] [--out FILE]
        [--rows FILE] [--traces FILE] [--seconds S]
    python benchmarks/throughput.py --tiny    # seconds, on any machine

A document with a markdown table, with --out into that file, too, after every row; then one JSON document as the last
line, with everything that is in the table. With --rows, every row is also a line of JSON in that file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import gpu_rows
from benchmarks.environment import environment
from benchmarks.throughput_check import CHECKED_STEPS, check
from benchmarks.throughput_models import MODELS
from benchmarks.throughput_report import document, line, with_shares
from benchmarks.throughput_runs import MODES, UBATCH_TOKENS, forget, measured, row_of, ubatch_of
from hf_l2l.testing.sim_memory import parse_bytes

BY_DEFAULT = ("bert-large", "llama-1b")
"""The models that are measured if none is named."""


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; one message and the end of the program for those that make no sense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, nargs="+", default=list(BY_DEFAULT))
    parser.add_argument("--modes", choices=MODES, nargs="+", default=list(MODES[:5]))
    parser.add_argument("--tokens", type=int, nargs="+", help="per optimizer step")
    parser.add_argument("--ubatch-size", type=int, help=f"rows of a micro-batch (default: {UBATCH_TOKENS} tokens)")
    parser.add_argument("--stash", choices=("device", "host"), default="device")
    parser.add_argument("--cmp", choices=("auto", "bf16", "fp16"), default="bf16", help="what mode cmp computes in")
    parser.add_argument("--card", help='memory of the device that may be used, as "24GiB"')
    parser.add_argument("--steps", type=int, help="measured steps")
    parser.add_argument("--warmup", type=int, help="steps before those")
    parser.add_argument("--seconds", type=float, help="in which all is done: cases that need longer are left out")
    parser.add_argument("--no-check", action="store_true", help="do not compare the trainers first")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few tokens: shows that it runs")
    parser.add_argument("--out", type=Path, help="markdown file for the result")
    parser.add_argument("--rows", type=Path, help="file to which each row is added as a line of JSON")
    parser.add_argument("--traces", type=Path, help="zip file to which a trace of one step of each case is added")
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
    if options.card is not None:
        try:
            parse_bytes(options.card)
        except ValueError as error:
            parser.error(f"--card must be a number of bytes (got {options.card}): {error}")
    return options


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """How it was measured, for the document and the JSON."""
    paths = {name: value and str(value) for name, value in vars(options).items() if name in ("out", "rows", "traces")}
    return {
        **vars(options),
        **paths,
        "precision": "bf16 autocast" if torch.cuda.is_available() else "fp32",
        "ubatches": {name: (ubatch_of(name, options), row_of(name, options)) for name in options.model},
        "checked_steps": CHECKED_STEPS,
    }


def limit_card(size: str | None) -> None:
    """Let torch allocate no more of the device's memory; where there is no CUDA, nothing is limited."""
    if size is not None and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, parse_bytes(size) / total))


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Check, measure, print, and return what was printed as the last line."""
    start = time.monotonic()
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parsed(arguments)
    checks: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    where, how = environment("throughput.py", arguments), settings(options)
    result = {"environment": where, "settings": how, "checks": checks, "rows": rows}
    gpu_rows.append(options.rows, "environment", **where)
    gpu_rows.append(options.rows, "settings", **how)
    for name in () if options.no_check else options.model:
        checks.append(check(name, options))
        gpu_rows.append(options.rows, "check", **checks[-1])
        if checks[-1]["failure"] is not None:
            print(f"{name}, tiny: {checks[-1]['failure']}", file=sys.stderr, flush=True)
        forget()
    limit_card(options.card)
    for name in options.model:
        for tokens in options.tokens:
            for mode in options.modes:
                left_s = float("inf") if options.seconds is None else options.seconds - (time.monotonic() - start)
                rows.append(measured(name, mode, tokens, options, left_s))
                forget()
                gpu_rows.append(options.rows, "row", **rows[-1])
                print(line(with_shares(rows)[-1]), file=sys.stderr, flush=True)
                if options.out is not None:
                    options.out.write_text(document(result), encoding="utf-8")
    print(document(result))
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
