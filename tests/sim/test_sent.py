"""Inputs and buffers are uploaded without a wait of the host, and may be written to right after the call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.runtime import stream
from hf_l2l.runtime.tensors import SMALL, sent, to_device
from models import assert_same_bits, attached, batch_for, bert, gpt2, gradients, train_once
from tiers import more

SIM = torch.device("sim", 0)


@pytest.fixture(autouse=True)
def _nothing_refused(monkeypatch):
    """Other tests of this process let the device refuse to page-lock memory."""
    monkeypatch.setattr(stream, "last_refusal", lambda device: None)


class Busy:
    """A download that the device has been given, which the host has not waited for."""

    def __init__(self) -> None:
        values = torch.ones(4, device=SIM)
        self.target = torch.zeros(4).pin_memory()
        self.target.copy_(values, non_blocking=True)
        self.event = torch.sim.Event()
        self.event.record()

    @property
    def is_waited_for(self) -> bool:
        """Whether the host has waited for it, for which a blocking copy is enough."""
        return bool(self.event.query())


def waits_for(value: Any) -> bool:
    """Whether the host waits for the device while `value` is uploaded."""
    busy = Busy()
    assert not busy.is_waited_for
    to_device(value, SIM)
    return busy.is_waited_for


SMALL_ONES = {
    "numbers": lambda: torch.arange(24).view(4, 6),
    "as many bytes as are small": lambda: torch.zeros(SMALL, dtype=torch.uint8),
    "transposed": lambda: torch.randn(3, 4).T,
    "scalar": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0, 3),
    "page-locked": lambda: torch.randn(5).pin_memory(),
    "part of another": lambda: torch.arange(12.0)[3:7],
}
OTHERS = {
    "large": lambda: torch.zeros(SMALL + 1, dtype=torch.uint8),
    "with gaps": lambda: torch.arange(12)[::2],
    "repeated": lambda: torch.arange(3).expand(4, 3),
    "with a gradient": lambda: torch.randn(3, requires_grad=True),
    "parameter": lambda: nn.Parameter(torch.randn(3), requires_grad=False),
}


@pytest.mark.parametrize("kinds", [SMALL_ONES, OTHERS], ids=["small", "others"])
def test_what_is_sent_arrives_as_it_was(kinds):
    """The host waits for none of the small ones, which may be written to at once: the simulated accelerator notices
    writes to memory that an upload may still read."""
    for name, make in kinds.items():
        tensor = make()
        assert waits_for([tensor]) == (kinds is OTHERS), name
        before, arrived = tensor.detach().clone(), to_device(tensor, SIM)
        assert (arrived.device, arrived.dtype, arrived.shape) == (SIM, tensor.dtype, tensor.shape)
        assert arrived.stride() == tensor.to(SIM).stride() and arrived.requires_grad == tensor.requires_grad
        copied = [sent(tensor, SIM, tensor.dtype, SMALL, copy=True)] if kinds is SMALL_ONES else []
        if copied:
            tensor.fill_(9)
        torch.sim.synchronize()
        assert all(torch.equal(each.cpu(), before) for each in (arrived, *copied)), name
        if tensor.requires_grad:
            arrived.square().sum().backward()
            assert torch.equal(tensor.grad, 2 * tensor)


@pytest.mark.parametrize("why", ["cannot", "has refused", "fails"])
def test_a_device_that_page_locks_nothing_is_waited_for(why, monkeypatch):
    """It is not asked if that is known."""
    pin, x = torch.Tensor.pin_memory, torch.randn(3)

    def asked(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        if tensor.shape == (3,):  # the one that is sent
            assert why == "fails"
            raise RuntimeError("CUDA error: out of memory")
        return pin(tensor, *args)

    monkeypatch.setattr(torch.Tensor, "pin_memory", asked)
    if why == "cannot":
        monkeypatch.setattr(stream, "can_page_lock", lambda device: False)
    elif why == "has refused":
        monkeypatch.setattr(stream, "last_refusal", lambda device: 2)
    assert waits_for(x)
    assert torch.equal(to_device(x, SIM).cpu(), x)


def test_a_tensor_in_another_dtype_is_rounded_as_torch_rounds():
    x = torch.randn(1000)
    busy = Busy()
    arrived = sent(x, SIM, torch.bfloat16, SMALL)
    assert not busy.is_waited_for and arrived.dtype == torch.bfloat16
    assert torch.equal(arrived.cpu(), x.bfloat16())


@pytest.mark.parametrize("page_locked", [True, *more(False)])
def test_a_batch_may_be_overwritten_right_after_the_call(page_locked):
    """As a program does that reads all its batches into the same memory."""
    plain = bert()
    model = attached(copy.deepcopy(plain), device="sim")
    train_once(plain, batch_for(plain))
    batch = batch_for(model)
    if page_locked:
        batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
    loss = model(**batch).loss
    for tensor in batch.values():
        tensor.fill_(0)
    loss.backward()
    torch.sim.synchronize()
    assert_same_bits(gradients(model), gradients(plain))


# ---- buffers inside layers


class Masked(nn.Module):
    """A layer with a mask, a count that each call changes, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.register_buffer("mask", torch.ones(6, 6).tril())
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.norm(self.linear(x) @ self.mask)


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Masked() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_program_may_write_to_buffers_between_calls():
    plain = Stacked()
    model = copy.deepcopy(plain)
    attach_l2l(model, L2LConfig(device="sim", layer_classes=("Masked",)))
    for turn in range(4):
        x = torch.randn(5, 6)
        for each in (plain, model):
            each.zero_grad()
            each(x).backward()
            for layer in each.layers:  # the upload may still be under way for all that the program knows
                layer.mask[turn] = 0.5
                layer.norm.running_mean.data.mul_(0.5)  # a write that no version tells
        torch.sim.synchronize()
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
        for (name, ours), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, msg=name)


def test_the_host_does_not_wait_for_buffers(monkeypatch):
    """Of GPT-2, whose shell and layers have none that are written to."""
    model = attached(gpt2(), device="sim")
    for layer in model.transformer.h:
        layer.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool).tril())
    batch, uploads = batch_for(model), []
    to = torch.Tensor.to

    def recording(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if tensor.device.type == "cpu" and tensor.shape == (64, 64) and args[0] == SIM:
            uploads.append(kwargs.get("non_blocking", False))
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", recording)
    model(**batch).loss.backward()
    assert uploads == [True] * 4, "two layers, forward and backward"
