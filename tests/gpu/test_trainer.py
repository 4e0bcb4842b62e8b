"""`L2LTrainer` on a CUDA device beside transformers' Trainer: precisions, data loaders, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from gpu_machine import DEVICE, IS_CUDA, small_bert
from training import SAVING, assert_same_run, l2l_trainer, logs, plain_trainer, stopped_at_two

pytestmark = [
    pytest.mark.gpu,
    # torch warns of the scheduler's order when the optimizer is loaded; plain Trainer does the same.
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning"),
    # Of plain Trainer's activation checkpointing.
    pytest.mark.filterwarnings("ignore:.*use_reentrant.*"),
]
PINS = {"dataloader_pin_memory": IS_CUDA}
"""The simulated accelerator cannot have loaders pin memory."""


def losses(of: hf.Trainer) -> list[float]:
    return [entry["loss"] for entry in logs(of) if "loss" in entry]


def trained(made: hf.Trainer) -> hf.Trainer:
    made.train()
    assert made.args.device.type == DEVICE.type
    return made


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 1e-4),
        ({"l2l_resident": "shell"}, 1e-4),
        ({"bf16": True}, 2e-2),
        ({"cmp": "bf16"}, 2e-2),
        ({"cmp": "fp16", "l2l_resident": "shell"}, 2e-2),
    ],
    ids=str,
)
def test_it_trains_as_plain_trainer_does(tmp_path, options, tolerance):
    autocast = {"bf16": True} if "bf16" in options else {}
    plain = trained(plain_trainer(tmp_path / "plain", model=small_bert(dropout=0.0), **autocast, **PINS))
    found = trained(l2l_trainer(tmp_path / "ours", model=small_bert(dropout=0.0), ubatch_size=3, **options, **PINS))
    assert len(losses(plain)) == 4
    assert losses(found) == pytest.approx(losses(plain), rel=tolerance)
    weights = plain.model.state_dict()
    for name, value in found.model.state_dict().items() if tolerance < 1e-3 else ():
        if not name.endswith("key.bias"):  # its gradient is rounding, whose sign AdamW follows
            torch.testing.assert_close(value.cpu(), weights[name].cpu(), rtol=0.0, atol=1e-3)


def test_loaders_that_fork_and_pin_change_nothing(tmp_path):
    """Their workers are forked beside page-locked masters, threads of updates, and a device that is in use."""
    same: dict[str, Any] = {"ubatch_size": 3, "max_steps": 8 if IS_CUDA else 2}
    model, other = (small_bert() for _ in range(2))
    expected = trained(l2l_trainer(tmp_path / "plain", model=model, **same, dataloader_pin_memory=False))
    forking: dict[str, Any] = {"dataloader_num_workers": 2, **PINS}
    found = trained(l2l_trainer(tmp_path / "forked", model=other, **same, **forking))
    assert_same_run(found, expected)


@pytest.mark.parametrize(
    "options", [{}, {"stash": "host", "bf16": True}, {"cmp": "fp16"}, {"l2l_resident": "shell"}], ids=str
)
def test_a_resumed_run_is_one_that_was_never_stopped(tmp_path, options):
    """To the bit, with dropout; and serial updates are deferred ones."""
    same: dict[str, Any] = {"ubatch_size": 3, **options}
    first, second, third = (small_bert() for _ in range(3))
    whole = trained(l2l_trainer(tmp_path / "whole", model=first, **SAVING, **same, eps_update="serial"))
    same["eps_update"] = "deferred"
    checkpoint = stopped_at_two(l2l_trainer, tmp_path / "parts", model=second, **same)
    resumed = l2l_trainer(tmp_path / "parts", model=third, **SAVING, **same)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert_same_run(resumed, whole)
