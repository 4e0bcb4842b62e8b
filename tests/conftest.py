"""Shared fixtures: a seed for every test, and the versions in the report."""

from __future__ import annotations

import os
from collections.abc import Iterator

# The tests never look for a Hub.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

pytest.register_assert_rewrite("families", "parity_cases", "training")

import torch
import transformers
from accelerate.state import AcceleratorState, GradientState


def pytest_report_header() -> str:
    return f"torch {torch.__version__}, transformers {transformers.__version__}"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """A seed for every test, and no device chosen by an earlier one: accelerate keeps its state for the process."""
    torch.manual_seed(0)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
