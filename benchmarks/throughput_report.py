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
    "step, s: fastest, slowest, of how many",
    "device bytes, peak",
    "host bytes",
    "of the peak FLOP/s",
    "waits, s: upload, download, update",
    "bound by",
    "attached in, s",
)
NAMES = {
    "trainer": "`Trainer`, checkpointing",
    "fsdp2": "FSDP2 on one rank, `CPUOffloadPolicy`, checkpointing",
}


def with_shares(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each with how much it reaches of plain Trainer's speed, None where one of the two has none."""
    base = {key_of(row): row.get("tokens_per_s") for row in rows if row["mode"] == "trainer"}
    for row in rows:
        ours, theirs = row.get("tokens_per_s"), base.get(key_of(row))
        row["of_trainer"] = ours / theirs if ours and theirs else None
    return rows


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What rows that are compared have in common."""
    return row["model"], row["tokens"], row["card"]


def name_of(row: dict[str, Any]) -> str:
    """The trainer of a row, with what sets it apart."""
    mode = row["mode"]
    parts = [NAMES.get(mode, f"`L2LTrainer`, {mode}")]
    if mode in ("cmp", "resident"):
        parts = [f"`L2LTrainer`, deferred, cmp={row['cmp']}", *(["resident=shell"] if mode == "resident" else [])]
        parts += [f"{key}={value}" for key, value in (row["host_setting"] or {}).items()]
    return ", ".join(parts + ([f"{row['card']} of the device"] if row["card"] else []))


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    clips = f"{row['max_grad_norm']:g}: eager cannot clip" if row["mode"] == "eager" else str(row["max_grad_norm"])
    start = f"| {row['model']} | {row['tokens']:,} | {name_of(row)} | {clips} "
    if row["failure"]:
        return f"{start}| {row['failure']} {'| - ' * (len(HEAD) - 5)}|"
    share = "-" if row["of_trainer"] is None else f"{row['of_trainer']:.1%}"
    label = "measured" if row["is_measured"] else "accounted"
    need = row["estimated_device_bytes"]
    device = f"{size_text(row['device_bytes'])} ({label}"
    device += f"; {size_text(need)} by shapes, without activations)" if need and row["is_measured"] else ")"
    waits = [row["upload_s"], row["download_s"], row["eps_s"]]
    cells = (
        f"{row['tokens_per_s']:,.0f}",
        share,
        f"{row['fastest_s']:.3f}, {row['slowest_s']:.3f}, {row['steps']}",
        device,
        size_text(row["host_bytes"]),
        "-" if row["mfu"] is None else f"{row['mfu']:.1%}",
        "-" if None in waits else ", ".join(f"{seconds:.3f}" for seconds in waits),
        row["bound"] or "-",
        "-" if row["attach_s"] is None else f"{row['attach_s']:.1f}",
    )
    return f"{start}| {' | '.join(cells)} |"


def table(rows: list[dict[str, Any]]) -> str:
    """The result for people, in markdown."""
    return "\n".join((f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|", *map(line, rows)))


def check_text(checks: list[dict[str, Any]], steps: int) -> str:
    """What was compared before the timings, and what that found."""
    if not checks:
        return "The trainers were not compared before the timings."
    found = [
        f"{each['model']}: plain `Trainer` within {each['tolerance']:g}, found {each['difference']:.1e}"
        if each["failure"] is None
        else f"**{each['model']}: {each['failure']}**"
        for each in checks
    ]
    what = f"loss and grad_norm of {steps} steps, serial and deferred to the bit"
    return f"Before the timings, on tiny models: {what}; {'; '.join(found)}."


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
            check_text(result["checks"], settings["checked_steps"]),
            "",
            "## Result",
            "",
            table(with_shares(result["rows"])),
            "",
            "## To reproduce",
            "",
            "```bash",
            found["command"],
            "```",
            "",
        )
    )
