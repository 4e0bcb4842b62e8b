"""The order of layers and micro-batches on several devices."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_l2l.pipeline.schedule import Step, backward_steps, forward_steps, idle_share, sweep_length, sweep_s

SIZES = st.tuples(st.integers(1, 12), st.integers(1, 9), st.integers(1, 6))


def table(steps: list[Step], devices: int) -> list[str]:
    """A line for each device: "0.1" is micro-batch 1 of layer 0, ". ." nothing."""
    end = max(step.when for step in steps) + 1
    lines = [["---"] * end for _ in range(devices)]
    for step in steps:
        assert lines[step.device][step.when] == "---", "a device runs one at a time"
        lines[step.device][step.when] = f"{step.layer}.{step.ubatch}"
    return [" ".join(line) for line in lines]


def test_forward_with_as_many_micro_batches_as_devices():
    assert table(forward_steps(layers=4, ubatches=2, devices=2), 2) == [
        "0.0 0.1 2.0 2.1 ---",
        "--- 1.0 1.1 3.0 3.1",
    ]


def test_backward_goes_through_the_layers_from_the_last_one():
    assert table(backward_steps(layers=4, ubatches=2, devices=2), 2) == [
        "--- 2.0 2.1 0.0 0.1",
        "3.0 3.1 1.0 1.1 ---",
    ]


def test_with_more_micro_batches_no_device_waits_in_between():
    assert table(forward_steps(layers=4, ubatches=3, devices=2), 2) == [
        "0.0 0.1 0.2 2.0 2.1 2.2 ---",
        "--- 1.0 1.1 1.2 3.0 3.1 3.2",
    ]


def test_with_fewer_micro_batches_than_devices_they_wait_for_inputs():
    assert table(forward_steps(layers=6, ubatches=2, devices=3), 3) == [
        "0.0 0.1 --- 3.0 3.1 --- ---",
        "--- 1.0 1.1 --- 4.0 4.1 ---",
        "--- --- 2.0 2.1 --- 5.0 5.1",
    ]


def test_layers_that_the_devices_do_not_divide():
    assert table(forward_steps(layers=3, ubatches=2, devices=2), 2) == ["0.0 0.1 2.0 2.1", "--- 1.0 1.1 ---"]
    assert table(backward_steps(layers=3, ubatches=2, devices=2), 2) == ["2.0 2.1 0.0 0.1", "--- 1.0 1.1 ---"]


def test_one_device_runs_one_after_the_other():
    assert table(backward_steps(layers=2, ubatches=3, devices=1), 1) == ["1.0 1.1 1.2 0.0 0.1 0.2"]


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
