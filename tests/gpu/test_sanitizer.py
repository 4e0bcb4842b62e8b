"""CUDA's sanitizer, as torch has it, finds no race between streams; in a process of its own."""

from __future__ import annotations

import pytest

from gpu_machine import needs_cuda, program

pytestmark = pytest.mark.timeout(120)

SANITIZED = """
import torch
from models import batch_for, train_once
from hf_l2l import L2LConfig, attach_l2l
from training import tiny_bert

for mode, options in (
    ("serial", {}),
    ("deferred", {"stash": "host", "ubatch_size": 3}),
    ("eager", {"gradient_slots": 1}),
    ("deferred", {"resident": "shell"}),
):
    model = tiny_bert()
    eps = attach_l2l(model, L2LConfig(device="cuda", eps_update=mode, **options))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
    for _ in range(3):
        train_once(model, batch_for(model))
        if mode != "eager":
            eps.clip_grad_norm_(0.1)
        optimizer.step()
    eps.synchronize()
torch.cuda.synchronize()
print("trained")
"""


@needs_cuda
def test_the_sanitizer_finds_no_race(monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_SANITIZER", "1")
    process = program(SANITIZED)
    out, errors = process.communicate(timeout=110)
    assert process.returncode == 0, errors[-4000:]
    assert "trained" in out
    assert "CSAN" not in errors, errors[-4000:]
