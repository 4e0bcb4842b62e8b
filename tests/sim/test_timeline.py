"""What the timeline says of a step is what the virtual clock says, and looking changes nothing."""

from __future__ import annotations

import itertools
import json
import weakref
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as hf

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.report.wait_time import Averages
from hf_l2l.runtime import wait_reasons
from hf_l2l.testing import VirtualClock, engine_on_clock, virtual_clock
from models import Toy
from runs import attach, train
from tiers import more, nightly
from timed_machine import V100, WIDTH, Machine, Stack, sweeps_s, timed_step
from training import l2l_trainer, measured

Row = list[tuple[str, float, float]]
SHORT = replace(V100, layers=6, ubatches=4, forward_s=4 * V100.forward_s, optimizer_s=V100.optimizer_s / 4)
LINK_BOUND = Machine(layers=6, ubatches=2, forward_s=1.0, transfer_s=4.0, optimizer_s=10.0)


def rows_of(file: Path) -> dict[str, Row]:
    """By row of a trace, its spans as (name, start, end) in seconds, by start."""
    events = json.loads(file.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    rows: dict[str, Row] = defaultdict(list)
    for e in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        rows[names[e["tid"]]].append((e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6))
    return rows


def busy(spans: Row) -> float:
    return sum(end - start for _, start, end in spans)


def watched_step(
    machine: Machine, file: Path, mode: str = "serial", **options: Any
) -> tuple[VirtualClock, Averages, dict[str, Row]]:
    """A step that begins at 0, as the clock saw it and as the timeline and all spans of the trace did: the second one,
    or the third one where that before it is still updated. What is computed and what is waited for are all of it, and
    nothing is counted twice."""
    options |= {"ubatch_size": machine.rows, "layer_classes": ("Block",), "trace": str(file), "eps_update": mode}
    model, eps, optimizer, _ = attach(Stack(machine.layers), **options)
    x = torch.randn(machine.ubatches * machine.rows, WIDTH, device="sim", requires_grad=True)
    model(x).backward()
    optimizer.step()
    eps.synchronize()
    eps.timeline.averages()
    earlier = rows_of(file)
    with virtual_clock(machine.costs()) as clock, engine_on_clock(clock, eps):
        eps.timeline.begin_trace(0.0)  # the step before was on another clock
        eps.timeline.watch()
        for _ in range(1 if mode == "serial" else 2):
            begun = clock.now
            model(x).backward()
            optimizer.step()
            averages = eps.timeline.averages()
        assert averages is not None and averages.steps == 1
        assert averages.step_s == pytest.approx(clock.now - begun)
        waits = averages.upload_s + averages.download_s + averages.eps_s
        assert clock.busy("compute", begun, clock.now) + waits == pytest.approx(averages.step_s)
        eps.synchronize()
    eps.timeline.close()
    rows = {
        name: [
            (what, start - begun, end - begun)
            for what, start, end in spans
            if (what, start, end) not in earlier.get(name, []) and end > begun + 1e-6
        ]
        for name, spans in rows_of(file).items()
    }
    assert busy([span for span in rows["waits"] if span[1] < averages.step_s - 1e-6]) == pytest.approx(waits)
    for name, spans in rows.items():
        assert all(one[2] <= other[1] + 1e-6 for one, other in itertools.pairwise(spans)), name
    return clock, averages, rows


@pytest.mark.parametrize("machine", [SHORT, *more(LINK_BOUND)], ids="{0.layers} layers".format)
def test_the_trace_shows_what_the_clock_shows(machine, tmp_path):
    clock, averages, rows = watched_step(machine, tmp_path / "trace.json")
    names = {row: [name for name, *_ in spans] for row, spans in rows.items()}
    layers = [f"blocks.{i}" for i in range(machine.layers)]
    backwards = layers[::-1]
    assert names["compute"] == [f"forward {each}" for each in layers] + [f"backward {each}" for each in backwards]
    assert names["download"] == names["norm"] == backwards  # the norm of each layer leaves before its gradients
    assert [end for *_, end in rows["norm"]] == pytest.approx([start for _, start, _ in rows["download"]])
    assert len(rows["upload"]) == 2 * machine.layers - 2
    for lane in ("compute", "upload"):
        assert busy(rows[lane]) == pytest.approx(clock.busy(lane))
    for lane, first in (("compute", "compute"), ("download", "norm")):
        tasks = [t for t in clock.tasks if t.lane == lane]
        assert rows[first][0][1] == pytest.approx(min(t.start for t in tasks), abs=1e-6)
        assert rows[lane][-1][2] == pytest.approx(max(t.end for t in tasks), abs=1e-6)
    assert rows["steps"] == [(rows["steps"][0][0], pytest.approx(0.0), pytest.approx(clock.end))]
    assert averages.step_s == pytest.approx(clock.end)


@pytest.mark.parametrize(
    ("machine", "options"),
    [
        *((SHORT, {"stash": "host"}), (LINK_BOUND, {"gradient_slots": 1})),
        *more((SHORT, {"prefetch": False}), (LINK_BOUND, {})),
    ],
)
def test_a_step_is_what_is_computed_and_what_is_waited_for_and_looking_takes_no_time(machine, options, tmp_path):
    """Events alone are recorded; nothing waits in order to be measured."""
    clock, averages, rows = watched_step(machine, tmp_path / "trace.json", **options)
    assert busy(rows["waits"]) == pytest.approx(averages.upload_s + averages.download_s + averages.eps_s)
    assert averages.eps_s == pytest.approx(machine.optimizer_s, rel=0.01)
    unwatched = timed_step(machine, **options)
    assert clock.end == pytest.approx(unwatched.end)
    assert sweeps_s(clock) == pytest.approx(sweeps_s(unwatched))


def test_waits_of_a_step_bound_by_the_link(tmp_path):
    """Forwards a layer computes 2 s while the next one travels for 4; the first one travels under nothing."""
    _, averages, rows = watched_step(LINK_BOUND, tmp_path / "trace.json")
    assert averages.upload_s == pytest.approx(4.0 + 5 * 2.0)
    norm_s = rows["norm"][-1][2] - rows["norm"][-1][1]
    assert averages.download_s == pytest.approx(4.0 + norm_s) and norm_s < 0.1  # of the first layer's gradients
    assert averages.bound == "link"
    waits = [(name, round(end - start, 6)) for name, start, end in rows["waits"]]
    assert waits[:6] == [(wait_reasons.WEIGHTS_UPLOADED, seconds) for seconds in (4.0, *[2.0] * 5)]
    assert waits[6:8] == [(wait_reasons.NORMS_DOWNLOADED, round(norm_s, 6)), (wait_reasons.GRADIENT_DOWNLOADED, 4.0)]
    for _, start, end in rows["waits"]:
        assert all(e <= start + 1e-6 or s >= end - 1e-6 for _, s, e in rows["compute"])


# ---- updates in the background: 8 layers, forwards each computes for 2 s, and is updated in 10 s

UPDATE_S, FORWARD_S = 10.0, 2.0


def slow_update(transfer_s: float) -> Machine:
    return Machine(layers=8, ubatches=2, forward_s=FORWARD_S / 2, transfer_s=transfer_s, optimizer_s=8 * UPDATE_S)


UPDATES = [f"the update of blocks.{layer}" for layer in range(8)]


@nightly
@pytest.mark.parametrize("transfer_s", [7.0, 1.0], ids="a layer travels for {} s".format)
def test_a_forward_waits_for_the_updates_of_the_step_before(transfer_s, tmp_path):
    """A layer begins when it has been updated and has travelled. What the updates add to that is the EPS's. The last
    gradients of the step before still travel when this one begins."""
    _, averages, rows = watched_step(slow_update(transfer_s), tmp_path / "t.json", "deferred")
    starts = [start for name, start, _ in rows["compute"] if name.startswith("forward")]
    assert starts == pytest.approx([transfer_s + UPDATE_S * (layer + 1) + transfer_s for layer in range(8)])
    assert rows["waits"][0] == (wait_reasons.GRADIENT_DOWNLOADED, pytest.approx(0.0), pytest.approx(transfer_s))
    slower = max(FORWARD_S, transfer_s)
    assert averages.eps_s == pytest.approx(UPDATE_S + 7 * (UPDATE_S - slower))
    backward = 6 * max(0.0, transfer_s - 3 * FORWARD_S)  # the last two layers stay
    assert averages.upload_s == pytest.approx(transfer_s + 7 * (slower - FORWARD_S) + backward)
    assert averages.bound == ("link" if averages.upload_s + averages.download_s > averages.eps_s else "host update")
    assert transfer_s == 7.0 or averages.bound == "host update"
    updates = rows["host update"]
    assert [name for name, *_ in updates] == UPDATES * 2  # of the step before and of this one, which ends after it
    assert [end - start for _, start, end in updates] == pytest.approx([UPDATE_S] * 16)
    ends = {name: pytest.approx(end) for name, _, end in updates[:8]}
    waits = [(name, end) for name, _, end in rows["waits"] if name in ends and end <= updates[7][2] + 1e-6]
    assert waits == [*ends.items()]


def test_an_eager_update_is_under_the_backward(tmp_path):
    """Only what it takes longer than the backward does is waited for: at the first layer, which is updated last."""
    _, averages, rows = watched_step(slow_update(1.0), tmp_path / "t.json", "eager")
    updates = [span for span in rows["host update"] if span[1] > 0][-8:]
    assert [name for name, *_ in updates] == UPDATES[::-1]
    [after_the_last] = [start for name, start, _ in rows["download"] if name == "blocks.7"]
    assert updates[0][1] == pytest.approx(after_the_last + 1.0, abs=0.01)  # when it has landed
    assert rows["waits"][0] == (wait_reasons.GRADIENT_DOWNLOADED, pytest.approx(0.0), pytest.approx(1.0))
    assert rows["waits"][1][:2] == (UPDATES[0], pytest.approx(1.0))
    assert averages.eps_s == pytest.approx(8 * UPDATE_S - 7 * 3 * FORWARD_S)
    assert averages.bound == "host update"


def test_nothing_is_recorded_without_a_request(monkeypatch):
    timed: list[bool] = []

    class Event(torch.sim.Event):
        def __init__(self, *args: Any, enable_timing: bool = False) -> None:
            timed.append(enable_timing)
            super().__init__(*args, enable_timing=enable_timing)

    monkeypatch.setattr(torch.sim, "Event", Event)
    train(steps=1)
    assert timed and not any(timed)


def test_what_waits_for_the_device_keeps_nothing_of_earlier_steps(tmp_path):
    """Events of many steps are not kept: the trace on the disk is all that grows. Nor are they of a model that rests
    while another one trains."""
    model, eps, optimizer, batch = attach(Toy(2), trace=str(tmp_path / "trace.json"))
    left, sizes = [], []
    for _ in range(3):
        model(**batch).loss.backward()
        optimizer.step()
        eps.synchronize()
        eps.timeline.collect()
        left.append(eps.timeline.pending)
        sizes.append(len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]))
    assert left[1:] == [left[0]] * 2 and left[0] < 30
    assert sizes == sorted(set(sizes))
    with torch.no_grad():
        for _ in range(4):
            model(**batch)
    assert eps.timeline.pending < 60
    lengths = []
    for _ in range(2):
        train(Toy(2), steps=1)
        lengths.append(eps.timeline.pending)
    assert eps.timeline.is_watched and lengths[0] == lengths[1]


def test_an_evaluation_that_runs_ahead_of_the_device_keeps_no_more_with_every_forward(monkeypatch):
    asked, alive, found = [], weakref.WeakSet(), []

    class Event(torch.sim.Event):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            alive.add(self)

        def elapsed_time(self, other: Any) -> float:
            asked.append(other)
            return super().elapsed_time(other)

    model, x = Stack(4), torch.randn(2, WIDTH, device="sim")
    eps = attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",)))
    monkeypatch.setattr(torch.sim, "Event", Event)
    with virtual_clock(Machine(4, 2, 1.0, 0.5, 1.0).costs()) as clock, engine_on_clock(clock, eps), torch.no_grad():
        eps.timeline.watch()
        for _ in range(15):
            model(x)
            found.append((len(asked), eps.timeline.pending, len(alive)))
            asked.clear()
    assert found[3:] == [found[3]] * 12
    assert found[3][1] > 0  # it does run ahead


def test_what_is_wrong_with_the_device_is_said(monkeypatch):
    eps = attach_l2l(Stack(2), L2LConfig(device="sim", layer_classes=("Block",)))
    eps.timeline.watch()
    eps.model(torch.randn(2, WIDTH, device="sim")).sum().backward()
    monkeypatch.setattr(torch.sim.Event, "query", mock.Mock(side_effect=RuntimeError("an illegal memory access")))
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        eps.timeline.averages()


@nightly
def test_a_training_log_on_the_clock(tmp_path):
    """Waits, tokens and what bounds a step, in virtual seconds."""
    with ExitStack() as stack:
        clock = stack.enter_context(virtual_clock(Machine(4, 1, 1e-3, 1.0, 1e-3).costs()))

        class OnClock(hf.TrainerCallback):
            def on_train_begin(self, *args: Any, **more: Any) -> None:
                stack.enter_context(engine_on_clock(clock, trainer.eps))

        trainer = l2l_trainer(tmp_path, max_steps=2, callbacks=[OnClock()], eps_update="serial")
        trainer.train()
    lines = measured(tmp_path)
    steps_s = sum(8 * 8 / line["l2l_tokens_per_s"] for line in lines)  # batches are of 8 rows of 8 tokens
    waits_s = sum(line[f"l2l_wait_{name}_s"] for name in ("upload", "download", "eps") for line in lines)
    assert 0.9 * clock.end < steps_s <= clock.end  # the Trainer moves the inputs before a step begins
    assert waits_s == pytest.approx(steps_s - clock.busy("compute"), rel=1e-3)
    assert [line["l2l_bound"] for line in lines] == ["link", "link"]
