"""The order of layers and micro-batches on several devices, and the time of a step there."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_l2l.pipeline.schedule import Step, backward_steps, forward_steps, idle_share, sweep_length, sweep_s
from hf_l2l.pipeline.times import LayerSeconds, step_time

SIZES = st.tuples(st.integers(1, 12), st.integers(1, 9), st.integers(1, 6))


def table(steps: list[Step], devices: int) -> list[str]:
    """A line for each device: "0.1" is micro-batch 1 of layer 0, ". ." nothing."""
    end = max(step.when for step in steps) + 1
    lines = [["---"] * end for _ in range(devices)]
    for step in steps:
        assert lines[step.device][step.when] == "---", "a device runs one at a time"
        lines[step.device][step.when] = f"{step.layer}.{step.ubatch}"
    return [" ".join(line) for line in lines]


TABLES = [
    # As many micro-batches as devices; backwards, from the last layer.
    (forward_steps, (4, 2, 2), ["0.0 0.1 2.0 2.1 ---", "--- 1.0 1.1 3.0 3.1"]),
    (backward_steps, (4, 2, 2), ["--- 2.0 2.1 0.0 0.1", "3.0 3.1 1.0 1.1 ---"]),
    # More: no device waits in between. Fewer: they wait for inputs.
    (forward_steps, (4, 3, 2), ["0.0 0.1 0.2 2.0 2.1 2.2 ---", "--- 1.0 1.1 1.2 3.0 3.1 3.2"]),
    (
        forward_steps,
        (6, 2, 3),
        ["0.0 0.1 --- 3.0 3.1 --- ---", "--- 1.0 1.1 --- 4.0 4.1 ---", "--- --- 2.0 2.1 --- 5.0 5.1"],
    ),
    # Layers that the devices do not divide; one device.
    (forward_steps, (3, 2, 2), ["0.0 0.1 2.0 2.1", "--- 1.0 1.1 ---"]),
    (backward_steps, (3, 2, 2), ["2.0 2.1 0.0 0.1", "--- 1.0 1.1 ---"]),
    (backward_steps, (2, 3, 1), ["1.0 1.1 1.2 0.0 0.1 0.2"]),
]


@pytest.mark.parametrize(("steps_of", "sizes", "expected"), TABLES)
def test_when_each_device_runs_which_layer(steps_of, sizes, expected):
    assert table(steps_of(*sizes), sizes[2]) == expected


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


@given(sizes=SIZES, parts=st.tuples(st.integers(0, 5), st.integers(1, 5)))
def test_a_recompute_does_not_wait_for_a_gradient(sizes, parts):
    """Each step has a part before its input arrives, and one after it."""
    layers, ubatches, devices = sizes
    before, after = parts
    ends: dict[tuple[int, int], int] = {}
    for turn in range(layers):
        for ubatch in range(ubatches):
            own = ends.get((turn, ubatch - 1), ends.get((turn - devices, ubatches - 1), 0) if ubatch == 0 else 0)
            ends[turn, ubatch] = max(own + before, ends.get((turn - 1, ubatch), 0)) + after
    assert sweep_s(*sizes, before + after, after) == max(ends.values())


def test_four_devices_are_idle_six_in_hundred_where_a_classic_pipeline_is_27():
    assert idle_share(24, 8, 4) == pytest.approx(0.059, abs=1e-3)
    assert idle_share(4, 8, 4) == pytest.approx(3 / 11)  # as if each device had all its layers in a row


# ---- the time of a step

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
