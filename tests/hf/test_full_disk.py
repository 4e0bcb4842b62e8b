"""A disk that is full when a checkpoint is saved: one error, nothing left, and the training is resumed."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import transformers as hf

from hf_l2l.checkpoint.finding import newest_whole
from training import assert_same_run, l2l_trainer, left_in

EACH_STEP: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "cosine"}


@contextmanager
def no_file_above(num_bytes: int) -> Iterator[None]:
    """The kernel refuses to make any file longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class _Full(hf.TrainerCallback):
    """From the third step on."""

    def __init__(self, num_bytes: int) -> None:
        self.limit = no_file_above(num_bytes)
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.trainer._finish_saving()  # the checkpoints before are in their places
            self.limit.__enter__()


SIZES = {"weights": 30_000, "optimizer": 60_000}
"""Bytes that a file may have when its disk is full: a model's weights have more than the first, and its optimizer's
state, but not its weights, has more than the second."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("what", "later"),
    [
        ("weights", False),
        ("optimizer", True),
        pytest.param("weights", True, marks=pytest.mark.slow),
        pytest.param("optimizer", False, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_that_the_disk_cannot_hold(what, later, tmp_path):
    full = _Full(SIZES[what])
    made = full.trainer = l2l_trainer(tmp_path, **EACH_STEP, l2l_async_save=later, callbacks=[full])
    weights = sum(p.nbytes for p in made.model.parameters())
    assert SIZES["weights"] < weights < SIZES["optimizer"] - 10_000 < 2 * weights - 20_000
    try:
        with pytest.raises(OSError, match="a checkpoint must be written as a whole") as told:
            made.train()
    finally:
        full.limit.__exit__(None, None, None)
    assert str(tmp_path / "checkpoint-3") in str(told.value) + "".join(getattr(told.value, "__notes__", ()))
    assert newest_whole(tmp_path) == (tmp_path / "checkpoint-2", [])
    assert left_in(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    resumed = l2l_trainer(tmp_path, **EACH_STEP)
    resumed.train(resume_from_checkpoint=True)
    whole = l2l_trainer(tmp_path / "whole", **EACH_STEP)
    whole.train()
    assert_same_run(resumed, whole)
