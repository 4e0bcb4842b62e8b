"""The program itself: help, exit statuses, and one sentence for what it does not understand."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import hf_l2l
from cli_models import LLAMA, ran, refused, written
from documented_commands import check
from hf_l2l.cli.main import COMMANDS

ROOT = Path(hf_l2l.__file__).parents[1]


def test_help_names_every_command_with_an_example(capsys):
    found = ran(capsys, "--help")
    assert found.status == 0
    assert ran(capsys, "--version").out == f"hf_l2l {hf_l2l.__version__}\n"
    for name in COMMANDS:
        assert f"\n    {name}" in found.out and f"\n  hf-l2l {name} " in found.out
        of_command = ran(capsys, name, "--help")
        example = import_module(f"hf_l2l.cli.{name}").COMMAND.example
        assert of_command.status == 0 and "--json" in of_command.out
        assert f"example:\n  hf-l2l {example}\n" in of_command.out
        check(["hf-l2l", *example.split()])


def test_env_is_there_whatever_library_is_broken_and_others_say_so_in_one_sentence(tmp_path, monkeypatch, capsys):
    """In a process of its own, where these packages cannot be imported."""
    for package in ("transformers", "accelerate"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('this is broken')")
    found = subprocess.run(
        [sys.executable, "-m", "hf_l2l", "env"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (found.returncode, found.stderr) == (0, "") and "\n  transformers: " in found.stdout

    def broken(*_: object) -> None:
        raise ImportError("this is broken")

    command = import_module("hf_l2l.cli.inspect").COMMAND
    monkeypatch.setattr("hf_l2l.cli.inspect.COMMAND", dataclasses.replace(command, run=broken))
    assert refused(capsys, "inspect", written(tmp_path / "model", LLAMA)) == "hf-l2l inspect: this is broken\n"


TELLS = """
import dataclasses, sys
from hf_l2l.cli import inspect, main
inspect.COMMAND = dataclasses.replace(inspect.COMMAND, run=lambda options: print("told") or 0)
sys.exit(main.main())
"""


def test_the_reader_of_the_output_may_leave(tmp_path):
    """As `head` does."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nobody:
        found = subprocess.run(
            [sys.executable, "-c", TELLS, "inspect", written(tmp_path, LLAMA)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdout=nobody,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (found.returncode, found.stderr) == (0, "")


def test_what_is_not_understood_is_one_sentence(capsys):
    for arguments, said in (
        ((), "arguments are required: COMMAND; see hf-l2l --help"),
        (("inspekt", "x"), "(got 'inspekt'); did you mean inspect?"),
        (("inspect",), "arguments are required: MODEL; see hf-l2l inspect --help"),
        (("inspect", "x", "--jsn"), "unrecognized arguments: --jsn; did you mean --json? see hf-l2l inspect --help"),
        (("inspect", "x", "--js"), "unrecognized arguments: --js"),
    ):
        assert said in refused(capsys, *arguments)
