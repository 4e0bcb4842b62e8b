"""The cost model: literal times of small steps, and what bounds them."""

from __future__ import annotations

from dataclasses import replace

from hf_l2l.plan.step_time import Cost, Rates, step_time

RATES = Rates(flops=1.0, link_up=1.0, link_down=1.0, adamw=1.0, device_adamw=1.0)
NOTHING = Cost()


def test_computing_alone_is_its_operations():
    layers = [Cost(forward_flops=2, backward_flops=6)] * 3
    found = step_time(layers, Cost(forward_flops=1, backward_flops=2), RATES)
    assert (found.seconds, found.forward, found.backward, found.bound) == (27, 7, 20, "compute")


def test_uploads_run_beside_layers():
    """The first upload is waited for, the others are hidden: the backward has the last two layers in their slots."""
    layers = [Cost(forward_flops=4, backward_flops=8, forward_up=3, backward_up=up) for up in (3, 0, 0)]
    found = step_time(layers, NOTHING, RATES)
    assert (found.forward, found.backward) == (3 + 12, 24)
    slow = step_time(layers, NOTHING, replace(RATES, link_up=0.1))
    assert slow.bound == "upload" and slow.forward == 3 * 30 + 4


def test_without_overlap_every_upload_is_waited_for():
    layers = [Cost(forward_flops=4, backward_flops=8, forward_up=3, backward_up=3)] * 3
    assert step_time(layers, NOTHING, RATES, prefetches=False).seconds == 3 * (3 + 4) + 3 * (3 + 8)


def test_updates_run_under_the_next_forward():
    """Layer by layer, in the order in which the forward needs them."""
    layers = [Cost(forward_flops=10, backward_flops=10, forward_up=1, parameters=5)] * 4
    hidden = step_time(layers, NOTHING, RATES)
    assert hidden.forward == 5 + 1 + 40, "the first layer waits for its update and its upload"
    exposed = step_time([replace(each, parameters=50) for each in layers], NOTHING, RATES)
    assert exposed.forward == 4 * 50 + 1 + 10 and exposed.bound == "update"


def test_gradients_leave_while_other_layers_compute():
    """With two slots for sums, the tail is one download; a slow link bounds the sweep."""
    layers = [Cost(forward_flops=1, backward_flops=4, backward_down=3)] * 3
    assert step_time(layers, NOTHING, RATES).backward == 3 * 4 + 3
    slow = step_time([replace(each, backward_down=40) for each in layers], NOTHING, RATES)
    assert slow.backward == 4 + 3 * 40 and slow.bound == "download"


def test_one_slot_for_sums_waits_for_downloads():
    layers = [Cost(backward_flops=4, backward_down=8)] * 3
    two, one = (step_time(layers, NOTHING, RATES, gradient_slots=count).backward for count in (2, 1))
    assert one > two


def test_what_is_resident_waits_for_nothing():
    """It computes while the others are updated, and is updated on the device."""
    streamed = Cost(forward_flops=10, backward_flops=10, forward_up=1, parameters=20)
    resident = Cost(forward_flops=10, backward_flops=10, on_device=1)
    found = step_time([resident, resident, streamed, streamed], NOTHING, RATES)
    assert found.forward == 2 * 20 + 1 + 10, "the last layer waits for the second update"
    assert found.backward == 40 + 2
    assert found.seconds < step_time([streamed] * 4, NOTHING, RATES).seconds


def test_each_micro_batch_has_a_price():
    layers = [Cost(forward_flops=4, backward_flops=8)] * 2
    found = step_time(layers, NOTHING, replace(RATES, per_call=0.5), ubatches=4)
    assert found.seconds == 2 * (4 + 2) + 2 * (8 + 2)


def test_steps_repeat():
    layers = [Cost(forward_flops=3, backward_flops=5, forward_up=2, backward_up=2, backward_down=3, parameters=7)] * 5
    shell = Cost(forward_flops=1, backward_flops=2, forward_up=4, backward_down=4, parameters=3)
    late = [step_time(layers, shell, RATES, steps=steps).seconds for steps in (4, 5, 8)]
    assert late[0] == late[1] == late[2]
