"""Lines that say where the program is, and traces of a raw loop, on every device."""

from __future__ import annotations

import gc
import json
import re
import threading
import time
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l import EagerParamServer, L2LConfig, attach_l2l, detach_l2l
from hf_l2l.engine import relay
from hf_l2l.engine.splitting import Splitter
from hf_l2l.runtime import stall_log, stream, wait_reasons, worker
from runs import attach
from tiers import cpu_suffices

Acts = Callable[[], object]


def stall_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hf_l2l stall log"]


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


class Acting(nn.Linear):
    """A layer that calls `acts` when it computes."""

    def __init__(self, acts: Acts) -> None:
        super().__init__(1, 1)
        self.acts = acts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.acts()
        return super().forward(x)


class CallsSGD(torch.optim.SGD):
    """Calls `acts` when it steps."""

    acts: Acts = staticmethod(lambda: None)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.acts()
        super().step(closure)


def attached(acts: Acts = lambda: None, device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two layers that call `acts`."""
    model = nn.Sequential(Acting(acts), Acting(acts), nn.Identity())
    eps = attach_l2l(model, L2LConfig(device=device, layer_classes=("Acting",), eps_update="serial"))
    return model, eps.wrap(CallsSGD(model.parameters(), lr=0.1))


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(2, 1)).sum()


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets so many virtual seconds pass; after each of them, the program is looked at."""
    now, at = 0.0, set()

    def passes(seconds: int) -> None:
        nonlocal now
        for _ in range(seconds):
            now += 1.0
            for each in list(at):
                each.log_if_due()

    def register(each: stall_log.StallLog, *, active: bool) -> None:
        (at.add if active else at.discard)(each)

    clock = types.SimpleNamespace(monotonic=lambda: now, sleep=time.sleep)
    monkeypatch.setattr(stall_log, "time", clock)
    monkeypatch.setattr(stall_log.StallThread, "register", register)
    return passes


def test_pauses_evaluations_and_updates_that_failed_say_nothing(passes, caplog, device):
    takes = 60
    model, optimizer = attached(lambda: passes(takes), device)
    with torch.no_grad():
        loss_of(model)
    takes = 1
    loss = loss_of(model)
    passes(60)
    loss.backward()
    passes(60)
    optimizer.acts = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    passes(60)
    assert not caplog.records


@pytest.mark.parametrize("backward", [True, False], ids=["with backward", "forward only"])
def test_sweeps_that_are_never_stepped_after_are_timed_one_by_one(backward, passes, caplog, device):
    """As in a loop that looks at gradients; each of them ends long before a line is due."""
    model, _ = attached(lambda: passes(takes), device)
    for number in range(31):
        takes = 12 if number == 30 else 1
        assert not caplog.records
        loss = loss_of(model)
        if backward:
            loss.backward()
    lines = [
        "forward, layer 1 of 2 (0), 10 s into this forward",
        "forward, layer 2 of 2 (1), 20 s into this forward",
        "backward, layer 2 of 2 (1), 10 s into this backward",
        "backward, layer 1 of 2 (0), 20 s into this backward",
    ]
    assert messages(caplog) == lines[: 4 if backward else 2]


def test_what_is_done_for_a_layer_is_in_that_layer(passes, caplog, monkeypatch):
    """Learning how to split it, uploading it, receiving its gradients; what comes between layers tells after which."""

    def before(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def slow(*args: Any, **kwargs: Any) -> Any:
            passes(20)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, slow)

    before(Splitter, "split_for")
    before(relay, "uploaded")
    before(EagerParamServer, "receive")
    model, optimizer = attached()
    model[2].register_forward_pre_hook(lambda *_: passes(10))
    optimizer.acts = lambda: passes(10)
    loss_of(model).backward()
    optimizer.step()
    first, second = "layer 1 of 2 (0)", "layer 2 of 2 (1)"
    forward = [(first, (10, 20, 30, 40)), (second, (50, 60, 70, 80)), (f"non-layer modules, after {second}", (90,))]
    backward = [(second, (10, 20, 30, 40)), (first, (50, 60, 70, 80))]
    assert messages(caplog) == [
        *(
            f"{sweep}, {place}, {seconds} s into this {sweep}"
            for sweep, places in (("forward", forward), ("backward", backward))
            for place, times in places
            for seconds in times
        ),
        "the update of all layers, 10 s so far",
    ]
    caplog.clear()
    loss_of(model).backward()  # this is no first step
    optimizer.step()
    assert not caplog.records


@cpu_suffices
def test_one_thread_looks_and_ends_and_keeps_no_model_alive(monkeypatch, device):
    def wait_until_none() -> None:
        end = time.monotonic() + 60.0
        while stall_threads() and time.monotonic() < end:
            time.sleep(0.01)

    monkeypatch.setattr(stall_log, "INTERVAL_S", 0.2)
    wait_until_none()
    started, start = [], threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (started.append(thread), start(thread)))
    model, _ = attached(device=device)
    for _ in range(3):
        loss_of(model).backward()
    assert len([thread for thread in started if thread.name == "hf_l2l stall log"]) == 1
    loss_of(model)
    gone = weakref.ref(model)
    del model, _
    gc.collect()
    assert gone() is None
    wait_until_none()
    assert not stall_threads()


@cpu_suffices
def test_a_wait_says_so_again_and_again(monkeypatch, caplog):
    """For the device, and for an update."""
    monkeypatch.setattr(stall_log, "INTERVAL_S", 0.1)

    def until_said_twice() -> None:
        end = time.monotonic() + 60.0
        while len(caplog.records) < 2 and time.monotonic() < end:
            time.sleep(0.005)

    def assert_said(pattern: str) -> None:
        assert len(caplog.records) >= 2 and all(re.fullmatch(pattern, line) for line in messages(caplog))
        caplog.clear()

    def point(synchronize: Callable[[], None], is_reached: bool = False) -> stream.Point:
        event = types.SimpleNamespace(query=lambda: is_reached, synchronize=synchronize)
        return stream.Point(event, types.ModuleType("device"), torch.device("meta"))

    stream.wait(point(until_said_twice), "gradients are there", host=True)
    assert_said(r"waiting for the device, \d+ s so far: gradients are there")
    for thread in stall_threads():
        thread.join(60.0)  # it ends a moment after the wait
    threads: list[threading.Thread] = []
    stream.wait(point(lambda: threads.extend(stall_threads()), True), "gradients are there", host=True)
    assert not stall_threads() and not threads  # there is none for a point that has been reached
    background, task = worker.Worker(), worker.Task("the update of blocks.3")
    background.submit(task, until_said_twice)
    task.wait(wait_reasons.WEIGHTS_UPDATED)
    assert_said(r"waiting for the update of blocks.3, \d+ s so far")
    background.close()


# ---- traces


def read(file: Path) -> list[tuple[str, str, float, float]]:
    """The spans of a trace as (row, name, start, end), in microseconds."""
    events = json.loads(file.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return [(rows[e["tid"]], e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]


@cpu_suffices
def test_a_raw_loop_writes_every_step(tmp_path, device):
    file = tmp_path / "trace.json"
    model, eps, optimizer, batch = attach(trace=str(file), eps_update="serial")
    names = [f"blocks.{i}" for i in range(3)]
    sweeps = [f"forward {n}" for n in names] + [f"backward {n}" for n in reversed(names)]
    for step in (1, 2):
        for _ in range(2):  # two batches, one step
            model(**batch).loss.backward()
        optimizer.step()
        eps.synchronize()
        eps.timeline.collect()
        spans = read(file)
        computed = [name for row, name, *_ in sorted(spans, key=lambda span: span[2]) if row == "compute"]
        assert computed == sweeps * 2 * step
        assert [row for row, *_ in spans].count("steps") == step
        assert [row for row, *_ in spans].count("host update") == step
        assert all(start < end for *_, start, end in spans)
        assert ("upload" in {row for row, *_ in spans}) == (device != "cpu")
    assert min(start for *_, start, _ in spans) == 0.0
    detach_l2l(model)
    model.to("cpu")(**batch).loss.backward()
    assert read(file) == spans
