"""What benchmarks print: the message that refuses options, and the table of a document."""

from __future__ import annotations

import re

import pytest


def refused(main, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one message with which a benchmark refuses its options."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    errors = [line for line in printed.err.splitlines() if ": error: " in line]
    assert len(errors) == 1
    return errors[0].split(": error: ")[1]


def columns(text: str) -> list[list[str]]:
    """The cells of the markdown table in `text`, its head and ruler left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert re.fullmatch(r"\|(---\|)+", lines[1])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {len(row) for row in rows} == {len(rows[0])}
    return rows[2:]
