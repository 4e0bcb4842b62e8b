"""Trace files for ui.perfetto.dev and chrome://tracing: spans in the JSON form of Chrome's trace events."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hf_l2l.paths import cannot_be_written

_END = b"\n]}\n"
_PROCESS = 1
"""Not 0: to viewers, process 0 and thread 0 mean an idle processor."""


class Span(NamedTuple):
    """An interval of time in one row."""

    row: str
    """The row it is drawn in."""
    name: str
    start_s: float
    end_s: float


class FreeRows:
    """Assigns rows to concurrent spans of several threads: spans of one row must not overlap."""

    def __init__(self, rows: Iterable[str]) -> None:
        """`rows` has one row for each possible thread."""
        self._rows = list(rows)
        self._lock = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[str]:
        """Reserve the first free row for the block."""
        with self._lock:
            assert self._rows, "there is a row for each thread that works at a time"
            row = self._rows.pop(0)
        try:
            yield row
        finally:
            with self._lock:
                self._rows.append(row)
                self._rows.sort()


class TraceFile:
    """A trace of one process with a row per lane. The file is complete and valid after every `write`."""

    begins_s: float | None = None
    """What is 0 in the file; None until the first spans are written, of which the earliest begins there."""

    def __init__(self, path: str | os.PathLike[str], title: str, rows: Sequence[str]) -> None:
        """Create the file, or overwrite it.

        Raises:
            ValueError: if the file is not writable.
        """
        self.path = os.path.abspath(path)  # absolute, since the program may change its working directory
        self._has_ended = False
        self._rows = {row: number for number, row in enumerate(rows, start=1)}
        named: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": _PROCESS, "args": {"name": title}}]
        for row, number in self._rows.items():
            about = {"ph": "M", "pid": _PROCESS, "tid": number}
            named.append({"name": "thread_name", **about, "args": {"name": row}})
            named.append({"name": "thread_sort_index", **about, "args": {"sort_index": number}})
        text = '{"displayTimeUnit": "ms", "traceEvents": [\n' + ",\n".join(map(json.dumps, named))
        try:
            with open(self.path, "wb") as file:
                file.write(text.encode() + _END)
        except OSError as error:
            raise ValueError(cannot_be_written(repr(self.path), error)) from error

    def write(self, spans: Iterable[Span]) -> None:
        """Add spans, in any order, without empty ones; those of one row must not overlap in part.

        If the file can no longer be written, the trace ends with a warning, and the run continues.
        """
        spans = list(spans)
        if self.begins_s is None and spans:
            self.begins_s = min(span.start_s for span in spans)
        events = [
            {
                "name": span.name,
                "ph": "X",
                "pid": _PROCESS,
                "tid": self._rows[span.row],
                "ts": 1e6 * (span.start_s - (self.begins_s or 0.0)),
                "dur": 1e6 * (span.end_s - span.start_s),
            }
            for span in spans
            if span.end_s > span.start_s
        ]
        if not events or self._has_ended:
            return
        try:
            # Opened for each write: a long run may be killed at any time.
            with open(self.path, "r+b") as file:
                file.seek(-len(_END), os.SEEK_END)
                file.write("".join(",\n" + json.dumps(event) for event in events).encode() + _END)
        except OSError as error:
            self._has_ended = True
            warnings.warn(
                f"the trace {self.path} ends here, since the file can no longer be written: {error}", stacklevel=2
            )


def names_in_trace(model: nn.Module | None, layers: Sequence[nn.Module]) -> WeakIdKeyDictionary:
    """Names of modules and parameters in the trace, by weak reference; a layer's parameters have the layer's name."""
    names = WeakIdKeyDictionary()
    if model is not None:
        names.update({p: name for name, p in model.named_parameters()})
        names.update({module: name for name, module in model.named_modules()})
        for layer in layers:
            names.update(dict.fromkeys(layer.parameters(), names[layer]))
    return names
