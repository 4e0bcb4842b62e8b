"""What is said where memory cannot be page-locked."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from hf_l2l.eps.host_memory import HostMemory
from hf_l2l.eps.masters import Masters
from hf_l2l.runtime import stream
from training import tiny_bert


@pytest.fixture(autouse=True)
def _devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All of them page-lock memory. It is gone before this ends: a real device would be asked to unlock it."""
    monkeypatch.setattr(stream, "can_page_lock", lambda device: True)
    monkeypatch.setattr(stream, "page_lock", lambda address, num_bytes, device: True)
    monkeypatch.setattr(stream, "page_unlock", lambda address, device: None)
    yield
    gc.collect()


def refused(device: str, monkeypatch: pytest.MonkeyPatch) -> HostMemory:
    monkeypatch.setattr(stream, "page_lock", lambda address, num_bytes, device: False)
    return HostMemory(torch.device(device, 0), Masters(tiny_bert()))


def test_the_warning_fails_no_test_on_a_gpu_machine(monkeypatch):
    """Other warnings are errors in the tests; so is this one, for a device that is no GPU."""
    refused("cuda", monkeypatch).adopt()
    with pytest.raises(UserWarning, match="could be page-locked for xpu:0"):
        refused("xpu", monkeypatch).adopt()


def test_tests_of_the_warning_see_it(monkeypatch):
    memory = refused("cuda", monkeypatch)
    with pytest.warns(UserWarning, match=r"0 bytes of .* for cuda:0, whose driver .* not ask `ulimit -l`"):
        memory.adopt()
    memory.adopt()
    memory.take_gradients()  # once is enough


def test_a_layer_counts_as_done_when_its_masters_have_moved():
    """Threads make the memory of later layers meanwhile."""
    model = tiny_bert()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    at = [p.data_ptr() for p in model.parameters()]
    moved: list[int] = []

    def counting(units, what):
        for unit in units:
            moved.append(sum(p.data_ptr() != was for p, was in zip(model.parameters(), at, strict=True)))
            yield unit

    memory = HostMemory(torch.device("cuda", 0), Masters(model), counting)
    memory.adopt()
    assert moved == list(range(len(at))), "one by one, since this engine knows of no layers"
    assert all(p.data_ptr() != was for p, was in zip(model.parameters(), at, strict=True))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
