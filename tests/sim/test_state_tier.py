"""State on disk with a device of its own: the same bits, and uploads through page-locked memory of one layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_l2l import L2LConfig, attach_l2l, estimate
from hf_l2l.hf.attach import attachment_of
from hf_l2l.state_tier import server
from hf_l2l.testing import sim_stream
from models import assert_same_bits
from timed_machine import Machine, Stack, timed_step
from training import batch_for, tiny_bert, weights_after


@pytest.fixture(autouse=True)
def on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of tests count as such, wherever they are."""
    monkeypatch.setattr(server, "is_in_memory", lambda folder: False)
    monkeypatch.setattr("hf_l2l.state_tier.state._SMALL", 64)  # models of tests are small


OPTIONS: list[dict[str, Any]] = [
    {},
    {"cmp": "bf16"},
    {"cmp": "bf16", "host_copies": "per_sweep"},
    {"moment_dtype": "bf16", "grad_dtype": "16bit"},
    {"stash": "host", "boundary": "host"},
    {"resident": "shell"},
    {"resident_layers": 1, "resident_update": "host"},
    {"kept_weights": 1, "kept_graphs": 1},
    {"gradient_slots": 1},
    {"prefetch": False},
]


@pytest.mark.parametrize(
    "mode", ["deferred", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("eager", "serial"))]
)
@pytest.mark.parametrize(
    "options",
    [each if "host_copies" in each else pytest.param(each, marks=pytest.mark.slow) for each in OPTIONS],
    ids=str,
)
def test_the_bits_are_those_of_state_in_memory(options, mode, tmp_path):
    if mode == "serial" and options:
        options = {**options, "ubatch_size": 5}
    same = {"ubatch_size": 3, "eps_update": mode, "clips": mode != "eager", "accumulation": 2, **options}
    expected = weights_after(tiny_bert(layers=3, width=32), **same)
    on_disk = {"state_tier": "disk", "state_dir": tmp_path, "state_window": 3}
    assert_same_bits(weights_after(tiny_bert(layers=3, width=32), **on_disk, **same), expected)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 16))])
def test_when_copies_land_changes_no_bit(seed, tmp_path):
    expected = weights_after(tiny_bert(layers=3, width=32), count=2)
    with sim_stream.random_landing(seed):
        model = tiny_bert(layers=3, width=32)
        found = weights_after(model, count=2, state_tier="disk", state_dir=tmp_path, state_window=3)
    assert_same_bits(found, expected)


def test_masters_are_not_page_locked_but_what_travels_is(tmp_path):
    """Two layers are page-locked for uploads, and the gradients."""
    model = tiny_bert(layers=4, width=32)
    eps = attach_l2l(model, L2LConfig(device="sim", state_tier="disk", state_dir=tmp_path))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        model(**batch_for(model)).loss.backward()
        optimizer.step()
    eps.synchronize()
    gradients = sum(m.gradient_room.num_bytes for m in eps.masters.all() if m.gradient_room is not None)
    slots = attachment_of(model).relay.devices[0].weight_slots
    assert slots.staged_bytes == 2 * max(unit.layout.num_bytes for unit in eps.masters.layer_units)
    assert eps.memory.bytes_locked < 2 * gradients + 2 * slots.staged_bytes


MACHINE = Machine(layers=12, ubatches=4, forward_s=1.0, transfer_s=1.0, optimizer_s=12.0)


@pytest.mark.parametrize("window", [3, 6])
def test_a_step_that_the_disk_bounds_takes_as_long_as_the_estimate_says(window, tmp_path):
    """The bytes that it reads and writes, and what nothing overlaps with: the end of the last update."""
    slow = replace(MACHINE, disk_s=200.0)
    model = Stack(slow.layers)
    config = L2LConfig(state_window=window, state_tier="disk", layer_classes=("Block",), eps_update="serial")
    found = estimate(model, config, device="sim")
    clock = timed_step(slow, state_tier="disk", state_dir=tmp_path, state_window=window)
    traffic = found.state_traffic
    seconds = (traffic.read + traffic.written) / slow.costs().disk_bytes_per_s
    assert clock.busy("disk") == pytest.approx(seconds, rel=0.1)
    assert clock.end == pytest.approx(seconds, rel=0.1)


def test_a_fast_disk_delays_nothing_but_the_first_read(tmp_path):
    """Reads and writes travel under computation and updates."""
    fast = replace(MACHINE, disk_s=0.5)
    clock = timed_step(fast, state_tier="disk", state_dir=tmp_path, state_window=4)
    assert clock.busy("disk") > 5.0
    assert clock.end == pytest.approx(timed_step(MACHINE, eps_update="serial").end, rel=0.06)
