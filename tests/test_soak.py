"""A long part of the tests resumes where it was interrupted, and ends with a document."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import soak
import soak_updates

SETTINGS = {"code": "this one"}


def counting(fails: set[int]) -> tuple[Any, list[int]]:
    """A part whose rows of these seeds fail, and the seeds that it was run with."""
    made: list[int] = []

    def run(seed: int) -> dict[str, Any]:
        made.append(seed)
        return {"failure": "bits differ" if seed in fails else None}

    return SimpleNamespace(run=run), made


def test_finished_rows_are_not_run_again(tmp_path):
    file = tmp_path / "rows" / "part.jsonl"
    part, made = counting(set())
    soak.rows_of(part, range(2), file, SETTINGS)
    file.write_text(file.read_text() + '{"settings": {"co')  # interrupted within a line
    rows = soak.rows_of(part, range(4), file, SETTINGS)
    assert made == [0, 1, 2, 3]
    assert [row["seed"] for row in rows] == [0, 1, 2, 3]
    assert soak.rows_of(part, range(4), file, SETTINGS) == rows and len(made) == 4
    soak.rows_of(part, range(1), file, {"code": "another one"})
    assert made[4:] == [0]


def test_rows_that_failed_are_run_again(tmp_path):
    file, fails = tmp_path / "part.jsonl", {1}
    part, made = counting(fails)
    assert soak.rows_of(part, range(3), file, SETTINGS)[1]["failure"] == "bits differ"
    fails.clear()
    assert [row["failure"] for row in soak.rows_of(part, range(3), file, SETTINGS)] == [None] * 3
    assert made == [0, 1, 2, 1]


def test_without_a_part_the_parts_are_listed(capsys):
    assert soak.main([]) == 0
    assert "  updates     Random training programs" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["nothing"], ["updates", "--runs", "0"]], ids=str)
def test_bad_options_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        soak.main(arguments)
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("runs", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_programs_are_compared_and_told_of(runs, tmp_path, capsys, monkeypatch):
    options = [
        "updates",
        "--runs",
        str(runs),
        "--rows",
        str(tmp_path),
        "--results",
        str(tmp_path),
        "--hardware",
        "here",
    ]
    assert soak.main(options) == 0
    rows = [json.loads(line)["row"] for line in (tmp_path / "updates.jsonl").read_text().splitlines()]
    assert [row["seed"] for row in rows] == list(range(runs))
    assert any("eager" in row["modes"] for row in rows) and all("deferred" in row["modes"] for row in rows)
    [file] = tmp_path.glob("soak_updates_here_*.md")
    text = file.read_text()
    for words in (
        f"{runs} programs, seeds 0 to {runs - 1}.",
        "No run failed.",
        f"make soak PART=updates SOAK_RUNS={runs}",
        "## Environment",
    ):
        assert words in text
    assert f"{runs} runs, 0 failed" in capsys.readouterr().out

    trained = soak_updates.trained

    def wrong(program: Any, mode: str) -> Any:
        run = trained(program, mode)
        next(iter(run.weights.values())).add_(float(mode == "deferred"))
        return run

    monkeypatch.setattr(soak_updates, "trained", wrong)
    monkeypatch.setattr(soak, "code_state", lambda: "broken")
    assert soak.main([*options[:2], "1", *options[3:]]) == 1
    assert "- seed 0: AssertionError" in Path(file).read_text()


def test_a_seed_always_gives_the_same_program():
    programs = [soak_updates.program_of(seed) for seed in range(60)]
    assert programs == [soak_updates.program_of(seed) for seed in range(60)]
    assert {program.options["cmp"] for program in programs} == {None, "bf16", "fp16"}
    assert {program.optimizer for program in programs} == set(soak_updates.OPTIMIZERS)
