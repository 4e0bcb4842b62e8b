"""What a step takes beside what was planned for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

from hf_l2l.memory.memory_report import MemoryReport
from hf_l2l.plan.planner import Plan
from hf_l2l.runtime.tensors import size_text, two_digits

_FIRST, _LAST = 3, 20
"""The first steps allocate, and choose kernels. The median is of those after them: an evaluation or a checkpoint
between two steps is no step."""

_PLANNED = "device memory was planned"
"""With this, a note on an error begins."""


class PlanWatch:
    """Tells after 20 steps what was measured of a plan, and, when the device has no memory left, what took more."""

    def __init__(
        self,
        plan: Plan,
        report: Callable[[], MemoryReport],
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`report` is that of the memory, and `tell` is given the text."""
        self._plan, self._report, self._tell, self._clock = plan, report, tell, clock
        self._steps = 0
        self._ends: list[float] = []

    def step_ended(self) -> None:
        """The optimizer has stepped."""
        self._steps += 1
        if _FIRST <= self._steps <= _LAST:
            self._ends.append(self._clock())
        if self._steps == _LAST:
            self._tell(self.measured(statistics.median(b - a for a, b in pairwise(self._ends))))

    def measured(self, seconds: float) -> str:
        """The time of a step, and the most bytes of the device, beside the planned ones."""
        device = self._report().get("device")
        held = "" if device is None else f", {size_text(device['total']['peak'])} of the device at the peak"
        planned = f"{two_digits(self._plan.time.seconds)} s, {size_text(self._plan.peak_bytes)}"
        return f"measured in {_LAST} steps: {seconds:.3g} s per step{held} (planned: {planned})"

    @contextmanager
    def evaluates(self, warn: Callable[[str], None], rows: int) -> Iterator[None]:
        """Inside, there is an evaluation with so many rows in a batch, which was not planned: tell if it has taken
        more than the budget."""
        before = self._peak()
        yield
        if before <= self._plan.budget < (peak := self._peak()):
            warn(
                "device_memory_budget is planned for the steps of the training, and an evaluation has taken more "
                f"({size_text(peak)} of the device, and the budget is {size_text(self._plan.budget)}); give its "
                f"batches fewer rows (per_device_eval_batch_size={rows}) than now"
            )

    def _peak(self) -> int:
        device = self._report().get("device")
        return 0 if device is None else int(device["total"]["peak"])

    def explain(self, error: BaseException) -> None:
        """Add to an error of device memory what holds more than was planned."""
        device = self._report().get("device")
        if device is None or any(_PLANNED in note for note in getattr(error, "__notes__", ())):
            return
        most = {name: max(size["now"], size["peak"]) for name, size in device.items() if name != "total"}
        over = {name: size - self._plan.peak.get(name, 0) for name, size in most.items()}
        name = max(over, key=lambda each: over[each])
        if over[name] > 0.01 * self._plan.budget:
            what = (
                f"{name} took {size_text(most[name])} ({size_text(self._plan.peak.get(name, 0))} planned); a batch "
                "may have had more or longer rows than the one that was planned for"
            )
        else:
            what = "nothing of it took more than planned; other programs, or fragments, may have taken the memory"
        error.add_note(
            f"{_PLANNED}: {size_text(self._plan.peak_bytes)} within {size_text(self._plan.budget)}. Of "
            f"it, {what}; give a smaller device_memory_budget"
        )
