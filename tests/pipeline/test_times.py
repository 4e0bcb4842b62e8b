"""The time of a step on several devices, from what layers compute and move."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_l2l.pipeline.schedule import sweep_s
from hf_l2l.pipeline.times import LayerSeconds, step_time

NOTHING = LayerSeconds(0.0, 0.0, 0.0)


def layer(**more: float) -> LayerSeconds:
    return LayerSeconds(8.0, 16.0, 8.0, **more)


@given(
    count=st.integers(1, 12),
    ubatches=st.integers(1, 9),
    devices=st.integers(1, 6),
    forward=st.integers(1, 5),
    backward=st.integers(1, 9),
)
def test_without_transfers_it_is_the_formula(count, ubatches, devices, forward, backward):
    each = LayerSeconds(forward * ubatches, backward * ubatches, forward * ubatches)
    found = step_time([each] * count, NOTHING, devices, ubatches)
    sizes = count, ubatches, devices
    assert found.forward == pytest.approx(sweep_s(*sizes, forward))
    # A recompute may begin before the forward has ended everywhere.
    whole = sweep_s(*sizes, forward + backward, backward)
    assert whole - forward * (devices - 1) - 1e-9 <= found.backward <= whole + 1e-9
    assert 0 <= found.idle < 1


def test_a_link_that_sets_the_pace_is_shared():
    """Each link carries its layers; two that are in slots are not uploaded again, which this leaves out."""
    slow = [layer(up=20.0, down=20.0)] * 16
    one, four = (step_time(slow, NOTHING, devices, 8) for devices in (1, 4))
    assert one.forward == pytest.approx(15 * 20 + 20 + 8) and one.forward > 2 * 16 * 8
    assert four.forward == pytest.approx(3 * 20 + 20 + 8 + 3)
    assert one.busy["upload"] == 4 * four.busy["upload"] == 16 * 20


def test_one_thread_launches_for_all():
    found = step_time([layer()] * 16, NOTHING, 4, 8, launch=2.0)
    assert found.bound == "launch" and found.busy["launch"] == 16 * 8 * 2.0 * 3
    assert found.seconds == pytest.approx(found.busy["launch"], rel=0.05)
    assert step_time([layer()] * 16, NOTHING, 4, 8, launch=0.05).bound == "compute"


def test_rows_pass_while_other_rows_are_computed():
    without, found = (step_time([layer()] * 16, NOTHING, 4, 8, passed=passed) for passed in (0.0, 0.5))
    assert found.seconds - without.seconds < 16 * 2 * 0.5
    assert step_time([layer()] * 16, NOTHING, 1, 8, passed=0.5) == step_time([layer()] * 16, NOTHING, 1, 8)


def test_the_update_of_the_host_is_not_shared():
    """It is hidden under the next forward as far as that lasts, which is shorter on more devices."""
    slow = [layer(up=1.0, update=16.0)] * 16
    hidden = [step_time(slow, NOTHING, devices, 8) for devices in (1, 4)]
    assert hidden[0].bound == "compute" and hidden[1].bound == "update"
    serial = step_time(slow, NOTHING, 4, 8, defers=False)
    assert serial.seconds > hidden[1].seconds


def test_what_is_outside_the_layers_runs_on_the_first_device():
    head = LayerSeconds(10.0, 20.0, 0.0, up=5.0, down=5.0)
    without, found = (step_time([layer()] * 8, each, 4, 8) for each in (NOTHING, head))
    assert found.seconds - without.seconds == pytest.approx(5 + 10 + 20, rel=0.1)


def test_sums_wait_for_their_slot():
    """The third layer of a device adds its gradients where those of the first one were."""
    quick, slow = (step_time([layer(down=down)] * 6, NOTHING, 1, 8) for down in (20.0, 60.0))
    assert quick.backward == pytest.approx(6 * 24 + 20)
    assert slow.backward == pytest.approx(24 + 6 * 60, rel=0.05)
