"""Trace files, what is read from them again, and what the timeline adds up where host and device are one."""

from __future__ import annotations

import concurrent.futures
import json
import threading
import time
import types
from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter
from pathlib import Path

import pytest
import torch

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.report import timeline
from hf_l2l.report.timeline import Timeline
from hf_l2l.report.trace_file import Span, TraceFile
from hf_l2l.report.traced_steps import traced_steps
from hf_l2l.report.wait_time import Averages
from hf_l2l.runtime import wait_reasons
from models import Toy
from tiers import times

HOST = torch.device("cpu")


def read(file: Path) -> list[tuple[str, str, float, float]]:
    """Its spans as (row, name, start, end), in microseconds."""
    events = json.loads(file.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return [(rows[e["tid"]], e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]


# ---- the file


def test_the_file_is_valid_after_every_write(tmp_path, monkeypatch):
    """It stays where it was when the folder changes; a new run replaces it. Its first span, which may be
    empty and is not drawn, begins at 0."""
    monkeypatch.chdir(tmp_path)
    trace = TraceFile("trace.json", "a title", ("above", "below"))
    file = tmp_path / "trace.json"
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert read(file) == []
    trace.write([Span("below", 'a "name"', 1.0, 1.5), Span("above", "b", 0.0, 2.0)])
    first = [("below", 'a "name"', 1e6, 1.5e6), ("above", "b", 0.0, 2e6)]
    assert read(file) == first
    trace.write([Span("above", "ü", 3.0, 4.0)])
    assert read(file) == [*first, ("above", "ü", 3e6, 4e6)]
    trace = TraceFile(str(file), "", ("row",))
    assert read(file) == []
    trace.write([Span("row", "b", 100.5, 101.0), Span("row", "", 100.25, 100.25)])
    assert read(file) == [("row", "b", 0.25e6, 0.75e6)]


def test_a_file_is_made_when_attaching(tmp_path):
    """If its folder has gone, nothing is left on the model. One that cannot be written any more ends."""
    folder, model = tmp_path / "folder", Toy(2)
    folder.mkdir()
    config = L2LConfig(trace=folder / "trace.json", device="cpu", layer_classes=("Block",))
    assert list(folder.iterdir()) == []
    folder.rmdir()
    with pytest.raises(ValueError, match="the trace must go where"):
        attach_l2l(model, config)
    folder.mkdir()
    eps = attach_l2l(model, config)
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    (folder / "trace.json").unlink()
    ids = torch.ones(2, 3, dtype=torch.long)
    model(ids, ids).loss.backward()
    with pytest.warns(UserWarning, match="trace.json ends here"):
        optimizer.step()
    model(ids, ids).loss.backward()
    optimizer.step()
    assert list(folder.iterdir()) == [] and eps.timeline.averages() is not None


# ---- read again

ROWS = "steps,compute,upload,stash upload,host update,host update 2,waits,cuda:1 compute,cuda:1 upload".split(",")


def written(folder: Path, spans: Sequence[Span]) -> Path:
    TraceFile(folder / "trace.json", "a run", ROWS).write(spans)
    return folder / "trace.json"


def step(at: float, scale: float, *, second: str = "compute") -> list[Span]:
    """A step of two layers, `a` and `b`, whose times are multiples of `scale`."""
    uploads = second.replace("compute", "upload")
    return [
        Span("steps", "step", at, at + 20 * scale),
        Span("upload", "a", at, at + scale),
        Span("compute", "forward a", at + scale, at + 3 * scale),
        Span("stash upload", "a", at + scale, at + 9 * scale),
        Span(uploads, "b", at + scale, at + 2 * scale),
        Span(second, "forward b", at + 3 * scale, at + 4 * scale),
        Span("waits", "upload of b", at + 3 * scale, at + 4 * scale),
        Span(second, "backward b", at + 4 * scale, at + 9 * scale),
        Span("upload", "a", at + 5 * scale, at + 7 * scale),
        Span("compute", "backward a", at + 9 * scale, at + 15 * scale),
    ]


def test_the_first_of_several_steps_is_left_out(tmp_path):
    """The second layer is on the same device, or on another one."""
    mean = (0.5 + 0.25) / 2
    for second in ("compute", "cuda:1 compute"):
        spans = [span for n, scale in enumerate((1.0, 0.5, 0.25)) for span in step(100 * n, scale, second=second)]
        found = traced_steps(written(tmp_path, spans))
        assert (found.steps, found.step, found.update) == (2, pytest.approx(20 * mean), None)
        first, last = found.layers
        assert first == ("a", pytest.approx(2 * mean), pytest.approx(6 * mean), pytest.approx(3 * mean), None)
        assert last == ("b", pytest.approx(mean), pytest.approx(5 * mean), pytest.approx(mean), None)


def test_updates_in_the_background_count_where_they_begin(tmp_path):
    updates = [
        Span("host update", "the update of a", 30, 40),  # of the first step, which is left out
        Span("host update", "the update of a", 119, 125),
        Span("host update 2", "the update of b", 121, 125),
        Span("host update", "the update of non-layer modules", 125, 126),
    ]
    found = traced_steps(written(tmp_path, [*step(0, 1.0), *step(100, 1.0), *updates]))
    assert [layer.update for layer in found.layers] == [pytest.approx(6), pytest.approx(4)]
    assert found.update == pytest.approx(11)
    # On a CPU nothing travels; one step alone counts, and one that goes on does not.
    spans = [span for span in step(0, 1.0) if span.row != "upload"]
    spans += [Span("host update", "all layers", 16, 19), Span("steps", "", 20, 21)]
    found = traced_steps(written(tmp_path, spans))
    assert found.steps == 1 and found.update == pytest.approx(3)
    assert [(layer.upload, layer.update) for layer in found.layers] == [(None, None)] * 2


def test_what_is_no_trace_is_refused(tmp_path):
    file = tmp_path / "trace.json"
    for text, why in (
        (None, "No such file or directory"),
        ("", "it is no such file"),
        (json.dumps({"traceEvents": [3]}), "it is no such file"),
        (json.dumps({"traceEvents": []}), "it has no step that has ended"),
    ):
        if text is not None:
            file.write_text(text)
        with pytest.raises(ValueError, match=f"measured must be a trace .*{why}"):
            traced_steps(file)


# ---- averages


def test_averages_are_per_step_and_since_the_last_time(monkeypatch):
    """Reading weights outside of a sweep is no stall, nor an upload of an evaluation; a batch that was thrown away
    belongs to the step after it."""
    clock = types.SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(timeline, "time", types.SimpleNamespace(perf_counter=lambda: clock.seconds))
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

    def read() -> None:
        with line.waiting_for_eps(wait_reasons.WEIGHTS_UPDATED):
            clock.seconds += 1.0

    with torch.no_grad():
        line.start_forward()
    with line.span("upload", "in an evaluation", exposed=True):
        clock.seconds += 5.0
    for _ in range(2):
        line.start_forward()
        with line.inside("forward"):
            reader = threading.Thread(target=read)
            reader.start()
            reader.join()
        read()
    line.end_step()
    assert line.averages() == Averages(steps=1, step_s=4.0, upload_s=0.0, download_s=0.0, eps_s=0.0)


def test_a_trace_that_another_model_ends_says_so(tmp_path):
    first = Timeline(HOST, trace=str(tmp_path / "first.json"))
    with pytest.warns(UserWarning, match="first.json ends here"):
        second = Timeline(HOST)
        second.watch()
    assert second.is_watched and not first.is_watched


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
        # On a busy machine, the threads need more steps; they end if one of them fails.
        while steps < times(150, 300) or (len(done) <= 100 and not any(future.done() for future in futures)):
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
