"""Adds up what the computation waits for, and says which of it is the most."""

from __future__ import annotations

import math
from typing import NamedTuple

from hf_l2l.report.trace_file import Span

COMPUTE_BOUND_BELOW = 0.05
"""A step is bound by computation if it waits for less than this share of its time."""


class Averages(NamedTuple):
    """Of one optimizer step, in seconds."""

    steps: int
    """How many were averaged."""
    step_s: float
    """From the beginning of the first forward with gradients since the last step to the end of `optimizer.step()`:
    with all that is between them, also batches that are thrown away."""
    upload_s: float
    """That the computation waited for weights or layer inputs to arrive."""
    download_s: float
    """That it waited for gradients or layer inputs to leave."""
    eps_s: float
    """That it waited for the host to update weights, or for uploads that began late because of updates."""

    @property
    def bound(self) -> str:
        """What to improve first: "compute" if waits are less than 5 % of the step, else "link" or "host update"."""
        link_s = self.upload_s + self.download_s
        if link_s + self.eps_s < COMPUTE_BOUND_BELOW * self.step_s:
            return "compute"
        return "link" if link_s >= self.eps_s else "host update"


class Waits:
    """Takes one span after the other, in the order of the program."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("upload", "download", "eps"), 0.0)
        self._until = -math.inf
        """Waits that are counted end here."""
        self._held_up = -math.inf, -math.inf, 0.0
        """When the host last waited for an update, from and to, and what was counted of that."""
        self._uploaded = -math.inf
        """When the lane of uploads had nothing more to do."""
        self._late_s = 0.0
        """By which an update made the upload that will be waited for begin late, where that is not counted yet."""

    def count(self, span: Span, waits_for: str, since: float) -> Span:
        """Return what to draw: a wait goes on where another one that began with it has ended."""
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
            self._held_up = since, span.end_s, seconds
        elif span.row == "upload" and not waits_for:  # while something may compute
            begin, end, counted_s = self._held_up
            self._late_s = max(0.0, min(end, span.start_s) - max(begin, self._uploaded) - counted_s)
            self._uploaded = span.end_s
        return span
