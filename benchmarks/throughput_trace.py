"""Traces of `throughput.py`: of one step of each case, in one zip file."""

from __future__ import annotations

import zipfile
from pathlib import Path

from hf_l2l.report.timeline import ROWS, Timeline
from hf_l2l.report.trace_file import TraceFile

MOST_BYTES = 15 * 2**20
"""Of the zip file: a machine that is borrowed may give back small files only."""


def trace_from_now(timeline: Timeline, file: Path) -> None:
    """Write to `file` what `timeline` records from now on, until the model is detached.

    `l2l_trace` would write all steps, and the time of writing would be measured with them.
    """
    timeline.collect()
    timeline._trace = TraceFile(file, f"hf_l2l on {timeline.device}", ROWS)


def add_to_zip(traces: Path, file: Path, name: str) -> None:
    """Add the trace `file` to the zip file `traces` as `name`, unless that would become too large."""
    before = traces.stat().st_size if traces.exists() else 0
    if file.exists() and before + file.stat().st_size // 8 <= MOST_BYTES:  # a trace shrinks to less than an eighth
        with zipfile.ZipFile(traces, "a", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
            packed.write(file, name)
