"""`throughput.py` and `resident.py` on a GPU that is there for minutes: cases in order of value, as far as time goes.

    python benchmarks/gpu_bench.py --rows FILE.jsonl [--seconds 520] [--tiny]

Each group of cases is a process of its own with a limit of its own, so that memory, page-locked memory too, is the
next one's again, and a group that hangs or is killed costs its own rows only. Traces go to traces.zip beside FILE.
--tiny makes all cases with tiny models and few tokens, in this process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import gpu_rows

START_S = 15.0
"""Less than that is not worth starting a process for."""


class Group(NamedTuple):
    """Cases of one process: options of a script, and a limit."""

    options: str
    limit_s: float = 150.0
    script: str = "throughput.py"


GROUPS = (
    Group("--model llama-1b --modes trainer deferred cmp resident --tokens 32768 --warmup 2 --steps 5"),
    Group("--layers 24 --hidden 1024 --batch 16 --tokens 256 --pairs 4 --steps 20", 90.0, "resident.py"),
    Group("--model llama-8b --modes cmp --tokens 32768 --warmup 1 --steps 2 --no-check", 240.0),
    Group("--model bert-large --modes trainer serial deferred cmp --tokens 32768 --warmup 2 --steps 5"),
    Group("--model llama-3b --modes cmp deferred --tokens 8192 --card 24GiB --warmup 1 --steps 4 --no-check"),
    Group("--model llama-1b --modes fsdp2 --tokens 32768 --warmup 1 --steps 3 --no-check"),
    Group("--model llama-1b --modes trainer deferred cmp --tokens 8192 65536 --warmup 2 --steps 5 --no-check", 240.0),
    Group("--model llama-3b --modes trainer deferred cmp --tokens 32768 --warmup 2 --steps 4 --no-check", 240.0),
)
"""The most valuable first. 24 GiB hold the logits of 8,192 tokens, and not those of 32,768."""
TINY = "--layers 2 --hidden 64 --batch 2 --tokens 8 --pairs 1 --steps 4"
"""Of `resident.py`."""


def tiny(options: list[str]) -> list[str]:
    """The same cases at tiny size."""
    small = {"32768": "64", "8192": "32", "65536": "128"}
    return [small.get(word, word) for word in options] + ["--tiny", "--warmup", "1", "--steps", "1"]


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, required=True, help="file to which a line of JSON is added per case")
    parser.add_argument("--seconds", type=float, default=520.0, help="in which all is done")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few tokens")
    return parser.parse_args(arguments)


def run(group: Group, options: argparse.Namespace, traces: Path, left_s: float) -> None:
    """The cases of one group in a process of their own; how it ended is a row, unless it ended well."""
    limit_s = min(group.limit_s, left_s)
    if limit_s < START_S:
        gpu_rows.append(options.rows, "group", options=group.options, how="not begun: no time was left")
        return
    command = [sys.executable, str(Path(__file__).with_name(group.script)), *group.options.split()]
    command += ["--rows", str(options.rows)]
    if group.script == "throughput.py":
        command += ["--traces", str(traces), "--seconds", f"{limit_s:.0f}"]
    try:
        status = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=limit_s).returncode
        how = None if status == 0 else f"ended with status {status}"
    except subprocess.TimeoutExpired:
        how = f"stopped at its limit of {limit_s:.0f} s"
    if how is not None:
        gpu_rows.append(options.rows, "group", options=group.options, how=how)


def main(arguments: Sequence[str] | None = None) -> int:
    """All groups; 0, or 1 if a case of a rehearsal has failed."""
    options, start = parsed(arguments), time.monotonic()
    traces = options.rows.with_name("traces.zip")
    traces.unlink(missing_ok=True)
    if options.tiny:
        from benchmarks import throughput

        for group in GROUPS:
            if group.script == "throughput.py":
                rows = ["--rows", str(options.rows), "--traces", str(traces)]
                throughput.main(tiny([*group.options.split(), *rows]))
            else:  # the simulated accelerator, which it turns on, stays for the life of a process
                run(group._replace(options=TINY), options, traces, group.limit_s)
        failures = [row["failure"] for row in gpu_rows.read(options.rows, "row")]
        return int(any([*failures, *gpu_rows.read(options.rows, "group")]))
    for group in GROUPS:
        run(group, options, traces, options.seconds - (time.monotonic() - start))
    return 0


if __name__ == "__main__":
    sys.exit(main())
