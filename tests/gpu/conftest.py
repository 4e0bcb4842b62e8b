"""The device of these tests, and a file with a line per test: a run that is cut keeps the results it had.

Without the file, which `benchmarks/gpu_worker.py` names in an environment variable, these are ordinary tests.
"""

from __future__ import annotations

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS is used

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu_machine
from benchmarks import gpu_rows

ROWS = Path(os.environ["HF_L2L_GPU_TEST_ROWS"]) if "HF_L2L_GPU_TEST_ROWS" in os.environ else None
FATAL = ("CUDA error", "CUDA driver error", "cudaError", "unspecified launch failure")
"""Words of errors after which CUDA refuses everything else in the process. Out of memory is not among them."""
ORDER = ("engine", "several", "overlap", "trainer", "attention", "faults", "sanitizer")
"""Of the modules, the most valuable first: there may not be time for all."""
LONGEST = 4000
"""Characters of a failure that are kept, from its end."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that have a row already; in a rehearsal, run each test function once, unless tests are named."""
    items.sort(key=lambda item: next((n for n, name in enumerate(ORDER) if f"test_{name}.py" in item.nodeid), -1))
    if ROWS is not None:
        have = {row["name"] for row in gpu_rows.read(ROWS, "test")}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in have])
        items[:] = [item for item in items if item.nodeid not in have]
    if not gpu_machine.IS_CUDA and not any("::" in word for word in config.args):
        first: dict[str, pytest.Item] = {}
        for item in items:
            first.setdefault(item.nodeid.partition("[")[0], item)
        items[:] = list(first.values())


def pytest_runtest_logstart(nodeid: str) -> None:
    gpu_rows.append(ROWS, "begun", name=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One line per test: of its call, or of what failed or was skipped before or after it."""
    if report.when == "call" or report.outcome != "passed":
        message = "" if report.passed else str(report.longrepr)[-LONGEST:]
        gpu_rows.append(
            ROWS,
            "test",
            name=report.nodeid,
            outcome=report.outcome if report.when == "call" or report.skipped else f"error in {report.when}",
            seconds=report.duration,
            message=message,
        )
        if report.failed and ROWS is not None and any(words in message for words in FATAL):
            pytest.exit("the device has failed; the next process goes on with the other tests", returncode=70)


@pytest.fixture(autouse=True)
def _on_the_device() -> Iterator[None]:
    """Kernels that sum in a fixed order, and matrix products in full precision."""
    if not gpu_machine.is_there():
        pytest.skip("needs a CUDA device")
    if not gpu_machine.IS_CUDA:
        yield
        return
    before: Any = torch.backends.cuda.matmul.fp32_precision
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.matmul.fp32_precision = before
