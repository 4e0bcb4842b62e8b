"""Writes docs/measured.md: the papers' tables and the figures of others beside those in `benchmarks/results`.

    python benchmarks/measured.py [--check]

Every number of ours is read from a document in `results/`, whose name is beside it. What no document has is "not
measured". `--check` writes nothing, and ends with 1 if the page is not what it would write.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import published

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "measured.md"
NOT_MEASURED = "not measured"
SIMULATED = "simulated"
V100 = "BERT-large, V100 at 100 TFLOP/s, PCIe 12 GB/s, host 100 GB/s"
"""A machine of `scaling_virtual`."""

Cells = Sequence[object]


class Result(NamedTuple):
    """One document of `results/`."""

    name: str
    text: str

    @property
    def link(self) -> str:
        """For the page."""
        return f"[`{self.name}`](../benchmarks/results/{self.name})"

    def rows(self, head: str) -> list[list[str]]:
        """The cells of the rows of the table whose first line begins with `head`."""
        lines = self.text[self.text.index(head) :].splitlines()[2:]
        rows = iter(lambda: lines.pop(0) if lines else "", "")
        return [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in rows]

    def row(self, head: str, first: str, which: int = 0) -> list[str]:
        """The cells of the row of a table that begins with `first`; `which` of several."""
        return [row for row in self.rows(head) if row[0] == first][which]


def result(theme: str) -> Result | None:
    """The newest document of a theme, if there is one; names are theme, hardware, and month."""
    files = sorted(RESULTS.glob(f"{theme}_*.md"), key=lambda file: file.stem.rpartition("_")[2])
    return Result(files[-1].name, files[-1].read_text(encoding="utf-8")) if files else None


def known(theme: str) -> Result:
    """A document that is always there."""
    found = result(theme)
    assert found is not None, theme
    return found


def table(head: Cells, rows: Sequence[Cells]) -> list[str]:
    """In markdown, with an empty line on either side."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, ["---"] * len(head), *rows)]
    return ["", *lines, ""]


def gpu() -> list[str]:
    """What a GPU has measured, or that none has."""
    files = sorted((*RESULTS.glob("throughput_*.md"), *RESULTS.glob("gpu*/*.md")))
    if not files:
        return ["Nothing was measured on a GPU yet: figures of time are of CPUs, computed, or of a virtual clock."]
    links = (f"- [`{file.relative_to(RESULTS)}`](../benchmarks/results/{file.relative_to(RESULTS)})" for file in files)
    return ["Measured on a GPU:", "", *links]


def later_tables() -> list[str]:
    """Tables 2 to 6 of the paper's last version."""
    memory, scaling, depth = known("memory_papers_sim"), known("scaling_virtual"), known("memory_sim")
    head = "|  | device batch | the paper | ours, any depth (measured)"
    sizes = [f"{memory.row(head, first)[3]} ({SIMULATED})" for first in ("1 micro-batch", "2 micro-batches")]
    four = [row[4] for row in scaling.rows("| | sums on | ranks |") if row[0].startswith(V100) and row[2] == "4"]
    return [
        "### Table 2: memory and throughput of BERT-large, 64 rows of 512 tokens on each of 4 V100",
        *table(
            ("", "samples/s, theirs", "ours", "memory in GB, theirs", "ours"),
            [
                (name, speed, NOT_MEASURED, size, sizes[0] if name == "L2L CMP" else NOT_MEASURED)
                for name, speed, size in published.LATER_2
            ],
        ),
        f"Ours is with the stash on the host, and with fused attention: {memory.link}.",
        "",
        "### Table 3: more micro-batches of 64 rows",
        *table(
            ("micro-batches", "device batch", "samples/s, theirs", "ours", "memory in GB, theirs", "ours"),
            [
                (
                    count,
                    batch,
                    speed,
                    NOT_MEASURED,
                    size,
                    dict(zip((1, 2), sizes, strict=True)).get(count, NOT_MEASURED),
                )
                for count, batch, speed, size in published.LATER_3
            ],
        ),
        *further_token(depth),
        "",
        "### Table 4: four GPUs over one",
        *table(
            ("micro-batches", "samples/s, 1 GPU, theirs", "4 GPUs, theirs", "times, theirs"),
            [(count, one, more, f"{more / one:.2f}") for count, one, more in published.LATER_4],
        ),
        f"Ours, on a virtual clock: {four[0]} times with gradients added in host memory, {four[1]} times with",
        f"gradients added on the devices, of 8 micro-batches of 4,096 tokens ({scaling.link}).",
        f"On four GPUs: {NOT_MEASURED}.",
        "",
        "### Table 5: depth",
        *table(("theirs", "layers", "memory in GB"), published.LATER_5),
        f"Ours: {sizes[0]} at any depth, with the stash on the host ({memory.link}). Over depth, with a small",
        f"Llama, in MiB ({SIMULATED}, {depth.link}):",
        *table(("layers", "plain", "activation checkpointing", "L2L"), [row[:4] for row in depth.rows("| depth |")]),
        *widths(memory),
    ]


def further_token(depth: Result) -> list[str]:
    """What a larger device batch takes, of the document about device memory, which has neither model nor `cmp` of the
    tables."""
    [size] = re.findall(r"Formula: (\d+) bytes for each further token", depth.text)
    return [
        f'Of a small Llama in fp32 with `l2l_boundary="host"`, a further token takes {size} bytes from two',
        f"micro-batches on ({SIMULATED}, {depth.link}).",
    ]


def widths(memory: Result) -> list[str]:
    """Table 6."""
    [rows_of_8] = re.findall(r"A micro-batch of 8 rows, as in table 6, takes ([\d.]+) GB", memory.text)
    shell, slots = memory.row("| parameters | layers |", "17.2 billion")[4:6]
    size = sum(float(part.removesuffix(" GB")) for part in (shell, slots, rows_of_8))
    ours = f"ours, computed: shell {shell}, slots {slots}, workspace {rows_of_8} GB"
    return [
        "### Table 6: 17 billion parameters, 16 micro-batches of 8 rows of 1,024 tokens",
        *table(
            ("", "memory in GB", "samples/s"),
            [("theirs", *published.LATER_6), (ours, f"{size:.2f}", NOT_MEASURED)],
        ),
        f"{memory.link} also has 50 billion parameters, and a layer of this width that was run.",
        "",
    ]


def accuracy() -> list[str]:
    """Table 7."""
    found, same_bits = result("soak_glue"), known("glue_compare_sim")
    if found is None:
        ours = [f"Ours: {NOT_MEASURED}.", ""]
    else:
        picture = found.name.replace(".md", ".png")
        # Its text has line breaks anywhere.
        [seeds] = re.findall(r"the mean of (\d+ seeds?),", " ".join(found.text.split()))
        ours = [
            f"Ours: a BERT of 22.7 million parameters, a part of each task, on the CPU; the mean of {seeds}, and",
            f"the lowest and the highest of them ({found.link}). Dropout is on, drawn in another order by each.",
            *table(("ours", *published.TASKS), found.rows("| method | qnli")),
            f"![Validation curves of the six tasks by method](../benchmarks/results/{picture})",
            "",
        ]
    return [
        "### Table 7: GLUE (percent)",
        *table(("theirs: BERT-large", *published.TASKS), published.LATER_7),
        *ours,
        f"Where dropout is drawn in the same order, `Trainer` and `L2LTrainer` have the same bits: {same_bits.link}.",
        "",
    ]


def first_tables() -> list[str]:
    """Of the paper's first version: its tables 2 to 5, in fp32."""
    memory = known("memory_papers_sim")
    rows = memory.rows("| device batch | micro-batch | the paper")
    return [
        "### Table 2: depth",
        *table(("theirs", "layers", "memory in GB"), published.FIRST_2),
        f"Ours: {rows[-1][3]} ({SIMULATED}) for 32 rows in one micro-batch, at any depth, the stash on the host",
        f"({memory.link}).",
        "",
        "### Table 3: GLUE, the best of three epochs (percent)",
        *table(("theirs: BERT-large", *published.TASKS), published.FIRST_3),
        "Ours is beside table 7 above.",
        "",
        "### Tables 4 and 5: device batch and micro-batch",
        *table(
            ("device batch", "micro-batch", "theirs", "ours"),
            [(*row[:3], f"{row[3]} ({SIMULATED})") for row in rows[:-1]],
        ),
        f"Ours with the stash on the host ({memory.link}).",
        "",
    ]


def own() -> list[str]:
    """What was measured of the package on a CPU and on the simulated accelerator: a line each."""
    engine, eps, saving = known("engine_cpu"), known("eps_cpu"), known("saving")
    ranks, kills, cmp, times = known("ranks"), known("kills"), known("cmp_memory_sim"), known("host_overhead")
    updates = [row[2] for row in eps.rows("| case | ns, 1 thread")[2:6]]
    stands = [row[1] for row in saving.rows("| trainer | stands still")]
    killed = [row[2:4] for row in kills.rows("| killed | trainer") if row[1] == "`L2LTrainer`"]
    ended = [str(sum(int(row[column]) for row in killed)) for column in (1, 0)]
    two = [row[3] for row in ranks.rows("| ranks | | processes") if row[0] == "4"]
    peaks = [row[2] for row in cmp.rows("| | host: bytes per parameter")][:2]
    [calls] = re.findall(r"^layer calls, over checkpointing +x 1.00 +x ([\d.]+)", times.text, re.MULTILINE)[:1]
    return table(
        ("what", "figure", "where"),
        [
            (
                "a step of L2L over activation checkpointing, CPU, one micro-batch",
                engine.row("| | median", "ratio")[1],
                engine.link,
            ),
            ("Python of the layer calls over that of checkpointing, layers of no size", calls, times.link),
            (
                "the update of layers over flat AdamW; with clipping and copies; 16-bit gradients; bf16 moments, too",
                "; ".join(updates),
                eps.link,
            ),
            ("peak of the device, four layers of BERT-large's width: fp32; `cmp`", "; ".join(peaks), cmp.link),
            (
                "host memory of 4 processes beyond their start: one EPS for all; DistributedDataParallel, MiB",
                f"{two[0]}; {two[1]}",
                ranks.link,
            ),
            (
                "a training stands still for a checkpoint: `Trainer`; `L2LTrainer`; in the background, ms",
                "; ".join(stands),
                saving.link,
            ),
            ("trainings killed while they save, resumed without help", " of ".join(ended), kills.link),
        ],
    )


def page() -> str:
    """All of it."""
    head = ("project", "hardware", "model", "their figure", "exact weights", "source")
    lines = [
        "# What was measured",
        "",
        "The tables of the papers and the figures of other projects, beside ours. Theirs are as they publish them, of",
        "other hardware and other settings: nothing of theirs was run here. Ours are read from the documents in",
        "`benchmarks/results/`, which have environment and command; *simulated* means the simulated accelerator: its",
        "memory is counted as on a real one, its speed says nothing.",
        "",
        *gpu(),
        "",
        f"## The L2L paper ({published.LATER})",
        "",
        *later_tables(),
        *accuracy(),
        f"## Its first version ({published.FIRST})",
        "",
        *first_tables(),
        "## This package by itself",
        *own(),
        "## What others publish",
        *table(head, published.CLAIMS),
        "Tokens a step decide much of such a figure: with more of them, the same weights travel less often per token.",
        "What is computed for this package (README, docs/memory_needs.md) says how many tokens a step has.",
        "",
        "What the cost model expects of this package on an RTX 4090 and an H200, computed and not measured, is in",
        "[docs/budget_curve.md](budget_curve.md).",
        "",
        "`python benchmarks/measured.py` writes this page.",
        "",
    ]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if the page is another one")
    options = parser.parse_args(arguments)
    if options.check:
        return int(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
