"""Views where host and device are one memory, copies elsewhere; points and waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType

import pytest
import torch

from hf_l2l import L2LConfig, attach_l2l, devices
from hf_l2l.runtime import stream
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
    with pytest.raises(ValueError, match=r"must be one this machine has \(got cuda:4\)"):
        devices.execution_device("cuda:4")


# ---- points in the work of a stream


class FakeModule:
    """A device module whose streams and events note what they are told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []
        told = self.told

        class Event:
            def __init__(self, *, blocking: bool = False) -> None:
                assert blocking, "a thread of the host that waits for a CUDA event sleeps"

            def record(self, on: object) -> None:
                told.append(("record", on))

            def wait(self, on: object) -> None:
                told.append(("wait", on))

            def synchronize(self) -> None:
                told.append(("synchronize",))

            def query(self) -> bool:
                return False

        self.Event, self.Stream, self.stream = Event, object, nullcontext

    def current_stream(self, device: torch.device) -> str:
        return f"the current stream of {device}"


def test_waits_are_of_the_execution_device_and_not_of_the_current_one(monkeypatch):
    module, second = FakeModule(), torch.device("cuda", 1)
    monkeypatch.setattr(stream, "device_module", lambda device: module)
    point = stream.record(second)
    stream.wait(point, "a test")
    stream.wait(point, "a test", host=True)
    here = "the current stream of cuda:1"
    assert module.told == [("record", here), ("wait", here), ("synchronize",)]


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


@pytest.mark.parametrize("lacks", [["get_rng_state"], ["is_available", "device_count"], ["set_rng_state"]])
def test_a_device_module_that_lacks_functions_is_refused_when_the_model_is_attached(lacks, monkeypatch):
    module = ModuleType("torch.other")
    for name in ("is_available", "device_count", "get_rng_state", "set_rng_state"):
        if name not in lacks:
            setattr(module, name, lambda *args: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    model = tiny_bert()
    with pytest.raises(ValueError) as raised:
        attach_l2l(model, L2LConfig(device="xpu"))
    assert "must have is_available, device_count, get_rng_state, set_rng_state" in str(raised.value)
    assert f"torch.other has no {', '.join(lacks)})" in str(raised.value)
    assert not hasattr(model, "_hf_hook") and all(type(m).__name__ != "L2LHook" for m in model.modules())


def test_a_device_module_with_no_more_than_is_needed_computes_in_program_order(monkeypatch):
    module = ModuleType("torch.other")
    for name in ("is_available", "device_count", "get_rng_state", "set_rng_state"):
        setattr(module, name, lambda *args: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
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
