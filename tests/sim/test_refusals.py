"""What is refused is refused in time, by the name that was typed, with rule, value and remedy; docs/settings.md says
so. The table of cases is in tests/helpers/refusal_*.py."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from hf_l2l import L2LConfig
from hf_l2l.hf.training_args import OWN_OPTIONS
from hf_l2l.option_names import argument
from refusal_settings import MORE_VALUES, OF_THE_TRAINER, VALUES, as_config
from refusal_table import ERRORS, HAS_DATASETS, PAGE, WARNED, found, page
from refusals import not_provoked, parts_of, provoke

WRITTEN = PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("section", ERRORS)
def test_an_error_comes_in_time_with_rule_value_and_remedy(section, tmp_path):
    for case in ERRORS[section]:
        raised = found(case)
        assert issubclass(raised.kind, case.kind), case.typed
        assert all(len(part) > 2 for part in parts_of(raised.message)), raised.message
        assert "\n" not in raised.message
        assert not case.is_early or raised.allocated == [], case.typed
        if case.settings is not None:  # the config and the Trainer's arguments say the same, each with its own names
            by_arguments, by_config = provoke(case, tmp_path), provoke(as_config(case.settings), tmp_path)
            assert re.sub(r"\bl2l_", "", by_arguments.message) == by_config.message
            assert by_arguments.places == by_config.places
            typed = [argument(name) for name in case.settings]
            assert any(re.search(rf"(?<![\w.-]){name}\b", raised.message) for name in typed)


@pytest.mark.parametrize("section", WARNED)
def test_what_goes_on_without_a_setting_is_a_warning(section):
    for case in WARNED[section]:
        raised = found(case)
        assert issubclass(raised.kind, UserWarning), case.typed
        assert "\n" not in raised.message
        assert not case.is_early or raised.allocated == [], case.typed


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
    places = {
        place for cases in (*ERRORS.values(), *WARNED.values()) for case in cases for place in found(case).places
    }
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
