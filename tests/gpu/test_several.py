"""Layers in turn on two CUDA devices: the bits of one, whatever the order of copies, and the bytes of each link.

In a rehearsal, on two simulated devices.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import pipelined
from gpu_machine import DEVICE, IS_CUDA, full, module
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.runtime import stream
from hf_l2l.testing import enable_simulated_accelerator
from pipelined import trained

MODES: list[dict[str, Any]] = [
    {},
    {"stash": "host", "boundary": "host"},
    {"cmp": "bf16", "stash": "host", "boundary": "device"},
    {"eps_update": "eager", "clips": False},
    {"resident_layers": 2},
]


@pytest.fixture(autouse=True, scope="module")
def _two() -> Iterator[None]:
    if not IS_CUDA:
        enable_simulated_accelerator("64GiB", devices=2)
    elif torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    yield
    if not IS_CUDA:
        enable_simulated_accelerator("64GiB")


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("family", ["bert", "llama", "t5"])
def test_two_devices_have_the_bits_of_one(family, mode):
    """Of equal GPUs; dropout draws what one would draw."""
    if IS_CUDA and torch.cuda.get_device_name(0) != torch.cuda.get_device_name(1):
        pytest.skip("the devices are not equal")
    torch.manual_seed(1)
    model, steps = pipelined.FAMILIES[family](), full(10, 2)
    one, two = (trained(copy.deepcopy(model), count, kind=DEVICE.type, steps=steps, **mode) for count in (1, 2))
    assert not two.differences(one)


def test_rows_pass_in_the_way_that_is_told(monkeypatch, caplog):
    """By copies on lanes of two devices, there and back, where these read each other's memory; else no rows come from
    the second device on one. The mask goes from the first one to the second one in any case. The bits are the same."""
    lanes: list[tuple[int, int]] = []
    entered = stream.PeerLane.entered

    def noted(self: stream.PeerLane) -> AbstractContextManager[None]:
        lanes.append((self.source.index, self.target.index))
        return entered(self)

    monkeypatch.setattr(stream.PeerLane, "entered", noted)
    caplog.set_level(logging.DEBUG, "hf_l2l")
    torch.manual_seed(1)
    model = pipelined.FAMILIES["bert"]()

    def trained_on_two() -> tuple[Any, set[tuple[int, int]], str]:
        lanes.clear()
        caplog.clear()
        found = trained(copy.deepcopy(model), 2, kind=DEVICE.type, steps=2)
        return found, set(lanes), caplog.text

    peers = [bool(module().can_device_access_peer(*pair)) for pair in ((0, 1), (1, 0))]
    found, used, said = trained_on_two()
    if all(peers):
        assert used == {(0, 1), (1, 0)} and "rows pass between them directly" in said
    elif not any(peers):
        assert (1, 0) not in used and "rows pass between them through memory of the host" in said
    monkeypatch.setattr(stream, "copies_directly", lambda source, target: False)
    through_host, used, said = trained_on_two()
    assert (1, 0) not in used and "rows pass between them through memory of the host" in said
    assert not through_host.differences(found)


def test_each_device_holds_its_part():
    """The second device has the stash of its layers, slots, and nothing of what is not in a layer."""
    torch.manual_seed(1)
    model = pipelined.FAMILIES["bert"]()
    eps = attach_l2l(model, L2LConfig(device=pipelined.devices(2, DEVICE.type), ubatch_size=2))
    for _ in range(2):
        model(**pipelined.batch_for(model)).loss.backward()
    report = eps.memory_report()
    other = report[f"{DEVICE.type}:1"]
    assert other["slots"]["peak"] == report["device"]["slots"]["peak"] > 0
    assert other["shell"]["peak"] == 0 < other["stash"]["peak"]
