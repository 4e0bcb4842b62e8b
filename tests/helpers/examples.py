"""Runs the scripts of `examples/` as a user does, in this process, so that a warning of theirs is an error."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"


def run_example(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, *words: str) -> None:
    """Run `name` with the command line `words` in `folder`, where it writes what it writes."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [name, *words])
    runpy.run_path(str(FOLDER / name), run_name="__main__")
