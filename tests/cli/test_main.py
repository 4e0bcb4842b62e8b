"""The program itself: help, exit statuses, and one sentence for what it does not understand."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import hf_l2l
from cli_models import LLAMA, ran, refused, written
from hf_l2l.cli.main import COMMANDS, main

ROOT = Path(hf_l2l.__file__).parents[1]


def program(*arguments: str, path: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """`python -m hf_l2l` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "hf_l2l", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, str(ROOT)])), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_help_names_every_command_with_an_example(capsys):
    found = ran(capsys, "--help")
    assert found.status == 0
    for name in COMMANDS:
        assert f"\n    {name}" in found.out and f"\n  hf-l2l {name} " in found.out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command(name, capsys):
    found = ran(capsys, name, "--help")
    assert found.status == 0
    assert f"example:\n  hf-l2l {import_module(f'hf_l2l.cli.{name}').COMMAND.example}\n" in found.out
    assert "--json" in found.out


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_understood(name):
    from hf_l2l.cli.main import _parser

    commands = [import_module(f"hf_l2l.cli.{each}").COMMAND for each in COMMANDS]
    command = next(each for each in commands if each.name == name)
    assert _parser(commands, COMMANDS).parse_args(command.example.split()).command is command


def test_python_m_runs_it_without_torch_and_transformers(tmp_path):
    """So that help is quick, and there whatever is broken."""
    for package in ("torch", "transformers", "accelerate"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('this is broken')")
    found = program("--help", path=str(tmp_path))
    assert found.returncode == 0 and "hf-l2l env" in found.stdout and found.stderr == ""


def test_the_program_is_installed():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"hf-l2l": "hf_l2l.cli.main:main"} and callable(main)


def test_env_needs_no_transformers(tmp_path):
    for package in ("transformers", "accelerate"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('this is broken')")
    found = program("env", path=str(tmp_path))
    assert (found.returncode, found.stderr) == (0, "") and "\n  transformers: " in found.stdout


@pytest.mark.parametrize("library", ["torch", pytest.param("transformers", marks=pytest.mark.slow)])
def test_a_broken_library_is_one_sentence(library, tmp_path):
    (tmp_path / f"{library}.py").write_text("raise ImportError('this is broken')")
    found = program("inspect", written(tmp_path / "model", LLAMA), path=str(tmp_path))
    assert found.returncode == 2
    assert found.stderr == "hf-l2l inspect: this is broken\n"


TELLS = """
import dataclasses, sys
from hf_l2l.cli import inspect, main
inspect.COMMAND = dataclasses.replace(inspect.COMMAND, run=lambda options: print("told") or 0)
sys.exit(main.main())
"""


@pytest.mark.parametrize("words", [["-c", TELLS], pytest.param(["-m", "hf_l2l"], marks=pytest.mark.slow)])
def test_the_reader_of_the_output_may_leave(words, tmp_path):
    """As `head` does; the command, or one that imports nothing, in its place."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nobody:
        found = subprocess.run(
            [sys.executable, *words, "inspect", written(tmp_path, LLAMA)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdout=nobody,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (found.returncode, found.stderr) == (0, "")


def test_the_version(capsys):
    assert ran(capsys, "--version").out == f"hf_l2l {hf_l2l.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "the following arguments are required: COMMAND; see hf-l2l --help"),
        (("inspekt", "x"), "hf-l2l: a command must be estimate, inspect, env, verify, checkpoint, plan or plot (got "),
        (("inspekt", "x"), "(got 'inspekt'); did you mean inspect?"),
        (("plt",), "(got 'plt'); did you mean plot?"),
        (("train",), "(got 'train'); hf-l2l --help says what each of them does"),
        (("inspect",), "the following arguments are required: MODEL; see hf-l2l inspect --help"),
        (("inspect", "x", "--jsn"), "unrecognized arguments: --jsn; did you mean --json? see hf-l2l inspect --help"),
        (("inspect", "x", "--trust_remote_cod=1"), "=1; did you mean --trust-remote-code? see"),
        (
            ("inspect", "x", "--lora", "8"),
            "hf-l2l inspect: unrecognized arguments: --lora 8; see hf-l2l inspect --help",
        ),
        (("inspect", "x", "--js"), "unrecognized arguments: --js"),
    ],
)
def test_flags_that_are_not_understood(arguments, said, capsys):
    assert said in refused(capsys, *arguments)
