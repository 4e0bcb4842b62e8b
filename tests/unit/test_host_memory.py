"""What is said where memory cannot be page-locked, what has moved when a layer is done, and what shares memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from hf_l2l.eps.host_memory import HostMemory
from hf_l2l.eps.masters import Masters
from hf_l2l.runtime import stream
from hf_l2l.runtime.tensors import sharing_memory
from models import Toy


@pytest.fixture(autouse=True)
def _devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All of them page-lock memory. It is gone before this ends: a real device would be asked to unlock it."""
    monkeypatch.setattr(stream, "can_page_lock", lambda device: True)
    monkeypatch.setattr(stream, "page_lock", lambda address, num_bytes, device: True)
    monkeypatch.setattr(stream, "page_unlock", lambda address, device: None)
    yield
    gc.collect()


def test_the_warning_is_said_once_and_fails_no_test_on_a_gpu_machine(monkeypatch):
    """Other warnings are errors in the tests; so is this one, for a device that is no GPU."""
    monkeypatch.setattr(stream, "page_lock", lambda address, num_bytes, device: False)
    cuda, again, xpu = (HostMemory(torch.device(kind, 0), Masters(Toy())) for kind in ("cuda", "cuda", "xpu"))
    cuda.adopt()
    with pytest.raises(UserWarning, match="could be page-locked for xpu:0"):
        xpu.adopt()
    with pytest.warns(UserWarning, match="for cuda:0"):
        again.adopt()
    again.adopt()
    again.take_gradients()  # once is enough


def test_a_layer_counts_as_done_when_its_masters_have_moved():
    """Threads make the memory of later layers meanwhile."""
    model = Toy()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    at = [p.data_ptr() for p in model.parameters()]
    moved: list[int] = []

    def counting(units, what):
        for unit in units:
            moved.append(sum(p.data_ptr() != was for p, was in zip(model.parameters(), at, strict=True)))
            yield unit

    HostMemory(torch.device("cuda", 0), Masters(model), counting).adopt()
    assert moved == list(range(len(at))), "one by one, since this engine knows of no layers"
    assert all(p.data_ptr() != was for p, was in zip(model.parameters(), at, strict=True))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def overlapping(one: torch.Tensor, other: torch.Tensor) -> bool:
    bytes_of = [{t.data_ptr() + 4 * i for i in range(t.numel())} for t in (one, other)]
    return bool(bytes_of[0] & bytes_of[1])


def test_sharing_is_found_between_any_two_of_many():
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        memory = torch.zeros(40)
        bounds = torch.randint(0, 20, (6, 2), generator=generator).tolist()
        every = [nn.Parameter(memory[start : start + size]) for start, size in bounds]
        expected = {a for a in every if any(a is not b and overlapping(a, b) for b in every)}
        assert sharing_memory(every) == expected
