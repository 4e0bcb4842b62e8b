"""The device of a process of tests: L2L_TEST_DEVICE in the environment, "cpu", "sim" or "cuda".

The simulated accelerator and CUDA stay the accelerator of a process until it ends, so each has processes of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

DEVICE = os.environ.get("L2L_TEST_DEVICE", "cpu")
if DEVICE not in ("cpu", "sim", "cuda"):
    raise ValueError(f"L2L_TEST_DEVICE must be 'cpu', 'sim' or 'cuda' (got {DEVICE!r}); leave it out for 'cpu'")
if DEVICE == "cuda":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS is used, which then repeats its sums
else:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of the programs that tests start, too; torch has not looked yet
if DEVICE == "sim":  # before any backward of the process
    from hf_l2l.testing import enable_simulated_accelerator

    enable_simulated_accelerator()

ON_EVERY_DEVICE = ("engine", "trainer")
"""Folders of tests that take their device from the fixture."""
IF_NAMED = ("clients", "gpu")
"""Those that run if their folder is named: they need other libraries, or a real device."""


def runs_here(folder: str, arguments: Iterable[str]) -> bool:
    """Whether a process that was called with these arguments runs the tests of a folder. Those of `sim` need the
    simulated accelerator, on which those of `gpu` are rehearsed; those of all other folders are about the host, and
    run with "cpu"."""
    if folder in IF_NAMED:
        return any(folder in each for each in arguments) and (folder != "gpu" or DEVICE != "cpu")
    return folder in ON_EVERY_DEVICE or DEVICE == ("sim" if folder == "sim" else "cpu")
