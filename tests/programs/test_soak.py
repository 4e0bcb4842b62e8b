"""A long part of the tests resumes where it was interrupted, and ends with a document."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import transformers as hf

import golden
import golden_runs
import soak
import soak_updates
from golden_cases import NOT_RECORDED, OPTIONS, Case, cases, quick
from hf_l2l import L2LConfig, L2LTrainingArguments
from tiers import nightly, times

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
    soak.rows_of(part, range(1), file, {"code": "another one"})
    assert made[5:] == [0]
    part, made = counting(set())
    part.RUNS = 4
    part.document = lambda rows: f"# {len(rows)} rows"
    monkeypatch.setitem(sys.modules, "soak_updates", part)
    folders = ["--rows", str(tmp_path), "--results", str(tmp_path)]
    assert soak.main(["updates", "--first", "2", *folders]) == 0
    assert made == [2, 3, 0, 1]


@nightly
def test_programs_are_compared_and_told_of(tmp_path, monkeypatch):
    """A seed always gives the same program."""
    runs = times(1, 3)
    folders = ["--rows", str(tmp_path), "--results", str(tmp_path), "--hardware", "here"]
    assert soak.main(["updates", "--runs", str(runs), *folders]) == 0
    rows = [json.loads(line)["row"] for line in (tmp_path / "updates.jsonl").read_text().splitlines()]
    assert [row["seed"] for row in rows] == list(range(runs)) and all("deferred" in row["modes"] for row in rows)
    [file] = tmp_path.glob("soak_updates_here_*.md")
    assert "No run failed." in file.read_text()
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


# ---- the golden recording finds what it is to find

LLAMA = Case("cpu", "optimizers", "llama", {"update": "deferred"}, optimizer="fused AdamW", groups=True)


@nightly
def test_equal_runs_have_equal_records_and_a_gradient_of_a_millionth_more_is_found(tmp_path, monkeypatch):
    def larger(model: Any, eps: Any, step: int) -> None:
        if step == 0:
            model.model.layers[1].mlp.up_proj.weight.grad.mul_(1 + 2**-20)

    expected, same = ({LLAMA.name: golden_runs.run(LLAMA, tmp_path / name)} for name in "ab")
    assert golden.differences(expected, same) == []
    monkeypatch.setattr(golden_runs, "after_backward", larger)
    first, *_ = found = golden.differences(expected, {LLAMA.name: golden_runs.run(LLAMA, tmp_path / "c")})
    assert {(each.case, each.section) for each in found} == {(LLAMA.name, "bits")}
    assert first.what.startswith(("first at step 1 of 5: ", "first at step 2 of 5: "))


# ---- cases and their options


def test_all_options_are_spelled_in_the_table_and_every_kind_has_a_quick_case():
    """A new option gets a term and a case, or a reason to have none."""
    of_transformers = {f.name for f in fields(hf.TrainingArguments)}
    known = {name.partition(".")[0] for names in OPTIONS.values() for name in names if name}
    ours = {f.name for f in fields(L2LConfig)} | {f.name for f in fields(L2LTrainingArguments)} - of_transformers
    assert ours - known == set(NOT_RECORDED) and known <= ours
    used = {term for case in cases() for term in case.options}
    assert set(OPTIONS) - used == {"stash folder", "state folder"}, "which each case has of its own"
    found = quick(cases())
    assert [case.kind for case in found] == list(dict.fromkeys(case.kind for case in found))
    assert {case.kind for case in found} == {case.kind for case in cases()}
