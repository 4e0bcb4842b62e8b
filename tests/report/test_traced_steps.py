"""What is read from a trace of known spans, and files that are no trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from hf_l2l.report.trace_file import Span, TraceFile
from hf_l2l.report.traced_steps import TracedLayer, TracedSteps, traced_steps

ROWS = ("steps", "compute", "upload", "stash upload", "host update", "host update 2", "waits", "cuda:1 compute")
ROWS += ("cuda:1 upload",)


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


@pytest.mark.parametrize("second", ["compute", "cuda:1 compute"], ids=["one device", "two devices"])
def test_the_first_of_several_steps_is_left_out(second, tmp_path):
    spans = [*step(0, 1.0, second=second), *step(100, 0.5, second=second), *step(200, 0.25, second=second)]
    found = traced_steps(written(tmp_path, spans))
    mean = (0.5 + 0.25) / 2
    assert (found.steps, found.step, found.update) == (2, pytest.approx(20 * mean), None)
    first, last = found.layers
    assert first == ("a", pytest.approx(2 * mean), pytest.approx(6 * mean), pytest.approx(3 * mean), None)
    assert last == ("b", pytest.approx(mean), pytest.approx(5 * mean), pytest.approx(mean), None)


def test_one_step_alone_counts(tmp_path):
    found = traced_steps(written(tmp_path, step(0, 1.0)))
    assert (found.steps, found.step) == (1, 20.0) and [layer.name for layer in found.layers] == ["a", "b"]


def test_a_step_that_has_not_ended_counts_for_none(tmp_path):
    found = traced_steps(written(tmp_path, [*step(0, 1.0), *step(100, 1.0), Span("steps", "", 200, 201)]))
    assert found.steps == 1


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


def test_an_update_of_all_layers_is_of_none_alone(tmp_path):
    found = traced_steps(written(tmp_path, [*step(0, 1.0), Span("host update", "all layers", 16, 19)]))
    assert found.update == pytest.approx(3) and [layer.update for layer in found.layers] == [None, None]


def test_on_a_cpu_nothing_travels(tmp_path):
    spans = [span for span in step(0, 1.0) if span.row != "upload"]
    assert traced_steps(written(tmp_path, spans)) == TracedSteps(
        1, 20.0, [TracedLayer("a", 2.0, 6.0, None, None), TracedLayer("b", 1.0, 5.0, None, None)], None
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "No such file or directory"),
        ("", "it is no such file"),
        ("[1, 2]", "it is no such file"),
        ("{}", "it is no such file"),
        (json.dumps({"traceEvents": [{"name": "a", "ph": "X", "tid": 1}]}), "it is no such file"),
        (json.dumps({"traceEvents": [3]}), "it is no such file"),
        (json.dumps({"traceEvents": []}), "it has no step that has ended"),
    ],
)
def test_what_is_no_trace_is_refused(text, why, tmp_path):
    file = tmp_path / "trace.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match="measured must be a trace that a run with l2l_trace wrote") as refused:
        traced_steps(file)
    assert f"(got {str(file)!r}: {why}); train two steps or more" in str(refused.value)


def test_a_folder_and_a_run_without_layers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="Is a directory"):
        traced_steps(tmp_path)
    with pytest.raises(ValueError, match="it has no layer's forward"):
        traced_steps(written(tmp_path, [Span("steps", "step", 0, 1)]))
