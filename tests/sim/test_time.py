"""How long a step takes on a machine of given speed: the time equations of the papers, on the virtual clock.

The machine is scaled to the model, so that a layer and a ubatch take the times of the example, whatever their size.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.stash import spill
from hf_l2l.stash.stash import Stash
from hf_l2l.testing import Costs, page_lock_limit, virtual_clock
from tiers import more, nightly
from timed_machine import V100, WIDTH, Block, Machine, sweeps_s, timed_step
from training import tiny_bert


class Asking(Block):
    """A layer that makes the host wait for the device, as routers of experts do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.sum().isfinite().item()
        return super().forward(x)


def in_ubatches(count: int) -> Machine:
    """The example, whose rows come in so many micro-batches."""
    return replace(V100, ubatches=count, forward_s=V100.forward_s * V100.ubatches / count)


UBATCHES = pytest.mark.parametrize("ubatches", [2, *more(16)])


@UBATCHES
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
@UBATCHES
def test_the_example_without_overlap(ubatches):
    clock = timed_step(in_ubatches(ubatches), prefetch=False)
    assert clock.end == pytest.approx(2.94, rel=0.02)


@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(Machine(8, 2, 1.0, 1.5, 0.5), id="a slower link"),
        *more(pytest.param(V100, id="V100")),
    ],
)
def test_doing_without_prefetch_costs_every_transfer(machine):
    """As long as a layer travels in less time than another computes."""
    saved = timed_step(machine, prefetch=False).end - timed_step(machine).end
    first = 1  # its transfer is under nothing either way
    assert saved == pytest.approx((2 * machine.layers - 2 - first) * machine.transfer_s, rel=0.01)


@nightly
def test_doing_without_prefetch_costs_the_computation_where_the_link_sets_the_pace():
    """Forwards, where a layer travels longer than it computes, all computation but the last layer's is hidden."""
    machine = Machine(layers=8, ubatches=2, forward_s=1.0, transfer_s=3.0, optimizer_s=0.5)
    forward = (machine.layers - 1) * 2 * 1.0  # under transfers that would come anyway
    backward = (machine.layers - 2) * 3.0  # transfers that go under three times the computation
    saved = timed_step(machine, prefetch=False).end - timed_step(machine).end
    assert saved == pytest.approx(forward + backward, rel=0.01)


@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(Machine(8, 2, 1.0, 1.9, 0.5), id="a slower link"),
        *more(pytest.param(V100, id="V100")),
    ],
)
def test_layers_that_make_the_host_wait_lose_no_overlap(machine):
    assert timed_step(machine, Asking).end == pytest.approx(timed_step(machine).end, rel=0.005)


def test_a_step_bound_by_the_link():
    """Forwards a layer takes its transfer; backwards it computes longer than weights or gradients travel."""
    machine = Machine(layers=8, ubatches=2, forward_s=1.0, transfer_s=4.0, optimizer_s=10.0)
    compute, travel = 2 * 1.0, 4.0
    forward = machine.layers * travel + compute
    backward = 2 * 3 * compute + (machine.layers - 2) * max(3 * compute, travel)
    last = travel  # the first layer's gradients
    assert timed_step(machine).end == pytest.approx(forward + backward + last + 10.0, rel=0.02)


def test_a_step_bound_by_the_link_backwards_too():
    machine = Machine(layers=12, ubatches=1, forward_s=1.0, transfer_s=9.0, optimizer_s=10.0)
    forward = machine.layers * 9.0 + 1.0
    # The upload of a layer waits until its slot is free, that is for the layer two before; both directions at once.
    backward = 2 * 3.0 + (machine.layers - 2) * 9.0 + 9.0
    assert timed_step(machine).end == pytest.approx(forward + backward + 10.0, rel=0.03)


@nightly
def test_one_gradient_slot_waits_only_where_a_transfer_outlasts_a_recompute():
    """The next layer's first gradient arrives after one ubatch's recompute and a part of its backward."""
    short = Machine(layers=8, ubatches=2, forward_s=1.0, transfer_s=0.9, optimizer_s=1.0)
    assert timed_step(short, gradient_slots=1).end == pytest.approx(timed_step(short).end)
    long = Machine(layers=8, ubatches=2, forward_s=1.0, transfer_s=5.0, optimizer_s=1.0)
    assert timed_step(long, gradient_slots=1).end > timed_step(long).end + 6.0


def test_memory_that_is_not_locked_holds_up_the_host():
    short = replace(V100, ubatches=4, layers=6, optimizer_s=V100.optimizer_s / 4)
    with page_lock_limit(0), pytest.warns(UserWarning, match="page-locked"):
        pageable = timed_step(short)
    # An upload is given to the link when another layer's computation has been given to the device, and travels under
    # it; but the host waits for it, and for every gradient.
    locked = timed_step(short)
    assert locked.end + 0.0125 < pageable.end < timed_step(short, prefetch=False).end


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


@nightly
def test_the_example_with_a_bert():
    """24 layers and 16 ubatches of a real BERT, where attention's work is not in the weights."""
    torch.manual_seed(0)
    model = tiny_bert(layers=24, dropout=0.0)
    eps = attach_l2l(model, L2LConfig(device="sim", ubatch_size=1, eps_update="serial"))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
    generator = torch.Generator().manual_seed(1)
    batch = {"input_ids": torch.randint(5, 30, (16, 6), generator=generator), "labels": torch.zeros(16).long()}
    model.train()
    model(**batch).loss.backward()
    optimizer.step()
    with virtual_clock(Costs(link_bytes_per_s=1.0, flop_per_s=1.0, host_bytes_per_s=1.0)) as clock:
        model(**batch).loss.backward()
        optimizer.step()
    # The work of this model in each lane, in bytes and operations, gives the machine on which it takes the example's.
    costs = Costs(
        link_bytes_per_s=clock.busy("upload") / (46 * V100.transfer_s),
        flop_per_s=clock.busy("compute") / V100.compute_s,
        host_bytes_per_s=clock.busy("host") / V100.optimizer_s,
    )
    with virtual_clock(costs) as clock:
        model(**batch).loss.backward()
        optimizer.step()
    assert clock.end == pytest.approx(2.458 + 0.333, rel=0.02)
    assert clock.busy("compute") >= 0.95 * sweeps_s(clock)
