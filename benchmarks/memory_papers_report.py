"""The document of `memory_papers.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.environment import description
from benchmarks.memory_report import SIMULATED

GB = 10**9

Rows = Mapping[str, Mapping[str, Any]]


HEAD = """# Device memory in the tables of the L2L papers

Theirs are figures of the papers (arXiv:2002.05645), of V100s. Ours are *measured* or *computed*: by `hf_l2l.estimate`
on the meta device, or as the text says. GB are 10^9 bytes. {where}"""


def document(result: Mapping[str, Any]) -> str:
    """All tables of which there are rows."""
    environment, rows = result["environment"], result["rows"]
    where = SIMULATED if environment["device"].startswith("sim") else f"Measured on {environment['device']}."
    parts = [
        HEAD.format(where=where),
        f"## Environment\n\n{description(environment)}",
        *_sections(rows),
        f"## To reproduce\n\n```bash\n{environment['command']}\n```\n",
    ]
    return "\n\n".join(parts)


def _sections(rows: Rows) -> Iterator[str]:
    """The tables, each with how the names of its rows begin."""
    for name, section in (("bert", _bert), ("first", _first), ("layer", _layer), ("giant", _giants)):
        if any(each.startswith(name) for each in rows):
            yield section(rows)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """In markdown."""
    return "\n".join(["| " + " | ".join(each) + " |" for each in (head, ["---"] * len(head), *lines)])


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / GB:.2f} GB"


def _parts(row: Mapping[str, Any]) -> str:
    """The kinds of memory of a measured peak that are 1 % of it or more."""
    kinds = {name: size for name, size in row["parts"].items() if name != "total" and size >= row["peak"] / 100}
    return ", ".join(f"{name} {_gb(size)}" for name, size in sorted(kinds.items(), key=lambda kind: -kind[1]))


SETTINGS = """BERT-large's width (hidden size 1,024, 16 heads, MLP 4,096, vocabulary 30,522), rows of 512 tokens,
dropout 0.1 except in attention (the host has no fused attention with dropout; CUDA has). Two layers: the device's
bytes are the same for any depth (`memory_sim_202611.md`), so they stand for 24 or 384."""

BERT = """## The later text, tables 2, 3 and 5: micro-batches of 64 rows

{settings}

`cmp="bf16"`, stash and boundary on the host.

{table}

The paper's 3.69 GB are enough where attention is fused. The line with dropout in attention has it in plain
products of matrices, which take S x S numbers per head and row. Several micro-batches pass from layer to layer
through host memory, a single one stays on the device."""

FIRST = """## The first text, tables 2, 4 and 5: fp32

{settings}

Theirs have the stash on the device, ours in host memory.
The text does not say how long the rows of tables 4 and 5 are.

{table}"""

LAYER = """## One layer of the model with 17 billion parameters, run

Hidden size 4,256, 28 heads, rows of 1,024 tokens, `cmp="bf16"`, a vocabulary of 1,000; forward and backward of one
micro-batch.

{table}"""

GIANTS = """## 17 and 50 billion parameters on 16 GB and 512 GB (all computed)

Models like GPT-2, rows of 1,024 tokens, a vocabulary of 50,257, on the meta device. `cmp="bf16"`; for 10 bytes per
parameter on the host `grad_dtype="16bit"`, `moment_dtype="bf16"`, `host_copies="per_sweep"`. The workspace of a
micro-batch comes on top of shell and slots, the stash on top of the host's. The paper: 17 billion in 6.68 GB (table 6,
micro-batches of 8 rows), and up to 50 billion on 16 GB and 512 GB (section 3.4.2).

{table}"""


def _bert(rows: Rows) -> str:
    theirs = {
        "1 micro-batch": "3.69 GB (tables 3 and 5: 24, 96, 384 layers, stash on the CPU); 4.96 GB (table 2)",
        "2 micro-batches": "3.89 GB (table 3)",
        "1 micro-batch, attention with dropout": "as above",
    }
    lines = [
        [name.removeprefix("bert cmp, "), str(row["rows"]), theirs[name.removeprefix("bert cmp, ")]]
        + [_gb(row["peak"]), _parts(row)]
        for name, row in rows.items()
        if name.startswith("bert")
    ]
    head = ["", "device batch", "the paper", "ours, any depth (measured)", "of which"]
    return BERT.format(settings=SETTINGS, table=table(head, lines))


def _first(rows: Rows) -> str:
    # Megabytes of table 4 and table 5; those of table 2, of 24 layers, in one micro-batch of 32 rows.
    theirs = {
        "4/4": "1,296 MB (table 4)",
        "8/4": "2,122 MB (table 4)",
        "16/4": "3,770 MB (table 4)",
        "32/4": "7,067 MB (tables 4 and 5)",
        "32/2": "7,020 MB (table 5)",
        "32/8": "7,185 MB (table 5)",
        "32/16": "7,432 MB (table 5)",
        "32/32": "6.52 GB with 24 layers, 8.06 with 48, 11.13 with 96 (table 2)",
    }
    lines = []
    for name, row in rows.items():
        if name.startswith("first"):
            sizes = name.removeprefix("first ")
            lines.append([*sizes.split("/"), theirs[sizes], f"{row['peak'] / 1e6:,.0f} MB", _parts(row)])
    head = ["device batch", "micro-batch", "the paper", "ours, any depth (measured)", "of which"]
    return FIRST.format(settings=SETTINGS, table=table(head, lines))


def _layer(rows: Rows) -> str:
    found = [row for name, row in rows.items() if name.startswith("layer")]
    lines = [
        [
            str(r["ubatch"]),
            _gb(r["slots"]),
            _gb(r["parts"]["slots"]),
            _gb(r["parts"].get("workspace", 0)),
            _gb(r["peak"]),
        ]
        for r in found
    ]
    one, *more = (row["parts"].get("workspace", 0) for row in found)
    head = ["rows", "slots (computed)", "slots (measured)", "workspace (measured)", "peak (measured)"]
    text = LAYER.format(table=table(head, lines))
    if more:
        eight = _gb(one + 7 * (more[0] - one))
        text += f"\n\nA micro-batch of 8 rows, as in table 6, takes {eight} of workspace (computed from these two)."
        text += " Shell and slots of the whole model, below, come on top."
    return text


def _giants(rows: Rows) -> str:
    lines = []
    for name, row in rows.items():
        if name.startswith("giant"):
            lines.append(
                [f"{row['parameters'] / 1e9:.1f} billion", str(row["layers"]), f"{row['hidden']:,}"]
                + [str(row["gradient_slots"]), _gb(row["shell"]), _gb(row["slots"])]
                + [f"{row[kind] / 2**30:,.0f} GiB" for kind in ("host_in_full", "host")]
            )
    head = [
        "parameters",
        "layers",
        "hidden size",
        "`gradient_slots`",
        "shell",
        "slots",
        "host: 18 bytes each",
        "host: 10",
    ]
    return GIANTS.format(table=table(head, lines))
