"""A long part of the tests resumes where it was interrupted, and ends with a document."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import soak
import soak_glue
import soak_updates
from glue_script import needs_datasets, needs_demo_model
from tiers import more, nightly, times

SETTINGS = {"code": "this one"}


def counting(fails: set[int]) -> tuple[Any, list[int]]:
    """A part whose rows of these seeds fail, and the seeds that it was run with."""
    made: list[int] = []

    def run(seed: int) -> dict[str, Any]:
        made.append(seed)
        return {"failure": "bits differ" if seed in fails else None}

    return SimpleNamespace(run=run), made


def test_finished_rows_are_not_run_again_and_rows_that_failed_are(tmp_path, monkeypatch):
    """The first seed can be a later one."""
    file, fails = tmp_path / "rows" / "part.jsonl", {1}
    part, made = counting(fails)
    assert soak.rows_of(part, range(2), file, SETTINGS)[1]["failure"] == "bits differ"
    fails.clear()
    file.write_text(file.read_text() + '{"settings": {"co')  # interrupted within a line
    rows = soak.rows_of(part, range(4), file, SETTINGS)
    assert made == [0, 1, 1, 2, 3]
    assert [(row["seed"], row["failure"]) for row in rows] == [(seed, None) for seed in range(4)]
    assert soak.rows_of(part, range(4), file, SETTINGS) == rows and len(made) == 5
    soak.rows_of(part, range(1), file, {"code": "another one"})
    assert made[5:] == [0]
    part, made = counting(set())
    part.RUNS = 4
    part.document = lambda rows: f"# {len(rows)} rows"
    monkeypatch.setitem(sys.modules, "soak_updates", part)
    folders = ["--rows", str(tmp_path), "--results", str(tmp_path)]
    assert soak.main(["updates", "--first", "2", *folders]) == 0
    assert made == [2, 3, 0, 1]


def test_parts_are_listed_and_bad_options_refused(capsys):
    assert soak.main([]) == 0
    assert "  updates     Random training programs" in capsys.readouterr().out
    for arguments in (["nothing"], ["updates", "--runs", "0"], ["updates", "--first", "-1"]):
        with pytest.raises(SystemExit):
            soak.main(arguments)
        assert "error: " in capsys.readouterr().err


def test_programs_are_compared_and_told_of(tmp_path, capsys, monkeypatch):
    """A seed always gives the same program."""
    runs = times(1, 3)
    folders = ["--rows", str(tmp_path), "--results", str(tmp_path), "--hardware", "here"]
    assert soak.main(["updates", "--runs", str(runs), *folders]) == 0
    rows = [json.loads(line)["row"] for line in (tmp_path / "updates.jsonl").read_text().splitlines()]
    assert [row["seed"] for row in rows] == list(range(runs)) and all("deferred" in row["modes"] for row in rows)
    [file] = tmp_path.glob("soak_updates_here_*.md")
    text = file.read_text()
    for words in ("seeds 0", "No run failed.", f"make soak PART=updates SOAK_RUNS={runs}", "## Environment"):
        assert words in text
    assert f"{runs} runs, 0 failed" in capsys.readouterr().out
    trained = soak_updates.trained

    def wrong(program: Any, mode: str) -> Any:
        run = trained(program, mode)
        next(iter(run.weights.values())).add_(float(mode == "deferred"))
        return run

    monkeypatch.setattr(soak_updates, "trained", wrong)
    monkeypatch.setattr(soak, "code_state", lambda: "broken")
    assert soak.main(["updates", "--runs", "1", *folders]) == 1
    assert "- seed 0: AssertionError" in Path(file).read_text()
    programs = [soak_updates.program_of(seed) for seed in range(60)]
    assert programs == [soak_updates.program_of(seed) for seed in range(60)]
    assert {program.options["cmp"] for program in programs} == {None, "bf16", "fp16"}
    assert {program.optimizer for program in programs} == set(soak_updates.OPTIMIZERS)


def glue_row(index: int, final: float) -> dict[str, Any]:
    """A row of the part `glue` that ends with this value of its measure."""
    seed, task, method = soak_glue.which(index)
    curve = [(1, final / 2, 0.7), (2, final, 0.6)]
    sizes = {"train_rows": 1000, "validation_rows": 300, "steps": 2}
    return {"seed": index, "task": task, "method": method, "draw": seed, "curve": curve, **sizes, "failure": None}


@needs_datasets
def test_the_table_of_glue_has_mean_and_spread():
    """Of all tasks, methods and seeds."""
    runs = [soak_glue.which(index) for index in range(soak_glue.RUNS)]
    assert len(set(runs)) == 54 == len(runs)
    assert {seed for seed, *_ in runs[:18]} == {0} and len({run[1:] for run in runs[:18]}) == 18
    rows = [glue_row(index, 0.5 + 0.1 * soak_glue.which(index)[0]) for index in range(soak_glue.RUNS)]
    lines = soak_glue.document(rows).splitlines()
    assert lines.count(f"| Trainer, fp32 |{' 60.00 (50.00 to 70.00) |' * 6}") == 1
    assert "| L2L CMP | 91.45 | 94.26 | 61.18 | none | 88.50 | 72.2 |" in lines
    lines = soak_glue.document(rows[:1]).splitlines()
    assert f"| Trainer, fp32 | 50.00 |{' not run |' * 5}" in lines
    pytest.importorskip("matplotlib")
    axes = soak_glue.figure_of(rows).axes[0]
    assert [list(line.get_ydata())[-1] for line in axes.lines] == pytest.approx([60.0] * 3)  # the mean of three
    bands = [band.get_paths()[0].vertices[:, 1] for band in axes.collections]
    assert [(band.min(), band.max()) for band in bands] == [pytest.approx((25.0, 70.0))] * 3
    assert len(soak_glue.figure_of(rows[:1]).axes[0].lines) == 1


@nightly
@needs_datasets
@needs_demo_model
@pytest.mark.skipif(not soak_glue.data_folder().is_dir(), reason="the data of GLUE are not on this machine")
@pytest.mark.parametrize("index", [11, *more(0, 10)])
def test_a_task_of_glue_is_trained_and_evaluated(index):
    row = soak_glue.run(index, 16)
    assert (row["failure"], row["steps"], row["train_rows"], row["validation_rows"]) == (None, 3, 16, 16)
    assert [step for step, *_ in row["curve"]] == [1, 2, 3]
    assert all(-1 <= value <= 1 for _, value, _ in row["curve"])
