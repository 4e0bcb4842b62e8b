"""Everything that is refused is refused in time, with rule, value and remedy, and docs/settings.md says so."""

from __future__ import annotations

import gc
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.hf.training_args import OWN_OPTIONS
from hf_l2l.option_names import argument
from hf_l2l.testing import page_locked_bytes
from refusal_models import OPTIMIZERS
from refusal_settings import MORE_VALUES, OF_THE_TRAINER, TOGETHER, VALUES, as_config, of_config, shown
from refusal_table import ERRORS, HAS_DATASETS, PAGE, WARNED, found, page
from refusals import PACKAGE, Case, Scene, not_provoked, parts_of, provoke

REFUSED = [case for cases in ERRORS.values() for case in cases]
WARNED_OF = [case for cases in WARNED.values() for case in cases]


def named(case: Case) -> str:
    return case.typed.replace("`", "")


@pytest.mark.parametrize("case", REFUSED, ids=named)
def test_an_error_has_rule_value_and_remedy(case):
    raised = found(case)
    assert not issubclass(raised.kind, UserWarning)
    assert all(len(part) > 2 for part in parts_of(raised.message)), raised.message
    assert "\n" not in raised.message


@pytest.mark.parametrize("case", WARNED_OF, ids=named)
def test_what_goes_on_without_a_setting_is_a_warning(case):
    raised = found(case)
    assert issubclass(raised.kind, UserWarning)
    assert "\n" not in raised.message


@pytest.mark.parametrize("case", [case for case in (*REFUSED, *WARNED_OF) if case.is_early], ids=named)
def test_nothing_is_allocated_or_moved_before(case):
    assert found(case).allocated == []


def options_in(message: str) -> set[str]:
    return {name for name in OWN_OPTIONS if re.search(rf"(?<![\w.-]){name}\b", message)}


@pytest.mark.parametrize(
    "settings", [*({name: value} for name, value in VALUES.items()), *MORE_VALUES, *TOGETHER], ids=shown
)
def test_options_are_called_as_they_were_typed(settings, tmp_path):
    """The config and the Trainer's arguments say the same, each with its own names."""
    by_arguments, by_config = provoke(of_config(settings), tmp_path), provoke(as_config(settings), tmp_path)
    assert re.sub(r"\bl2l_", "", by_arguments.message) == by_config.message
    assert by_arguments.places == by_config.places
    assert options_in(by_arguments.message) & {argument(name) for name in settings}


def test_every_option_has_a_value_that_is_refused():
    of_config = {argument(name) for name in (*VALUES, *(name for each in MORE_VALUES for name in each))}
    assert of_config | set(OF_THE_TRAINER) == set(OWN_OPTIONS)
    assert {field.name for field in fields(L2LConfig)} == {*VALUES, "spill_dir", "state_dir", "device"}


CHECKED = (
    "config.py",
    "counts.py",
    "paths.py",
    "budget/trainer_plan.py",
    "budget/within.py",
    "cli/env.py",
    "cli/estimate.py",
    "eps/server.py",
    "glue/options.py",
    "glue/retired.py",
    "glue/own_data/files.py",
    "hf/attach.py",
    "hf/callback.py",
    "hf/hooks.py",
    "hf/placement.py",
    "hf/preparation.py",
    "hf/trainer.py",
    "hf/training_args.py",
    "hf/variants.py",
    "memory/memory_estimate.py",
    "model/precision.py",
    "model/quantized.py",
    "model/residency.py",
    "model/stacks.py",
    "optim/lamb.py",
    "optim/layerwise_check.py",
    "optim/optimizer_check.py",
    "plan/planner.py",
    "devices.py",
    "sizing/arguments.py",
    "sizing/estimate.py",
    "stash/spill.py",
)
"""Files of the package whose errors are about what the user has given: each of them has a row."""

APART = (
    "the plan of the checkpoint is not used again",  # of a training that is resumed
    "training starts anew, over",  # the same
    "is not resumed from, but",  # the same
    "stays on {p.device}, since something still refers to its values",  # when a model is detached
    "{message}; --help lists all options",  # what the parser of flags says by itself
    "--simulate needs a process without another accelerator",  # which this one has not
)


@pytest.mark.parametrize("file", [file for file in CHECKED if HAS_DATASETS or not file.startswith("glue")])
def test_every_refusal_has_a_row(file):
    places = {place for case in (*REFUSED, *WARNED_OF) for place in found(case).places}
    left = [text for text in not_provoked(file, places) if not any(part in text for part in APART)]
    assert left == [], "add a case to tests/helpers/refusal_settings.py, refusal_models.py or refusal_commands.py"


def sections(text: str) -> dict[str, str]:
    return {part.partition("\n")[0]: part.strip() for part in text.split("\n## ")}


def test_the_page_is_what_the_code_says():
    """Else run: PYTHONPATH=. python tests/helpers/refusal_table.py"""
    written, said = sections(PAGE.read_text(encoding="utf-8")), sections(page())
    assert {title: written.get(title) for title in said} == said
    assert [title for title in written if title in said] == list(said)
    assert len(written) - len(said) == (0 if HAS_DATASETS else 2)


def test_nothing_is_kept_of_what_was_provoked(tmp_path):
    gc.collect()
    before = page_locked_bytes()
    kept = [provoke(case, tmp_path) for case in OPTIMIZERS]
    gc.collect()
    assert len(kept) == len(OPTIMIZERS) and page_locked_bytes() == before


# ---- the checks find what they look for


def test_a_refusal_without_a_row_is_found():
    assert len(list(not_provoked("hf/callback.py", set()))) == 2
    places = {("hf/callback.py", line) for line in range(1, 1 + (PACKAGE / "hf/callback.py").read_text().count("\n"))}
    assert list(not_provoked("hf/callback.py", places)) == []


@pytest.mark.parametrize(
    ("message", "rule", "value", "remedy"),
    [
        ("a must be 1 (got 2 (two)); write 1 (one)", "a must be 1", "got 2 (two)", "write 1 (one)"),
        ("a (the first) is bad (got 2): it is; write 1", "a (the first) is bad", "got 2", "it is; write 1"),
        ("a must be there (none was found); add one", "a must be there", "none was found", "add one"),
        ("a is 1 (a count) of many; write 1", "a is 1 (a count) of many", "a count", "write 1"),
        ("a must be 1 (got 2)", "a must be 1 (got 2)", "got 2", ""),
        ("a must be 1", "a must be 1", "", ""),
    ],
)
def test_messages_are_taken_apart(message, rule, value, remedy):
    assert parts_of(message) == (rule, value, remedy)


def _attached_and_refused(scene: Scene):
    model = scene.model()

    def act() -> None:
        attach_l2l(model, L2LConfig(device="sim"))
        torch.zeros(16, 16)
        raise L2LConfig(stash="ssd")

    return act


def test_what_is_allocated_and_moved_before_an_error_is_found(tmp_path):
    found = provoke(Case("", _attached_and_refused), tmp_path)
    assert any("made [16, 16] on cpu" in each for each in found.allocated)
    assert "0.bert.pooler.dense.weight moved" in found.allocated


def test_what_is_accepted_and_what_others_raise_is_found(tmp_path):
    with pytest.raises(AssertionError, match="was accepted"):
        provoke(Case("", lambda scene: lambda: L2LConfig(stash="host")), tmp_path)
    with pytest.raises(AssertionError, match="that raised ValueError"):
        provoke(Case("", lambda scene: lambda: int("x")), tmp_path)


def test_the_page_is_where_it_is_linked():
    assert PAGE == Path(__file__).parents[2] / "docs" / "settings.md" and PAGE.is_file()
