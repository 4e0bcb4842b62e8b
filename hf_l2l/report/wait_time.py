"""Accumulates stall time of the computation by cause, and names the bottleneck."""

from __future__ import annotations

import math
from typing import NamedTuple

from hf_l2l.report.trace_file import Span

COMPUTE_BOUND_BELOW = 0.05
"""A step is compute-bound if it stalls for less than this share of its time."""


class Averages(NamedTuple):
    """Averages per optimizer step, in seconds."""

    steps: int
    """Number of steps averaged."""
    step_s: float
    """From the start of the first forward with gradients since the last step to the end of `optimizer.step()`,
    including all time in between, such as that of batches without a step."""
    upload_s: float
    """Stall time for uploads of weights or layer inputs."""
    download_s: float
    """Stall time for downloads of gradients or layer inputs."""
    eps_s: float
    """Stall time for updates on the host, or for uploads that began late because of updates."""

    @property
    def bound(self) -> str:
        """The bottleneck: "compute" if stalls are less than 5 % of the step, else "link" or "host update"."""
        link_s = self.upload_s + self.download_s
        if link_s + self.eps_s < COMPUTE_BOUND_BELOW * self.step_s:
            return "compute"
        return "link" if link_s >= self.eps_s else "host update"


class Waits:
    """Accumulates the stall time of a step; spans are passed to `count` in program order."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("upload", "download", "eps"), 0.0)
        self._until = -math.inf
        """End of the last stall that was counted."""
        self._update_wait = -math.inf, -math.inf, 0.0
        """The host's last wait for an update: start, end, and the part that was counted."""
        self._uploaded = -math.inf
        """End of the last upload."""
        self._late_s = 0.0
        """Delay of the next awaited upload by an update, as far as it is not counted yet."""

    def count(self, span: Span, waits_for: str, since: float) -> Span:
        """Count `span`, and return it as drawn: the part of a stall that overlaps an earlier one is cut off."""
        if waits_for:
            span = span._replace(start_s=min(span.end_s, max(span.start_s, self._until)))
            self._until = max(self._until, span.end_s)
        seconds = span.end_s - span.start_s
        if waits_for == "upload":
            late_s, self._late_s = min(seconds, self._late_s), 0.0
            self.seconds["eps"] += late_s
            self.seconds["upload"] += seconds - late_s
        elif waits_for in self.seconds:
            self.seconds[waits_for] += seconds
        if waits_for == "eps":
            self._update_wait = since, span.end_s, seconds
        elif span.row == "upload" and not waits_for:  # overlapped with computation
            begin, end, counted_s = self._update_wait
            self._late_s = max(0.0, min(end, span.start_s) - max(begin, self._uploaded) - counted_s)
            self._uploaded = span.end_s
        return span
