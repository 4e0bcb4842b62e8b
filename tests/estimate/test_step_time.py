"""The cost model: literal times of small steps, what bounds them, and the rates of one layer by a clock of tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from hf_l2l import L2LConfig
from hf_l2l.plan.layer_probe import with_layer_rates
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.plan.step_time import Cost, Rates, step_time
from hf_l2l.shapes.inputs import example_inputs
from models import FAMILIES
from tiers import more

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


def test_what_is_resident_waits_for_nothing():
    """It computes while the others are updated, and is updated on the device."""
    streamed = Cost(forward_flops=10, backward_flops=10, forward_up=1, parameters=20)
    resident = Cost(forward_flops=10, backward_flops=10, on_device=1)
    found = step_time([resident, resident, streamed, streamed], NOTHING, RATES)
    assert found.forward == 2 * 20 + 1 + 10, "the last layer waits for the second update"
    assert found.backward == 40 + 2
    assert found.seconds < step_time([streamed] * 4, NOTHING, RATES).seconds


def test_steps_repeat():
    layers = [Cost(forward_flops=3, backward_flops=5, forward_up=2, backward_up=2, backward_down=3, parameters=7)] * 5
    shell = Cost(forward_flops=1, backward_flops=2, forward_up=4, backward_down=4, parameters=3)
    late = [step_time(layers, shell, RATES, steps=steps).seconds for steps in (4, 5, 8)]
    assert late[0] == late[1] == late[2]


# ---- one layer, measured


def shapes_of(kind: str, rows: int, **options: Any) -> RunShapes:
    with torch.device("meta"):
        model = FAMILIES[kind]()
    inputs = example_inputs(model, rows, None if kind == "vit" else 16)
    return RunShapes(model, L2LConfig(), inputs, device=torch.device("cuda"), **options)


def layer_rates(run: RunShapes, seconds: list[float]) -> Rates:
    given = iter(seconds)
    return with_layer_rates(replace(RATES, link_up=2.0), run, torch.device("cpu"), lambda work: next(given))


def flops_of(run: RunShapes, rows: int) -> int:
    layer = run.traced(rows).calls[0].layer
    return layer.forward_flops + layer.backward_flops


def test_operations_are_told_from_what_comes_besides():
    """A layer that takes 3 ms besides, and computes 10 GFLOP/s; and one whose time tells nothing of that."""
    run = shapes_of("llama", 8)
    found = layer_rates(run, [3e-3 + flops_of(run, rows) / 1e10 for rows in (1, 8)])
    assert found.flops == pytest.approx(1e10) and found.per_call == pytest.approx(1.5e-3)
    assert (found.link_up, found.link_down, found.adamw, found.device_adamw) == (2.0, 1.0, 1.0, 1.0)
    for rows, seconds in ((1, [0.5]), (8, [0.5, 0.5]), (8, [0.6, 0.5])):
        found = layer_rates(shapes_of("llama", rows), seconds)
        assert found.flops == pytest.approx(flops_of(run, rows) / seconds[-1]) and found.per_call == 0


@pytest.mark.parametrize(("kind", "autocast"), [("llama", torch.bfloat16), ("vit", None), *more(("t5", None))])
def test_layers_of_many_kinds_run(kind, autocast):
    """Forward and backward, of one row and of all, under the autocast of the training; the model stays without
    values."""
    run = shapes_of(kind, 4, autocast=autocast)
    seen: list[torch.dtype] = []
    turns: list[Any] = []

    class Sees(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if func is torch.nn.functional.linear:
                seen.append(found.dtype)
            return found

    def measure(work: Any) -> float:
        with Sees():
            work()
        turns.append(work)
        return float(len(turns))

    assert with_layer_rates(RATES, run, torch.device("cpu"), measure).flops > 0
    assert len(turns) == 2 and set(seen) == {autocast or torch.float32}
    assert {p.device.type for p in run.model.parameters()} == {"meta"}
