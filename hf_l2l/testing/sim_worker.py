"""Runs an engine on the virtual clock: its background work takes the time given by `Costs`, also in its timeline."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from hf_l2l.testing.sim_clock import VirtualClock
from hf_l2l.testing.sim_recorder import Moment


class _Job:
    """Stands in for the event that a task sets at its end. The work is done when a thread waits for it."""

    def __init__(self, lane: _Lane, run: Callable[[], None]) -> None:
        self.lane = lane
        self._run: Callable[[], None] | None = run
        self._submitted = lane.clock.moment()
        self.end: Moment | None = None

    def do(self) -> None:
        """Do the work, after all work submitted before."""
        clock, lane = self.lane.clock, self.lane
        with clock.own_time("worker", lane.free):
            clock.wait_for(self._submitted)
            assert self._run is not None, "work is done once"
            self._run()
            self._run = None  # frees all that it refers to, for the next step
            lane.free = self.end = clock.moment()

    def is_set(self) -> bool:
        """Whether a thread has waited for the work, which is done as late as the program's waits allow."""
        return self.end is not None

    def wait(self, timeout: float | None = None) -> bool:
        """Make the calling thread wait in virtual time."""
        self.lane.clock.wait_for(self.lane.end_of(self))
        return True


class _Piece:
    """Stands in for the event that a piece of a task sets at its end."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._end: Moment | None = None

    def set(self) -> None:
        """The work has got so far."""
        self._end = self._job.lane.clock.moment()

    def is_set(self) -> bool:
        """See `_Job.is_set`."""
        return self._end is not None

    def wait(self, timeout: float | None = None) -> bool:
        """Make the calling thread wait in virtual time, for the piece alone."""
        lane = self._job.lane
        end = lane.end_of(self._job)
        lane.clock.wait_for(self._end or end)
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
    """In the block, updates in the background of `eps` take virtual time, concurrently with other threads, and its
    timeline has virtual times.

    No thread is used: work is done, in the worker's own virtual time, when a thread waits for it or for later work. A
    timeline that is recorded starts over, since other times are not comparable.
    """
    lane, worker, clocks = _Lane(clock), eps.updates.worker, eps.timeline.clocks
    before = [(each, each.now, each.is_reached) for each in clocks]

    def submit(task: Any, run: Callable[[], None], modes: Any = None) -> None:
        worker.check()
        job = _Job(lane, run)
        task._worker, task._over, task._pieces = worker, job, [_Piece(job) for _ in task._pieces]
        lane.jobs.append(job)

    worker.submit = submit
    for each in clocks:
        each.now = lambda: clock.now
        each.is_reached = lambda point: point.event.is_reached()  # on this clock, `query` is a wait
    if eps.timeline.is_watched:
        eps.timeline.watch()
    try:
        yield
    finally:
        del worker.submit
        for each, now, is_reached in before:
            each.now, each.is_reached = now, is_reached
        while lane.jobs:
            lane.jobs.pop(0).do()
