"""Trace files, what is read from them again and what the timeline adds up; and the picture of a run."""

from __future__ import annotations

import concurrent.futures
import json
import logging
import sys
import threading
import time
import types
import warnings
from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_models import ran, refused
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.report import timeline
from hf_l2l.report.pictures import run_log
from hf_l2l.report.pictures.run_log import NO_LOG, NOT_OF_L2L, RUN_FILE, RunFacts, RunLog, StepTime, read_run
from hf_l2l.report.pictures.run_picture import draw_run
from hf_l2l.report.timeline import Timeline
from hf_l2l.report.trace_file import Span, TraceFile
from hf_l2l.report.traced_steps import traced_steps
from hf_l2l.report.wait_time import Averages
from hf_l2l.runtime import wait_reasons
from models import Toy
from tiers import times
from training import SAVING, StopAt, l2l_trainer, measured

HOST = torch.device("cpu")


def read(file: Path) -> list[tuple[str, str, float, float]]:
    """Its spans as (row, name, start, end), in microseconds."""
    events = json.loads(file.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return [(rows[e["tid"]], e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]


def test_the_file_is_valid_after_every_write(tmp_path, monkeypatch):
    """It stays where it was when the folder changes; a new run replaces it. It begins at its first span."""
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


def test_averages_are_per_step_and_since_the_last_time(monkeypatch):
    """What is outside of a sweep is no stall; a batch that was thrown away belongs to the next step."""
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


# ---- the picture of a run says what the run logged, from its Trainer or from its files


EVALUATED = {**SAVING, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "ubatch_size": 4}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()


def drawn(log: RunLog) -> Any:
    pytest.importorskip("matplotlib")
    return draw_run(log, "a picture", None, "leave it out")


def texts(figure: Any) -> str:
    """All that is written in a picture."""
    figure.draw_without_rendering()
    found = [each.get_text() for each in figure.findobj(match=lambda artist: hasattr(artist, "get_text"))]
    return "\n".join(found).replace("\n", " ")


def log_of(entries: list[dict[str, Any]], rows: Sequence[dict[str, Any]] = ()) -> RunLog:
    return RunLog.of_state({"log_history": entries, "global_step": 4}, RunFacts("Model", 9), rows)


def test_a_trainer_draws_its_run_and_files_say_the_same(tmp_path):
    """A run without rows says why it has none."""
    pytest.importorskip("matplotlib")
    trainer = l2l_trainer(tmp_path, **EVALUATED)
    trainer.train()
    trainer.save_state()
    figure = trainer.plot(tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert figure._repr_png_().startswith(b"\x89PNG")  # for notebooks
    written, parameters = texts(figure), sum(p.numel() for p in trainer.model.parameters())
    assert f"{type(trainer.model).__name__}, {parameters:,} parameters" in written
    memory, time, loss = figure.axes
    assert {"masters", "gradients", "moments"} <= {label.get_text() for label in memory.get_yticklabels()}
    steps_s = [row["l2l_step_s"] for row in measured(tmp_path)]
    assert list(time.patches[-1].get_data().values) == pytest.approx(steps_s)  # all causes together
    losses = {line.get_label(): list(line.get_xdata()) for line in loss.lines}
    assert losses == {"training": [1, 2, 3, 4], "eval loss": [2, 4]}

    found, halfway = (read_run(tmp_path / name / "trainer_state.json") for name in ("", "checkpoint-2"))
    facts = RunFacts("BertForSequenceClassification", parameters, 8, 1, 1, 4, "cpu")
    assert found.facts == halfway.facts == facts
    assert (found.steps, len(found.times), len(halfway.times)) == (4, 4, 2)
    assert found.missing == halfway.missing == {}
    for log in (found, halfway):
        assert log.memory is not None and log.memory["host"]["masters"]["peak"] == 4 * parameters
        assert json.loads(json.dumps(log.as_json()))["memory"] == log.memory

    (tmp_path / RUN_FILE).unlink()
    log = read_run(tmp_path / "checkpoint-4" / "trainer_state.json")
    assert log.missing == {"time": NOT_OF_L2L, "memory": NOT_OF_L2L} and len(log.losses) == 4
    assert f"time, memory: {NOT_OF_L2L}" in texts(trainer.plot())


def test_before_a_training_there_is_nothing_to_draw(tmp_path, monkeypatch):
    """Nor without matplotlib, or where it cannot be written."""
    pytest.importorskip("matplotlib")
    trainer = l2l_trainer(tmp_path)
    figure = trainer.plot()
    assert f"memory, time, loss: {NO_LOG}" in texts(figure) and figure.axes == []
    assert "4 steps" in log_of([]).missing["loss"]
    with pytest.raises(ValueError, match="path must be a file that can be written"):
        trainer.plot(tmp_path / "none" / "run.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="needs the package matplotlib .* pip install matplotlib"):
        trainer.plot("a.png")


def test_a_resumed_run_goes_on_with_the_rows_of_the_one_before(tmp_path):
    options = {**SAVING, "eval_strategy": "no"}
    for _ in range(2):
        l2l_trainer(tmp_path, **options, callbacks=[StopAt(3)]).train()
    assert [row["step"] for row in measured(tmp_path)] == [1, 2, 3]  # and none of a training before
    with (tmp_path / RUN_FILE).open("a") as file:
        file.write('{"step": 4, "l2l_wai')  # killed while it wrote
    resumed = l2l_trainer(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    rows = [row for row in run_log.read_rows(tmp_path / RUN_FILE) if "memory" not in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 3, 4]
    times = read_run(tmp_path / "checkpoint-4" / "trainer_state.json").times
    assert [each.step for each in times] == [1, 2, 3, 4]
    assert [each.upload + each.download + each.eps + (each.compute or 0) for each in times] == pytest.approx(
        [row["l2l_step_s"] for row in (*rows[:2], *rows[3:])]
    )


def test_a_checkpoint_whose_state_has_what_was_measured_is_resumed_from(tmp_path):
    """As versions before `l2l_run.jsonl` have written it."""
    l2l_trainer(tmp_path, **SAVING).train()
    (tmp_path / "checkpoint-4" / "l2l_manifest.json").unlink()
    file = tmp_path / "checkpoint-4" / "trainer_state.json"
    state = json.loads(file.read_text())
    state["log_history"] = [each | row for each, row in zip(state["log_history"], measured(tmp_path), strict=True)]
    state["stateful_callbacks"]["L2LRun"] = {"args": {}, "attributes": {"facts": {}, "memory": {}}}
    file.write_text(json.dumps(state))
    (tmp_path / RUN_FILE).unlink()
    assert len(read_run(file).times) == 4
    resumed = l2l_trainer(tmp_path, **{**SAVING, "max_steps": 6}, restore_callback_states_from_checkpoint=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*checkpoint-4 has no manifest.*")
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert resumed.state.global_step == 6


def test_rows_that_cannot_be_written_do_not_end_a_training(tmp_path, caplog):
    trainer = l2l_trainer(tmp_path, max_steps=2)
    (tmp_path / RUN_FILE).mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "transformers"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert [text for text in caplog.messages if f"{RUN_FILE} cannot be written" in text] == [caplog.messages[0]]


def loss(step: int, **more: float) -> dict[str, Any]:
    return {"step": step, "loss": 1.0, **more}


def row(step: int, **more: float) -> dict[str, Any]:
    waits = {f"l2l_wait_{cause}_s": seconds for cause, seconds in (("upload", 1.0), ("download", 0.5), ("eps", 0.25))}
    return {"step": step, **waits, **more}


def test_the_rest_of_a_step_is_computation_and_steps_whose_times_were_not_logged_are_left_empty():
    log = log_of([loss(2), loss(3), loss(4)], [row(2, l2l_step_s=4.0), row(3, l2l_step_s=1.5), row(4)])
    assert log.times == [
        StepTime(0, 2, 1.0, 0.5, 0.25, 2.25),
        StepTime(2, 3, 1.0, 0.5, 0.25, 0.0),  # of rounding
        StepTime(3, 4, 1.0, 0.5, 0.25, None),
    ]
    assert "step time not logged" in texts(drawn(log))
    memory = {"host": {"total": {"now": 1, "peak": 7}}}
    log = log_of([loss(2)], [row(2), row(3), {"step": 4, "memory": memory}, row(6), {"step": 6, "memory": {}}])
    assert [each.step for each in log.times] == [2] and log.memory == memory, "no rows of steps that were undone"

    log = log_of([loss(1), {"step": 2, "loss": float("nan"), "eval_loss": float("inf")}], [row(1)])
    found = json.loads(json.dumps(log.as_json(), allow_nan=False))  # numbers that JSON does not have are null
    assert found["losses"] == [[1, 1.0], [2, None]] and found["evaluations"] == {"eval_loss": [[2, None]]}
    drawn(log).draw_without_rendering()


def test_what_is_no_state_or_no_row_is_refused(tmp_path):
    file = tmp_path / "trainer_state.json"
    for text, why in (("no JSON", "it is no JSON: Expecting value"), ("{}", "it has no log of a Trainer")):
        file.write_text(text)
        with pytest.raises(ValueError, match=why):
            read_run(file)
    file.write_text('{"log_history": [], "global_step": 4}')
    (tmp_path / RUN_FILE).write_text('{"times": 1}\n')
    with pytest.raises(ValueError, match=f"line 1 of .*{RUN_FILE} is no row of a run"):
        read_run(file)


def state_of(folder: Path, step: int) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    log = [{"loss": 1.0, "step": step}]
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": log}))
    return str(folder / "trainer_state.json")


def test_a_picture_is_drawn_here_unless_a_file_is_named(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    run = tmp_path / "run"
    l2l_trainer(run, **SAVING, logging_steps=1).train()
    capsys.readouterr()
    found = ran(capsys, "plot", str(run))
    assert found.status == 0 and (tmp_path / "hf_l2l_run.png").read_bytes().startswith(b"\x89PNG")
    assert found.out.startswith(f"{run}/checkpoint-4/trainer_state.json: 4 steps of BertForSequenceClassification, ")
    assert "device batch of 8 rows" in found.out and found.out.endswith("-> hf_l2l_run.png\n")
    assert "must be a file that can be written" in refused(capsys, "plot", str(run), "--out", "nowhere/run.png")
    without = state_of(tmp_path / "without times", 1)
    assert "  time: not in l2l_run.jsonl of" in ran(capsys, "plot", without, "--out", "other.svg").out
    assert "<svg" in (tmp_path / "other.svg").read_text()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib, or give --json" in refused(capsys, "plot", str(run))
    found = ran(capsys, "plot", str(run / "checkpoint-2"), "--json").json  # times are in a file in the folder above
    assert [each["step"] for each in found["times"]] == [1, 2] and found["memory"]["host"]["masters"]["peak"] > 0


def test_the_state_after_the_training_comes_before_that_of_a_checkpoint(tmp_path, capsys):
    """What is no run is refused."""
    state_of(tmp_path / "run" / "checkpoint-2", 2)
    newest = state_of(tmp_path / "run" / "checkpoint-9", 9)
    for own, is_taken in ((9, True), (8, False)):
        state = state_of(tmp_path / "run", own)
        assert ran(capsys, "plot", str(tmp_path / "run"), "--json").json["file"] == (state if is_taken else newest)
    (tmp_path / "empty").mkdir()
    Path(state_of(tmp_path / "broken", 3)).write_text("{")
    state_of(tmp_path / "broken" / "checkpoint-1", 1)
    for name in ("nowhere", "empty", "broken"):
        said = refused(capsys, "plot", name, "--json")
        assert "RUN must be the output_dir of a training" in said and f"(got '{name}" in said
