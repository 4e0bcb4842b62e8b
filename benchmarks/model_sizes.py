"""What models of several sizes take of the device and the host, and how fast a step would be on some cards: computed.

    python benchmarks/model_sizes.py [--models llama-1b ...] [--cards rtx4090 ...] [--out FILE.md]

Nothing is measured: bytes are those of `hf-l2l estimate`, and times those of its cost model with the assumed figures
of `--card`. Weights travel and layers compute in 16 bits (`cmp`), and what else stays on the device is chosen for nine
tenths of its memory.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_l2l
from hf_l2l import L2LConfig
from hf_l2l.cli.main import main as main_of_cli
from hf_l2l.plan.estimate import estimate_of
from hf_l2l.plan.planner import BudgetError
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.probe.cards import card_named
from hf_l2l.runtime.tensors import two_digits
from hf_l2l.shapes.inputs import example_inputs
from hf_l2l.sizing.capacity import LORA, SETTINGS
from hf_l2l.sizing.fit import fits

ROWS, TOKENS = 8, 2048
"""Of a step."""
WHOLE, (SHORT, SMALLEST) = "cmp", list(SETTINGS)[-2:]
"""The settings of the table: 18 bytes per parameter on the host, 10, and 8."""


def shape(hidden: int, layers: int, heads: int, inner: int, vocab: int, *, tied: bool) -> Any:
    """A decoder with gated layers and 8 heads of keys and values."""
    return transformers.LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        intermediate_size=inner,
        vocab_size=vocab,
        tie_word_embeddings=tied,
    )


MODELS = {
    "llama-1b": ("Llama-3.2-1B", shape(2048, 16, 32, 8192, 128256, tied=True)),
    "llama-3b": ("Llama-3.2-3B", shape(3072, 28, 24, 8192, 128256, tied=True)),
    "llama-8b": ("Llama-3.1-8B", shape(4096, 32, 32, 14336, 128256, tied=False)),
    "qwen-14b": ("Qwen2.5-14B", shape(5120, 48, 40, 13824, 152064, tied=False)),
    "qwen-32b": ("Qwen2.5-32B", shape(5120, 64, 40, 27648, 152064, tied=False)),
}
"""Name -> what it has the dimensions of, and its configuration."""
FOUR = ("started with", "a step", "host memory, GiB")
CARDS = ("rtx4090", "a100", "h200")


def gib(size: int | None) -> str:
    """Bytes as GiB."""
    return "" if size is None else two_digits(size / 2**30)


def speed(seconds: float, tokens: int) -> str:
    """Of a step."""
    return f"{two_digits(seconds)} s, {two_digits(tokens / seconds)} tokens/s"


def row(name: str, cards: Sequence[str]) -> list[str]:
    """The cells of a model."""
    title, config = MODELS[name]
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    device = torch.device("cuda")
    run, run_of_one = (
        RunShapes(
            model, L2LConfig(cmp="bf16"), example_inputs(model, rows, TOKENS), device=device, device_memory=10**15
        )
        for rows in (ROWS, 1)
    )
    plain, plain_of_one = (estimate_of(each, each.config).plain_checkpointing for each in (run, run_of_one))
    least = run.most(L2LConfig(cmp="bf16", stash="host", boundary="host", ubatch_size=1, gradient_slots=1))
    host = {setting: each.host_bytes for setting, each in fits(run, run.config, 1, None, None).by_setting.items()}
    cells = []
    for card in cards:
        figures = card_named(card)
        assert figures.device_memory_bytes is not None
        try:
            found = fits(run, run.config, 1, figures.device_memory_bytes * 9 // 10, figures)
        except BudgetError:
            cells.append("does not fit")
            continue
        seconds, tokens = found.by_setting[WHOLE].seconds_per_step, found.tokens
        assert seconds is not None and tokens is not None
        cells.append(speed(seconds, tokens))
    count = sum(p.numel() for p in model.parameters()) / 1e9
    sizes = (plain, plain_of_one, least, host[WHOLE], host[SHORT], host[SMALLEST], host[LORA])
    return [f"{title} ({count:.1f} B)", *map(gib, sizes), *cells]


def several(name: str, card: str, count: int = 4) -> list[list[str]]:
    """Rows for so many cards: in one process, and as ranks, by `hf-l2l estimate`."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        MODELS[name][1].save_pretrained(folder)
        for flag, command in (
            ("--devices", "python script.py"),
            ("--ranks", f"torchrun --nproc_per_node {count} script.py"),
        ):
            printed = io.StringIO()
            words = [
                "estimate",
                folder,
                "--class",
                "LlamaForCausalLM",
                "--tokens",
                str(TOKENS),
                "--cmp",
                "bf16",
                "--card",
                card,
                flag,
                str(count),
            ]
            with contextlib.redirect_stdout(printed):
                main_of_cli([*words, "--json"])
            found = json.loads(printed.getvalue())
            ranks = found["ranks"] or {"seconds_per_step": found["seconds_per_step"]}
            host = ranks.get("host_bytes", found["host"]["total"]["peak"])
            seconds = ranks["seconds_per_step"]
            rows.append([f"`{command}`", speed(seconds, count * ROWS * TOKENS), gib(host)])
    return rows


def document(rows: Sequence[Sequence[str]], cards: Sequence[str], four: Sequence[Sequence[str]]) -> str:
    """The tables in markdown."""
    sizes = (
        "plain",
        "plain, one row",
        "L2L, at least",
        f"host: `{WHOLE}`",
        "host: 10 bytes each",
        "host: 8 bytes each",
        "host: LoRA",
    )
    head = ("model", *sizes, *(card_named(card).device_name for card in cards))
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    text = (
        f"{datetime.date.today().isoformat()}, hf_l2l {hf_l2l.__version__}. Computed from shapes and from assumed "
        "figures of the cards (`hf_l2l/probe/cards.py`: layers reach 60 % of the peak of the data sheet); nothing was "
        f"measured, and two digits are given. GiB at the peak, {ROWS} rows of {TOKENS:,} tokens per step, AdamW. "
        "*Plain* is transformers' Trainer in fp32 with activation checkpointing, all rows at once; *one row* is the "
        f"same with one row at a time and `gradient_accumulation_steps={ROWS}`. *At least* is the device memory "
        "without which L2L does not train, with `cmp` and micro-batches of one row. Of the host: masters, gradients, "
        "moments and 16-bit copies (`cmp`, 18 bytes per parameter), or all but the masters in 16 bits (10 bytes), or "
        "with moments in 8 bits (8.01 bytes), or frozen 16-bit weights and adapters (LoRA), and the inputs of all "
        "layers. Times are with nine tenths of the card."
    )
    return "\n\n".join(
        (
            "# Models of several sizes, computed",
            text,
            "\n".join(lines),
            "## Four cards",
            f"Llama-3.1-8B, `cmp`, four RTX 4090 on one host, {ROWS} rows of {TOKENS:,} tokens for each: what `hf-l2l "
            "estimate` says with `--devices 4` and `--ranks 4`.",
            "\n".join(f"| {' | '.join(cells)} |" for cells in (FOUR, ["---"] * len(FOUR), *four)),
            "## To reproduce",
            "```bash\npython benchmarks/model_sizes.py --out model_sizes_computed_<yyyymm>.md\n```\n",
        )
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--models", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--cards", nargs="+", default=CARDS)
    parser.add_argument("--out", type=Path, help="markdown file")
    options = parser.parse_args(arguments)
    rows = []
    for name in options.models:
        rows.append(row(name, options.cards))
        print(" | ".join(rows[-1]), file=sys.stderr)
    text = document(rows, options.cards, several("llama-8b", "rtx4090"))
    print(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
