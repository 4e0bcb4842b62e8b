"""Inputs and buffers are uploaded without a wait of the host, and may be written to right after the call; memory for
uploads is page-locked when a model is attached and in its first step."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l import attach_l2l
from hf_l2l.eps.host_memory import HostMemory, SmallTensors
from hf_l2l.eps.masters import Masters
from hf_l2l.runtime import stream
from hf_l2l.runtime.tensors import SMALL, sent, to_device
from models import Toy, assert_same_bits, attached, batch_for, bert, gpt2, gradients, train_once
from runs import attach, config_for
from tiers import more, nightly

SIM = torch.device("sim", 0)


@pytest.fixture(autouse=True)
def _nothing_refused(monkeypatch):
    """Other tests of this process let the device refuse to page-lock memory."""
    monkeypatch.setattr(stream, "last_refusal", lambda device: None)


class Busy:
    """A download that the device has been given, which the host has not waited for; a blocking copy waits, too."""

    def __init__(self) -> None:
        self.source, self.target = torch.ones(4, device=SIM), torch.zeros(4).pin_memory()
        self.target.copy_(self.source, non_blocking=True)
        self.event = torch.sim.current_stream().record_event()

    @property
    def is_waited_for(self) -> bool:
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
        before, arrived = tensor.detach().clone(), [to_device(tensor, SIM)]
        assert (arrived[0].device, arrived[0].dtype, arrived[0].shape) == (SIM, tensor.dtype, tensor.shape)
        assert arrived[0].stride() == tensor.to(SIM).stride() and arrived[0].requires_grad == tensor.requires_grad
        if kinds is SMALL_ONES:
            arrived.append(sent(tensor, SIM, tensor.dtype, SMALL, copy=True))
            tensor.fill_(9)
        torch.sim.synchronize()
        assert all(torch.equal(each.cpu(), before) for each in arrived), name
        if tensor.is_floating_point() and kinds is SMALL_ONES:
            busy, rounded = Busy(), sent(before, SIM, torch.bfloat16, SMALL)
            assert not busy.is_waited_for and torch.equal(rounded.cpu(), before.bfloat16())
        if tensor.requires_grad:
            arrived[0].square().sum().backward()
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
    monkeypatch.setattr(stream, "can_page_lock", lambda device: why != "cannot")
    monkeypatch.setattr(stream, "last_refusal", lambda device: 2 if why == "has refused" else None)
    assert waits_for(x)
    assert torch.equal(to_device(x, SIM).cpu(), x)


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


def test_a_program_may_write_to_buffers_between_calls():
    plain = Toy(dropout=0.0, buffers=True)
    model = copy.deepcopy(plain)
    attach_l2l(model, config_for(model, device="sim"))
    for _ in range(4):
        for each in (plain, model):
            each.zero_grad()
            train_once(each, batch_for(each, masked=False))
            for layer in each.blocks:  # the upload may still be under way for all that the program knows
                layer.seen += 5
                layer.mean.data.mul_(0.5)  # a write that no version tells
        torch.sim.synchronize()
        assert_same_bits(gradients(model), gradients(plain))
        assert_same_bits(dict(model.named_buffers()), dict(plain.named_buffers()))


def test_the_host_does_not_wait_for_buffers(monkeypatch):
    """Of GPT-2, whose shell and layers have none that are written to."""
    model = attached(gpt2(), device="sim")
    for layer in model.transformer.h:
        layer.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool).tril())
    uploads, to = [], torch.Tensor.to

    def recording(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if tensor.device.type == "cpu" and tensor.shape == (64, 64) and args[0] == SIM:
            uploads.append(kwargs.get("non_blocking", False))
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", recording)
    train_once(model, batch_for(model))
    assert uploads == [True] * 4, "two layers, forward and backward"


# ---- memory is page-locked at attach and in the first step, not in the midst of later ones


@pytest.fixture
def registrations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each registration, in order."""
    found, lock = [], stream.page_lock
    monkeypatch.setattr(stream, "page_lock", lambda at, size, device: found.append(size) or lock(at, size, device))
    return found


def steps(model: nn.Module, batches: list[dict[str, Any]], registrations: list[int], **options: Any) -> list[int]:
    """Train `model` as a program does; how many registrations there were after each step."""
    model, eps, optimizer, _ = attach(model, **options)
    done = []
    for batch in batches:
        model(**batch).loss.backward()
        optimizer.step()
        model.zero_grad()
        done.append(len(registrations))
    eps.synchronize()
    return done


@nightly
@pytest.mark.parametrize("options", [{"cmp": "bf16", "stash": "host"}, {}, {"eps_update": "eager"}], ids=str)
def test_nothing_is_registered_after_the_first_steps(options, registrations):
    """Without a stash on the host there is one for masters and one for gradients, of each layer and of each parameter
    that is in none, and one for the norms of all."""
    model = bert(num_hidden_layers=5)
    in_layers = {id(p) for p in model.bert.encoder.layer.parameters()}
    groups = 5 + sum(id(p) not in in_layers for p in model.parameters())
    first, second, *rest = steps(model, [batch_for(model)] * 5, registrations, **options)
    assert first >= groups and rest == [second] * 3
    assert options or second == 2 * groups + 1


@nightly
def test_batches_that_slowly_become_longer_seldom_register(registrations):
    """In four steps each time that the length doubles, with the bits of a stash on the device."""
    lengths, found = range(4, 13), []
    for stash in ("device", "host"):
        model = Toy(2)
        batch = batch_for(model, masked=False)
        batches = [{name: value.repeat(1, 3)[:, :tokens] for name, value in batch.items()} for tokens in lengths]
        done = steps(model, batches, registrations, stash=stash)
        found.append(dict(model.named_parameters()))
    registering = sum(now > before for before, now in itertools.pairwise(done))
    assert 0 < registering <= 4 * math.log2(lengths[-1] / lengths[0])
    assert_same_bits(*found)


@nightly
def test_gradients_have_the_same_bits_when_norms_need_more_memory():
    """A layer that is called several times sends norms each time."""
    plain, model = Toy(1, dropout=0.0, calls=24), Toy(1, dropout=0.0, calls=24)
    attach_l2l(model, config_for(model, device="sim"))
    for _ in range(2):
        for each in (plain, model):
            each.zero_grad()
            train_once(each, batch_for(each, masked=False))
        assert_same_bits(gradients(model), gradients(plain))


@pytest.fixture
def small() -> SmallTensors:
    return SmallTensors(HostMemory(torch.device("sim", 0), Masters(nn.Linear(1, 1))), "numbers")


def test_small_tensors_lie_apart_and_keep_their_kind(small):
    shapes = {torch.float32: (3,), torch.bfloat16: (5,), torch.float64: (2, 2), torch.uint8: (1,), torch.int64: ()}
    kinds = [*shapes.items()] * 20
    for _ in range(3):
        made = [small.tensor_like(torch.empty(shape, dtype=dtype), 64) for dtype, shape in kinds]
        for number, tensor in enumerate(made):
            tensor.fill_(number)
        assert [(t.dtype, tuple(t.shape)) for t in made] == kinds
        assert all(bool((tensor == number).all()) and tensor.is_pinned() for number, tensor in enumerate(made))
        del made, tensor
        small.drop()


def test_small_tensors_register_at_doubling_sizes_and_keep_their_memory_while_they_are_used(small, registrations):
    for turn in range(3):
        made = [small.tensor_like(torch.empty(1, dtype=torch.float64), 16) for _ in range(1000)]
        assert len({tensor.data_ptr() for tensor in made}) == 1000
        assert [-(-size // 16) for size in registrations] == [1, 2, 4, 8, 16, 32, 64, 128, 256], f"turn {turn}"
        del made
        small.drop()
    first = small.tensor_like(torch.empty(4), 16)
    for value in range(3):  # a program that always keeps the last one
        first.fill_(7)
        small.drop()
        second = small.tensor_like(torch.empty(4), 16).fill_(value)
        assert first.tolist() == [7] * 4 and second.tolist() == [value] * 4
        first = second
        del second
