"""When a generation of a real-time checkpoint begins, and what that costs: bytes, and steps that a crash loses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from hf_l2l.realtime.options import Every

_AGAIN_AFTER = 100
"""Steps after which "auto" tries again, if a generation could not be written."""
_DAY_S = 86_400.0


class Schedule:
    """Of one training, in which one generation is written at a time."""

    def __init__(self, every: Every, first: int, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            every: see `Every`.
            first: optimizer steps that were done before.
            clock: seconds.
        """
        self._every, self._clock = every, clock
        self._due = first + (2 if every == "auto" else every)  # of the second step, the time is known
        self._times = [(first, clock())]
        """Steps, the first and the last one known, and when they ended. The first step takes longer than others."""
        self._begun: float | None = None
        """When the generation was begun that is being written."""
        self.seconds: float | None = None
        """How long the last generation took to write."""

    def is_due(self, step: int) -> bool:
        """Whether a generation begins after this step."""
        return step >= self._due and not (self._every == "auto" and self._begun is not None)

    def begin(self, step: int) -> None:
        """A generation begins after this step."""
        self._begun = self._clock()
        self._due = step + (1 if self._every == "auto" else self._every)

    def end(self, step: int, *, failed: bool = False) -> None:
        """The generation is in its place, or has failed, as the training has made this step."""
        if self._begun is not None and not failed:
            self.seconds = self._clock() - self._begun
        self._begun = None
        if failed:
            self._due = step + (_AGAIN_AFTER if self._every == "auto" else self._every)

    @property
    def is_auto(self) -> bool:
        """Whether it begins generations as the disk allows."""
        return self._every == "auto"

    def made(self, step: int) -> None:
        """A step has ended."""
        if step > self._times[-1][0]:
            self._times.append((step, self._clock()))
            if len(self._times) > 3:
                del self._times[2]

    def put_off(self, step: int) -> None:
        """No generation begins after this step, at which one is due."""
        self._due = step + (1 if self._every == "auto" else self._every)

    def step_seconds(self) -> float:
        """The mean time of a step of this training, without the first one if others are known."""
        (first, start), (last, end) = self._times[min(1, max(0, len(self._times) - 2))], self._times[-1]
        return max(1e-9, (end - start) / max(1, last - first))

    def most_lost(self, step_s: float, write_s: float) -> int:
        """How many steps a crash loses at most: those since the last whole generation, while the next one is written.

        Args:
            step_s: seconds of a step.
            write_s: seconds in which a generation is written.
        """
        return self._between(step_s, write_s) + _steps_of(step_s, write_s)

    def bytes_per_day(self, num_bytes: int, step_s: float, write_s: float) -> float:
        """What is written in a day of training, with generations of so many bytes."""
        return num_bytes * _DAY_S / (self._between(step_s, write_s) * step_s)

    def _between(self, step_s: float, write_s: float) -> int:
        """Steps from the beginning of one generation to that of the next."""
        needed = _steps_of(step_s, write_s)
        return needed if self._every == "auto" else max(self._every, needed)


def _steps_of(step_s: float, write_s: float) -> int:
    """Steps that begin while a generation is written."""
    return max(1, math.ceil(write_s / step_s))
