"""The time of several hosts: what the network hides behind computing, and what not."""

from __future__ import annotations

import pytest

from hf_l2l.pipeline.hosts import HostsLoad, hosts_seconds

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
