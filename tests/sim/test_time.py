"""How long a step takes on a machine of given speed: the time equations of the papers, on the virtual clock.

The machine is scaled to the model, so that a layer and a ubatch take the times of the example, whatever their size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from hf_l2l import L2LConfig, attach_l2l, detach_l2l, estimate
from hf_l2l.hf.training_args import l2l_config
from hf_l2l.pipeline.schedule import forward_steps, sweep_s
from hf_l2l.pipeline.times import LayerSeconds, step_time
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.stash import spill
from hf_l2l.stash.stash import Stash
from hf_l2l.testing import (
    VirtualClock,
    enable_simulated_accelerator,
    engine_on_clock,
    page_lock_limit,
    page_locked_bytes,
    virtual_clock,
)
from models import Toy, batch_for, bert
from pipelined import devices
from runs import attach
from tiers import more, nightly
from timed_machine import V100, WIDTH, Block, Machine, Stack, sweeps_s, timed_step
from training import l2l_trainer, settled_memory, tiny_bert


@pytest.fixture(autouse=True, scope="module")
def _eight() -> Iterator[None]:
    enable_simulated_accelerator("4GB", devices=8)
    yield
    enable_simulated_accelerator()


ON_DISK = pytest.mark.filterwarnings("ignore:.*is in host memory:UserWarning")
"""Where folders of tests are."""


def example_in(ubatches: int, layers: int = V100.layers) -> Machine:
    """The example, whose rows come in so many micro-batches, and whose layers are as many of its own."""
    times = V100.layers / layers
    forward_s = times * V100.forward_s * V100.ubatches / ubatches
    return replace(V100, layers=layers, ubatches=ubatches, forward_s=forward_s, transfer_s=times * V100.transfer_s)


@pytest.mark.parametrize("ubatches", [2, *more(16)])
def test_the_example_with_transfers_under_compute(ubatches):
    assert V100.compute_s == pytest.approx(2.458, rel=1e-3)
    clock = timed_step(example_in(ubatches))
    assert clock.end == pytest.approx(2.458 + 0.333, rel=0.02)
    assert clock.busy("compute") == pytest.approx(2.458, rel=0.001)
    assert clock.busy("compute") >= 0.95 * sweeps_s(clock)
    assert clock.busy("upload") == pytest.approx((2 * 24 - 2) * V100.transfer_s)  # the last two layers stay
    assert clock.busy("download") == pytest.approx(24 * V100.transfer_s, rel=0.005)  # and the norms
    assert clock.busy("host") == pytest.approx(0.333, rel=0.01)


class Asking(Block):
    """A layer that makes the host wait for the device, as routers of experts do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.sum().isfinite().item()
        return super().forward(x)


SIX, FOUR = Machine(6, 2, 1.0, 1.5, 0.5), Machine(layers=4, ubatches=2, forward_s=1.0, transfer_s=0.9, optimizer_s=1.0)
LONGER: dict[str, tuple[Machine, dict[str, Any], float, float]] = {
    # As long as a layer travels in less time than another computes. The first one is under nothing either way.
    "every transfer but one without prefetch": (SIX, {"prefetch": False}, (2 * 6 - 2 - 1) * 1.5, 0.13),
    "nothing for layers that make the host wait": (replace(SIX, transfer_s=1.9), {"block": Asking}, 0.0, 0.24),
    # The next layer's first gradient arrives after one ubatch's recompute and a part of its backward.
    "nothing for one gradient slot if a transfer is under a recompute": (FOUR, {"gradient_slots": 1}, 0.0, 1e-6),
}


@nightly
@pytest.mark.parametrize("case", LONGER)
def test_how_much_longer_a_step_takes(case):
    machine, options, longer_s, within_s = LONGER[case]
    longer = timed_step(machine, **options).end - timed_step(machine).end
    assert longer == pytest.approx(longer_s, abs=within_s)


@nightly
def test_a_step_bound_by_the_link_backwards_too():
    machine = Machine(layers=12, ubatches=1, forward_s=1.0, transfer_s=9.0, optimizer_s=10.0)
    forward = machine.layers * 9.0 + 1.0
    # The upload of a layer waits until its slot is free, that is for the layer two before; both directions at once.
    backward = 2 * 3.0 + (machine.layers - 2) * 9.0 + 9.0
    assert timed_step(machine).end == pytest.approx(forward + backward + 10.0, rel=0.03)
    slow = replace(FOUR, transfer_s=5.0)
    assert timed_step(slow, gradient_slots=1).end > timed_step(slow).end + 2.0, "one slot waits for each transfer"


@nightly
def test_memory_that_is_not_locked_holds_up_the_host():
    short = replace(V100, ubatches=4, layers=6, optimizer_s=V100.optimizer_s / 4)
    with page_lock_limit(0), pytest.warns(UserWarning, match="page-locked"):
        pageable = timed_step(short)
    # An upload is given to the link when another layer's computation has been given to the device, and travels under
    # it; but the host waits for it, and for every gradient.
    locked = timed_step(short)
    assert locked.end + 0.0125 < pageable.end < timed_step(short, prefetch=False).end


@nightly
def test_the_stash_travels_under_compute(monkeypatch, tmp_path):
    """Layer inputs leave and come back over a link on which each way takes a fifth of the computation."""
    machine = Machine(layers=4, ubatches=4, forward_s=1.0, transfer_s=1.8, optimizer_s=1.0, rows=64)
    ubatch_s = 4 * 64 * WIDTH / machine.costs().link_bytes_per_s
    on_device, on_host = (timed_step(machine, stash=place) for place in ("device", "host"))
    for lane in ("upload", "download"):
        travelled = on_host.busy(lane) - on_device.busy(lane)
        assert travelled == pytest.approx(4 * 4 * ubatch_s)
        assert travelled > 0.2 * machine.compute_s
    # The backward's first fetch is under nothing.
    assert on_host.end - on_device.end == pytest.approx(ubatch_s, abs=ubatch_s)
    # Copies to and from a file block the host, which has given the device its work before.
    monkeypatch.setattr(spill, "is_in_memory", lambda folder: False)
    on_disk = timed_step(machine, stash="disk", spill_dir=tmp_path)
    assert on_disk.end == pytest.approx(on_host.end, abs=ubatch_s)
    monkeypatch.setattr(Stash, "fetch_ahead", lambda self, *tensors: None)
    assert timed_step(machine, stash="host").end > on_host.end + 0.15 * machine.compute_s


# ---- state on disk: what is page-locked for it, and the time of a step


@nightly
@ON_DISK
def test_masters_are_not_page_locked_but_what_travels_is(tmp_path):
    """Two layers are page-locked for uploads, and the gradients."""
    model, layers = Toy(8, 32, tied=False), 8
    layer, all_bytes = (sum(p.nbytes for p in of.parameters()) for of in (model.blocks[0], model))
    settled_memory()  # what models of other tests have locked goes
    before = page_locked_bytes()
    model, eps, optimizer, batch = attach(model, state_tier="disk", state_dir=tmp_path)
    for _ in range(2):
        model(**batch).loss.backward()
        optimizer.step()
    eps.synchronize()
    assert all_bytes < page_locked_bytes() - before < 1.1 * (all_bytes + 2 * layer) < 2 * layers * layer


@pytest.fixture
def no_tensor_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the machine are; with larger ones, its step takes long."""
    monkeypatch.setattr("hf_l2l.state_tier.state.SMALL", 64)


EIGHT = Machine(layers=8, ubatches=4, forward_s=1.0, transfer_s=1.0, optimizer_s=8.0)


@ON_DISK
@pytest.mark.usefixtures("no_tensor_is_small")
def test_a_step_that_the_disk_bounds_takes_as_long_as_the_estimate_says(tmp_path):
    """The bytes that it reads and writes, and what nothing overlaps with: the end of the last update."""
    slow = replace(EIGHT, disk_s=200.0)
    config = L2LConfig(state_window=3, state_tier="disk", layer_classes=("Block",), eps_update="serial")
    traffic = estimate(Stack(slow.layers), config, device="sim").state_traffic
    clock = timed_step(slow, state_tier="disk", state_dir=tmp_path, state_window=3)
    seconds = (traffic.read + traffic.written) / slow.costs().disk_bytes_per_s
    assert clock.busy("disk") == pytest.approx(seconds, rel=0.1)
    assert clock.end == pytest.approx(seconds, rel=0.1)


@ON_DISK
@pytest.mark.usefixtures("no_tensor_is_small")
def test_a_fast_disk_delays_nothing_but_the_first_read(tmp_path):
    """Reads and writes travel under computation and updates."""
    fast = replace(EIGHT, disk_s=0.5)
    clock = timed_step(fast, state_tier="disk", state_dir=tmp_path, state_window=4)
    assert clock.busy("disk") > 5.0
    assert clock.end == pytest.approx(timed_step(EIGHT, eps_update="serial").end, rel=0.06)


# ---- updates in the background, on a worker of its own time


class Embedded(Stack):
    """A stack with an input embedding as large as two layers, which is all the shell."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        numel = sum(p.numel() for p in self.blocks[0].parameters())
        self.embed = nn.Embedding(2 * numel // WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.embed(torch.zeros(len(x), dtype=torch.long, device=x.device)))


def step_s(machine: Machine, mode: str, kind: type[Stack] = Stack) -> float:
    """How long a step takes after the first ones, from the end of one `optimizer.step()` to the end of the next."""
    model, eps, optimizer, _ = attach(
        kind(machine.layers), ubatch_size=machine.rows, layer_classes=("Block",), eps_update=mode
    )
    x = torch.randn(machine.ubatches * machine.rows, WIDTH, device="sim", requires_grad=True)

    def step() -> None:
        model(x).backward()
        assert eps.clip_grad_norm_(1e-3) > 1e-3
        optimizer.step()
        model.zero_grad()

    step()  # the first one learns the order of the layers
    eps.synchronize()
    with virtual_clock(machine.costs()) as clock, engine_on_clock(clock, eps):
        step()  # and this one leaves an update behind
        begun = clock.now
        step()
        return clock.now - begun


@nightly
def test_of_the_update_of_the_example_only_that_of_the_first_layer_is_not_under_the_forward():
    """With clipping."""
    machine = example_in(ubatches=2, layers=8)
    assert machine.compute_s == pytest.approx(2.458, rel=1e-3)
    assert step_s(machine, "deferred") == pytest.approx(2.458 + 0.333 / 8, rel=0.02)
    assert step_s(machine, "serial") == pytest.approx(2.458 + 0.333, rel=0.02)


def test_an_embedding_is_exposed():
    """It is the first that the next forward needs, and its gradient the last that arrives."""
    machine = Machine(layers=6, ubatches=4, forward_s=1.0, transfer_s=0.5, optimizer_s=6 * 3.0)
    deferred = step_s(machine, "deferred", Embedded)
    assert deferred == pytest.approx(machine.compute_s + 3.0 + 2 * 3.0, rel=0.03), "and the first layer's update"


class Moments(hf.TrainerCallback):
    """The clock before an optimizer's step, after it, and after what other callbacks do at the end of the step."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock, self.found = clock, []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.found.append(self.clock.now)

    on_pre_optimizer_step = on_optimizer_step = on_step_end


def moments_of(folder: Path, mode: str) -> list[float]:
    model = tiny_bert(layers=2, dropout=0.0)
    # A slow host: the update of the whole model takes 10 seconds.
    host_bytes_per_s = 28 * sum(p.numel() for p in model.parameters()) / 10.0
    with virtual_clock(replace(Machine(1, 1, 1e-6, 1e-6, 1.0).costs(), host_bytes_per_s=host_bytes_per_s)) as clock:
        moments = Moments(clock)
        made = l2l_trainer(folder, model=model, eps_update=mode, max_steps=3, ubatch_size=4, callbacks=[moments])
        with engine_on_clock(clock, attach_l2l(model, l2l_config(made.args))):
            made.train()
    return moments.found


@pytest.fixture
def one_device() -> Iterator[None]:
    """A Trainer runs on all."""
    enable_simulated_accelerator()
    yield
    enable_simulated_accelerator("4GB", devices=8)


def test_with_the_callbacks_of_transformers_a_step_waits_for_nothing(one_device, tmp_path):
    """The progress bar, the log and the flow of control look at a step that is still being made."""
    serial, deferred = (moments_of(tmp_path / mode, mode) for mode in ("serial", "deferred"))
    for before, after in zip(serial[::3], serial[1::3], strict=True):
        assert after - before == pytest.approx(10.0, rel=0.01)
    assert len(deferred) == 3 * 3 and deferred[::3] == deferred[1::3] == deferred[2::3]


# ---- several devices in turn: the formulas of the modular pipeline, and what each device holds

MACHINE = Machine(layers=24, ubatches=8, forward_s=1.0, transfer_s=4.0, optimizer_s=1.0)
"""A layer travels while half of its rows are computed."""


def on_several(machine: Machine, count: int, *, costs: dict[str, float] | None = None, **options: Any) -> VirtualClock:
    """The clock of the sweeps of a step on so many devices."""
    known = replace(machine.costs(), **(costs or {}))
    return timed_step(machine, costs=known, updates=False, device=devices(count), **options)


def formula_s(machine: Machine, count: int) -> float:
    """Forward, and backward, in which the recompute waits for no gradient."""
    sizes, one = (machine.layers, machine.ubatches, count), machine.forward_s
    return sweep_s(*sizes, one) + sweep_s(*sizes, 3 * one, 2 * one)


FEW, ODD, LAYERS = replace(MACHINE, ubatches=2), replace(MACHINE, layers=10, ubatches=5), replace(MACHINE, layers=8)


@nightly
@pytest.mark.parametrize(
    ("machine", "count", "options"),
    [
        (ODD, 4, {}),
        *((MACHINE, count, {}) for count in (1, 2, 4, 8)),
        (FEW, 8, {}),
        (LAYERS, 4, {"stash": "host", "boundary": "device"}),
        (LAYERS, 4, {"cmp": "bf16"}),
    ],
)
def test_layers_in_turn_take_the_time_of_the_formula(machine, count, options):
    machine = replace(machine, transfer_s=min(machine.transfer_s, 0.9 * machine.ubatches))
    clock = on_several(machine, count, **options)
    assert sweeps_s(clock) == pytest.approx(formula_s(machine, count), rel=0.05)
    assert options or sum(clock.busy("compute", device=each) for each in range(count)) == pytest.approx(
        machine.compute_s, rel=1e-3
    )


SLOW, MIXED = replace(MACHINE, transfer_s=16.0), replace(MACHINE, layers=10, ubatches=3, transfer_s=6.0)


@pytest.mark.parametrize(("machine", "count"), [(MIXED, 2), *more((SLOW, 4), (MACHINE, 4), (MIXED, 1))])
def test_the_estimate_of_time_is_what_the_engine_does(machine, count):
    rows, up = machine.ubatches * machine.forward_s, machine.transfer_s
    # The last two layers of each device stay in their slots.
    layers = [
        LayerSeconds(rows, 2 * rows, rows, up=up, down=up, up_again=up if number < machine.layers - 2 * count else 0.0)
        for number in range(machine.layers)
    ]
    found = step_time(layers, LayerSeconds(0.0, 0.0, 0.0), count, machine.ubatches)
    assert on_several(machine, count).end == pytest.approx(found.forward + found.backward, rel=0.05)


def test_the_trace_has_the_times_of_all_devices(tmp_path):
    """The clocks of the devices begin together: a layer ends one micro-batch after the layer before. While masters are
    updated, the first layers of all devices travel at once all the same."""
    machine, file = replace(MACHINE, layers=8, ubatches=4, transfer_s=2.0, optimizer_s=0.1), tmp_path / "trace.json"
    model = Stack(machine.layers)
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
    spans = [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]
    # Of the last step.
    ends = {e["name"]: (e["ts"] + e["dur"]) / 1e6 for e in sorted(spans, key=lambda e: e["ts"])}
    done = [ends[f"forward blocks.{layer}"] - ends["forward blocks.0"] for layer in range(machine.layers)]
    by_rule = [step.when for step in forward_steps(machine.layers, machine.ubatches, 4) if step.ubatch == 0]
    assert done == pytest.approx(sorted(by_rule), abs=0.1)


def test_links_carry_weights_and_rows_under_the_computation():
    """Each its share of the weights; of each device, the last two layers of the forward stay. A micro-batch takes a
    quarter of its computation over the link to the next device."""
    machine, count = LAYERS, 4
    clock = on_several(machine, count, costs={"peer_bytes_per_s": 4 * WIDTH / (machine.forward_s / 4)})
    of_each = machine.layers // count
    for device in range(count):
        assert clock.busy("upload", device=device) == pytest.approx((2 * of_each - 2) * machine.transfer_s)
        assert clock.busy("download", device=device) == pytest.approx(of_each * machine.transfer_s, rel=0.01)
    hops = 2 * (machine.layers - 1)
    passed = sum(clock.busy("peer", device=each) for each in range(count))
    assert passed == pytest.approx((hops + 1) * machine.compute_s / machine.layers / 16, rel=0.1)
    fill = 2 * of_each * (count - 1) * machine.forward_s / 4
    assert formula_s(machine, count) <= sweeps_s(clock) <= formula_s(machine, count) + fill


def test_one_thread_launches_for_all_devices():
    """From some point on, more devices do not help: the launches take their time, whoever computes."""
    machine = replace(MACHINE, layers=8, ubatches=4, transfer_s=2.0)
    clock = on_several(machine, 4, costs={"launch_s": 0.2})
    assert sweeps_s(clock) == pytest.approx(clock.busy("launch"), rel=0.05)
    assert clock.busy("launch") > 1.5 * formula_s(machine, 4)


SIZES = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "vocab_size": 100}


def llama(**sizes: int) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_key_value_heads=1))


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
    model = make(**SIZES, num_hidden_layers=layers).train()
    batch = batch_for(model, rows=64)
    config = L2LConfig(device=devices(count), ubatch_size=16, eps_update="serial", **options)
    optimizer = torch.optim.AdamW(model.parameters())
    run = RunShapes(model, config, batch, optimizer=optimizer, device=torch.device("sim:0"), devices=count)
    expected = [sum(run.on_device(config, number).peak()[1].values()) for number in range(count)]
    settled_memory()
    before = [torch.sim.memory_allocated(number) for number in range(count)]  # of other modules
    eps = attach_l2l(model, config)
    eps.wrap(optimizer)
    for _ in range(3):
        for number in range(count):
            torch.sim.reset_peak_memory_stats(number)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    peaks = [torch.sim.max_memory_allocated(number) for number in range(count)]  # of the last step
    report = eps.memory_report()
    detach_l2l(model)
    found = [peak - earlier for peak, earlier in zip(peaks, before, strict=True)]
    assert found == pytest.approx(expected, rel=0.03)
    assert run.most(config) >= max(expected)
    tiers = ["device", *(f"sim:{number}" for number in range(1, count))]
    assert [*report] == [*tiers, "host", "of which"]
    assert [report[tier]["total"]["peak"] for tier in tiers] == pytest.approx(peaks, rel=0.01)
    assert all(report[tier]["shell"]["peak"] == 0 for tier in tiers[1:])
