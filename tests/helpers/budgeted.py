"""Runs with a budget of device memory, on a machine whose figures are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_l2l.hf.attach import attachment_of
from hf_l2l.probe.figures import HardwareFigures
from hf_l2l.testing import enable_simulated_accelerator
from training import settled_memory

FIGURES = HardwareFigures("sim", 2**23, 1e9, 1e9, 1e9, 1e9, 1e10, {1: 1e9}, {"fp32": 1e11, "bf16": 1e11}, True, 1e13)


def use_machine_of_8_mib(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The device has 8 MiB from now on, and nothing of the machine is measured; `folder` gets its figures."""
    file = folder / "figures.json"
    file.write_text(FIGURES.to_json())
    monkeypatch.setenv("HF_L2L_FIGURES", str(file))
    settled_memory()
    enable_simulated_accelerator("8MiB")


def plan_of(made: Any) -> Any:
    """The plan that a model, or that of a trainer, is attached with."""
    attached = attachment_of(getattr(made, "model", made))
    assert attached is not None
    return attached.plan


class SumOfSquares(torch.optim.Optimizer):
    """Steps by the sum over all gradients, so that it cannot update some weights alone."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = sum(float(p.grad.square().sum()) for p in given)
        for p in given:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"] / (1 + total))
