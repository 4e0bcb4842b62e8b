"""The golden recording finds what it is to find, and means the same before and after a renaming."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import transformers as hf

import golden
import golden_cases
from golden_cases import NOT_RECORDED, OPTIONS, Case, cases, options_of, quick, terms_of
from golden_runs import Faults, Record, run
from hf_l2l import L2LConfig, L2LTrainingArguments

LLAMA = Case("cpu", "optimizers", "llama", {"update": "deferred"}, optimizer="fused AdamW", groups=True)
TRAINER = Case("cpu", "Trainer", "bert", {"update": "deferred"}, run="trainer")


class LargerGradient(Faults):
    """One gradient of the first step is 1 + 2**-20 times as large."""

    def after_backward(self, model: Any, eps: Any, step: int) -> None:
        if step == 0:
            model.model.layers[1].mlp.up_proj.weight.grad.mul_(1 + 2**-20)


class FileMore(Faults):
    """The first checkpoint has a file that nobody asked for."""

    def after_save(self, checkpoint: Path) -> None:
        if checkpoint.name == "checkpoint-2":
            (checkpoint / "model.safetensors.tmp").touch()


def records(case: Case, folder: Path, faults: Faults | None = None) -> dict[str, Record]:
    return {case.name: run(case, folder / type(faults).__name__, faults)}


def test_equal_runs_have_equal_records_and_a_gradient_of_a_millionth_more_is_found(tmp_path):
    expected = records(LLAMA, tmp_path / "1")
    assert golden.differences(expected, records(LLAMA, tmp_path / "2")) == []
    first, *_ = found = golden.differences(expected, records(LLAMA, tmp_path, LargerGradient()))
    assert {(each.case, each.section) for each in found} == {(LLAMA.name, "bits")}
    assert first.what.startswith(("first at step 1 of 5: ", "first at step 2 of 5: "))


def test_a_file_more_in_a_checkpoint_is_found(tmp_path):
    """And nothing else: equal runs have equal files."""
    (found,) = golden.differences(records(TRAINER, tmp_path), records(TRAINER, tmp_path, FileMore()))
    assert found == (TRAINER.name, "files", "whole/checkpoint-2/model.safetensors.tmp is new")


# ---- comparing

OLD = {"keeps": ["bits", "copies"], "bits": [{"loss": "1"}, {"loss": "2", "norm": "3"}], "copies": {"up": 5}}
NEW = {"keeps": ["bits", "copies"], "bits": [{"loss": "1"}, {"loss": "9", "norm": "3"}], "copies": {"up": 4}}
BITS, COPIES = ("a", "bits", "first at step 2 of 2: loss 2 -> 9"), ("a", "copies", "up 5 -> 4")


def test_differences_are_told_by_case_section_and_step():
    assert golden.differences({"a": OLD, "b": OLD}, {"a": NEW}) == [
        ("b", "case", "it is in the recording only"),
        BITS,
        COPIES,
    ]
    failed = {"keeps": ["failed"], "failed": "ValueError: no"}
    whats = [each.what for each in golden.differences({"a": OLD}, {"a": failed})]
    assert whats == ["there is none any more"] * 2 + ["it was not there before: ValueError: no"]


def test_meant_differences_are_left_out_and_other_versions_are_told():
    found = golden.differences({"a": OLD}, {"a": NEW})
    fewer = {"case": "a*", "section": "copies", "what": "up *", "reason": "batches share an upload"}
    other, absent = {**fewer, "what": "down *"}, {**fewer, "case": "b"}
    assert golden.split(found, [fewer], ["a"]) == ([BITS], [])
    assert golden.split(found, [fewer, other, absent], ["a"]) == ([BITS], [other])
    assert golden.split(found, [other], ["a"]) == ([BITS, COPIES], [other]), "an entry for one thing hides no other"
    made = {"versions": golden.versions(), "cases": {"a": OLD}}
    assert golden.compare(made, {"a": NEW}, [fewer, {**fewer, "section": "bits", "what": "*"}]) == []
    assert golden.compare(made, {"a": OLD}, [fewer]) == [f"meant, and yet nothing differs: {json.dumps(fewer)}"]
    (line,) = golden.compare({"versions": {"torch": "1.0"}, "cases": {"a": OLD}}, {"a": OLD}, [])
    assert "'torch': '1.0'" in line and "record again with these versions" in line


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


def test_a_case_means_the_same_after_a_renaming(monkeypatch):
    """Options that move into a dict, with other values."""
    terms = {"gradients": "16bit", "moments": "bf16", "boundary": "host"}
    assert options_of(terms) == {"grad_dtype": "16bit", "moment_dtype": "bf16", "boundary": "host"}
    assert options_of(terms, of_trainer=True)["l2l_boundary"] == "host"
    later = {"gradients": "host_state.gradients", "moments": "host_state.moments", "boundary": "placement.boundary"}
    monkeypatch.setattr(golden_cases, "OPTIONS", {term: (name, f"l2l_{name}") for term, name in later.items()})
    monkeypatch.setattr(golden_cases, "VALUES", {"moments": {"bf16": "16bit"}})
    now = options_of(terms)
    assert now == {"host_state": {"gradients": "16bit", "moments": "16bit"}, "placement": {"boundary": "host"}}
    assert terms_of(now, of_trainer=False) == terms
