"""Do the trainers of `throughput.py` compute the same? Tiny models, four steps, before anything is measured."""

from __future__ import annotations

import os
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.throughput_models import made
from benchmarks.throughput_runs import trainer_for
from hf_l2l import detach_l2l

CHECKED_STEPS = 4
TOKENS = 64
"""Of a step, in two micro-batches."""


@contextmanager
def fixed_order() -> Iterator[None]:
    """Kernels that sum in a fixed order, where there are such; attention without the kernels that do not."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def logged(name: str, mode: str, options: Namespace) -> list[tuple[float, float]]:
    """Loss and grad_norm of every step of a tiny model, two micro-batches a step, without dropout."""
    tiny = Namespace(**{**vars(options), "tiny": True, "ubatch_size": None, "warmup": 1, "steps": CHECKED_STEPS - 1})
    model = made(name, True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    try:
        with tempfile.TemporaryDirectory() as folder, fixed_order():
            trainer = trainer_for(model, name, mode, TOKENS, tiny, folder, [])
            trainer.args.logging_strategy, trainer.args.logging_steps = transformers.IntervalStrategy.STEPS, 1
            trainer.train()
    finally:
        if mode != "trainer":
            detach_l2l(model)
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [(float(step["loss"]), float(step["grad_norm"])) for step in steps]


def check(name: str, options: Namespace) -> dict[str, Any]:
    """What the check of one model found: `failure` is None, or says what differs."""
    plain, serial, deferred = (logged(name, mode, options) for mode in ("trainer", "serial", "deferred"))
    found: dict[str, Any] = {"model": name, "tolerance": tolerance(), "failure": None}
    pairs = [(a, b) for ours, theirs in zip(serial, plain, strict=False) for a, b in zip(ours, theirs, strict=True)]
    found["difference"] = max((abs(a - b) / abs(b) for a, b in pairs), default=float("nan"))
    if serial != deferred or len(serial) != CHECKED_STEPS:
        found["failure"] = f"serial and deferred log other bits: {serial}, {deferred}"
    # A comparison with "not a number" is false.
    elif len(plain) != CHECKED_STEPS or not all(abs(a - b) <= tolerance() * abs(b) for a, b in pairs):
        found["failure"] = f"L2L and plain Trainer differ: {serial}, {plain}"
    return found


def tolerance() -> float:
    """How far loss and grad_norm may be from plain Trainer's, relatively: sums are in another order."""
    return 2e-2 if torch.cuda.is_available() else 1e-5
