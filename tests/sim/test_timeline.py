"""What the timeline says of a step is what the virtual clock says, and looking changes nothing."""

from __future__ import annotations

import itertools
import json
import weakref
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.report.wait_time import Averages
from hf_l2l.runtime import wait_reasons
from hf_l2l.testing import VirtualClock, engine_on_clock, virtual_clock
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
    for e in events:
        if e["ph"] == "X":
            rows[names[e["tid"]]].append((e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6))
    return {name: sorted(spans, key=lambda span: span[1]) for name, spans in rows.items()}


def busy(spans: Row) -> float:
    return sum(end - start for _, start, end in spans)


class Watched:
    """A model that has made a step, on the virtual clock and with a trace: what the clock and the timeline say of the
    steps that it makes then, which begin at 0."""

    def __init__(self, machine: Machine, file: Path, **options: Any) -> None:
        self.machine, self.file = machine, file
        options = {"ubatch_size": machine.rows, "layer_classes": ("Block",), "trace": str(file), **options}
        self.model, self.eps, self.optimizer, _ = attach(Stack(machine.layers), **options)
        self.x = torch.randn(machine.ubatches * machine.rows, WIDTH, device="sim", requires_grad=True)
        self.step()
        self.eps.synchronize()
        self.eps.timeline.averages()
        self.earlier = rows_of(file)

    def step(self) -> None:
        self.model(self.x).backward()
        self.optimizer.step()

    def timed(self, count: int) -> tuple[VirtualClock, float, Averages]:
        """Make so many steps; the clock, when the last one began, and the timeline's averages of that."""
        with virtual_clock(self.machine.costs()) as clock, engine_on_clock(clock, self.eps):
            self.eps.timeline.begin_trace(0.0)  # the step before was on another clock
            self.eps.timeline.watch()
            for _ in range(count):
                begun = clock.now
                self.step()
                averages = self.eps.timeline.averages()
            assert averages is not None and averages.steps == 1
            assert averages.step_s == pytest.approx(clock.now - begun)
            self.computed = clock.busy("compute", begun, clock.now)
            self.eps.synchronize()
        self.eps.timeline.close()
        return clock, begun, averages

    def rows(self, begun: float) -> dict[str, Row]:
        """All spans that end after `begun`, which is their time 0."""
        return {
            name: [
                (what, start - begun, end - begun)
                for what, start, end in spans
                if (what, start, end) not in self.earlier.get(name, []) and end > begun + 1e-6
            ]
            for name, spans in rows_of(self.file).items()
        }


def watched_step(machine: Machine, file: Path, **options: Any) -> tuple[VirtualClock, Averages, dict[str, Row]]:
    """One step, as the clock saw it and as the timeline saw it."""
    watched = Watched(machine, file, **{"eps_update": "serial", **options})
    clock, begun, averages = watched.timed(1)
    return clock, averages, watched.rows(begun)


def background_step(machine: Machine, file: Path, mode: str) -> tuple[Averages, dict[str, Row]]:
    """A step during which the one before is still updated: what the timeline says of it, and all spans since it began.
    Nothing is counted twice."""
    watched = Watched(machine, file, eps_update=mode)
    _, begun, averages = watched.timed(2)
    rows, waits = watched.rows(begun), averages.upload_s + averages.download_s + averages.eps_s
    assert watched.computed + waits == pytest.approx(averages.step_s)
    assert busy([span for span in rows["waits"] if span[1] < averages.step_s - 1e-6]) == pytest.approx(waits)
    for name, spans in rows.items():
        assert all(one[2] <= other[1] + 1e-6 for one, other in itertools.pairwise(spans)), name
    return averages, rows


@pytest.mark.parametrize("machine", [SHORT, *more(LINK_BOUND)], ids="{0.layers} layers".format)
def test_the_trace_shows_what_the_clock_shows(machine, tmp_path):
    clock, averages, rows = watched_step(machine, tmp_path / "trace.json", eps_update="serial")
    n = machine.layers
    assert [name for name, _, _ in rows["compute"]] == [
        *(f"forward blocks.{i}" for i in range(n)),
        *(f"backward blocks.{i}" for i in reversed(range(n))),
    ]
    assert busy(rows["compute"]) == pytest.approx(clock.busy("compute"))
    assert len(rows["upload"]) == 2 * n - 2
    for row in ("download", "norm"):  # the norm of each layer leaves after its gradients
        assert [name for name, *_ in rows[row]] == [f"blocks.{i}" for i in reversed(range(n))]
    assert [start for _, start, _ in rows["norm"]] == pytest.approx([end for *_, end in rows["download"]])
    for lane, last in (("compute", "compute"), ("download", "norm")):
        tasks = [t for t in clock.tasks if t.lane == lane]
        assert rows[lane][0][1] == pytest.approx(min(t.start for t in tasks), abs=1e-6)
        assert rows[last][-1][2] == pytest.approx(max(t.end for t in tasks), abs=1e-6)
    assert busy(rows["upload"]) == pytest.approx(clock.busy("upload"))
    [(_, start, end)] = rows["steps"]
    assert (start, end) == (pytest.approx(0.0), pytest.approx(clock.end))
    assert averages.step_s == pytest.approx(clock.end)


@nightly
def test_copies_of_the_stash_name_their_layers(tmp_path):
    """What passes between layers has the name of the one that sends or receives it."""
    _, _, rows = watched_step(SHORT, tmp_path / "trace.json", stash="host", boundary="host")
    layers = [f"blocks.{i}" for i in range(SHORT.layers)]

    def each(*order: str) -> list[str]:
        return [name for name in order for _ in range(SHORT.ubatches)]

    downloads = [name for name, *_ in rows["stash download"]]
    sent = each(
        *(f"output of {layer}" for layer in layers[:-1]),
        *(f"input gradient of {layer}" for layer in reversed(layers[1:])),
    )
    assert downloads == ["input of blocks.0", *sent]
    uploads = Counter(name for name, *_ in rows["stash upload"])
    assert uploads.keys() <= {f"{what} of {layer}" for what in ("input", "output gradient") for layer in layers}
    assert {uploads[f"output gradient of {layer}"] for layer in layers[:-1]} == {SHORT.ubatches}
    assert {uploads[f"input of {layer}"] for layer in layers[1:]} == {2 * SHORT.ubatches}  # forward and recompute


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
    waits = averages.upload_s + averages.download_s + averages.eps_s
    assert clock.busy("compute") + waits == pytest.approx(averages.step_s)
    assert busy(rows["waits"]) == pytest.approx(waits)
    assert averages.eps_s == pytest.approx(machine.optimizer_s, rel=0.01)
    unwatched = timed_step(machine, **{"eps_update": "serial", **options})
    assert clock.end == pytest.approx(unwatched.end)
    assert sweeps_s(clock) == pytest.approx(sweeps_s(unwatched))


def test_waits_of_a_step_bound_by_the_link(tmp_path):
    """Forwards a layer computes 2 s while the next one travels for 4; the first one travels under nothing."""
    clock, averages, rows = watched_step(LINK_BOUND, tmp_path / "trace.json")
    assert averages.upload_s == pytest.approx(4.0 + 5 * 2.0)
    norm_s = rows["norm"][-1][2] - rows["norm"][-1][1]
    assert averages.download_s == pytest.approx(4.0 + norm_s) and norm_s < 0.1  # of the first layer's gradients
    assert averages.bound == "link"
    waits = [(name, round(end - start, 6)) for name, start, end in rows["waits"]]
    weights = wait_reasons.WEIGHTS_UPLOADED
    assert waits[:6] == [(weights, 4.0), *[(weights, 2.0)] * 5]
    assert waits[6] == (wait_reasons.ALL_GRADIENTS_DOWNLOADED, round(4.0 + norm_s, 6))
    computing = [span for span in rows["compute"]]
    for _, start, end in rows["waits"]:
        assert all(e <= start + 1e-6 or s >= end - 1e-6 for _, s, e in computing)


# ---- updates in the background: 8 layers, forwards each computes for 2 s, and is updated in 10 s

UPDATE_S, FORWARD_S = 10.0, 2.0


def slow_update(transfer_s: float) -> Machine:
    return Machine(layers=8, ubatches=2, forward_s=FORWARD_S / 2, transfer_s=transfer_s, optimizer_s=8 * UPDATE_S)


@nightly
@pytest.mark.parametrize("transfer_s", [7.0, *more(1.0)], ids="a layer travels for {} s".format)
def test_a_forward_waits_for_the_updates_of_the_step_before(transfer_s, tmp_path):
    """A layer begins when it has been updated and has travelled. What the updates add to that is the EPS's."""
    averages, rows = background_step(slow_update(transfer_s), tmp_path / "t.json", "deferred")
    starts = [start for name, start, _ in rows["compute"] if name.startswith("forward")]
    assert starts == pytest.approx([UPDATE_S * (layer + 1) + transfer_s for layer in range(8)])
    slower = max(FORWARD_S, transfer_s)
    assert averages.eps_s == pytest.approx(UPDATE_S + 7 * (UPDATE_S - slower))
    backward = 6 * max(0.0, transfer_s - 3 * FORWARD_S)  # the last two layers stay
    assert averages.upload_s == pytest.approx(transfer_s + 7 * (slower - FORWARD_S) + backward)
    assert averages.bound == ("link" if averages.upload_s + averages.download_s > averages.eps_s else "host update")
    assert transfer_s == 7.0 or averages.bound == "host update"
    names = [f"the update of blocks.{layer}" for layer in range(8)]
    updates = rows["host update"]
    assert [name for name, *_ in updates] == names * 2  # of the step before and of this one, which ends after it
    assert [end - start for _, start, end in updates] == pytest.approx([UPDATE_S] * 16)
    ends = {name: end for name, _, end in updates[:8]}
    waits = [(name, end) for name, _, end in rows["waits"] if name in ends and end <= ends[names[-1]] + 1e-6]
    assert waits == [(name, pytest.approx(ends[name])) for name in names]


@nightly
def test_an_eager_update_is_under_the_backward(tmp_path):
    """Only what it takes longer than the backward does is waited for: at the first layer, which is updated last."""
    averages, rows = background_step(slow_update(1.0), tmp_path / "t.json", "eager")
    updates = [span for span in rows["host update"] if span[1] > 0][-8:]
    assert [name for name, *_ in updates] == [f"the update of blocks.{layer}" for layer in reversed(range(8))]
    _, after_the_first, _ = next(span for span in rows["download"] if span[0] == "blocks.7")
    assert updates[0][1] == pytest.approx(after_the_first + 1.0, abs=0.01)  # when it has landed
    assert rows["waits"][0][:2] == ("the update of blocks.0", pytest.approx(0.0))
    assert averages.eps_s == pytest.approx(8 * UPDATE_S - 7 * 3 * FORWARD_S)
    assert averages.bound == "host update"


def test_nothing_is_recorded_without_a_request(monkeypatch):
    timed: list[bool] = []
    event = torch.sim.Event

    def making(*args: Any, enable_timing: bool = False) -> Any:
        timed.append(enable_timing)
        return event(*args, enable_timing=enable_timing)

    monkeypatch.setattr(torch.sim, "Event", making)
    train(steps=1)
    assert timed and not any(timed)


def test_what_waits_for_the_device_keeps_nothing_of_earlier_steps(tmp_path):
    """Events of many steps are not kept: the trace on the disk is all that grows. Nor are they of a model that rests
    while another one trains."""
    model, eps, optimizer, batch = attach(trace=str(tmp_path / "trace.json"))
    left, sizes = [], []
    for _ in range(4):
        model(**batch).loss.backward()
        optimizer.step()
        eps.synchronize()
        eps.timeline.collect()
        left.append(eps.timeline.pending)
        sizes.append(len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]))
    assert left[1:] == [left[0]] * 3 and left[0] < 30
    assert sizes == sorted(set(sizes))
    with torch.no_grad():
        for _ in range(4):
            model(**batch)
    assert eps.timeline.pending < 60
    lengths = []
    for _ in range(2):
        train(steps=1)
        lengths.append(eps.timeline.pending)
    assert eps.timeline.is_watched and lengths[0] == lengths[1]


def test_an_evaluation_that_runs_ahead_of_the_device_keeps_no_more_with_every_forward(monkeypatch):
    model = Stack(4)
    eps = attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",)))
    x = torch.randn(2, WIDTH, device="sim")
    asked, alive = 0, weakref.WeakSet()
    event, elapsed = torch.sim.Event, torch.sim.Event.elapsed_time

    def counting(*events: Any) -> float:
        nonlocal asked
        asked += 1
        return elapsed(*events)

    def making(*args: Any, **options: Any) -> Any:
        made = event(*args, **options)
        alive.add(made)
        return made

    monkeypatch.setattr(event, "elapsed_time", counting)
    monkeypatch.setattr(torch.sim, "Event", making)
    found = []
    with virtual_clock(Machine(4, 2, 1.0, 0.5, 1.0).costs()) as clock, engine_on_clock(clock, eps), torch.no_grad():
        eps.timeline.watch()
        for _ in range(30):
            asked = 0
            model(x)
            found.append((asked, eps.timeline.pending, len(alive)))
    assert found[3:] == [found[3]] * 27
    assert found[3][1] > 0  # it does run ahead


def test_what_is_wrong_with_the_device_is_said(monkeypatch):
    eps = attach_l2l(Stack(2), L2LConfig(device="sim", layer_classes=("Block",)))
    eps.timeline.watch()
    eps.model(torch.randn(2, WIDTH, device="sim")).sum()

    def fail(*_: Any) -> bool:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.sim.Event, "query", fail)
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

        options = {"eps_update": "serial", "l2l_check_recompute": "off"}  # whose copy is no wait
        trainer = l2l_trainer(tmp_path, max_steps=2, callbacks=[OnClock()], **options)
        trainer.train()
    lines = measured(tmp_path)
    # Each row of the data has 8 tokens, 8 rows are a batch.
    steps_s = [8 * 8 / line["l2l_tokens_per_s"] for line in lines]
    waits_s = [sum(line[f"l2l_wait_{name}_s"] for name in ("upload", "download", "eps")) for line in lines]
    assert 0.9 * clock.end < sum(steps_s) <= clock.end  # the Trainer moves the inputs before a step begins
    assert sum(waits_s) == pytest.approx(sum(steps_s) - clock.busy("compute"), rel=1e-3)
    assert [line["l2l_bound"] for line in lines] == ["link", "link"]
