"""L2L as a method of the planner: its memory, transfers and updates, against the equations of its papers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_l2l.scale import HARDWARE, Cluster, Degrees, Limits, Method, TransformerShape, Usage, fastest, smallest
from hf_l2l.scale.hardware import GIB
from hf_l2l.scale.l2l import LayerTimes
from hf_l2l.scale.planner import DAY_S

X48 = TransformerShape.family(48)
DESKTOP = Cluster(HARDWARE["rtx4090"])
SERVER = Cluster(HARDWARE["h100"])
CLUSTERS = ["desktop", "server", "slow host"]


def of(shape: TransformerShape, cluster: Cluster, ubatches: int, data: int = 1) -> Usage:
    return Usage(shape, cluster, Method.L2L, Degrees(1, ubatches, data))


@pytest.mark.parametrize("ubatches", [1, 2, 8, 64])
@pytest.mark.parametrize("cluster", [DESKTOP, SERVER, replace(DESKTOP, host_bandwidth=10.0)], ids=CLUSTERS)
def test_one_device_takes_the_time_of_equation_7(cluster, ubatches):
    """First text, section 3.1, with few rows and with enough: uploads longer than forwards, and updates longer than
    backwards, are added. So are, besides, sums of gradients, twice as long as an upload, where they are longer than a
    backward."""
    usage, hardware = of(X48, cluster, ubatches), cluster.hardware
    times = LayerTimes.of(X48, cluster, ubatches)
    assert times.forward == ubatches * 2 * X48.tokens * X48.layer_parameters / hardware.peak_flops
    assert times.host_to_device == hardware.cpu_gpu * GIB / 2 and times.layer_bytes == 2 * X48.layer_parameters
    host = cluster.host_bandwidth or hardware.host_memory_bandwidth
    assert times.host_update == 30 * X48.parameters / (host * GIB)
    assert times.ubatches == 1, "one that stands for all"
    downloads = X48.layers * max(0.0, 2 * times.upload - times.forward - times.backward)
    assert usage.step_seconds == pytest.approx(times.parallel + downloads)
    assert usage.efficiency.value == pytest.approx(times.computing / (times.parallel + downloads))
    assert usage.seconds(1) * ubatches / X48.critical_batch == pytest.approx(usage.step_seconds)


def test_the_device_holds_two_layers_however_deep_the_model_is():
    """Equation 4, with the sums of gradients in fp32 (docs/memory.md); the host has the rest."""
    usage = of(X48, DESKTOP, 8)
    deep = of(replace(X48, layers=480), DESKTOP, 8)
    assert usage.memory.resident == deep.memory.resident
    assert usage.memory.buffers == 2 * 2 * X48.layer_parameters + 2 * 4 * X48.layer_parameters
    assert usage.in_host_memory == usage.memory.state == 18 * X48.parameters


def test_a_stash_that_the_device_cannot_hold_is_in_host_memory():
    usage = of(X48, DESKTOP, 8)
    many = of(X48, DESKTOP, 200)
    assert many.memory.checkpoints > 20 * GIB > usage.memory.checkpoints
    assert many.in_host_memory == many.memory.state + many.memory.checkpoints


def test_hosts_divide_the_state_and_the_updates():
    """Each has all copies that travel (docs/ranks.md)."""
    one, four = of(X48, SERVER, 4, data=8), of(X48, SERVER, 4, data=32)
    assert 8 * one.memory.state == pytest.approx(18 * X48.parameters)
    assert 8 * four.memory.state == pytest.approx((16 / 4 + 2) * X48.parameters)
    assert four.update_seconds == one.update_seconds / 4
    assert one.efficiency.reduction == 0


def test_one_card_trains_what_does_not_fit_it():
    """24 GiB, and 64 GiB of host memory: 3.1 B parameters, whose state would take 34 GiB on the device."""
    cluster = replace(DESKTOP, host_bytes=64 * GIB)
    plan = fastest(X48, cluster, Method.L2L, "none", Limits(devices=1))
    usage = plan.usage
    assert usage.memory.total - usage.in_host_memory < 24 * GIB and usage.in_host_memory < 64 * GIB
    assert usage.efficiency.value == 1
    fewer = of(X48, cluster, usage.degrees.micro_batches - 1)
    assert fewer.efficiency.value < 1, "as many micro-batches as hide all"
    with pytest.raises(ValueError, match="and the state alone takes 216.0 GiB"):
        fastest(TransformerShape.family(64), replace(cluster, host_bytes=128 * GIB), Method.L2L, "none")


def test_few_rows_take_longer():
    few = fastest(X48, DESKTOP, Method.L2L, "none", Limits(devices=1, batch=4))
    assert few.usage.degrees.batch == 4 and few.usage.efficiency.update > 0
    assert few.seconds > fastest(X48, DESKTOP, Method.L2L, "none", Limits(devices=1)).seconds


def test_a_slow_network_makes_one_node_faster_than_two():
    found = [
        fastest(X48, replace(DESKTOP, network=network), Method.L2L, "data", Limits(devices=16)).usage.degrees.devices
        for network in (0.01, 100)
    ]
    assert found == [8, 16]


def test_the_smallest_cluster():
    plan = smallest(X48, SERVER, 5, Method.L2L, "data")
    assert plan.seconds <= 5 * DAY_S
    assert (
        fastest(X48, SERVER, Method.L2L, "data", Limits(devices=plan.usage.degrees.devices // 2)).seconds > 5 * DAY_S
    )
