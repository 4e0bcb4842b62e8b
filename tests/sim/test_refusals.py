"""What is refused is refused in time, by the name that was typed, with rule, value and remedy; docs/settings.md says
so. The table of cases is in tests/helpers/refusal_*.py."""

from __future__ import annotations

import gc
import re
from dataclasses import fields
from functools import partial

import pytest
import torch

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.hf.training_args import OWN_OPTIONS
from hf_l2l.option_names import argument
from hf_l2l.testing import page_locked_bytes
from refusal_models import OPTIMIZERS
from refusal_settings import MORE_VALUES, OF_THE_TRAINER, VALUES, as_config
from refusal_table import ERRORS, HAS_DATASETS, PAGE, WARNED, found, page, row
from refusals import Case, Scene, not_provoked, parts_of, provoke

REFUSED = [case for cases in ERRORS.values() for case in cases]
WARNED_OF = [case for cases in WARNED.values() for case in cases]
WRITTEN = PAGE.read_text(encoding="utf-8")


def named(case: Case) -> str:
    return case.typed.replace("`", "")


@pytest.mark.parametrize("case", REFUSED, ids=named)
def test_an_error_comes_in_time_with_rule_value_and_remedy(case, tmp_path):
    raised = found(case)
    assert issubclass(raised.kind, case.kind)
    assert all(len(part) > 2 for part in parts_of(raised.message)), raised.message
    assert "\n" not in raised.message
    assert row(case, is_error=True) in WRITTEN.splitlines()
    if case.is_early:
        assert raised.allocated == []
    if case.settings is not None:  # the config and the Trainer's arguments say the same, each with its own names
        by_arguments, by_config = provoke(case, tmp_path), provoke(as_config(case.settings), tmp_path)
        assert re.sub(r"\bl2l_", "", by_arguments.message) == by_config.message
        assert by_arguments.places == by_config.places
        typed = [argument(name) for name in case.settings]
        assert any(re.search(rf"(?<![\w.-]){name}\b", raised.message) for name in typed)


@pytest.mark.parametrize("case", WARNED_OF, ids=named)
def test_what_goes_on_without_a_setting_is_a_warning(case):
    raised = found(case)
    assert issubclass(raised.kind, UserWarning)
    assert "\n" not in raised.message
    assert row(case, is_error=False) in WRITTEN.splitlines()
    if case.is_early:
        assert raised.allocated == []


def test_every_option_has_a_value_that_is_refused():
    of_config = {argument(name) for each in ({**VALUES}, *MORE_VALUES) for name in each}
    assert of_config | set(OF_THE_TRAINER) == set(OWN_OPTIONS)
    assert {field.name for field in fields(L2LConfig)} == {*VALUES, "spill_dir", "state_dir", "device"}


CHECKED = """
config.py counts.py paths.py budget/trainer_plan.py budget/within.py cli/env.py cli/estimate.py eps/server.py
glue/options.py glue/retired.py glue/own_data/files.py hf/attach.py hf/callback.py hf/hooks.py hf/placement.py
hf/preparation.py hf/trainer.py hf/training_args.py hf/variants.py memory/memory_estimate.py model/precision.py
model/quantized.py model/residency.py model/stacks.py optim/lamb.py optim/layerwise_check.py
optim/optimizer_check.py plan/planner.py devices.py sizing/arguments.py sizing/estimate.py stash/spill.py
""".split()
"""Files of the package whose errors are about what the user has given: each of them has a row."""

APART = (
    "the plan of the checkpoint is not used again",  # of a training that is resumed
    "training starts anew, over",  # the same
    "is not resumed from, but",  # the same
    "stays on {p.device}, since something still refers to its values",  # when a model is detached
    "{message}; --help lists all options",  # what the parser of flags says by itself
    "--simulate needs a process without another accelerator",  # which this one has not
)


def test_every_refusal_has_a_row():
    """Else add a case to tests/helpers/refusal_settings.py, refusal_models.py or refusal_commands.py."""
    places = {place for case in (*REFUSED, *WARNED_OF) for place in found(case).places}
    checked = [file for file in CHECKED if HAS_DATASETS or not file.startswith("glue")]
    left = {
        file: [text for text in not_provoked(file, places) if not any(part in text for part in APART)]
        for file in checked
    }
    assert {file: texts for file, texts in left.items() if texts} == {}
    assert len(list(not_provoked("hf/callback.py", set()))) == 2  # they are found


def test_the_page_is_what_the_code_says():
    """Else run: PYTHONPATH=. python tests/helpers/refusal_table.py"""
    said = page()
    assert WRITTEN == said if HAS_DATASETS else WRITTEN.startswith(said.partition("\n## Warnings")[0])


def test_nothing_is_kept_of_what_was_provoked(tmp_path):
    gc.collect()
    before = page_locked_bytes()
    kept = [provoke(case, tmp_path) for case in OPTIMIZERS]
    gc.collect()
    assert len(kept) == len(OPTIMIZERS) and page_locked_bytes() == before


# ---- the checks find what they look for


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        (
            "a (the first) is bad (got 2 (two)): it is; write 1",
            ("a (the first) is bad", "got 2 (two)", "it is; write 1"),
        ),
        ("a is 1 (a count) of many; write 1", ("a is 1 (a count) of many", "a count", "write 1")),
        ("a must be 1 (got 2)", ("a must be 1 (got 2)", "got 2", "")),
        ("a must be 1", ("a must be 1", "", "")),
    ],
)
def test_messages_are_taken_apart(message, parts):
    assert parts_of(message) == parts


def _attached_and_refused(scene: Scene):
    model = scene.model()

    def act() -> None:
        attach_l2l(model, L2LConfig(device="sim"))
        torch.zeros(16, 16)
        raise L2LConfig(stash="ssd")

    return act


def test_what_is_allocated_accepted_or_raised_by_others_is_found(tmp_path):
    allocated = provoke(Case("", _attached_and_refused), tmp_path).allocated
    assert any("made [16, 16] on cpu" in each for each in allocated)
    assert "0.bert.pooler.dense.weight moved" in allocated
    with pytest.raises(AssertionError, match="was accepted"):
        provoke(Case("", lambda scene: partial(L2LConfig, stash="host")), tmp_path)
    with pytest.raises(AssertionError, match="that raised ValueError"):
        provoke(Case("", lambda scene: partial(int, "x")), tmp_path)
