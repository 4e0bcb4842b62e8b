"""The order of layers and micro-batches on several devices, and the time of a step there, or of ranks on one host or
more: bytes of host memory, where scaling stops, what a network hides."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scaling import MACHINES, VirtualRanks, on_clock
from hf_l2l.pipeline.hosts import HostsLoad, hosts_seconds
from hf_l2l.pipeline.ranks import HostBytes, ranks_time
from hf_l2l.pipeline.schedule import backward_steps, forward_steps, idle_share, sweep_length, sweep_s
from hf_l2l.pipeline.times import LayerSeconds, step_time
from tiers import combinations, nightly

SIZES = st.tuples(st.integers(1, 12), st.integers(1, 9), st.integers(1, 6))


@pytest.mark.parametrize("steps_of", [forward_steps, backward_steps])
@given(sizes=SIZES)
def test_every_step_begins_as_soon_as_it_can(steps_of, sizes):
    layers, ubatches, devices = sizes
    steps = steps_of(*sizes)
    when = {(step.layer, step.ubatch): step.when for step in steps}
    assert len(steps) == len(when) == layers * ubatches
    before = -1 if steps_of is forward_steps else 1
    for layer, ubatch in when:
        ends = [when[each] + 1 for each in ((layer + before, ubatch), (layer, ubatch - 1)) if each in when]
        ends += [when[each] + 1 for each in ((layer + before * devices, ubatches - 1),) if each in when]
        assert when[layer, ubatch] == max(ends, default=0)
    assert {step.layer % devices == step.device for step in steps} == {True}
    assert max(when.values()) + 1 == sweep_length(*sizes)


@given(sizes=SIZES)
def test_the_idle_share_is_what_the_formulas_say(sizes):
    layers, ubatches, devices = sizes
    found = idle_share(*sizes)
    assert 0 <= found < 1
    if layers % devices == 0 and ubatches >= devices:
        assert found == pytest.approx((devices - 1) / (layers / devices * ubatches + devices - 1), abs=1e-9)
        assert sweep_length(*sizes) == math.ceil(layers / devices) * ubatches + devices - 1
    if ubatches < devices:
        assert sweep_length(*sizes) == layers + ubatches - 1


NOTHING = LayerSeconds(0.0, 0.0, 0.0)


def layer(**more: float) -> LayerSeconds:
    return LayerSeconds(8.0, 16.0, 8.0, **more)


@given(sizes=SIZES, forward=st.integers(1, 5), backward=st.integers(1, 9))
def test_without_transfers_it_is_the_formula(sizes, forward, backward):
    count, ubatches, devices = sizes
    each = LayerSeconds(forward * ubatches, backward * ubatches, forward * ubatches)
    found = step_time([each] * count, NOTHING, devices, ubatches)
    assert found.forward == pytest.approx(sweep_s(*sizes, forward))
    # A recompute may begin before the forward has ended everywhere.
    whole = sweep_s(*sizes, forward + backward, backward)
    assert whole - forward * (devices - 1) - 1e-9 <= found.backward <= whole + 1e-9
    assert 0 <= found.idle < 1


def test_what_sets_the_pace():
    """Each link carries its layers. An update is hidden as far as the next forward lasts, which devices shorten."""
    slow = [layer(up=20.0, down=20.0)] * 16
    one, four = (step_time(slow, NOTHING, devices, 8) for devices in (1, 4))
    assert one.forward == pytest.approx(15 * 20 + 20 + 8) and one.forward > 2 * 16 * 8
    assert four.forward == pytest.approx(3 * 20 + 20 + 8 + 3)
    assert one.busy["upload"] == 4 * four.busy["upload"] == 16 * 20
    launched = step_time([layer()] * 16, NOTHING, 4, 8, launch=2.0)
    assert launched.bound == "launch" and launched.busy["launch"] == 16 * 8 * 2.0 * 3
    assert launched.seconds == pytest.approx(launched.busy["launch"], rel=0.05)
    updated = [step_time([layer(up=1.0, update=16.0)] * 16, NOTHING, devices, 8) for devices in (1, 4)]
    assert [each.bound for each in updated] == ["compute", "update"]


def test_sums_wait_for_their_slot_and_what_is_outside_the_layers_runs_on_the_first_device():
    """The third layer of a device adds its gradients where those of the first one were."""
    quick, slow = (step_time([layer(down=down)] * 6, NOTHING, 1, 8) for down in (20.0, 60.0))
    assert quick.backward == pytest.approx(6 * 24 + 20)
    assert slow.backward == pytest.approx(24 + 6 * 60, rel=0.05)
    head = LayerSeconds(10.0, 20.0, 0.0, up=5.0, down=5.0)
    without, found = (step_time([layer()] * 8, each, 4, 8) for each in (NOTHING, head))
    assert found.seconds - without.seconds == pytest.approx(5 + 10 + 20, rel=0.1)


# ---- ranks of a host

OUTSIDE = LayerSeconds(0.001, 0.002, 0.0, up=0.001, down=0.002, update=0.001)


def layers(count: int, compute: float) -> list[LayerSeconds]:
    return [LayerSeconds(compute, 2 * compute, compute, up=0.01, up_again=0.01, down=0.02, update=0.005)] * count


def test_sums_on_devices_send_a_share_over_each_link():
    """Where downloads take longest, n ranks are faster than one by more than n. A parameter's weights travel in 2
    bytes, twice; sums in 4; and AdamW's 30. Of sums on the devices, the sum alone comes to the host, once."""
    parameter = HostBytes(up=4, down=4, parameters=1)
    assert [parameter.moved(ranks) for ranks in (1, 2, 4, 8)] == [38, 58, 82, 130]
    assert [parameter.moved(ranks, on_devices=True) for ranks in (1, 2, 4, 8)] == [38, 42, 50, 66]
    slow = [each._replace(down=0.5) for each in layers(12, 0.05)]
    moved = [HostBytes(4, 4, 1)] * 13
    host, device = (ranks_time(slow, OUTSIDE, moved, 4, dram=1e12, on_devices=each) for each in (False, True))
    assert (host.bound, device.bound) == ("download", "compute")
    assert host.seconds == pytest.approx(step_time(slow, OUTSIDE).seconds)
    of_a_share = step_time([each._replace(down=0.125) for each in slow], OUTSIDE._replace(down=0.0005))
    assert device.seconds == pytest.approx(of_a_share.seconds)
    assert device.times_as_many == pytest.approx(4 * host.seconds / device.seconds)


def test_each_sweep_waits_for_the_host():
    """The forward for its uploads, and for updates that run beside it; the backward for its own uploads and sums."""
    moved = [HostBytes(4 * 10**8, 4 * 10**8, 10**8)] * 12 + [HostBytes(0, 0, 0)]
    for defers in (True, False):
        found = ranks_time(layers(12, 0.01), OUTSIDE, moved, 8, dram=1e10, on_devices=True, defers=defers)
        halves = [12 * (8 * 2 + 30 * defers) * 10**8 / 1e10, 12 * (8 * 2 + 4) * 10**8 / 1e10]
        assert [found.forward, found.backward] == pytest.approx(halves)


def test_ranks_scale_until_the_host_has_no_more_bytes_per_second():
    moved = [HostBytes(4 * 10**7, 4 * 10**7, 10**7)] * 12 + [HostBytes(4 * 10**6, 4 * 10**6, 10**6)]
    found = {n: ranks_time(layers(12, 0.05), OUTSIDE, moved, n, dram=2e10) for n in (1, 2, 8, 16, 32, 64)}
    one = step_time(layers(12, 0.05), OUTSIDE)
    assert (found[1].seconds, found[1].bound, found[1].times_as_many) == (one.seconds, one.bound, 1)
    assert found[2].times_as_many == pytest.approx(2, rel=0.01)
    assert found[8].times_as_many == pytest.approx(8, rel=0.01)
    assert [found[n].bound for n in (8, 64)] == ["compute", "host memory"]
    limit = 2e10 / (12 * 10**7 * 12)  # ranks per second of step that host memory carries, in the end
    assert found[64].times_as_many < found[1].seconds * limit
    assert found[64].times_as_many > found[32].times_as_many > found[16].times_as_many


WHERE = {"": False, ", sums on the devices": True}
MOST = 0.07
"""By how much clock and formula differ, as the document says."""


@nightly
def test_the_document_has_the_table_of_the_formula():
    text = (Path(__file__).parents[2] / "docs" / "ranks.md").read_text()
    assert f"within {100 * MOST:.0f} %" in text
    for name, where in itertools.product(MACHINES, WHERE):
        counts = (2, 4, 8, 16, 32, 64)
        found = {ranks: MACHINES[name].by_formula(ranks, on_devices=WHERE[where]) for ranks in counts}
        row = " | ".join(f"{each.times_as_many:.1f}" for each in found.values())
        stops = next((f"{n}: {each.bound}" for n, each in found.items() if each.bound == "host memory"), "none")
        assert f"| {name}{where} | {row} | {stops} |" in text


@nightly
@pytest.mark.parametrize(("name", "ranks", "where"), combinations(MACHINES, [2, 8, 16, 32, 64], WHERE, together=1))
def test_a_virtual_clock_takes_the_time_of_the_formula(name, ranks, where):
    """They are farthest apart where devices and host memory take equally long."""
    machine, options = MACHINES[name], {"on_devices": WHERE[where]}
    clock, formula = on_clock(machine, ranks, **options), machine.by_formula(ranks, **options)
    clocked = ranks * on_clock(machine, 1).seconds / clock.seconds
    assert formula.times_as_many == pytest.approx(clocked, rel=MOST)
    assert clock.busiest == formula.bound or {clock.busiest, formula.bound} <= {"compute", "host memory"}
    run = VirtualRanks(machine, ranks, **options)
    run.step()
    again = ranks * 2 * machine.outside  # the formula uploads what is outside the layers in both sweeps
    assert run.busy["host memory"] * machine.dram == pytest.approx(formula.host_bytes - again)


def test_a_network_is_hidden_but_for_the_first_and_the_last_layer():
    """Half of 600 bytes each; what is outside the layers crosses alone. A slow network is all that counts."""
    load = HostsLoad(forward=12.0, backward=24.0, layers=[600] * 12 + [0])
    assert hosts_seconds(load, 2, 3000) == pytest.approx(12 + 24 + 2 * 0.1)
    assert hosts_seconds(load._replace(layers=[600] * 12 + [6000]), 2, 3000) == pytest.approx(36 + 2 * 0.1 + 2 * 1.0)
    assert hosts_seconds(load, 2, 10.0) == pytest.approx(2.0 + 12 * 30 + 12 * 30 + 1.0)
    for hosts, share in ((1, 0.0), (2, 0.5), (64, 63 / 64)):
        assert hosts_seconds(load._replace(forward=0.0, backward=0.0), hosts, 1.0) == pytest.approx(2 * 7200 * share)
