"""The cases that `make test-all` leaves out, where a test has many: each of 20 runs has a twentieth of them."""

from __future__ import annotations

import subprocess
import sys
import zlib
from functools import cache
from typing import Any

SLICES = 20
PLACES = {
    "simulated accelerator": ("tests/sim",),
    "host": ("tests", "--ignore=tests/sim", "--ignore=tests/clients"),
}
"""Tests that have a process of their own."""


def run(seed: int) -> dict[str, Any]:
    """Run one slice of the cases: how each part of it ended."""
    row: dict[str, Any] = {"failure": None}
    for place, paths in PLACES.items():
        mine = [each for each in cases(paths) if zlib.crc32(each.encode()) % SLICES == seed % SLICES]
        if not mine:
            row[place] = "0 cases"
            continue
        done = _pytest("-n", "2", "--dist", "worksteal", *mine)
        row[place] = f"{len(mine)} cases: {done.stdout.strip().rpartition(chr(10))[2]}"
        if done.returncode:
            failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            row["failure"] = "; ".join(failed) or row[place]
    return row


@cache
def cases(paths: tuple[str, ...]) -> list[str]:
    """Names of the cases among these tests."""
    found = _pytest("--collect-only", "-m", "soak", *paths)
    if found.returncode not in (0, 5):  # 5: there are none
        raise RuntimeError(f"the cases cannot be collected: {found.stdout[-2000:]}")
    return [line for line in found.stdout.splitlines() if "::" in line]


def _pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def document(rows: list[dict[str, Any]]) -> str:
    """How each slice ended."""
    return "\n".join(
        (
            "# Cases beyond those of `make test-all`",
            "",
            f"Tests with many cases, in {SLICES} slices that are drawn by their names.",
            "",
            f"| slice | {' | '.join(PLACES)} |",
            "|---|---|---|",
            *(f"| {row['seed']} | {' | '.join(row[place] for place in PLACES)} |" for row in rows),
        )
    )
