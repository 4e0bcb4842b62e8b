"""What benchmarks print: the table of a document."""

from __future__ import annotations

import re


def columns(text: str) -> list[list[str]]:
    """The cells of the markdown table in `text`, its head and ruler left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert re.fullmatch(r"\|(---\|)+", lines[1])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {len(row) for row in rows} == {len(rows[0])}
    return rows[2:]
