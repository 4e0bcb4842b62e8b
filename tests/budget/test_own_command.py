"""What the end of an error tells the user to type."""

from __future__ import annotations

import shlex
import sys

import pytest

from hf_l2l import own_command
from hf_l2l.option_names import options_of_the_trainer
from hf_l2l.own_command import python, with_options

SCRIPT = "python train.py --output_dir out"


@pytest.mark.parametrize(
    ("typed", "changes", "expected"),
    [
        ("", {"device_memory_budget": "6GiB"}, " --device_memory_budget=6GiB"),
        (
            " --device_memory_budget 4GiB --seed 1",
            {"device_memory_budget": "6GiB"},
            " --seed 1 --device_memory_budget=6GiB",
        ),
        (" --device_memory_budget=4GiB", {"device_memory_budget": "6GiB"}, " --device_memory_budget=6GiB"),
        (" --stash device --l2l-kept-graphs 3 --bf16", {"stash": None, "kept_graphs": None}, " --bf16"),
        (" --l2l_layer_classes A B --seed 1", {"layer_classes": None}, " --seed 1"),
        (" --run_name 'a b'", {"ubatch_size": 2}, " --run_name 'a b' --ubatch_size=2"),
    ],
)
def test_the_command_line_with_other_flags(typed, changes, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", shlex.split(SCRIPT + typed)[1:])
    monkeypatch.setattr(own_command, "python", lambda: "python")
    with options_of_the_trainer():
        assert with_options(changes) == SCRIPT + expected


@pytest.mark.parametrize(
    ("runs", "typed"),
    [("bin/python", "python"), (".venv/bin/python", ".venv/bin/python"), ("/other/python", "/other/python")],
)
def test_the_interpreter_is_the_one_that_runs(runs, typed, tmp_path, monkeypatch):
    """`python` is another one, unless the shell finds it: that of a virtual environment that is not active."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("")
    (tmp_path / "bin" / "python").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / runs))
    assert python() == typed


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"device_memory_budget": "6GiB"}, "device_memory_budget='6GiB'"),
        ({"stash": None, "boundary": None}, "without stash, boundary"),
        ({"stash": "host", "boundary": None}, "stash='host', and without boundary"),
    ],
)
@pytest.mark.parametrize("argv", [["pytest"], ["train.py", "--lr", "1"], [], ["-c"]], ids=str)
def test_a_program_without_the_flags_of_the_trainer_sets_options(changes, expected, argv, monkeypatch):
    monkeypatch.setattr(sys, "argv", argv)
    assert with_options(changes) == expected


def test_options_are_called_as_the_user_calls_them(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["notebook"])
    with options_of_the_trainer():
        assert with_options({"boundary": "host"}) == "l2l_boundary='host'"
