"""The golden recording finds what it is to find, and means the same before and after a renaming."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import transformers as hf

import golden
from golden_cases import NOT_RECORDED, OPTIONS, Case, cases, quick
from golden_runs import Faults, Record, run
from hf_l2l import L2LConfig, L2LTrainingArguments

LLAMA = Case("cpu", "optimizers", "llama", {"update": "deferred"}, optimizer="fused AdamW", groups=True)


class LargerGradient(Faults):
    """One gradient of the first step is 1 + 2**-20 times as large."""

    def after_backward(self, model: Any, eps: Any, step: int) -> None:
        if step == 0:
            model.model.layers[1].mlp.up_proj.weight.grad.mul_(1 + 2**-20)


def records(case: Case, folder: Path, faults: Faults | None = None) -> dict[str, Record]:
    return {case.name: run(case, folder / type(faults).__name__, faults)}


def test_equal_runs_have_equal_records_and_a_gradient_of_a_millionth_more_is_found(tmp_path):
    expected = records(LLAMA, tmp_path / "1")
    assert golden.differences(expected, records(LLAMA, tmp_path / "2")) == []
    first, *_ = found = golden.differences(expected, records(LLAMA, tmp_path, LargerGradient()))
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
