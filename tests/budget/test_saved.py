"""The plan in a checkpoint."""

from __future__ import annotations

import logging

import pytest

from hf_l2l.budget.saved import PLAN_FILE, save_plan, saved_choice
from hf_l2l.config import L2LConfig
from hf_l2l.plan.planner import Plan
from hf_l2l.plan.step_time import StepTime

ASKED = L2LConfig(device_memory_budget="auto", cmp="bf16", layer_classes=("Block",), trace=None)
CHOSEN = {"ubatch_size": 2, "stash": "host", "resident": "shell", "resident_layers": 3}


def saved(folder):
    plan = Plan(ASKED, CHOSEN, 1000, "head", {}, StepTime(1.0, 0.5, 0.5, {"compute": 1.0}), batches=4)
    save_plan(folder, plan, ASKED)
    return folder


def test_a_resumed_run_finds_what_was_chosen(tmp_path):
    assert saved_choice(saved(tmp_path), ASKED) == {**CHOSEN, "batches": 4}


def test_options_that_change_nothing_of_a_plan_may_differ(tmp_path):
    same = L2LConfig(device_memory_budget="auto", cmp="bf16", layer_classes=["Block"], trace=str(tmp_path / "t.json"))
    assert saved_choice(saved(tmp_path), same) is not None


@pytest.mark.parametrize("change", [{"device_memory_budget": "8GiB"}, {"cmp": None}, {"stash": "host"}], ids=str)
def test_with_other_options_it_is_planned_again_and_a_warning_names_them(tmp_path, change, caplog):
    options = {"device_memory_budget": "auto", "cmp": "bf16", "layer_classes": ("Block",), **change}
    with caplog.at_level(logging.WARNING, "hf_l2l"):
        assert saved_choice(saved(tmp_path), L2LConfig(**options)) is None
    assert f"for other options ({next(iter(change))})" in caplog.text


def test_no_checkpoint_and_none_with_a_plan(tmp_path):
    assert saved_choice(None, ASKED) is None
    assert saved_choice(tmp_path, ASKED) is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"asked": {}}', '{"asked": {}, "chosen": {"ubatch_size": -1}, "batches": 1}', '{"asked": 1}'],
)
def test_a_damaged_plan_is_refused_by_name(tmp_path, text):
    (tmp_path / PLAN_FILE).write_text(text)
    with pytest.raises(ValueError, match=f"a checkpoint must have a whole {PLAN_FILE}"):
        saved_choice(tmp_path, ASKED)


@pytest.mark.parametrize("option", ["cmp", "of_a_later_version"])
def test_a_plan_of_another_version_is_refused(tmp_path, option):
    (tmp_path / PLAN_FILE).write_text(f'{{"asked": {{}}, "chosen": {{"{option}": "bf16"}}, "batches": 1}}')
    with pytest.raises(ValueError, match=f"of this version of hf_l2l .*{option}.*; remove that file to have another"):
        saved_choice(tmp_path, L2LConfig())
