"""Runs tests in this process, with a row for each as soon as it has ended: a call that is cut keeps those it had."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_rows

LIMIT_S = 60
"""Of one test. The process is ended after it: a kernel that does not end cannot be interrupted."""
DEVICE_FAILED = 70
"""The status of pytest after an error of the device, which then refuses everything."""
FATAL = ("CUDA error", "CUDA driver error", "cudaError", "unspecified launch failure")
"""Words of errors after which CUDA refuses everything else in the process. Out of memory is not among them."""
LONGEST = 4000
"""Characters of a failure that are kept, from its end."""


class Rows:
    """Writes a row for each test to a file, and leaves out tests that have one. A rehearsal runs each function once,
    unless tests are named."""

    def __init__(self, file: Path, rehearse: bool) -> None:
        self.file, self.rehearse = file, rehearse

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        have = {row["name"] for row in gpu_rows.read(self.file, "test")}
        left = [item for item in items if item.nodeid not in have]
        if self.rehearse and not any("::" in word for word in config.args):
            left = list({item.nodeid.partition("[")[0]: item for item in reversed(left)}.values())[::-1]
        config.hook.pytest_deselected(items=[item for item in items if item not in left])
        items[:] = left

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A row of a file that cannot be imported: perhaps for want of a package."""
        if report.failed:
            message = str(report.longrepr)[-LONGEST:]
            outcome = {"outcome": "error in collection", "seconds": 0.0, "message": message}
            gpu_rows.append(self.file, "test", name=report.nodeid, **outcome)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        gpu_rows.append(self.file, "begun", name=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A row of a test's call, or of what failed or was skipped before or after it."""
        if report.when != "call" and report.passed:
            return
        message = "" if report.passed else str(report.longrepr)[-LONGEST:]
        gpu_rows.append(
            self.file,
            "test",
            name=report.nodeid,
            outcome=report.outcome if report.when == "call" or report.skipped else f"error in {report.when}",
            seconds=report.duration,
            message=message,
        )
        if report.failed and any(words in message for words in FATAL):
            pytest.exit("the device has failed; the next process goes on with the other tests", DEVICE_FAILED)


def run(names: Sequence[str], file: Path, rehearse: bool) -> str:
    """Run tests, files or single ones; returns how that ended. It ends the process if the device has failed."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    # Modules of the first call are there in the second one.
    words = "-q --continue-on-collection-errors -W ignore::pytest.PytestAssertRewriteWarning".split()
    words += f"-p pytest_timeout --timeout-method thread --timeout {LIMIT_S}".split()
    threads = torch.get_num_threads()
    status = int(pytest.main([*words, *names], plugins=[Rows(file, rehearse)]))
    torch.set_num_threads(threads)  # tests have one
    if status == DEVICE_FAILED:
        os._exit(DEVICE_FAILED)
    return "ended" if status in (0, 1, 5) else f"failed: pytest ended with status {status}"
