"""A device whose torch module has no streams of its own: torch's interface for any accelerator has them."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from hf_l2l.runtime import stream
from models import assert_same_bits
from training import tiny_bert, weights_after

SIM = torch.device("sim", 0)


class Accelerator(types.ModuleType):
    """`torch.accelerator` of a device in C++, with the streams of the simulated one."""

    current_stream = staticmethod(lambda device: torch.sim.current_stream(device))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.accelerator, name)


class Torch(types.ModuleType):
    """`torch` with a backend that has streams and events."""

    accelerator = Accelerator("accelerator")
    made: list[str] = []

    def Stream(self, *, device: torch.device) -> Any:
        self.made.append("stream")
        return torch.sim.Stream(device)

    def Event(self, device: str, *, enable_timing: bool = False) -> Any:
        assert device == "sim"
        self.made.append("timed event" if enable_timing else "event")
        return torch.sim.Event(enable_timing=enable_timing)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class Bare(types.ModuleType):
    """The module of a device, without names for streams."""

    def __getattr__(self, name: str) -> Any:
        if name in ("Stream", "Event", "stream"):
            raise AttributeError(name)
        return getattr(torch.sim, name)


def without_streams(patch: pytest.MonkeyPatch) -> None:
    of, bare = stream.device_module, Bare("torch.bare")
    patch.setattr(stream, "device_module", lambda device: bare if device.type == "sim" else of(device))


def test_copies_run_beside_the_computation_with_the_same_bits(monkeypatch, tmp_path):
    options: dict[str, Any] = {"count": 2, "stash": "host", "ubatch_size": 4}
    expected = weights_after(tiny_bert(layers=2), **options)
    with monkeypatch.context() as patch:
        without_streams(patch)
        patch.setattr(stream, "torch", Torch("torch"))
        assert stream.is_asynchronous(SIM)
        found = weights_after(tiny_bert(layers=2), **options, trace=str(tmp_path / "trace.json"))
    assert Torch.made.count("stream") > 2 and Torch.made.count("timed event") > 20
    assert_same_bits(found, expected)


def test_a_backend_without_streams_computes_in_program_order(monkeypatch):
    """torch then has one stream for the device, and no events."""
    without_streams(monkeypatch)
    assert not stream.is_asynchronous(SIM) and stream.record(SIM) is None
    weights_after(tiny_bert(layers=2), count=1, eps_update="deferred")


def test_memory_is_asked_of_the_module_or_of_torch(monkeypatch):
    module = types.ModuleType("torch.bare")
    monkeypatch.setattr(stream, "device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (30, 100))
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: {"reserved_bytes.all.current": 12})
    assert (stream.memory_of(SIM), stream.memory_free(SIM)) == (100, 42)
    module.mem_get_info = lambda device: (1, 7)
    assert (stream.memory_of(SIM), stream.memory_free(SIM)) == (7, 13)
    del module.mem_get_info

    def cannot(device: torch.device) -> tuple[int, int]:
        raise RuntimeError("the backend does not say")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", cannot)
    assert (stream.memory_of(SIM), stream.memory_free(SIM)) == (None, None)
