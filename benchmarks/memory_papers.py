"""The memory tables of the L2L papers (arXiv:2002.05645, both texts), with our figures beside theirs.

BERT-large at its width: every case trains a model of two layers at full width, since depth costs nothing
(`memory.py`). A first step has short rows, so that the second one, which counts, knows the order of the layers.
The models of 17 and 50 billion parameters are on the meta device, and their bytes are those of `hf_l2l.estimate`;
one layer of the first is run.

    python benchmarks/memory_papers.py [--parts bert first layer giants] [--tiny] [--rows FILE.jsonl] [--out FILE.md]

A document, then all rows as one JSON document in the last line; --rows as in `memory.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.utils import logging as hf_logging

from hf_l2l import L2LConfig, attach_l2l, detach_l2l, estimate
from hf_l2l.testing import enable_simulated_accelerator

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import memory_papers_report
from benchmarks.environment import environment
from benchmarks.memory_runs import settled_bytes, step_peak

HOST = {"stash": "host", "boundary": "host", "eps_update": "deferred"}
LEAN = {"cmp": "bf16", "grad_dtype": "16bit", "moment_dtype": "bf16", "host_copies": "per_sweep"}
"""10 bytes per parameter on the host."""


def bert(tiny: bool, attention_dropout: float = 0.0, layers: int = 2) -> nn.Module:
    """Of the width of BERT-large. Attention without dropout, as the host's fused kernel has none."""
    torch.manual_seed(0)
    width = 64 if tiny else 1024
    config = transformers.BertConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        vocab_size=300 if tiny else 30522,
        attention_probs_dropout_prob=attention_dropout,
        attn_implementation="sdpa",
    )
    return transformers.BertForSequenceClassification(config).train()


def gpt(layers: int, hidden: int, tokens: int = 1024, vocab: int = 50257) -> nn.Module:
    """Like Turing-NLG: 28 heads at hidden size 4256, 64 at 8192."""
    heads = {4256: 28, 8192: 64}.get(hidden, 2)
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": tokens, "vocab_size": vocab}
    config = transformers.GPT2Config(**sizes, attn_pdrop=0.0, use_cache=False, attn_implementation="sdpa")
    return transformers.GPT2LMHeadModel(config).train()


def measured(
    model: nn.Module, rows: int, tokens: int, ubatch: int, device: torch.device, updates: bool = True, **options: Any
) -> dict[str, Any]:
    """Peak bytes of the second step; without `updates`, without moments on the host."""
    before = settled_bytes()
    config = L2LConfig(device=device, ubatch_size=ubatch, **HOST, **options)
    need = estimate(model, config)
    eps = attach_l2l(model, config)
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True))
    peaks = []
    for length in (8, tokens):
        ids = torch.randint(5, model.config.vocab_size, (rows, length))
        labels = ids[:, 0] % 2 if "Bert" in type(model).__name__ else ids
        peaks.append(
            step_peak(model, optimizer if updates else None, {"input_ids": ids, "labels": labels}, before, eps)
        )
    parts = {name: size["peak"] for name, size in eps.memory_report()["device"].items() if size["peak"]}
    detach_l2l(model)
    found = {"peak": peaks[-1], "shell": need.shell, "slots": need.slots, "parts": parts}
    return {"rows": rows, "tokens": tokens, "ubatch": ubatch, "options": options, **found}


def bert_cases(tiny: bool, device: torch.device) -> dict[str, Callable[[], dict[str, Any]]]:
    """The later text, tables 2, 3 and 5: micro-batches of 64 rows of 512 tokens."""
    rows, tokens = (4, 32) if tiny else (64, 512)
    return {
        f"bert {name}": lambda u=times, d=dropout, o=options: measured(
            bert(tiny, d), rows * u, tokens, rows, device, **o
        )
        for name, times, dropout, options in (
            ("cmp, 1 micro-batch", 1, 0.0, {"cmp": "bf16"}),
            ("cmp, 2 micro-batches", 2, 0.0, {"cmp": "bf16"}),
            ("cmp, 1 micro-batch, attention with dropout", 1, 0.1, {"cmp": "bf16"}),
        )
    }


def first_cases(tiny: bool, device: torch.device) -> dict[str, Callable[[], dict[str, Any]]]:
    """The first text, tables 2, 4 and 5, in fp32: device batch and micro-batch."""
    tokens = 32 if tiny else 512
    sizes = ((4, 4), (8, 4), (16, 4), (32, 4), (32, 2), (32, 8), (32, 16), (32, 32))
    return {
        f"first {rows}/{ubatch}": lambda r=rows, u=ubatch: measured(bert(tiny), r, tokens, u, device)
        for rows, ubatch in sizes
    }


def layer_cases(tiny: bool, device: torch.device) -> dict[str, Callable[[], dict[str, Any]]]:
    """One layer of the model of 17 billion parameters, forwards and backwards; a small vocabulary."""
    hidden, tokens = (64, 32) if tiny else (4256, 1024)
    return {
        f"layer {rows}/{rows}": lambda r=rows: measured(
            gpt(1, hidden, tokens, 1000), r, tokens, r, device, updates=False, cmp="bf16", grad_dtype="16bit"
        )
        for rows in (1, 2)
    }


def giant_cases(tiny: bool, device: torch.device) -> dict[str, Callable[[], dict[str, Any]]]:
    """The models of 17 and 50 billion parameters, on the meta device."""

    def estimated(layers: int, hidden: int, slots: int) -> dict[str, Any]:
        with torch.device("meta"):
            model = gpt(layers, hidden)
        need = estimate(model, L2LConfig(device=device, gradient_slots=slots, **HOST, **LEAN))
        full = estimate(model, L2LConfig(device=device, gradient_slots=slots, **HOST, cmp="bf16"))
        sizes = {"layers": layers, "hidden": hidden, "gradient_slots": slots}
        found = {"shell": need.shell, "slots": need.slots, "host": need.host_bytes, "host_in_full": full.host_bytes}
        return {**sizes, "parameters": sum(p.numel() for p in model.parameters()), **found}

    shapes = ((78, 4256, 2), (230, 4256, 2), (62, 8192, 2), (62, 8192, 1))
    return {f"giant {n}x{h}, {s}": lambda n=n, h=h, s=s: estimated(n, h, s) for n, h, s in shapes}


PARTS = {"bert": bert_cases, "first": first_cases, "layer": layer_cases, "giants": giant_cases}


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tiny", action="store_true", help="a small width, to see that it runs")
    for name, meaning in (("rows", "where rows are kept"), ("out", "the document")):
        parser.add_argument(f"--{name}", type=Path, help=meaning)
    options = parser.parse_args(arguments)
    for name in ("rows", "out"):
        file = getattr(options, name)
        if file is not None and not file.absolute().parent.is_dir():
            parser.error(f"--{name} must be in a folder that exists (got {file})")
    return options


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and print."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parsed(arguments)
    if not torch.accelerator.is_available():
        enable_simulated_accelerator()
    hf_logging.set_verbosity_error()
    device = torch.accelerator.current_accelerator()
    assert device is not None, "one has just been made sure of"
    kept = [] if options.rows is None or not options.rows.exists() else options.rows.read_text().splitlines()
    rows: dict[str, Any] = {row["name"]: row for row in map(json.loads, kept) if row["tiny"] == options.tiny}
    for part in options.parts:
        for name, run in PARTS[part](options.tiny, device).items():
            if name in rows:
                continue
            rows[name] = {"name": name, "tiny": options.tiny, **run()}
            print(f"{name}: {rows[name]}", file=sys.stderr, flush=True)
            if options.rows is not None:
                with options.rows.open("a") as file:
                    file.write(json.dumps(rows[name]) + "\n")
    where = environment("memory_papers.py", arguments)
    if where["device"].startswith("sim"):
        where["link_bytes_per_s"] = None  # a simulated link has no speed of its own
    result = {"environment": where, "rows": rows}
    text = memory_papers_report.document(result)
    if options.out is not None:
        options.out.write_text(text)
    print(text)
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
