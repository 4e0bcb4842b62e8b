"""The equations of the L2L papers with the numbers printed there, and L2L as a method of the planner, by them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_l2l.scale import HARDWARE, Cluster, Degrees, Limits, Method, TransformerShape, Usage, fastest
from hf_l2l.scale.l2l import LayerSizes, LayerTimes, throughput

GIB = 2**30

V100 = LayerTimes(
    layers=24,
    ubatches=16,
    forward=4 * 12e9 / 30e12,
    backward=4 * 24e9 / 30e12,
    layer_bytes=50e6,
    host_to_device=16e9,
    device_update=100e9 / 30e12,
    host_update=100e9 / 300e9,
)
"""BERT-Large with ubatches of 4 rows at 30 TFLOP/s, an optimizer of 100 GFLOP at 300 GFLOP/s, and 16 GB/s."""


def test_the_v100_example():
    """First text, section 3.1.2; it prints 2.92 and 2.45, which are these with what was rounded before."""
    assert V100.serial == pytest.approx(2.94, abs=0.005)
    assert V100.parallel == V100.computing == pytest.approx(2.458, abs=0.0005)
    assert V100.plain == pytest.approx(24 * 16 * 4.8e-3 + 1 / 300)
    slow_host, slow_link = replace(V100, host_update=2.0), replace(V100, host_to_device=16e8)
    assert slow_host.parallel - V100.parallel == pytest.approx(2.0 - 24 * 16 * 3.2e-3), "what is not hidden is added"
    assert slow_link.parallel - V100.parallel == pytest.approx(24 * (31.25e-3 - 16 * 1.6e-3))


def test_more_ubatches_by_equation_6():
    """Later text, table 4: from the rates with 1 and 2 ubatches of 64 rows follows that with 4, of 1 and 4 GPUs."""
    for measured in ((14.57, 18.6, 22.07), (52.48, 70.97, 84.91)):
        first, second, third = (64 / rate for rate in measured)  # seconds of a ubatch: 4 C + 2 X / u, of all layers
        uploads = 2 * (first - second)
        computing = first - uploads
        _, found = throughput(64, 4, forward=computing / 4, upload=uploads / 2, layers=1)
        assert found == pytest.approx(64 / third, rel=0.03)


def test_uploads_as_long_as_forwards_are_hidden_by_ten_ubatches():
    """Later text, below equation 6: less than 10 % with X = C."""
    alone = throughput(8, 10, 1.0, 0.0, layers=12)[1]
    assert 0.9 < throughput(8, 10, 1.0, 1.0, layers=12)[1] / alone < 1
    assert throughput(8, 1, 1.0, 1.0, layers=12) == (8 / 24, 8 / 72)


def test_memory():
    """First text, equations 1 to 4: only the last does not grow with the layers."""
    sizes = LayerSizes(layers=24, layer=50.0, rows=4, inner=30.0, output=2.0)
    deep = replace(sizes, layers=96)
    assert sizes.plain == 4 * 24 * 50 + 24 * 4 * 30 + 4 * 2
    assert sizes.serial == 2 * 50 + 4 * 30 + 24 * 4 * 2
    assert sizes.parallel == 4 * 50 + 4 * 30 + 24 * 4 * 2
    assert sizes.parallel_with_host_stash == deep.parallel_with_host_stash == 4 * 50 + 4 * 30
    assert deep.serial - sizes.serial == 72 * 4 * 2


# ---- a method of the planner


X48 = TransformerShape.family(48)
DESKTOP = Cluster(HARDWARE["rtx4090"])
SERVER = Cluster(HARDWARE["h100"])


def of(shape: TransformerShape, cluster: Cluster, ubatches: int, data: int = 1) -> Usage:
    return Usage(shape, cluster, Method.L2L, Degrees(1, ubatches, data))


@pytest.mark.parametrize(("cluster", "ubatches"), [(SERVER, 1), (replace(DESKTOP, host_bandwidth=10.0), 64)])
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
