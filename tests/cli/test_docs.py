"""docs/cli.md names every field of the JSON and every command, and its commands are understood."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from cli_models import LLAMA, ran, written
from hf_l2l.cli import verify
from hf_l2l.cli.main import COMMANDS, _parser
from training import SAVING, l2l_trainer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cli.md").read_text()


def section(command: str) -> str:
    """What the page says of a command."""
    return PAGE.split(f"## `hf-l2l {command}")[1].split("\n## ")[0]


def fields_in(text: str) -> list[str]:
    """The fields in the first column of its table."""
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_fields_are_told(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(verify, "_checked", lambda family, device: ("green", {}))
    given = [] if command == "env" else [written(tmp_path, LLAMA)]
    if command == "checkpoint":
        l2l_trainer(tmp_path / "run", **SAVING).train()
        capsys.readouterr()
        given = [str(tmp_path / "run"), str(tmp_path / "kept")]
    if command == "plot":
        l2l_trainer(tmp_path / "run", **SAVING).train()
        capsys.readouterr()
        given = [str(tmp_path / "run")]
    found = ran(capsys, command, *given, "--json").json
    assert sorted(fields_in(section(command))) == sorted(found)


def names_inside(found: object) -> set[str]:
    """The names of fields in objects and lists of objects."""
    if isinstance(found, list):
        return {name for each in found for name in names_inside(each)}
    if not isinstance(found, dict):
        return set()
    return {name for key, value in found.items() for name in {key, *names_inside(value)}}


def test_the_fields_in_fields_are_told(tmp_path, capsys):
    found = ran(capsys, "inspect", written(tmp_path, LLAMA), "--json").json
    assert [name for name in names_inside(found) if f"`{name}`" not in PAGE and f'"{name}"' not in PAGE] == []
    found = ran(capsys, "env", "--json").json
    parts = {name: found[name] for name in ("system", "page_locking", "host", "devices")}
    assert [name for name in names_inside(parts) if f"`{name}`" not in PAGE] == []


def test_commands_are_understood():
    lines = re.findall(r"^hf-l2l (.*)$", PAGE, re.MULTILINE)
    assert len(lines) >= 3
    parser = _parser([import_module(f"hf_l2l.cli.{name}").COMMAND for name in COMMANDS], COMMANDS)
    for line in lines:
        parser.parse_args(shlex.split(line, comments=True))
