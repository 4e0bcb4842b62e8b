"""Runs with a budget of device memory, on a machine whose figures are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hf_l2l.hf.attach import attachment_of
from hf_l2l.probe.figures import HardwareFigures
from hf_l2l.testing import enable_simulated_accelerator
from training import settled_memory, tiny_bert

FIGURES = HardwareFigures("sim", 2**23, 1e9, 1e9, 1e9, 1e9, 1e10, {1: 1e9}, {"fp32": 1e11, "bf16": 1e11}, True, 1e13)


def use_machine_of_8_mib(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The device has 8 MiB from now on, and nothing of the machine is measured; `folder` gets its figures."""
    file = folder / "figures.json"
    file.write_text(FIGURES.to_json())
    monkeypatch.setenv("HF_L2L_FIGURES", str(file))
    settled_memory()
    enable_simulated_accelerator("8MiB")


def bert(dropout: float = 0.0) -> nn.Module:
    return tiny_bert(dropout=dropout, layers=6, width=64)


def plan_of(made: Any) -> Any:
    """The plan that the model of a trainer is attached with."""
    attached = attachment_of(made.model)
    assert attached is not None
    return attached.plan
