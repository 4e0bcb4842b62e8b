"""Layers in turn on two CUDA devices: the bits of one, whatever the order of copies, and the bytes of each link.

In a rehearsal, on two simulated devices.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pipelined
from gpu_machine import DEVICE, IS_CUDA, full, module
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.runtime import stream
from hf_l2l.testing import enable_simulated_accelerator
from pipelined import trained

pytestmark = pytest.mark.gpu
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


def test_rows_pass_in_the_way_that_is_told():
    """By peer access if there is any."""
    assert stream.copies_directly(torch.device(DEVICE.type, 0), torch.device(DEVICE.type, 1)) == bool(
        module().can_device_access_peer(1, 0)
    )


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
