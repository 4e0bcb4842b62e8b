"""Traces, averages and lines that say where the program is, where host and device are one."""

from __future__ import annotations

import concurrent.futures
import gc
import inspect
import json
import re
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.integrations import integration_utils

from hf_l2l import EagerParamServer, L2LConfig, L2LTrainer, L2LTrainingArguments, attach_l2l, detach_l2l
from hf_l2l.engine.relay import Relay
from hf_l2l.engine.splitting import Splitter
from hf_l2l.engine.sweeps import InputGradients
from hf_l2l.optim.layerwise_step import SplitStep
from hf_l2l.report import timeline
from hf_l2l.report.timeline import Timeline
from hf_l2l.report.trace_file import Span, TraceFile
from hf_l2l.report.wait_time import Averages
from hf_l2l.runtime import stall_log, stream, wait_reasons, worker
from memory_switches import forced_copies
from models import batch_for
from training import assert_same_run, l2l_trainer, measured, plain_trainer, tiny_bert

HOST = torch.device("cpu")


class Clock:
    """Stands in for the host's clock."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timeline, "time", types.SimpleNamespace(perf_counter=clock))
    return clock


# ---- the file


def read(file: Path) -> list[tuple[str, str, float, float]]:
    """Its spans as (row, name, start, end), in microseconds."""
    events = json.loads(file.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return [(rows[e["tid"]], e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]


def test_the_file_is_valid_after_every_write(tmp_path):
    file = tmp_path / "trace.json"
    trace = TraceFile(str(file), "a title", ("above", "below"))
    assert read(file) == []
    trace.write([])
    assert read(file) == []
    trace.write([Span("below", 'a "name"', 1.0, 1.5), Span("above", "b", 0.0, 2.0)])
    first = [("below", 'a "name"', 1e6, 1.5e6), ("above", "b", 0.0, 2e6)]
    assert read(file) == first
    trace.write([Span("above", "ü", 3.0, 4.0)])
    assert read(file) == [*first, ("above", "ü", 3e6, 4e6)]
    events = json.loads(file.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {1}
    order = [(e["tid"], e["args"]["sort_index"]) for e in events if e["name"] == "thread_sort_index"]
    assert order == [(1, 1), (2, 2)]  # 0 is an idle processor


def test_the_file_begins_with_the_earliest_span(tmp_path):
    """Also with an empty one, which is not drawn; or where it was told to."""
    trace = TraceFile(tmp_path / "trace.json", "", ("row",))
    trace.write([Span("row", "b", 100.5, 101.0), Span("row", "", 100.25, 100.25)])
    trace.write([Span("row", "c", 102.0, 103.0)])
    assert read(tmp_path / "trace.json") == [("row", "b", 0.25e6, 0.75e6), ("row", "c", 1.75e6, 2.75e6)]
    trace = TraceFile(tmp_path / "trace.json", "", ("row",))
    trace.begins_s = 99.0
    trace.write([Span("row", "b", 100.5, 101.0)])
    assert read(tmp_path / "trace.json") == [("row", "b", 1.5e6, 2e6)]


def test_a_new_run_replaces_the_file(tmp_path):
    file = tmp_path / "trace.json"
    TraceFile(str(file), "", ("row",)).write([Span("row", "old", 0.0, 1.0)])
    TraceFile(str(file), "", ("row",))
    assert read(file) == []


def test_the_file_stays_where_it_was_when_the_folder_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trace = TraceFile("trace.json", "", ("row",))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    trace.write([Span("row", "name", 0.0, 1.0)])
    assert len(read(tmp_path / "trace.json")) == 1


@pytest.mark.parametrize(
    ("path", "match"),
    [("", "trace must be"), (7, "trace must be"), ("missing/t.json", "no folder"), (".", "a folder")],
)
def test_a_path_that_cannot_be_written_is_refused(path, match, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=match) as refused:
        L2LConfig(trace=path)
    assert repr(path) in str(refused.value)
    with pytest.raises(ValueError, match=match):
        L2LTrainingArguments(str(tmp_path), l2l_trace=path)


def test_a_path_may_be_one_of_pathlib(tmp_path):
    config = L2LConfig(trace=tmp_path / "trace.json", device="cpu")
    assert config == L2LConfig(trace=str(tmp_path / "trace.json"), device="cpu")
    attach_l2l(tiny_bert(), config)
    assert (tmp_path / "trace.json").exists()


def test_no_file_is_written_before_attaching(tmp_path):
    config = L2LConfig(trace=str(tmp_path / "trace.json"), device="cpu")
    assert list(tmp_path.iterdir()) == []
    attach_l2l(tiny_bert(), config)
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]


def test_a_folder_that_has_gone_is_refused_when_attaching(tmp_path):
    (tmp_path / "folder").mkdir()
    config = L2LConfig(trace=str(tmp_path / "folder" / "trace.json"), device="cpu")
    (tmp_path / "folder").rmdir()
    model = tiny_bert()
    with pytest.raises(ValueError, match="the trace must go where"):
        attach_l2l(model, config)
    attach_l2l(model, L2LConfig(device="cpu"))  # nothing was left on it


# ---- a raw loop


def test_a_raw_loop_writes_every_step(tmp_path):
    file, model = tmp_path / "trace.json", tiny_bert(layers=2)
    eps = attach_l2l(model, L2LConfig(device="cpu", trace=str(file)))
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    names = [f"bert.encoder.layer.{i}" for i in (0, 1)]
    sweeps = [f"forward {n}" for n in names] + [f"backward {n}" for n in reversed(names)]
    for step in (1, 2):
        for _ in range(2):  # two batches, one step
            model(**batch_for(model)).loss.backward()
        optimizer.step()
        spans = read(file)
        assert [name for row, name, *_ in spans if row == "compute"] == sweeps * 2 * step
        assert len([row for row, *_ in spans if row == "steps"]) == step
        assert len([row for row, *_ in spans if row == "host update"]) == step
        assert all(start < end for *_, start, end in spans)
    assert min(start for *_, start, _ in spans) == 0.0
    detach_l2l(model)
    model(**batch_for(model)).loss.backward()
    assert read(file) == spans


def test_copies_on_a_device_without_streams_are_waited_for(tmp_path):
    file, model = tmp_path / "trace.json", tiny_bert(layers=2)
    with forced_copies():
        eps = attach_l2l(model, L2LConfig(device="cpu", trace=str(file)))
        optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
        model(**batch_for(model)).loss.backward()
        optimizer.step()
        averages = eps.timeline.averages()
    rows = [row for row, *_ in read(file)]
    assert rows.count("upload") == 5  # the inputs, buffers and weights of the shell, and two layers, which stay
    assert rows.count("download") > 2
    assert averages is not None and averages.upload_s > 0 and averages.download_s > 0


def test_without_a_trace_a_raw_loop_keeps_nothing():
    model = tiny_bert(layers=2)
    eps = attach_l2l(model, L2LConfig(device="cpu"))
    model(**batch_for(model)).loss.backward()
    eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1)).step()
    assert not eps.timeline.is_watched and not eps.timeline.pending and eps.timeline.averages() is None


# ---- averages


def test_averages_are_per_step_and_since_the_last_time(clock):
    line = Timeline(HOST)
    line.watch()
    for update_s in (1.0, 3.0):
        line.start_forward()
        with line.host_works("a layer"):  # in the background
            clock.seconds += 10.0
        with line.span("upload", "a layer", exposed=True):
            clock.seconds += 2.0
        with line.span("download", "a layer", exposed=False):  # under compute
            clock.seconds += 1.0
        with line.inside("forward"), line.waiting_for_eps(wait_reasons.WEIGHTS_UPDATED):
            clock.seconds += update_s
        line.start_update()
        line.end_step()
        clock.seconds += 100.0  # between the steps
    assert line.averages() == Averages(steps=2, step_s=15.0, upload_s=2.0, download_s=0.0, eps_s=2.0)
    assert line.averages() is None


def test_reading_weights_outside_of_a_sweep_is_no_stall(clock):
    """Neither the main thread between two sweeps nor another one during a forward."""
    line = Timeline(HOST)
    line.watch()

    def read() -> None:
        with line.waiting_for_eps(wait_reasons.WEIGHTS_UPDATED):
            clock.seconds += 1.0

    line.start_forward()
    with line.inside("forward"):
        reader = threading.Thread(target=read)
        reader.start()
        reader.join()
    read()
    with line.inside("backward"):
        with line.waiting_for_eps(wait_reasons.WEIGHTS_UPDATED):
            clock.seconds += 4.0
    line.end_step()
    assert line.averages() == Averages(steps=1, step_s=6.0, upload_s=0.0, download_s=0.0, eps_s=4.0)


def test_looking_again_forgets_a_step_that_was_interrupted(clock):
    line = Timeline(HOST)
    line.watch()
    for _ in range(2):  # one that ends, and one that does not
        line.start_forward()
        with line.inside("forward"), line.waiting_for_eps(wait_reasons.WEIGHTS_UPDATED):
            clock.seconds += 1.0
        if _ == 0:
            line.end_step()
    clock.seconds += 100.0
    line.watch()
    line.start_forward()
    clock.seconds += 3.0
    line.end_step()
    assert line.averages() == Averages(1, 3.0, 0.0, 0.0, 0.0)


def test_a_batch_thrown_away_belongs_to_the_step_after_it(clock):
    line = Timeline(HOST)
    line.watch()
    for _ in range(2):
        line.start_forward()
        clock.seconds += 10.0
    line.end_step()
    assert line.averages() == Averages(1, 20.0, 0.0, 0.0, 0.0)


def test_a_trace_that_another_model_ends_says_so(tmp_path):
    first = Timeline(HOST, trace=str(tmp_path / "first.json"))
    with pytest.warns(UserWarning, match="first.json ends here"):
        second = Timeline(HOST)
        second.watch()
    assert second.is_watched and not first.is_watched
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.watch()
        second.unwatch()
        first.watch()


def test_what_is_waited_for_outside_of_a_step_is_not_counted(clock):
    line = Timeline(HOST)
    line.watch()
    with torch.no_grad():
        line.start_forward()
    with line.span("upload", "in an evaluation", exposed=True):
        clock.seconds += 5.0
    line.start_forward()
    clock.seconds += 1.0
    line.start_update()
    line.end_step()
    assert line.averages() == Averages(1, 1.0, 0.0, 0.0, 0.0)


def test_an_optimizer_that_steps_after_the_step_is_not_in_the_next_one(clock):
    line = Timeline(HOST)
    line.watch()
    for background in (False, True):
        line.start_forward()
        clock.seconds += 1.0
        if not background:
            line.start_update()
        line.end_step()
        line.start_update()  # a second optimizer
        clock.seconds += 5.0
        line.end_step()
    assert line.averages() == Averages(2, 1.0, 0.0, 0.0, 0.0)


def test_work_in_the_background_is_drawn(tmp_path):
    """Threads note what they have done while another one takes it in, and nothing of it is lost."""
    file = tmp_path / "trace.json"
    line = Timeline(HOST, trace=str(file))
    over = threading.Event()
    done = ["one", "beside it"]
    with line.host_works(done[0]), line.host_works(done[1]):
        pass

    def work(thread: int) -> None:
        while not over.is_set():
            done.append(f"{thread}: {len(done)}")
            with line.host_works(done[-1]):
                time.sleep(1e-5)

    steps = 0
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(work, thread) for thread in range(2)]
        # On a busy machine, the threads need more steps than 300; they end if one of them fails.
        while steps < 300 or (len(done) <= 100 and not any(future.done() for future in futures)):
            steps += 1
            line.start_forward()
            with line.inside("forward"), line.waiting_for_eps("a layer"):
                pass
            line.end_step()
        over.set()
    for future in futures:
        future.result()
    averages = line.averages()
    assert averages is not None and averages.steps == steps
    spans = read(file)
    assert len([row for row, *_ in spans if row == "steps"]) == steps
    rows = {row: [span for span in spans if span[0] == row] for row in ("host update", "host update 2")}
    assert sorted(name for found in rows.values() for _, name, *_ in found) == sorted(done)
    assert rows["host update 2"]
    for found in rows.values():
        assert all(end <= start for (_, _, _, end), (_, _, start, _) in pairwise(sorted(found, key=itemgetter(2))))


def test_a_trace_that_cannot_be_written_any_more_ends(tmp_path):
    file, model = tmp_path / "folder" / "trace.json", tiny_bert(layers=2)
    file.parent.mkdir()
    eps = attach_l2l(model, L2LConfig(device="cpu", trace=str(file)))
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    file.unlink()
    model(**batch_for(model)).loss.backward()
    with pytest.warns(UserWarning, match="trace.json ends here"):
        optimizer.step()
    model(**batch_for(model)).loss.backward()
    optimizer.step()
    assert not file.exists() and eps.timeline.averages() is not None


@pytest.mark.parametrize(
    ("upload", "download", "eps", "bound"),
    [
        (0.02, 0.01, 0.01, "compute"),
        (0.03, 0.02, 0.0, "link"),
        (0.3, 0.2, 0.4, "link"),
        (0.2, 0.1, 0.4, "host update"),
        (0.0, 0.0, 0.05, "host update"),
        (0.0, 0.0, 0.0, "compute"),
    ],
)
def test_what_bounds_a_step(upload, download, eps, bound):
    assert Averages(1, 1.0, upload, download, eps).bound == bound


# ---- under the Trainer


def test_training_logs_are_those_of_plain_trainer_and_more(tmp_path):
    plain = plain_trainer(tmp_path / "plain")
    plain.train()
    l2l = l2l_trainer(tmp_path / "l2l", l2l_trace=str(tmp_path / "t.json"))
    l2l.train()
    assert_same_run(l2l, plain)
    added = {
        f"l2l_{name}" for name in ("wait_upload_s", "wait_download_s", "wait_eps_s", "step_s", "bound", "tokens_per_s")
    }
    for ours, theirs in zip(l2l.state.log_history, plain.state.log_history, strict=True):
        assert ours.keys() == theirs.keys()
    assert [set(row) for row in measured(tmp_path / "l2l")] == [{"step", *added}] * 4
    assert len([row for row, *_ in read(tmp_path / "t.json") if row == "steps"]) == 4


def test_the_last_update_is_finished_when_training_is(tmp_path, monkeypatch):
    trainer = l2l_trainer(tmp_path, max_steps=2, eps_update="deferred", l2l_trace=str(tmp_path / "t.json"))
    trainer.train()
    names = [name for row, name, *_ in read(tmp_path / "t.json") if row == "host update"]
    layers = [f"bert.encoder.layer.{i}" for i in range(len(names) // 2 - 1)]
    assert names == [f"the update of {what}" for what in ("non-layer modules", *layers)] * 2

    def fail(*args: object) -> None:
        raise FloatingPointError("in the update")

    monkeypatch.setattr(SplitStep, "run", fail)
    with pytest.raises(FloatingPointError, match="in the update"):
        l2l_trainer(tmp_path, max_steps=1, eps_update="deferred").train()


def test_evaluation_lines_have_nothing_added(tmp_path):
    trainer = l2l_trainer(tmp_path)
    trainer.train()
    assert not [key for key in trainer.evaluate() if key.startswith("l2l_")]


def test_a_second_training_looks_again_and_the_first_has_ended(tmp_path):
    trainer = l2l_trainer(tmp_path, max_steps=1)
    for _ in range(2):
        trainer.train()
        assert not trainer.eps.timeline.is_watched
        assert ["l2l_bound" in row for row in measured(tmp_path)] == [True]


def test_inputs_that_are_no_tokens_have_no_tokens_per_second(tmp_path):
    class Rows(nn.Module):
        """Takes rows of numbers."""

        main_input_name = "pixel_values"

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            for block in self.blocks:
                pixel_values = block(pixel_values)
            return {"loss": pixel_values.sum() + 0 * labels.sum()}

    trainer = l2l_trainer(tmp_path, model=Rows(), max_steps=1, l2l_layer_classes=["Linear"])
    trainer.train_dataset = [{"pixel_values": [0.0, 1.0, 2.0, 3.0], "labels": 0}] * 8
    trainer.train()
    [line] = measured(tmp_path)
    assert "l2l_bound" in line and "l2l_tokens_per_s" not in line


def test_tensorboard_takes_every_value(tmp_path, caplog):
    """It tells numbers from text, and drops anything else with a warning."""

    class Writer:
        def __init__(self) -> None:
            self.written: dict[str, Any] = {}

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.written[name] = value

        def add_text(self, name: str, value: str, step: int) -> None:
            self.written[name] = value

        def flush(self) -> None:
            pass

    class Lines(hf.TrainerCallback):
        """What callbacks and trackers get."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            self.first = getattr(self, "first", dict(logs))

    lines = Lines()
    trainer = l2l_trainer(tmp_path, max_steps=1, callbacks=[lines], l2l_log_times=True)
    trainer.train()
    line = lines.first
    writer = Writer()
    package = types.SimpleNamespace(SummaryWriter=Writer)  # for where there is none
    with (
        mock.patch.object(integration_utils, "is_tensorboard_available", lambda: True),
        mock.patch.dict(sys.modules, {"tensorboardX": package}),
    ):
        board = integration_utils.TensorBoardCallback(tb_writer=writer)
    board.on_log(trainer.args, trainer.state, trainer.control, logs=dict(line))
    assert {name: writer.written.get(f"train/{name}") for name in line} == line
    assert type(writer.written["train/l2l_bound"]) is str


def test_a_training_that_was_interrupted_is_not_in_the_log_of_the_next(tmp_path, monkeypatch):
    pause_s = 0.0
    monkeypatch.setattr(timeline, "time", types.SimpleNamespace(perf_counter=lambda: time.perf_counter() + pause_s))

    class Stop(hf.TrainerCallback):
        at_step = 2

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == self.at_step:
                raise KeyboardInterrupt

    stop = Stop()
    trainer = l2l_trainer(tmp_path, max_steps=4, logging_steps=4, callbacks=[stop], l2l_trace=str(tmp_path / "t.json"))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    stop.at_step = -1
    pause_s = 1e4
    trainer.train()
    [line] = measured(tmp_path)
    steps_s = sorted(end - start for row, _, start, end in read(tmp_path / "t.json") if row == "steps")
    assert len(steps_s) == 6 and steps_s[-1] < pause_s * 1e6
    # Each row of the data has 8 tokens, 8 rows are a batch.
    last = [end - start for row, _, start, end in read(tmp_path / "t.json") if row == "steps"][-4:]
    assert line["l2l_tokens_per_s"] == pytest.approx(4 * 64 / (sum(last) / 1e6), rel=1e-3)


def test_train_takes_what_it_takes_in_transformers():
    assert inspect.signature(L2LTrainer.train) == inspect.signature(hf.Trainer.train)


# ---- where the program is


class Until:
    """Waits until so many lines were logged, as something does that takes long."""

    def __init__(self, caplog: pytest.LogCaptureFixture, lines: int) -> None:
        self.caplog, self.lines = caplog, lines

    def __call__(self) -> None:
        end = time.monotonic() + 60.0
        while len(self.caplog.records) < self.lines and time.monotonic() < end:
            time.sleep(0.005)
        assert len(self.caplog.records) >= self.lines


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are logged after a moment."""
    monkeypatch.setattr(stall_log, "INTERVAL_S", 0.1)
    monkeypatch.setattr(worker, "_POLL_S", 0.02)


def stall_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hf_l2l stall log"]


def assert_lines(caplog: pytest.LogCaptureFixture, pattern: str) -> None:
    found = [record.getMessage() for record in caplog.records]
    assert len(found) >= 2 and all(re.fullmatch(pattern, line) for line in found), found


class Block(nn.Module):
    """A layer that calls `acts` when it computes."""

    def __init__(self, acts: Callable[[], None]) -> None:
        super().__init__()
        self.weight, self.acts = nn.Parameter(torch.ones(1)), acts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.acts()
        return x * self.weight


class Blocks(nn.Module):
    """Two layers, and a head that calls `head`."""

    def __init__(self, acts: Callable[[], None], head: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(acts), Block(acts)]), head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        self.head()
        return x.sum()


class CallsSGD(torch.optim.SGD):
    """Calls `acts` when it steps."""

    acts: Callable[[], None] = staticmethod(lambda: None)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.acts()
        super().step(closure)


def attached(model: nn.Module) -> torch.optim.Optimizer:
    eps = attach_l2l(model, L2LConfig(device="cpu", layer_classes=("Block",)))
    return eps.wrap(CallsSGD(model.parameters(), lr=0.1))


def test_a_first_step_says_where_it_is_and_no_other_does(soon, caplog):
    waits = True

    def until_said() -> None:
        if waits:
            Until(caplog, len(caplog.records) + 2)()
        else:
            time.sleep(0.3)

    model = Blocks(until_said, head=until_said)
    optimizer = attached(model)
    optimizer.acts = until_said
    model(torch.ones(2, 1)).backward()
    optimizer.step()
    lines = [re.sub(r"\d+ s", "1 s", record.getMessage()) for record in caplog.records]
    places = [place for place, after in zip(lines, [*lines[1:], ""], strict=True) if place != after]
    assert places == [
        "forward, layer 1 of 2 (blocks.0), 1 s into this forward",
        "forward, layer 2 of 2 (blocks.1), 1 s into this forward",
        "forward, non-layer modules, after layer 2 of 2 (blocks.1), 1 s into this forward",
        "backward, layer 2 of 2 (blocks.1), 1 s into this backward",
        "backward, layer 1 of 2 (blocks.0), 1 s into this backward",
        "the update of all layers, 1 s so far",
    ]
    waits = False
    caplog.clear()
    model(torch.ones(2, 1)).backward()
    optimizer.step()
    assert not caplog.records


def test_an_evaluation_says_nothing_and_is_no_first_step(soon, caplog):
    model = Blocks(lambda: time.sleep(0.3))
    attached(model)
    with torch.no_grad():
        model(torch.ones(2, 1))
    assert not caplog.records
    model(torch.ones(2, 1)).backward()
    assert_lines(caplog, r"(forward|backward), layer [12] of 2 \(blocks.[01]\), \d+ s into this \1")


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
    monkeypatch.setattr(stall_log._StallThread, "register", register)
    return passes


def test_a_pause_between_forward_and_backward_says_nothing(passes, caplog):
    model = Blocks(lambda: passes(1))
    optimizer = attached(model)
    loss = model(torch.ones(2, 1))
    passes(60)
    loss.backward()
    passes(60)
    optimizer.step()
    passes(60)
    assert not caplog.records


@pytest.mark.parametrize("backward", [True, False], ids=["with backward", "forward only"])
def test_sweeps_that_are_never_stepped_after_are_timed_one_by_one(backward, passes, caplog):
    """As in a loop that looks at gradients; each of them ends long before a line is due."""
    takes = 1
    model = Blocks(lambda: passes(takes))
    attached(model)
    for _ in range(30):
        loss = model(torch.ones(2, 1))
        if backward:
            loss.backward()
    assert not caplog.records
    takes = 12
    loss = model(torch.ones(2, 1))
    if backward:
        loss.backward()
    assert [record.getMessage() for record in caplog.records] == [
        "forward, layer 1 of 2 (blocks.0), 10 s into this forward",
        "forward, layer 2 of 2 (blocks.1), 20 s into this forward",
        "backward, layer 2 of 2 (blocks.1), 10 s into this backward",
        "backward, layer 1 of 2 (blocks.0), 20 s into this backward",
    ][: 4 if backward else 2]


def test_what_is_done_for_a_layer_is_in_that_layer(passes, caplog, monkeypatch):
    """Learning how to split it, uploading it, receiving its gradients; what comes between layers tells after which."""

    def before(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def slow(*args: Any, **kwargs: Any) -> Any:
            passes(20)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, slow)

    before(Splitter, "split_for")
    before(Relay, "_weights")
    before(InputGradients, "__init__")
    before(EagerParamServer, "receive")
    model = Blocks(lambda: None, head=lambda: passes(10))
    attached(model)
    model(torch.ones(2, 1)).backward()
    first, second = "layer 1 of 2 (blocks.0)", "layer 2 of 2 (blocks.1)"
    forward = [(first, (10, 20, 30, 40)), (second, (50, 60, 70, 80)), (f"non-layer modules, after {second}", (90,))]
    backward = [(second, (10, 20, 30, 40, 50, 60)), (first, (70, 80, 90, 100, 110, 120))]
    assert [record.getMessage() for record in caplog.records] == [
        f"{sweep}, {place}, {seconds} s into this {sweep}"
        for sweep, places in (("forward", forward), ("backward", backward))
        for place, times in places
        for seconds in times
    ]


def test_an_update_that_failed_is_not_said_to_go_on(soon, caplog):
    def fail() -> None:
        raise MemoryError("no room for moments")

    model = Blocks(lambda: None)
    optimizer = attached(model)
    optimizer.acts = fail
    model(torch.ones(2, 1)).backward()
    with pytest.raises(MemoryError):
        optimizer.step()
    time.sleep(0.5)
    assert not caplog.records


def test_one_thread_looks_and_ends_and_keeps_no_model_alive(monkeypatch):
    def wait_until_none() -> None:
        end = time.monotonic() + 60.0
        while stall_threads() and time.monotonic() < end:
            time.sleep(0.01)

    monkeypatch.setattr(stall_log, "INTERVAL_S", 0.2)
    wait_until_none()
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def starting(thread: threading.Thread) -> None:
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    model = Blocks(lambda: None)
    attached(model)
    for _ in range(3):
        model(torch.ones(2, 1)).backward()
    assert len(started) == 1
    model(torch.ones(2, 1))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    wait_until_none()
    assert not stall_threads()


def test_a_wait_for_the_device_says_so_again_and_again(soon, caplog):
    def point(synchronize: Callable[[], None], is_reached: bool = False) -> stream.Point:
        event = types.SimpleNamespace(query=lambda: is_reached, synchronize=synchronize)
        return stream.Point(event, types.ModuleType("device"), torch.device("meta"))

    stream.wait(point(Until(caplog, 2)), "gradients are there", host=True)
    assert_lines(caplog, r"waiting for the device, \d+ s so far: gradients are there")
    for thread in stall_threads():
        thread.join(60.0)  # it ends a moment after the wait
    threads: list[threading.Thread] = []
    stream.wait(point(lambda: threads.extend(stall_threads()), True), "gradients are there", host=True)
    assert not stall_threads() and not threads  # there is none for a point that has been reached


def test_a_wait_for_an_update_says_so_again_and_again(soon, caplog):
    background, task = worker.Worker(), worker.Task("the update of blocks.3")
    background.submit(task, Until(caplog, 2))
    task.wait(wait_reasons.WEIGHTS_UPDATED)
    assert_lines(caplog, r"waiting for the update of blocks.3, \d+ s so far")
    background.close()
