"""The time of several ranks, of one host or more: bytes of host memory, where scaling stops, what a network hides."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from benchmarks.scaling import MACHINES, VirtualRanks, on_clock
from hf_l2l.pipeline.hosts import HostsLoad, hosts_seconds
from hf_l2l.pipeline.ranks import HostBytes, ranks_time
from hf_l2l.pipeline.times import LayerSeconds, step_time
from tiers import combinations, more

OUTSIDE = LayerSeconds(0.001, 0.002, 0.0, up=0.001, down=0.002, update=0.001)


def layers(count: int, compute: float) -> list[LayerSeconds]:
    return [LayerSeconds(compute, 2 * compute, compute, up=0.01, up_again=0.01, down=0.02, update=0.005)] * count


@pytest.mark.parametrize(("ranks", "on_host", "on_devices"), [(1, 38, 38), (2, 58, 42), (4, 82, 50), (8, 130, 66)])
def test_bytes_of_host_memory_per_parameter(ranks, on_host, on_devices):
    """Weights travel in 2 bytes, twice; sums in 4; and AdamW's 30. Of sums on the devices, the sum alone comes to the
    host, once."""
    parameter = HostBytes(up=4, down=4, parameters=1)
    assert parameter.moved(ranks) == on_host
    assert parameter.moved(ranks, on_devices=True) == on_devices


def test_sums_on_devices_send_a_share_over_each_link():
    """Where downloads take longest, n ranks are faster than one by more than n."""
    slow = [each._replace(down=0.5) for each in layers(12, 0.05)]
    moved = [HostBytes(4, 4, 1)] * 13
    host, device = (ranks_time(slow, OUTSIDE, moved, 4, dram=1e12, on_devices=each) for each in (False, True))
    assert (host.bound, device.bound) == ("download", "compute")
    assert host.seconds == pytest.approx(step_time(slow, OUTSIDE).seconds)
    of_a_share = step_time([each._replace(down=0.125) for each in slow], OUTSIDE._replace(down=0.0005))
    assert device.seconds == pytest.approx(of_a_share.seconds)
    assert device.times_as_many == pytest.approx(4 * host.seconds / device.seconds)


@pytest.mark.parametrize("defers", [True, False])
def test_each_sweep_waits_for_the_host(defers):
    """The forward for its uploads, and for updates that run beside it; the backward for its own uploads and sums."""
    moved = [HostBytes(4 * 10**8, 4 * 10**8, 10**8)] * 12 + [HostBytes(0, 0, 0)]
    given, options = layers(12, 0.01), {"dram": 1e10, "on_devices": True, "defers": defers}
    found = ranks_time(given, OUTSIDE, moved, 8, **options)
    halves = [12 * (8 * 2 + 30 * defers) * 10**8 / 1e10, 12 * (8 * 2 + 4) * 10**8 / 1e10]
    of_rank = step_time(
        [each._replace(down=0.02 / 8) for each in given], OUTSIDE._replace(down=0.002 / 8), defers=defers
    )
    assert [found.forward, found.backward] == pytest.approx(halves)
    assert found.seconds == pytest.approx(sum(halves) + of_rank.seconds - of_rank.forward - of_rank.backward)


def test_one_rank_is_the_plain_relay():
    found = ranks_time(layers(12, 0.05), OUTSIDE, [HostBytes(4, 4, 1)] * 13, 1, dram=1e9)
    one = step_time(layers(12, 0.05), OUTSIDE)
    assert (found.seconds, found.bound, found.times_as_many) == (one.seconds, one.bound, 1)


def test_ranks_scale_until_the_host_has_no_more_bytes_per_second():
    moved = [HostBytes(4 * 10**7, 4 * 10**7, 10**7)] * 12 + [HostBytes(4 * 10**6, 4 * 10**6, 10**6)]
    found = {n: ranks_time(layers(12, 0.05), OUTSIDE, moved, n, dram=2e10) for n in (1, 2, 4, 8, 16, 32, 64)}
    assert found[2].times_as_many == pytest.approx(2, rel=0.01)
    assert found[8].times_as_many == pytest.approx(8, rel=0.01)
    assert [found[n].bound for n in (8, 64)] == ["compute", "host memory"]
    limit = 2e10 / (12 * 10**7 * 12)  # ranks per second of step that host memory carries, in the end
    assert found[64].times_as_many < found[1].seconds * limit
    assert found[64].times_as_many > found[32].times_as_many > found[16].times_as_many


WHERE = {"": False, ", sums on the devices": True}
MOST = 0.07
"""By how much clock and formula differ, as the document says."""


def test_the_document_has_the_table_of_the_formula():
    text = (Path(__file__).parents[2] / "docs" / "ranks.md").read_text()
    assert f"within {100 * MOST:.0f} %" in text
    for name, where in itertools.product(MACHINES, WHERE):
        counts = (2, 4, 8, 16, 32, 64)
        found = {ranks: MACHINES[name].by_formula(ranks, on_devices=WHERE[where]) for ranks in counts}
        row = " | ".join(f"{each.times_as_many:.1f}" for each in found.values())
        stops = next((f"{n}: {each.bound}" for n, each in found.items() if each.bound == "host memory"), "none")
        assert f"| {name}{where} | {row} | {stops} |" in text


@pytest.mark.parametrize(("name", "ranks", "where"), combinations(MACHINES, [1, 2, 8, *more(16, 32, 64)], WHERE))
def test_a_virtual_clock_takes_the_time_of_the_formula(name, ranks, where):
    """The formula has no waits for slots, and no transfers that come at the same time: it is farthest from the clock
    where devices and host memory take equally long."""
    machine, options = MACHINES[name], {"on_devices": WHERE[where]}
    clock, formula = on_clock(machine, ranks, **options), machine.by_formula(ranks, **options)
    clocked = ranks * on_clock(machine, 1).seconds / clock.seconds
    assert formula.times_as_many == pytest.approx(clocked, rel=MOST)
    assert clock.busiest == formula.bound or {clock.busiest, formula.bound} <= {"compute", "host memory"}


@pytest.mark.parametrize("on_devices", [False, True])
def test_the_clock_and_the_formula_move_the_same_bytes_through_host_memory(on_devices):
    machine = MACHINES["Llama-8B, H100 at 400 TFLOP/s, PCIe 50 GB/s, host 300 GB/s"]
    for ranks in (1, 2, 3):
        run = VirtualRanks(machine, ranks, on_devices=on_devices)
        run.step()
        formula = machine.by_formula(ranks, on_devices=on_devices).host_bytes
        # The formula uploads what is outside the layers in both sweeps.
        again = ranks * 2 * machine.outside
        assert run.busy["host memory"] * machine.dram == pytest.approx(formula - again)


# ---- hosts

LOAD = HostsLoad(forward=12.0, backward=24.0, layers=[600] * 12 + [0])


def test_a_fast_network_costs_the_first_and_the_last_layer():
    """The sums of the first layer, and its weights: half of 600 bytes each."""
    assert hosts_seconds(LOAD, 2, 3000) == pytest.approx(12 + 24 + 2 * 0.1)


def test_a_slow_network_is_all_that_counts():
    """All sums after the first layer that is computed, and all weights before the last one."""
    assert hosts_seconds(LOAD, 2, 10.0) == pytest.approx(2.0 + 12 * 30 + 12 * 30 + 1.0)


def test_what_is_outside_the_layers_crosses_alone():
    load = LOAD._replace(layers=[600] * 12 + [6000])
    assert hosts_seconds(load, 2, 3000) == pytest.approx(12 + 24 + 2 * 0.1 + 2 * 1.0)


@pytest.mark.parametrize(("hosts", "share"), [(1, 0.0), (2, 0.5), (4, 0.75), (64, 63 / 64)])
def test_bytes_grow_to_those_of_the_model(hosts, share):
    assert hosts_seconds(LOAD._replace(forward=0.0, backward=0.0), hosts, 1.0) == pytest.approx(2 * 7200 * share)
