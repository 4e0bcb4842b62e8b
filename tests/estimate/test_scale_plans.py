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
from tiers import nightly, times

DAY_S = 86_400

X32 = TransformerShape.family(32)
A100 = Cluster(HARDWARE["a100"])


@nightly
@settings(max_examples=times(12, 200), deadline=None)
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


def test_the_smallest_cluster_is_just_fast_enough():
    plan = smallest(X32, A100, 1)
    devices = plan.usage.degrees.devices
    assert plan.seconds <= DAY_S < fastest(X32, A100, limits=Limits(devices=max(1, devices // 2))).seconds


def planned(**limits: int) -> Plan:
    return fastest(X32, A100, limits=Limits(**limits))


def test_refusals():
    for call, says in (
        (lambda: hardware_named("a1000"), r"did you mean a100\?"),
        (lambda: TransformerShape.of(2, 10, 3, 8), "heads must divide"),
        (lambda: planned(pipeline=5), "divide the 32 layers"),
        (lambda: planned(tensor=3), "divide the 16 heads"),
        (lambda: planned(devices=8, pipeline=4, tensor=4), "at least 16"),
        (lambda: fastest(X32, A100, Method.L2L, "3d"), "none, data with method l2l"),
        (lambda: fastest(X32, A100, Method.L2L, "none", Limits(offload=False)), "the state alone takes 6.8 GiB"),
        (lambda: smallest(X32, A100, days=1e-6), "within 1e-06 days"),
        (lambda: fastest(TransformerShape.family(1000), A100, limits=Limits(devices=8)), "an arrangement must"),
    ):
        with pytest.raises(ValueError, match=says):
            call()


def test_limits_are_kept_to():
    to = planned(pipeline=4, tensor=2, devices=64).usage.degrees
    assert (to.pipeline, to.tensor) == (4, 2) and to.devices <= 64
    assert planned(batch=10**6) == planned(), "a batch above the critical one is no use"


def test_more_instances_than_the_time_needs_may_be_needed_for_the_memory():
    plan = smallest(TransformerShape.family(64), A100, 100_000, Method.IMPROVED, "data", Limits(offload=False))
    assert 1 < plan.usage.degrees.devices <= 8 and not plan.usage.is_offloaded
