"""The golden recording finds what it is to find, and means the same before and after a renaming."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import transformers as hf

import golden
import golden_runs
from golden_cases import NOT_RECORDED, OPTIONS, Case, cases, quick
from hf_l2l import L2LConfig, L2LTrainingArguments

LLAMA = Case("cpu", "optimizers", "llama", {"update": "deferred"}, optimizer="fused AdamW", groups=True)


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
