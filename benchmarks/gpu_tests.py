"""The tests marked `gpu`, each with a row as soon as it has ended.

    python benchmarks/gpu_tests.py --rows FILE.jsonl [--seconds 400] [--tiny]

If the process of the tests dies, because a test took too long or because the device has failed, another one goes on
with the tests that have no row yet. --tiny runs every test function once, on the simulated accelerator.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import gpu_rows
from benchmarks.gpu_rows import Row

ROOT = Path(__file__).resolve().parent.parent
TEST_LIMIT_S = 60
"""Of one test. The process is ended after it: a kernel that does not end cannot be interrupted."""
MOST_PROCESSES = 12


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, required=True, help="file to which a line of JSON is added per test")
    parser.add_argument("--seconds", type=float, default=400.0, help="after which no further process is started")
    parser.add_argument("--tiny", action="store_true", help="on the simulated accelerator")
    return parser.parse_args(arguments)


def command_of(where: Path) -> list[str]:
    """Of the process that runs the tests in `where` that have no row yet."""
    timeout = ["--timeout", str(TEST_LIMIT_S), "--timeout-method", "thread"]
    return [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *timeout, str(where)]


def rows_of_the_dead(rows: list[Row]) -> list[Row]:
    """A row for each test that was begun and has none."""
    have = {row["name"] for row in rows if row["kind"] == "row"}
    begun = dict.fromkeys(row["name"] for row in rows if row["kind"] == "begun")
    message = f"its process ended within it, at the limit of {TEST_LIMIT_S} s or by itself; see the output"
    return [
        {"name": name, "outcome": "died", "seconds": 0.0, "message": message} for name in begun if name not in have
    ]


def main(arguments: Sequence[str] | None = None, where: Path = ROOT / "tests" / "gpu") -> int:
    """Run all tests in `where`; 0 if none failed."""
    options, start = parsed(arguments), time.monotonic()
    env = {**os.environ, "HF_L2L_GPU_TEST_ROWS": str(options.rows)}
    if options.tiny:
        env["HF_L2L_GPU_TESTS_ON"] = "sim"
    for _ in range(MOST_PROCESSES):
        status = subprocess.run(command_of(where), env=env, cwd=ROOT).returncode
        rows = gpu_rows.read(options.rows)
        for row in rows_of_the_dead(rows):
            gpu_rows.append(options.rows, "row", **row)
        if any(row["kind"] == "session ended" for row in rows):
            break
        if not any(row["kind"] == "begun" for row in rows) or time.monotonic() - start > options.seconds:
            return status or 1
    outcomes = [row["outcome"] for row in gpu_rows.read(options.rows, "row")]
    print(f"{len(outcomes)} tests: {', '.join(f'{outcomes.count(o)} {o}' for o in dict.fromkeys(outcomes))}")
    return 0 if set(outcomes) <= {"passed", "skipped"} and outcomes else 1


if __name__ == "__main__":
    sys.exit(main())
