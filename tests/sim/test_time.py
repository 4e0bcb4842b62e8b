"""How long a step takes on a machine of given speed: the time equations of the papers, on the virtual clock.

The machine is scaled to the model, so that a layer and a ubatch take the times of the example, whatever their size.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_l2l import L2LConfig, estimate
from hf_l2l.stash import spill
from hf_l2l.stash.stash import Stash
from hf_l2l.testing import page_lock_limit, page_locked_bytes, sim_stream
from models import Toy
from runs import assert_same_run, attach, train
from tiers import more, nightly
from timed_machine import V100, WIDTH, Block, Machine, Stack, sweeps_s, timed_step
from training import settled_memory

ON_DISK = pytest.mark.filterwarnings("ignore:.*is in host memory:UserWarning")
"""Where folders of tests are."""


class Asking(Block):
    """A layer that makes the host wait for the device, as routers of experts do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.sum().isfinite().item()
        return super().forward(x)


def in_ubatches(count: int) -> Machine:
    """The example, whose rows come in so many micro-batches."""
    return replace(V100, ubatches=count, forward_s=V100.forward_s * V100.ubatches / count)


@pytest.mark.parametrize("ubatches", [2, *more(16)])
def test_the_example_with_transfers_under_compute(ubatches):
    assert V100.compute_s == pytest.approx(2.458, rel=1e-3)
    clock = timed_step(in_ubatches(ubatches))
    assert clock.end == pytest.approx(2.458 + 0.333, rel=0.02)
    assert clock.busy("compute") == pytest.approx(2.458, rel=0.001)
    assert clock.busy("compute") >= 0.95 * sweeps_s(clock)
    assert clock.busy("upload") == pytest.approx((2 * 24 - 2) * V100.transfer_s)  # the last two layers stay
    assert clock.busy("download") == pytest.approx(24 * V100.transfer_s, rel=0.005)  # and the norms
    assert clock.busy("host") == pytest.approx(0.333, rel=0.01)


@nightly
@pytest.mark.parametrize("machine", [Machine(6, 2, 1.0, 1.5, 0.5), *more(V100)], ids="{0.layers} layers".format)
def test_doing_without_prefetch_costs_every_transfer(machine):
    """As long as a layer travels in less time than another computes. The example takes 2.94 s then."""
    saved = timed_step(machine, prefetch=False).end - timed_step(machine).end
    first = 1  # its transfer is under nothing either way
    assert saved == pytest.approx((2 * machine.layers - 2 - first) * machine.transfer_s, rel=0.01)


@nightly
def test_layers_that_make_the_host_wait_lose_no_overlap():
    machine = Machine(8, 2, 1.0, 1.9, 0.5)
    assert timed_step(machine, Asking).end == pytest.approx(timed_step(machine).end, rel=0.005)


@nightly
def test_a_step_bound_by_the_link_backwards_too():
    machine = Machine(layers=12, ubatches=1, forward_s=1.0, transfer_s=9.0, optimizer_s=10.0)
    forward = machine.layers * 9.0 + 1.0
    # The upload of a layer waits until its slot is free, that is for the layer two before; both directions at once.
    backward = 2 * 3.0 + (machine.layers - 2) * 9.0 + 9.0
    assert timed_step(machine).end == pytest.approx(forward + backward + 10.0, rel=0.03)


@nightly
def test_one_gradient_slot_waits_only_where_a_transfer_outlasts_a_recompute():
    """The next layer's first gradient arrives after one ubatch's recompute and a part of its backward."""
    for transfer_s, waits_s in ((0.9, 0.0), (5.0, 2.0)):
        machine = Machine(layers=4, ubatches=2, forward_s=1.0, transfer_s=transfer_s, optimizer_s=1.0)
        waited = timed_step(machine, gradient_slots=1).end - timed_step(machine).end
        assert waited > waits_s if waits_s else waited == pytest.approx(0.0, abs=1e-6)


@nightly
def test_memory_that_is_not_locked_holds_up_the_host():
    short = replace(V100, ubatches=4, layers=6, optimizer_s=V100.optimizer_s / 4)
    with page_lock_limit(0), pytest.warns(UserWarning, match="page-locked"):
        pageable = timed_step(short)
    # An upload is given to the link when another layer's computation has been given to the device, and travels under
    # it; but the host waits for it, and for every gradient.
    locked = timed_step(short)
    assert locked.end + 0.0125 < pageable.end < timed_step(short, prefetch=False).end


@nightly
def test_the_stash_travels_under_compute(monkeypatch, tmp_path):
    """Layer inputs leave and come back over a link on which each way takes a fifth of the computation."""
    machine = Machine(layers=4, ubatches=4, forward_s=1.0, transfer_s=1.8, optimizer_s=1.0, rows=64)
    ubatch_s = 4 * 64 * WIDTH / machine.costs().link_bytes_per_s
    on_device, on_host = (timed_step(machine, stash=place) for place in ("device", "host"))
    for lane in ("upload", "download"):
        travelled = on_host.busy(lane) - on_device.busy(lane)
        assert travelled == pytest.approx(4 * 4 * ubatch_s)
        assert travelled > 0.2 * machine.compute_s
    # The backward's first fetch is under nothing.
    assert on_host.end - on_device.end == pytest.approx(ubatch_s, abs=ubatch_s)
    # Copies to and from a file block the host, which has given the device its work before.
    monkeypatch.setattr(spill, "is_in_memory", lambda folder: False)
    on_disk = timed_step(machine, stash="disk", spill_dir=tmp_path)
    assert on_disk.end == pytest.approx(on_host.end, abs=ubatch_s)
    monkeypatch.setattr(Stash, "fetch_ahead", lambda self, *tensors: None)
    assert timed_step(machine, stash="host").end > on_host.end + 0.15 * machine.compute_s


# ---- state on disk: when copies land, what is page-locked for them, and the time of a step


@ON_DISK
@pytest.mark.parametrize("seed", [0, *more(1, 2, 3)])
def test_when_copies_land_changes_no_bit(seed, tmp_path):
    expected = train(Toy(3, 32), steps=2)
    with sim_stream.random_landing(seed):
        found = train(Toy(3, 32), steps=2, state_tier="disk", state_dir=tmp_path, state_window=3)
    assert_same_run(found, expected)


@nightly
@ON_DISK
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


MACHINE = Machine(layers=8, ubatches=4, forward_s=1.0, transfer_s=1.0, optimizer_s=8.0)


@ON_DISK
@pytest.mark.usefixtures("no_tensor_is_small")
def test_a_step_that_the_disk_bounds_takes_as_long_as_the_estimate_says(tmp_path):
    """The bytes that it reads and writes, and what nothing overlaps with: the end of the last update."""
    slow = replace(MACHINE, disk_s=200.0)
    model = Stack(slow.layers)
    config = L2LConfig(state_window=3, state_tier="disk", layer_classes=("Block",), eps_update="serial")
    found = estimate(model, config, device="sim")
    clock = timed_step(slow, state_tier="disk", state_dir=tmp_path, state_window=3)
    traffic = found.state_traffic
    seconds = (traffic.read + traffic.written) / slow.costs().disk_bytes_per_s
    assert clock.busy("disk") == pytest.approx(seconds, rel=0.1)
    assert clock.end == pytest.approx(seconds, rel=0.1)


@ON_DISK
@pytest.mark.usefixtures("no_tensor_is_small")
def test_a_fast_disk_delays_nothing_but_the_first_read(tmp_path):
    """Reads and writes travel under computation and updates."""
    fast = replace(MACHINE, disk_s=0.5)
    clock = timed_step(fast, state_tier="disk", state_dir=tmp_path, state_window=4)
    assert clock.busy("disk") > 5.0
    assert clock.end == pytest.approx(timed_step(MACHINE, eps_update="serial").end, rel=0.06)
