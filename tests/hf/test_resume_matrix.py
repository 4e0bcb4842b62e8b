"""A training that is resumed at any step ends with the bits of the one that was never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from resumed import STEPS, Recorded, assert_resumes_at, recorded

pytestmark = [
    # torch warns of the scheduler's order when the optimizer is loaded; plain Trainer does the same.
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*moves the weights:UserWarning"),
]


def whole_run(folder: Path, **options: Any) -> Recorded:
    whole = recorded(folder, **options)
    whole.made.train()
    return whole


def test_each_step(tmp_path):
    """Dropout, an order that is drawn, and random changes of rows and batches, two epochs."""
    whole = whole_run(tmp_path / "whole")
    for at in range(1, STEPS):
        assert_resumes_at(whole, at, tmp_path / f"at {at}")
