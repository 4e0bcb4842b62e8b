"""An engine on the virtual clock: its background thread is as fast as `Costs` says, and its timeline tells that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from hf_l2l.testing.sim_clock import VirtualClock
from hf_l2l.testing.sim_recorder import Moment


class _Job:
    """Stands in for the event that a task sets when it is over. The work is done when somebody waits for it."""

    def __init__(self, lane: _Lane, run: Callable[[], None]) -> None:
        self._lane = lane
        self._run: Callable[[], None] | None = run
        self._submitted = lane.clock.moment()
        self.end: Moment | None = None

    def do(self) -> None:
        """Do the work, after what was submitted before."""
        clock, lane = self._lane.clock, self._lane
        with clock.own_time("worker", lane.free):
            clock.wait_for(self._submitted)
            assert self._run is not None, "work is done once"
            self._run()
            self._run = None  # with all that it refers to, which the next step uses again
            lane.free = self.end = clock.moment()

    def is_set(self) -> bool:
        """Whether somebody has waited for the work, which is as late as the program's waits allow."""
        return self.end is not None

    def wait(self, timeout: float | None = None) -> bool:
        """Let the thread that asks wait in virtual time."""
        self._lane.clock.wait_for(self._lane.end_of(self))
        return True


class _Lane:
    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.free = clock.moment()
        self.jobs: list[_Job] = []

    def end_of(self, job: _Job) -> Moment:
        while job.end is None:
            self.jobs.pop(0).do()
        return job.end


@contextlib.contextmanager
def engine_on_clock(clock: VirtualClock, eps: Any) -> Iterator[None]:
    """Inside, the updates in the background of `eps` take virtual time, beside the other threads', and its timeline
    tells virtual times.

    No thread is used: a piece of work is done, on the worker's own time, when somebody waits for it or a later one.
    A timeline that is watched begins anew, since other times do not compare with these.
    """
    lane, worker, times = _Lane(clock), eps.updates.worker, eps.timeline.clock
    before = times.now, times.is_reached

    def submit(task: Any, run: Callable[[], None], modes: Any = None) -> None:
        worker.check()
        task._worker, task._over = worker, _Job(lane, run)
        lane.jobs.append(task._over)

    worker.submit = submit
    times.now = lambda: clock.now
    times.is_reached = lambda point: point.event.is_reached()  # on this clock, `query` is a wait
    if eps.timeline.is_watched:
        eps.timeline.watch()
    try:
        yield
    finally:
        del worker.submit
        times.now, times.is_reached = before
        while lane.jobs:
            lane.jobs.pop(0).do()
