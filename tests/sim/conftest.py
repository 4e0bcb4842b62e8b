"""Enables the simulated accelerator before anything runs a backward; these tests need a process of their own."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest
import torch

from hf_l2l.runtime import stream
from hf_l2l.testing import enable_simulated_accelerator, page_locked_bytes

enable_simulated_accelerator()


@pytest.fixture(autouse=True, scope="module")
def _nothing_of_other_modules() -> Iterator[None]:
    """Models of other test modules are gone, with their page-locked memory, and so are copies without a wait, and
    refusals to page-lock memory."""
    torch.sim.synchronize()
    stream.forget_refusal(torch.device("sim:0"))
    for _ in range(10):
        gc.collect()
        if page_locked_bytes() == 0:
            break
        gc.unfreeze()  # perhaps of a model that was there when an earlier module began
        time.sleep(0.02)
    gc.freeze()  # what is there before the first test of a module is not looked at again and again
    yield
