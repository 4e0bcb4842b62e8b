"""Shared fixtures: a seed for every test, and the versions in the report."""

from __future__ import annotations

import os

# The tests never look for a Hub.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

pytest.register_assert_rewrite("families", "parity_cases", "training")

import torch
import transformers


def pytest_report_header() -> str:
    return f"torch {torch.__version__}, transformers {transformers.__version__}"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
