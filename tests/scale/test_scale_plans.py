"""What a plan is refused for, and what must hold for any of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_l2l.scale import (
    ARRANGED,
    HARDWARE,
    PARALLELISM,
    Cluster,
    Limits,
    Method,
    Plan,
    TransformerShape,
    fastest,
    hardware_named,
    smallest,
)
from hf_l2l.scale.planner import DAY_S

X32 = TransformerShape.family(32)
A100 = Cluster(HARDWARE["a100"])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([2, 8, 16, 24, 32, 64]),
    st.sampled_from(sorted(HARDWARE)),
    st.sampled_from(list(Method)),
    st.sampled_from(PARALLELISM),
    st.integers(1, 2000),
)
def test_plans_are_within_their_bounds(x, card, method, parallelism, devices):
    shape, cluster = TransformerShape.family(x), Cluster(HARDWARE[card])
    try:
        plan = fastest(shape, cluster, method, parallelism, Limits(devices=devices))
    except ValueError as error:
        is_arranged = parallelism in ARRANGED[method]
        assert ("an arrangement must" if is_arranged else "parallelism must be one of") in str(error)
        return
    usage, to = plan.usage, plan.usage.degrees
    assert to.devices <= devices and to.batch <= shape.critical_batch
    assert shape.layers % to.pipeline == 0 and shape.heads % to.tensor == 0 and usage.fits
    assert 0 < usage.efficiency.value <= 1
    assert usage.method is Method.L2L or usage.efficiency.update == 0
    assert usage.hides_pipeline or usage.efficiency.pipeline > 0 or to.pipeline == 1
    slow = replace(usage, degrees=replace(to, data=1))
    assert slow.seconds() >= usage.seconds() * 0.999, "fewer instances are not faster"


def test_more_devices_are_not_slower():
    found = [fastest(X32, A100, limits=Limits(devices=n)).seconds for n in (1, 8, 64, 512, 4096)]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("days", [1, 7, 100])
def test_the_smallest_cluster_is_just_fast_enough(days):
    plan = smallest(TransformerShape.family(64), A100, days)
    devices = plan.usage.degrees.devices
    assert plan.seconds <= days * DAY_S
    assert (
        fastest(TransformerShape.family(64), A100, limits=Limits(devices=max(1, devices // 2))).seconds > days * DAY_S
    )


def test_slow_networks_need_longer_pipelines():
    """Section 8.3: 25 Gbit/s cost a model of a trillion parameters some percent."""
    x160 = TransformerShape.family(160)
    fast, slow = fastest(x160, A100), fastest(x160, Cluster(HARDWARE["a100"], network=6.25))
    assert slow.usage.degrees.pipeline > fast.usage.degrees.pipeline
    assert 1.01 < slow.seconds / fast.seconds < 1.6


def planned(**limits: int) -> Plan:
    return fastest(X32, A100, limits=Limits(**limits))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: hardware_named("a1000"), r"one of v100, .* \(got 'a1000'\); did you mean a100\?"),
        (lambda: TransformerShape.family(7), r"must be even, from 2 to 10,000 \(got 7\)"),
        (lambda: TransformerShape.of(2, 10, 3, 8), r"heads must divide the width \(got 3 heads and a width of 10\)"),
        (lambda: TransformerShape.of(0, 8, 2, 8), r"layers of a transformer must be at least 1 \(got 0\)"),
        (lambda: fastest(X32, A100, parallelism="4d"), r"parallelism must be one of none, .* \(got '4d'\)"),
        (lambda: planned(devices=0), r"devices must be at least 1 \(got 0\)"),
        (lambda: planned(batch=0), r"batch must be at least 1 \(got 0\)"),
        (lambda: planned(pipeline=5), r"pipeline must divide the 32 layers \(got 5\)"),
        (lambda: planned(tensor=3), r"tensor must divide the 16 heads \(got 3\)"),
        (
            lambda: planned(devices=8, pipeline=4, tensor=4),
            r"devices must be at least 16 for one instance of the model.*\(got 8\)",
        ),
        (
            lambda: fastest(X32, A100, Method.L2L, "3d"),
            r"parallelism must be one of none, data with method l2l \(got 3d\)",
        ),
        (
            lambda: fastest(X32, A100, Method.PARTITIONED, "none"),
            r"parallelism must be one of data, .* with method partitioned \(got none\)",
        ),
        (
            lambda: fastest(X32, A100, Method.L2L, "none", Limits(offload=False)),
            r"without offload, with .* the l2l method, and the state alone takes 6.8 GiB\)",
        ),
        (lambda: Cluster(HARDWARE["a100"], node_size=0), r"node_size must be a whole number from 1 \(got 0\)"),
        (lambda: fastest(X32, A100, steps=0), r"steps must be from 1 to 1,000,000,000,000 \(got 0\)"),
        (lambda: smallest(X32, A100, days=0), r"days must be a number above 0 \(got 0\)"),
        (lambda: smallest(X32, A100, days=1e-6), r"must hide its transfers .* within 1e-06 days"),
        (
            lambda: fastest(TransformerShape.family(160), A100, Method.BASELINE, "none", Limits(offload=False)),
            r"without offload, with .* \(got none with parallelism none and the baseline method, and the",
        ),
    ],
)
def test_refusals(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_names_of_hardware():
    assert hardware_named("RTX 4090") is HARDWARE["rtx4090"] and hardware_named("H100").memory_gib == 80


def test_degrees_that_are_asked_for():
    to = planned(pipeline=4, tensor=2, devices=64).usage.degrees
    assert (to.pipeline, to.tensor) == (4, 2) and to.devices <= 64


def test_a_batch_above_the_critical_one_is_no_use():
    assert planned(batch=10**6) == planned()


def test_more_instances_than_the_time_needs_may_be_needed_for_the_memory():
    plan = smallest(TransformerShape.family(64), A100, 100_000, Method.IMPROVED, "data", Limits(offload=False))
    assert 1 < plan.usage.degrees.devices <= 8 and not plan.usage.is_offloaded


def test_the_fastest_plan_is_among_those_for_its_time():
    fast = fastest(X32, A100, Method.BASELINE, "3d")
    found = smallest(X32, A100, fast.seconds * 1.001 / DAY_S, Method.BASELINE, "3d")
    assert found.usage.degrees.devices <= fast.usage.degrees.devices


def test_devices_of_one_node_do_not_use_the_network():
    shape = TransformerShape.of(32, 4096, 32, 2048, 14336)
    plan = fastest(shape, Cluster(HARDWARE["rtx4090"]), Method.PARTITIONED, "data", Limits(devices=8))
    assert plan.usage.degrees.devices == 8 and plan.usage.efficiency.reduction == 0


def test_without_instances_all_rows_fill_the_pipeline():
    found = fastest(TransformerShape.family(160), A100, Method.IMPROVED, "pipe+tensor").usage
    assert found.efficiency.value > 0.85


def test_large_models_are_refused_at_once():
    with pytest.raises(ValueError, match="an arrangement must"):
        fastest(TransformerShape.family(1000), A100, limits=Limits(devices=8))
