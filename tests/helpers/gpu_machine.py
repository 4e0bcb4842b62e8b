"""The device of `tests/gpu`: CUDA, or, in a rehearsal, the simulated accelerator.

A rehearsal runs each test once, to find faults of the tests themselves before there is a GPU to run them on. What
needs the time of a device, or CUDA alone, asks `IS_CUDA`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import devices
from training import tiny_bert

IS_CUDA = devices.DEVICE == "cuda"
DEVICE = torch.device("cuda" if IS_CUDA else "sim", 0)
MIB = 2**20

needs_cuda = pytest.mark.skipif(not IS_CUDA, reason="needs CUDA itself")


def full(on_cuda: int, in_rehearsal: int) -> int:
    """How many steps or layers: the simulated accelerator is slow."""
    return on_cuda if IS_CUDA else in_rehearsal


def small_bert(**options: Any) -> nn.Module:
    """A BERT whose weights are the same at every call."""
    return tiny_bert(layers=full(4, 2), **options)


def module() -> Any:
    """`torch.cuda`, or `torch.sim`."""
    return torch.get_device_module(DEVICE)


@cache
def cycles_per_s() -> float:
    """Of the clock by which a sleeping kernel counts; measured when the device has been busy for a while."""
    busy, cycles = 400_000_000, 100_000_000
    torch.cuda._sleep(busy)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / (start.elapsed_time(end) * 1e-3)


def sleep(seconds: float) -> None:
    """Let the current stream do nothing for so long; the host continues. No time passes in a rehearsal."""
    if IS_CUDA:
        torch.cuda._sleep(int(seconds * cycles_per_s()))


def event() -> Any:
    """An event that tells its time."""
    return module().Event(enable_timing=True)


def marked() -> Any:
    """An event at the end of what the current stream has been given."""
    made = event()
    made.record()
    return made


def seconds_between(start: Any, end: Any) -> float:
    """On the device; waits for both."""
    module().synchronize()
    return float(start.elapsed_time(end)) * 1e-3


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Inside, an operation that makes the host wait for the device raises RuntimeError, as far as torch notices."""
    if not IS_CUDA:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def program(text: str) -> subprocess.Popen[str]:
    """A Python program on this device in a process of its own, with the helpers of the tests; standard output and
    error are piped."""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    text = "import gpu_machine\n" + text
    return subprocess.Popen(
        [sys.executable, "-c", text], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
