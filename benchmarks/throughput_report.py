"""What `throughput.py` prints: the table, and the document around it. All of it is in the JSON, too."""

from __future__ import annotations

from typing import Any

from benchmarks.environment import description
from hf_l2l.runtime.tensors import size_text

HEAD = (
    "model",
    "tokens per step",
    "trainer",
    "max_grad_norm",
    "tokens/s",
    "of `Trainer`",
    "step, s: fastest, slowest",
    "device bytes, peak",
    "host bytes",
)


def with_shares(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each with how much it reaches of plain Trainer's speed, None where one of the two has none."""
    base = {(row["model"], row["tokens"]): row.get("tokens_per_s") for row in rows if row["mode"] == "trainer"}
    for row in rows:
        ours, theirs = row.get("tokens_per_s"), base.get((row["model"], row["tokens"]))
        row["of_trainer"] = ours / theirs if ours and theirs else None
    return rows


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    mode = row["mode"]
    trainer = "`Trainer`, checkpointing" if mode == "trainer" else f"`L2LTrainer`, {mode}"
    clips = f"{row['max_grad_norm']:g}: eager cannot clip" if mode == "eager" else str(row["max_grad_norm"])
    start = f"| {row['model']} | {row['tokens']:,} | {trainer} | {clips} "
    if row["failure"]:
        return f"{start}| {row['failure']} | - | - | - | - |"
    share = "-" if row["of_trainer"] is None else f"{row['of_trainer']:.1%}"
    label = "measured" if row["is_measured"] else "accounted"
    return (
        f"{start}| {row['tokens_per_s']:,.0f} | {share} | {row['fastest_s']:.3f}, {row['slowest_s']:.3f} "
        f"| {size_text(row['device_bytes'])} ({label}) | {size_text(row['host_bytes'])} |"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The result for people, in markdown."""
    return "\n".join((f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|", *map(line, rows)))


def document(result: dict[str, Any]) -> str:
    """The table, with what one needs to know about it."""
    settings, found = result["settings"], result["environment"]
    ubatches = ", ".join(f"{name} {rows} x {tokens}" for name, (rows, tokens) in settings["ubatches"].items())
    return "\n".join(
        (
            f"# Throughput on {found['device']}{', tiny models' if settings['tiny'] else ''}",
            "",
            "## Environment",
            "",
            description(found),
            "",
            "## Settings",
            "",
            f"Random weights and tokens; {settings['precision']}; micro-batches (rows x tokens): {ubatches}; stash on "
            f"the {settings['stash']}; {settings['steps']} measured steps after {settings['warmup']}.",
            "",
            f"Before the timings, on tiny models: {settings['check']}.",
            "",
            "## Result",
            "",
            table(result["rows"]),
            "",
            "## To reproduce",
            "",
            "```bash",
            found["command"],
            "```",
            "",
        )
    )
