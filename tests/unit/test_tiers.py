"""Where the stash is kept: as asked, or the first tier that it fits; and when rows that were sent there are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l import L2LConfig
from hf_l2l.eps.host_memory import HostMemory
from hf_l2l.runtime import stream
from hf_l2l.runtime.stream import HOST
from hf_l2l.stash import tiers
from hf_l2l.stash.arrivals import Arrivals
from hf_l2l.stash.tiers import Tiers
from memory_switches import forced_copies

GIB = 2**30


@pytest.fixture
def apart() -> Iterator[None]:
    """The device has memory of its own."""
    with forced_copies():
        yield


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tiers]:
    """Tiers of a model of 10 layers on a device of 8 GiB, beside 40 GiB of host memory."""
    monkeypatch.setattr(stream, "memory_of", lambda device: 8 * GIB)
    monkeypatch.setattr(tiers, "available_host_bytes", lambda: 40 * GIB)

    def make(stash: str = "auto", to_come: int = 0, devices: int = 1, **options: Any) -> Tiers:
        config = L2LConfig(stash=stash, spill_dir=tmp_path if stash in ("disk", "auto") else None, **options)
        memory = HostMemory(HOST, nn.Module())
        return Tiers(config, [HOST] * devices, memory, layers=10, bytes_to_come=lambda: to_come)

    return make


def of_bytes(num_bytes: float) -> torch.Tensor:
    return torch.empty(int(num_bytes), dtype=torch.uint8, device="meta")


def choice(of: Tiers, needed: float) -> str:
    """For a stash of so many bytes in all."""
    of.start_forward()
    return of.tier_of(of_bytes(needed // 10))


def test_each_of_several_devices_takes_the_inputs_of_its_own_layers(apart, made):
    """Of 10 layers, one of 4 devices has at most 3; an eighth of the device, three quarters of the host."""
    of = made(devices=4)
    sizes = (10 / 3 * GIB, 3.35 * GIB, 30 * GIB, 30.01 * GIB)
    assert [choice(of, size) for size in sizes] == ["device", "host", "host", "disk"]


def test_what_the_first_step_will_take_is_left_free(apart, made):
    of = made(to_come=20 * GIB)
    assert [choice(of, size) for size in (15 * GIB, 15.01 * GIB, 30 * GIB)] == ["host", "disk", "disk"]
    assert choice(made(to_come=50 * GIB), 2 * GIB) == "disk"


def test_host_memory_that_the_stash_has_already_counts_as_free(apart, made, monkeypatch):
    """Ten rooms of a MiB each, which a device has that copies beside the host."""
    monkeypatch.setattr(stream, "is_asynchronous", lambda device: True)
    monkeypatch.setattr(tiers, "available_host_bytes", lambda: 0)
    like = torch.empty(2**20, dtype=torch.uint8)
    of = made(boundary="host")
    assert choice(of, 7 * 2**20) == "disk"
    monkeypatch.setattr(tiers, "available_host_bytes", lambda: GIB)
    assert choice(of, 10 * 2**20) == "host"
    kept = [of.tensor_like(like) for _ in range(10)]
    of.settle()
    assert of.host_bytes() == sum(each.nbytes for each in kept)
    monkeypatch.setattr(tiers, "available_host_bytes", lambda: 0)
    assert [choice(of, size) for size in (7.4 * 2**20, 7.6 * 2**20, 15 * 2**20)] == ["host", "disk", "disk"]


def test_where_a_place_is_missing_the_next_one_is_taken(apart, made, monkeypatch):
    of = made(boundary="host")
    assert [choice(of, size) for size in (GIB, 31 * GIB)] == ["host", "disk"]
    monkeypatch.setattr(stream, "memory_of", lambda device: None)
    assert [choice(made(), size) for size in (1, 31 * GIB)] == ["host", "disk"]
    monkeypatch.setattr(tiers, "can_spill", lambda: False)
    assert choice(made(), 31 * GIB) == "host"


def test_the_first_layer_input_decides_for_a_forward(apart, made):
    of = made()
    of.start_forward()
    assert [of.tier_of(of_bytes(size)) for size in (4 * GIB, 1)] == ["disk", "disk"]
    of.start_forward()
    assert [of.tier_of(of_bytes(size)) for size in (1, 4 * GIB)] == ["device", "device"]
    for stash in ("device", "host", "disk"):
        assert choice(made(stash), 1) == choice(made(stash), 99 * GIB) == stash, "what was asked for"


def test_where_memory_is_shared_only_a_file_is_another_place(made):
    assert [choice(made(stash), 99 * GIB) for stash in ("device", "host", "auto", "disk")] == ["device"] * 3 + ["disk"]
    assert made().file is None


# ---- when rows are there


def test_rows_have_the_point_of_their_copy():
    arrivals, memory = Arrivals(), torch.empty(6, 2)
    assert arrivals.of(memory) == []
    arrivals.begin(memory)
    arrivals.add(memory[:2], "first")
    arrivals.add(memory[2:4], "second")
    assert [arrivals.of(memory[i : i + 2]) for i in (0, 2)] == [["first"], ["second"]]
    # Rows that were cut in another way, or not sent at all, are there when all are.
    assert (
        arrivals.of(memory[:3]) == arrivals.of(memory.view(-1)[:4]) == arrivals.of(memory[4:]) == ["first", "second"]
    )
    arrivals.add(memory[4:], None)  # it was there at once
    assert arrivals.of(memory[4:]) == [] and arrivals.of(memory) == ["first", "second"]


def test_memory_that_lies_across_earlier_memory_replaces_it():
    arrivals, memory = Arrivals(), torch.empty(12)
    for start in (0, 4, 8):
        arrivals.begin(memory[start : start + 4])
        arrivals.add(memory[start : start + 4], f"from {start}")
        arrivals.was_read(memory[start : start + 4], f"read {start}")
    arrivals.begin(memory[3:9], "allocated")
    assert arrivals.free(memory[4:6]) == ["allocated", "read 8", "read 4", "read 0"]
    assert arrivals.of(memory[:3]) == arrivals.of(memory[10:]) == []  # their memory is no more theirs
    arrivals.add(memory[3:9], "across")
    assert arrivals.of(memory[4:6]) == ["across"]
