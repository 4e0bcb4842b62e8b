"""Trainings whose accumulated batches run as one, beside those of batches one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import accumulated
from plain import assert_close_run

CLOSE = 1e-5
"""Relative difference of logs that are equal but for the order of fp32 sums, and absolute one of weights."""
ONE_STEP = [2, 2, 2, 2]
"""Rows of the batches of a step of `accumulated.made`."""
EAGER: dict[str, Any] = {"eps_update": "eager", "max_grad_norm": 0.0}


def pair(folder: Path, **options: Any) -> tuple[hf.Trainer, hf.Trainer]:
    """A training whose batches are folded, and one whose batches run one by one, which is warned of on a device."""
    apart = accumulated.made(folder, l2l_merge_accumulation="off", **options)
    assert told(apart, "l2l_merge_accumulation='off'")
    return accumulated.made(folder, **options), apart


def told(made: hf.Trainer, reason: str = "", *args: Any) -> bool:
    """Train; whether warnings say what is expected: on a device, that weights travel for each batch for this reason,
    unless it is ""; where layers run on the host, nothing."""
    said = accumulated.train(made, *args)
    if not reason or made.args.device.type == "cpu":
        return said == []
    [warning] = said
    return "moves the weights" in warning and reason in warning


def assert_folded(folded: hf.Trainer, apart: hf.Trainer, rel: float = CLOSE, weights: float = CLOSE) -> None:
    assert_close_run(folded, apart, rel=rel, weights=weights)
    ours, theirs = (each.state.log_history[-1]["train_loss"] for each in (folded, apart))
    assert ours == pytest.approx(theirs, rel=rel, nan_ok=True)


class OutOfRoom:
    """Lets the device run out of memory for many rows, in the forward or in the backward, after `steps`."""

    def __init__(self, made: hf.Trainer, where: str, steps: int) -> None:
        self.is_on = lambda rows: rows > 4 and made.state.global_step >= steps
        self.where = where
        made.model.model.layers[0].register_forward_hook(self.after_first_layer)

    def after_first_layer(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        def fail(gradient: torch.Tensor | None) -> None:
            torch.rand(1)
            raise torch.OutOfMemoryError("too much")

        if torch.is_grad_enabled() and self.is_on(len(out)):
            if self.where == "forward":
                fail(None)
            out.register_hook(fail)  # after the gradients of the layers above have arrived
