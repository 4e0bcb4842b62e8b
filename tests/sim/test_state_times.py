"""State on disk with a device of its own: when copies land, what is page-locked for them, and the time of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_l2l import L2LConfig, estimate
from hf_l2l.testing import page_locked_bytes, sim_stream
from models import Toy
from runs import assert_same_run, attach, train
from tiers import more
from timed_machine import Machine, Stack, timed_step
from training import settled_memory

pytestmark = pytest.mark.filterwarnings("ignore:.*is in host memory:UserWarning")  # where folders of tests are


@pytest.mark.parametrize("seed", [0, *more(*range(1, 16))])
def test_when_copies_land_changes_no_bit(seed, tmp_path):
    expected = train(Toy(3, 32), steps=2)
    with sim_stream.random_landing(seed):
        found = train(Toy(3, 32), steps=2, state_tier="disk", state_dir=tmp_path, state_window=3)
    assert_same_run(found, expected)


def test_masters_are_not_page_locked_but_what_travels_is(tmp_path):
    """Two layers are page-locked for uploads, and the gradients."""
    model, layers = Toy(8, 32, tied=False), 8
    layer, all_bytes = (sum(p.nbytes for p in of.parameters()) for of in (model.blocks[0], model))
    settled_memory()  # what models of other tests have locked goes
    before = page_locked_bytes()
    model, eps, optimizer, batch = attach(model, state_tier="disk", state_dir=tmp_path)
    for _ in range(2):
        model(**batch).loss.backward()
        optimizer.step()
    eps.synchronize()
    assert all_bytes < page_locked_bytes() - before < 1.1 * (all_bytes + 2 * layer) < 2 * layers * layer


@pytest.fixture
def no_tensor_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the machine are; with larger ones, its step takes long."""
    monkeypatch.setattr("hf_l2l.state_tier.state.SMALL", 64)


MACHINE = Machine(layers=12, ubatches=4, forward_s=1.0, transfer_s=1.0, optimizer_s=12.0)


@pytest.mark.usefixtures("no_tensor_is_small")
@pytest.mark.parametrize("window", [3, *more(6)])
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


@pytest.mark.usefixtures("no_tensor_is_small")
def test_a_fast_disk_delays_nothing_but_the_first_read(tmp_path):
    """Reads and writes travel under computation and updates."""
    fast = replace(MACHINE, disk_s=0.5)
    clock = timed_step(fast, state_tier="disk", state_dir=tmp_path, state_window=4)
    assert clock.busy("disk") > 5.0
    assert clock.end == pytest.approx(timed_step(MACHINE, eps_update="serial").end, rel=0.06)
