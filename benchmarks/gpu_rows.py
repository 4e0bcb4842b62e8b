"""Results as lines of JSON, each of them on the disk before the next measurement begins.

A program that is killed loses the row that it was at, and no other.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def append(file: Path | None, kind: str, **values: Any) -> None:
    """Add a line of a `kind` ("environment", "case", ...) to `file`; None writes nothing."""
    if file is None:
        return
    with file.open("ab+") as lines:
        if lines.tell() and _last_byte(lines) != b"\n":
            lines.write(b"\n")  # whoever wrote last was killed within a line
        lines.write(json.dumps({"kind": kind, **values}).encode() + b"\n")
        lines.flush()
        os.fsync(lines.fileno())


def _last_byte(lines: Any) -> bytes:
    lines.seek(-1, os.SEEK_END)
    found: bytes = lines.read(1)
    return found


def read(file: Path, kind: str | None = None) -> list[Row]:
    """The lines of `file`, of one `kind` or of all; none if there is no file. A line that was cut off is left out."""
    found = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if kind in (None, row["kind"]):
            found.append(row)
    return found


def cut(file: Path, most_bytes: int = 8 * 2**20) -> None:
    """Leave the last so many bytes of a file, so that it is easy to send."""
    if file.exists() and file.stat().st_size > most_bytes:
        with file.open("rb") as whole:
            whole.seek(-most_bytes, os.SEEK_END)
            last = whole.read()
        file.write_bytes(last)
