"""The time of several ranks: bytes of host memory by the table, and where scaling stops."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scaling import MACHINES, VirtualRanks, on_clock
from hf_l2l.pipeline.ranks import HostBytes, ranks_time
from hf_l2l.pipeline.times import LayerSeconds, step_time

OUTSIDE = LayerSeconds(0.001, 0.002, 0.0, up=0.001, down=0.002, update=0.001)


def layers(count: int, compute: float) -> list[LayerSeconds]:
    return [LayerSeconds(compute, 2 * compute, compute, up=0.01, up_again=0.01, down=0.02, update=0.005)] * count


@pytest.mark.parametrize(("ranks", "per_parameter"), [(1, 38), (2, 58), (4, 82), (8, 130)])
def test_bytes_of_host_memory_per_parameter(ranks, per_parameter):
    """Weights travel in 2 bytes, twice; sums in 4; and AdamW's 30."""
    assert HostBytes(up=4, down=4, parameters=1).moved(ranks) == per_parameter


@pytest.mark.parametrize(("ranks", "per_parameter"), [(1, 38), (2, 42), (4, 50), (8, 66)])
def test_bytes_per_parameter_with_sums_on_the_devices(ranks, per_parameter):
    """The sum alone comes to the host, once."""
    assert HostBytes(up=4, down=4, parameters=1).moved(ranks, on_devices=True) == per_parameter


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


DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "ranks.md"


WHERE = {"": False, ", sums on the devices": True}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", MACHINES)
def test_the_table_of_the_document(name, where):
    counts = (2, 4, 8, 16, 32, 64)
    found = {ranks: MACHINES[name].by_formula(ranks, on_devices=WHERE[where]) for ranks in counts}
    row = " | ".join(f"{each.times_as_many:.1f}" for each in found.values())
    stops = next((f"{ranks}: {each.bound}" for ranks, each in found.items() if each.bound == "host memory"), "none")
    assert f"| {name}{where} | {row} | {stops} |" in DOCUMENT.read_text()


MOST = 0.07
"""By how much clock and formula differ, as the document says."""
MANY = [*(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (16, 32, 64))]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("ranks", [1, 2, 8, *MANY])
def test_a_virtual_clock_takes_the_time_of_the_formula(name, ranks, where):
    """The formula has no waits for slots, and no transfers that come at the same time: it is farthest from the clock
    where devices and host memory take equally long."""
    machine, options = MACHINES[name], {"on_devices": WHERE[where]}
    clock, formula = on_clock(machine, ranks, **options), machine.by_formula(ranks, **options)
    clocked = ranks * on_clock(machine, 1).seconds / clock.seconds
    assert formula.times_as_many == pytest.approx(clocked, rel=MOST)
    assert clock.busiest == formula.bound or {clock.busiest, formula.bound} <= {"compute", "host memory"}


def test_the_document_says_how_far_they_differ():
    assert f"within {100 * MOST:.0f} %" in DOCUMENT.read_text()


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
