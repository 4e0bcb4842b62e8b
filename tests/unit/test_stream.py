"""Which device executes, and what is asked of its module: page-locking, generators, waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch

from hf_l2l import L2LConfig, attach_l2l, devices
from hf_l2l.runtime import stream
from hf_l2l.runtime.stream import HOST
from training import tiny_bert


def test_the_current_accelerator_executes_if_it_is_available(monkeypatch):
    checked = []

    def current_accelerator(check_available: bool = False) -> torch.device:
        checked.append(check_available)
        return torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert devices.execution_device(None) == torch.device("cuda", 3)
    assert checked == [True]
    assert devices.execution_device("cuda") == torch.device("cuda", 3)
    assert devices.execution_device("cuda:1") == torch.device("cuda", 1)
    assert devices.execution_device("cpu:0") == devices.execution_device(HOST) == HOST
    with pytest.raises(ValueError, match=r"must be one this machine has \(got cuda:4\)"):
        devices.execution_device("cuda:4")


# ---- page-locking


class FakeCuda:
    """A device module whose calls fail; as with CUDA, the next kernel launch of the device reports their error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.last_error = "another device", 0
        monkeypatch.setattr(stream, "device_module", lambda device: self)
        monkeypatch.setattr(torch, "zeros", self.launch)

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.current = str(device)
        yield
        self.current = "another device"

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 1, "cudaHostRegisterPortable: other devices copy this memory, too"
        return self.fails(2)

    def cudaHostUnregister(self, address: int) -> int:
        return self.fails(713)

    def fails(self, code: int) -> int:
        assert self.current == "cuda:77"
        self.last_error = code
        return code

    def launch(self, *size: int, device: torch.device) -> None:
        assert self.current == str(device) == "cuda:77"
        code, self.last_error = self.last_error, 0
        if code:
            raise RuntimeError(f"CUDA error {code}, of a call before")


def test_no_kernel_reports_that_page_locking_was_refused(monkeypatch):
    cuda, device = FakeCuda(monkeypatch), torch.device("cuda", 77)
    assert stream.last_refusal(device) is None
    assert not stream.page_lock(4096, 4096, device)
    assert cuda.last_error == 0 and stream.last_refusal(device) == 2
    stream.page_unlock(4096, device)
    assert cuda.last_error == 0 and stream.last_refusal(device) == 2


def test_a_wait_without_a_reason_is_a_mistake():
    with pytest.raises(AssertionError, match="reason"):
        stream.wait(None, "")


def other_module(*lacks: str) -> ModuleType:
    module = ModuleType("torch.other")
    for name in ("is_available", "device_count", "get_rng_state", "set_rng_state"):
        if name not in lacks:
            setattr(module, name, lambda *args: 1)
    return module


def test_a_device_module_that_lacks_functions_is_refused_when_the_model_is_attached(monkeypatch):
    lacks = ["is_available", "device_count"]
    monkeypatch.setattr(torch, "get_device_module", lambda device: other_module(*lacks))
    model = tiny_bert()
    with pytest.raises(ValueError) as raised:
        attach_l2l(model, L2LConfig(device="xpu"))
    assert "must have is_available, device_count, get_rng_state, set_rng_state" in str(raised.value)
    assert f"torch.other has no {', '.join(lacks)})" in str(raised.value)
    assert not hasattr(model, "_hf_hook") and all(type(m).__name__ != "L2LHook" for m in model.modules())


def test_a_device_module_with_no_more_than_is_needed_computes_in_program_order(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device: other_module())
    device = devices.execution_device("xpu:0")
    assert device == torch.device("xpu", 0)
    assert not stream.is_asynchronous(device) and not stream.can_page_lock(device) and stream.record(device) is None


def test_a_cache_is_emptied_by_the_module_or_by_torch_accelerator(monkeypatch):
    """A device in C++ that torch knows by a name alone has a module without such a function."""
    emptied = []
    module = ModuleType("torch.other")
    monkeypatch.setattr(stream, "device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append("accelerator"))
    stream.empty_cache(torch.device("xpu", 0))
    module.empty_cache = lambda: emptied.append("module")
    stream.empty_cache(torch.device("xpu", 0))
    assert emptied == ["accelerator", "module"]
