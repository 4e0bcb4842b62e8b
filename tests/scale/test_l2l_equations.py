"""The equations of the L2L papers, with the examples and the table that follow from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_l2l.scale.l2l import LayerSizes, LayerTimes, throughput

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


def test_what_is_not_hidden_is_added():
    slow_host = replace(V100, host_update=2.0)
    assert slow_host.parallel - V100.parallel == pytest.approx(2.0 - 24 * 16 * 3.2e-3)
    slow_link = replace(V100, host_to_device=16e8)
    assert slow_link.parallel - V100.parallel == pytest.approx(24 * (31.25e-3 - 16 * 1.6e-3))


@pytest.mark.parametrize("measured", [(14.57, 18.6, 22.07), (52.48, 70.97, 84.91)], ids=["1 GPU", "4 GPUs"])
def test_more_ubatches_by_equation_6(measured):
    """Later text, table 4: from the rates with 1 and 2 ubatches of 64 rows follows that with 4."""
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
