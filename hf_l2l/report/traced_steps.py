"""What a trace file tells of each layer: `hf-l2l plan --measured` has it beside what a plan says.

A trace has no rows, tokens or bytes: who reads it must know of which batch it is. Where nothing travels, as on a CPU,
it has no uploads; and layers that are updated together, as by a plain optimizer, have one update.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from hf_l2l.option_names import option
from hf_l2l.report.trace_file import Span

SWEEPS = ("forward", "backward")
_UPDATE = "the update of "


class TracedLayer(NamedTuple):
    """Mean seconds of a step; None for what the trace does not have of the layer alone."""

    name: str
    forward: float
    backward: float
    """The recomputation included."""
    upload: float | None
    update: float | None


class TracedSteps(NamedTuple):
    """Means over the steps of a trace; without the first one, if there are several."""

    steps: int
    step: float
    """Seconds of a step."""
    layers: list[TracedLayer]
    update: float | None
    """Seconds of all updates on the host of a step, those of non-layer modules included."""


def traced_steps(path: str | os.PathLike[str]) -> TracedSteps:
    """Read a trace that `l2l_trace` (`L2LConfig(trace=...)`) has written.

    Raises:
        ValueError: if the file cannot be read, is none of these, or has no step or no layer.
    """
    spans = _spans(path)
    steps = sorted((span for span in spans if span.row == "steps" and span.name == "step"), key=lambda s: s.start_s)
    if not steps:
        raise _refused(path, "it has no step that has ended")
    counted = steps[1:] or steps
    # Updates in the background may end, or even begin, after their step; what begins from the first one on counts.
    since = counted[0].start_s
    seconds: dict[tuple[str, str], float] = {}
    for span in spans:
        if span.start_s >= since and span.row != "steps":
            for key in _keys(span):
                seconds[key] = seconds.get(key, 0.0) + (span.end_s - span.start_s) / len(counted)
    names = [name for sweep, name in seconds if sweep == "forward"]
    if not names:
        raise _refused(path, "it has no layer's forward")
    layers = [
        TracedLayer(
            name,
            seconds["forward", name],
            seconds.get(("backward", name), 0.0),
            seconds.get(("upload", name)),
            seconds.get(("update", name)),
        )
        for name in names
    ]
    mean = sum(step.end_s - step.start_s for step in counted) / len(counted)
    return TracedSteps(len(counted), mean, layers, seconds.get(("update", "")))


def _keys(span: Span) -> Iterator[tuple[str, str]]:
    """What a span counts for, and for which layer; the empty name is that of all together. Of several devices each
    has rows of its own, whose names begin with that of the device."""
    row = span.row.partition(" ")[2] if ":" in span.row.partition(" ")[0] else span.row
    if row == "compute":
        sweep, _, name = span.name.partition(" ")
        yield sweep, name
    elif row == "upload":
        yield "upload", span.name
    elif row.startswith("host update"):
        yield "update", ""
        if span.name.startswith(_UPDATE):
            yield "update", span.name.removeprefix(_UPDATE)


def _spans(path: str | os.PathLike[str]) -> list[Span]:
    try:
        with open(path, encoding="utf-8") as file:
            events: list[dict[str, Any]] = json.load(file)["traceEvents"]
        rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        spans = [
            Span(rows[event["tid"]], event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
            for event in events
            if event["ph"] == "X"
        ]
    except OSError as error:
        raise _refused(path, error.strerror or error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refused(path, "it is no such file") from error
    return sorted(spans, key=lambda span: span.start_s)


def _refused(path: object, why: object) -> ValueError:
    return ValueError(
        f"{option('measured')} must be a trace that a run with l2l_trace wrote (got {str(path)!r}: {why}); train two "
        "steps or more with l2l_trace, and give that file"
    )
