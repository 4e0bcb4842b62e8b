"""What a Trainer trains layer to layer, beside what transformers' own does, on any device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from devices import DEVICE
from runs import assert_same_run
from training import l2l_trainer, logs, plain_trainer, tiny_bert

DROPOUT = 0.1 if DEVICE == "cpu" else 0.0
"""Of models that are compared with plain ones: a device draws random numbers of its own, in another order."""


def small_bert(dropout: float = DROPOUT, layers: int = 2) -> nn.Module:
    """A BERT whose weights are the same at every call."""
    return tiny_bert(dropout=dropout, layers=layers)


def trained(make: Callable[..., hf.Trainer], folder: Path, *args: Any, **options: Any) -> hf.Trainer:
    """A trainer of a small BERT, unless another model or something that makes one is given, after its training."""
    if "model_init" not in options:
        options.setdefault("model", small_bert())
    made = make(folder, *args, **options)
    made.train()
    return made


def both(folder: Path, *, ours: dict[str, Any] | None = None, **options: Any) -> tuple[hf.Trainer, hf.Trainer]:
    """One training layer to layer, with some options of its own, and the same one by transformers' Trainer."""
    found = trained(l2l_trainer, folder / "l2l", **options, **(ours or {}))
    return found, trained(plain_trainer, folder / "plain", **options)


def assert_as_plain(found: hf.Trainer, expected: hf.Trainer) -> None:
    """The same bits of logs, weights and optimizer state; close ones on a real device, which adds in another order."""
    if DEVICE == "cuda":
        assert_close_run(found, expected, rel=1e-3, weights=1e-3)
    else:
        assert_same_run(found, expected)


def assert_close_run(found: hf.Trainer, expected: hf.Trainer, rel: float = 1e-5, weights: float = 1e-5) -> None:
    """Logs are the same but for a relative difference, and weights but for an absolute one."""
    assert len(logs(found)) == len(logs(expected))
    for ours, theirs in zip(logs(found), logs(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=rel, nan_ok=True)
    others = expected.model.state_dict()
    for name, value in found.model.state_dict().items():
        if DEVICE != "cuda" or not name.endswith("key.bias"):  # its gradient is rounding, whose sign AdamW follows
            assert (value.cpu() - others[name].cpu()).abs().max() <= weights, name


def is_attached(model: nn.Module) -> bool:
    """Whether a model, or a module in one, runs layer to layer: it has the hook of Accelerate for that."""
    return hasattr(model, "_hf_hook")


class Streamed(torch.utils.data.IterableDataset[Any]):
    """Rows of which only the next is known."""

    def __init__(self, found: list[Any]) -> None:
        self.found = found

    def __iter__(self) -> Any:
        return iter(self.found)
