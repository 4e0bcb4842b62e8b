"""After a fault on a CUDA device: the next step is right, and a process ends."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from gpu_machine import DEVICE, IS_CUDA, module, needs_cuda, program
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.testing import enable_simulated_accelerator
from models import gradients, relative_error


@pytest.fixture(autouse=True, scope="module")
def _of_some_size() -> None:
    if not IS_CUDA:
        enable_simulated_accelerator("64GiB")


class Greedy(nn.Module):
    """A layer that takes, in the recompute of a large batch, more memory than any device has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and len(x) > 4:
            torch.empty(2**45, dtype=torch.uint8, device=x.device)
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Greedy() for _ in range(4)))
        self.head = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x)).square().mean()


@pytest.mark.parametrize("mode", ["serial", "deferred"])
@pytest.mark.parametrize("stash", ["device", "host"])
def test_a_smaller_batch_is_right_after_one_that_was_out_of_memory(stash, mode):
    torch.manual_seed(3)
    model, small, large = Model(), torch.randn(4, 32), torch.randn(8, 32)
    model(small).backward()
    expected = gradients(model)
    model.zero_grad()
    eps = attach_l2l(
        model, L2LConfig(device=DEVICE, layer_classes=("Greedy",), stash=stash, ubatch_size=8, eps_update=mode)
    )
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            model(large.to(DEVICE)).backward()
        optimizer.zero_grad()
        model(small.to(DEVICE)).backward()
        assert relative_error(gradients(model), expected) <= 1e-4
        optimizer.step()
        optimizer.zero_grad()
    eps.synchronize()
    module().synchronize()


PENDING = """
import sys
import time
import torch
from torch import nn
from hf_l2l import L2LConfig, attach_l2l

width = 4096 if gpu_machine.IS_CUDA else 64
model = nn.Sequential(*(nn.Linear(width, width) for _ in range(6)))
config = L2LConfig(device=gpu_machine.DEVICE, layer_classes=("Linear",), eps_update="deferred", num_threads=1)
eps = attach_l2l(model, config)
optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
for _ in range(2):
    model(torch.randn(2, width, device=gpu_machine.DEVICE)).square().mean().backward()
    optimizer.step()
print("stepped", flush=True)
"""
ENDS = {"the end": ("", 0), "exit": ("sys.exit(7)", 7), "an exception": ("raise KeyError('stop')", 1)}


@pytest.mark.parametrize("how", ENDS)
def test_a_process_ends_with_an_update_pending(how):
    last, status = ENDS[how]
    process = program(PENDING + last)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "stepped\n"
        start = time.monotonic()
        _, errors = process.communicate(timeout=30)
        assert time.monotonic() - start < 10
    finally:
        process.kill()
    assert process.returncode == status, errors
    assert ("Traceback" in errors) == (how == "an exception"), errors


# ---- CUDA's sanitizer, as torch has it, finds no race between streams


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
@pytest.mark.timeout(120)
def test_the_sanitizer_finds_no_race(monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_SANITIZER", "1")
    process = program(SANITIZED)
    out, errors = process.communicate(timeout=110)
    assert process.returncode == 0, errors[-4000:]
    assert "trained" in out
    assert "CSAN" not in errors, errors[-4000:]
