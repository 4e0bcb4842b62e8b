"""How long a step takes on several devices in turn, in virtual time, against the formulas of the modular pipeline; and
what each device holds at its peak, against the estimate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.pipeline.schedule import forward_steps, sweep_s
from hf_l2l.pipeline.times import LayerSeconds, step_time
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.testing import VirtualClock, enable_simulated_accelerator, engine_on_clock, virtual_clock
from models import bert
from pipelined import devices
from tiers import more, nightly
from timed_machine import WIDTH, Block, Machine, Stack, sweeps_s
from training import settled_memory

MACHINE = Machine(layers=24, ubatches=8, forward_s=1.0, transfer_s=4.0, optimizer_s=1.0)
"""A layer travels while half of its rows are computed."""


@pytest.fixture(autouse=True, scope="module")
def _eight() -> Iterator[None]:
    enable_simulated_accelerator("4GB", devices=8)
    yield
    enable_simulated_accelerator()


def timed(
    machine: Machine, count: int, *, steps: int = 1, costs: dict[str, float] | None = None, **options: Any
) -> VirtualClock:
    """The clock of the sweeps of a step after the first, which learns the order of the layers."""
    torch.manual_seed(0)
    model = Stack(machine.layers, Block)
    config = L2LConfig(
        device=devices(count), ubatch_size=machine.rows, layer_classes=("Block",), eps_update="serial", **options
    )
    eps = attach_l2l(model, config)
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
    x = torch.randn(machine.ubatches * machine.rows, WIDTH, device="sim:0", requires_grad=True)
    model(x).backward()
    optimizer.step()
    with virtual_clock(replace(machine.costs(), **(costs or {}))) as clock:
        model(x).backward()
    return clock


def formula_s(machine: Machine, count: int) -> float:
    """Forward, and backward, in which the recompute waits for no gradient."""
    sizes = machine.layers, machine.ubatches, count
    one = machine.forward_s
    return sweep_s(*sizes, one) + sweep_s(*sizes, 3 * one, 2 * one)


FEW, ODD, LAYERS = replace(MACHINE, ubatches=2), replace(MACHINE, layers=10, ubatches=5), replace(MACHINE, layers=8)


@nightly
@pytest.mark.parametrize(
    ("machine", "count", "options"),
    [
        (ODD, 4, {}),
        *more(*((MACHINE, count, {}) for count in (1, 2, 4, 8)), (FEW, 8, {})),
        *more((LAYERS, 4, {"stash": "host", "boundary": "device"}), (LAYERS, 4, {"cmp": "bf16"})),
    ],
)
def test_layers_in_turn_take_the_time_of_the_formula(machine, count, options):
    machine = replace(machine, transfer_s=min(machine.transfer_s, 0.9 * machine.ubatches))
    clock = timed(machine, count, **options)
    assert sweeps_s(clock) == pytest.approx(formula_s(machine, count), rel=0.05)
    assert options or sum(clock.busy("compute", device=each) for each in range(count)) == pytest.approx(
        machine.compute_s, rel=1e-3
    )


SLOW, MIXED = replace(MACHINE, transfer_s=16.0), replace(MACHINE, layers=10, ubatches=3, transfer_s=6.0)


@pytest.mark.parametrize(("machine", "count"), [(MIXED, 2), *more((SLOW, 4), (MACHINE, 4), (MIXED, 1))])
def test_the_estimate_of_time_is_what_the_engine_does(machine, count):
    rows = machine.ubatches * machine.forward_s
    usual = LayerSeconds(rows, 2 * rows, rows, up=machine.transfer_s, down=machine.transfer_s)
    # The last two layers of each device stay in their slots.
    layers = [
        usual._replace(up_again=machine.transfer_s if number < machine.layers - 2 * count else 0.0)
        for number in range(machine.layers)
    ]
    found = step_time(layers, LayerSeconds(0.0, 0.0, 0.0), count, machine.ubatches)
    clock = timed(machine, count)
    assert clock.end == pytest.approx(found.forward + found.backward, rel=0.05)


def test_the_trace_has_the_times_of_all_devices(tmp_path):
    """The clocks of the devices begin together: a layer ends one micro-batch after the layer before. While masters are
    updated, the first layers of all devices travel at once all the same."""
    torch.manual_seed(0)
    machine, file = replace(MACHINE, layers=8, ubatches=4, transfer_s=2.0, optimizer_s=0.1), tmp_path / "trace.json"
    model = Stack(machine.layers, Block)
    config = L2LConfig(device=devices(4), ubatch_size=1, layer_classes=("Block",), eps_update="deferred", trace=file)
    x = torch.randn(machine.ubatches, WIDTH, device="sim:0", requires_grad=True)
    with virtual_clock(machine.costs()) as clock:
        eps = attach_l2l(model, config)
        optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
        with engine_on_clock(clock, eps):
            for _ in range(2):
                model(x).backward()
                optimizer.step()
            detach_l2l(model)
    events = json.loads(file.read_text())["traceEvents"]
    ends = {}  # of the last step
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        ends[event["name"]] = (event["ts"] + event["dur"]) / 1e6
    done = [ends[f"forward blocks.{layer}"] - ends["forward blocks.0"] for layer in range(machine.layers)]
    by_rule = [step.when for step in forward_steps(machine.layers, machine.ubatches, 4) if step.ubatch == 0]
    assert done == pytest.approx(sorted(by_rule), abs=0.1)


def test_links_carry_weights_and_rows_under_the_computation():
    """Each its share of the weights; of each device, the last two layers of the forward stay. A micro-batch takes a
    quarter of its computation over the link to the next device."""
    machine, count = LAYERS, 4
    clock = timed(machine, count, costs={"peer_bytes_per_s": 4 * WIDTH / (machine.forward_s / 4)})
    layers = 2 * machine.layers // count - 2
    up = [clock.busy("upload", device=each) for each in range(count)]
    assert up == pytest.approx([layers * machine.transfer_s] * count)
    down = [clock.busy("download", device=each) for each in range(count)]
    assert down == pytest.approx([machine.layers // count * machine.transfer_s] * count, rel=0.01)
    hops = 2 * (machine.layers - 1)
    passed = sum(clock.busy("peer", device=each) for each in range(count))
    assert passed == pytest.approx((hops + 1) * machine.compute_s / machine.layers / 16, rel=0.1)
    fill = 2 * machine.layers / count * (count - 1) * machine.forward_s / 4
    assert formula_s(machine, count) <= sweeps_s(clock) <= formula_s(machine, count) + fill


def test_one_thread_launches_for_all_devices():
    """From some point on, more devices do not help: the launches take their time, whoever computes."""
    machine = replace(MACHINE, layers=8, ubatches=4, transfer_s=2.0)
    clock = timed(machine, 4, costs={"launch_s": 0.2})
    assert sweeps_s(clock) == pytest.approx(clock.busy("launch"), rel=0.05)
    assert clock.busy("launch") > 1.5 * formula_s(machine, 4)


# ---- memory

SIZES = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "vocab_size": 100}


def llama(**sizes: int) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_key_value_heads=1))


def batch_of(make: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 100, (16, 32), generator=generator)
    labels = ids.clone() if make is llama else torch.randint(0, 2, (16,), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


@pytest.mark.parametrize(
    ("make", "layers", "options", "count"),
    [
        (bert, 4, {"stash": "host", "boundary": "device"}, 2),
        *more((llama, 7, {"cmp": "bf16", "gradient_slots": 1}, 4), (llama, 6, {"resident_layers": 3}, 2)),
        *more((bert, 5, {"kept_weights": 2}, 4), (llama, 6, {"stash": "host", "head_device": "first"}, 2)),
    ],
)
def test_each_device_holds_what_was_estimated(make, layers, options, count):
    """Its names are in the report."""
    torch.manual_seed(0)
    model, batch = make(**SIZES, num_hidden_layers=layers).train(), batch_of(make)
    config = L2LConfig(device=devices(count), ubatch_size=4, eps_update="serial", **options)
    optimizer = torch.optim.AdamW(model.parameters())
    run = RunShapes(model, config, batch, optimizer=optimizer, device=torch.device("sim:0"), devices=count)
    expected = [sum(run.on_device(config, number).peak()[1].values()) for number in range(count)]
    settled_memory()
    before = [torch.sim.memory_allocated(number) for number in range(count)]  # of other modules
    eps = attach_l2l(model, config)
    eps.wrap(optimizer)
    for step in range(3):
        if step == 2:
            for number in range(count):
                torch.accelerator.reset_peak_memory_stats(torch.device("sim", number))
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = [torch.accelerator.memory_stats(torch.device("sim", number)) for number in range(count)]
    peaks = [each["allocated_bytes.all.peak"] for each in stats]
    found = [peak - earlier for peak, earlier in zip(peaks, before, strict=True)]
    report = eps.memory_report()
    detach_l2l(model)
    assert found == pytest.approx(expected, rel=0.03)
    assert run.most(config) >= max(expected)
    tiers = ["device", *(f"sim:{number}" for number in range(1, count))]
    assert [*report] == [*tiers, "host", "of which"]
    assert [report[tier]["total"]["peak"] for tier in tiers] == pytest.approx(peaks, rel=0.01)
    assert all(report[tier]["shell"]["peak"] == 0 for tier in tiers[1:])
