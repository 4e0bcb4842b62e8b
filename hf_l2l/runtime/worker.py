"""Background threads for the host's work, whose exceptions reach whoever waits for it.

They compute as their submitter would: under the same grad mode, autocast and treatment of denormal numbers (which
threads do not share). They leave a core to the thread that drives the device. After a failure they do nothing more.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_l2l.runtime.compute_state import AutocastState
from hf_l2l.runtime.stall_log import StallLog
from hf_l2l.runtime.stream import HOST

_POLL_S = 0.5  # how often a wait looks whether the thread that it waits for still lives
_CLOSES_WITHIN_S = 5.0
_AT_ONCE = 2
"""Tasks under way at once: while Python prepares one, memory is busy with the other, and threads that do not wait for
each other at every tensor get more of it. With more of them the first task, which is needed first, would be late."""


class EngineFailedError(RuntimeError):
    """The engine cannot go on: an update of the weights failed half-way, and was reported then."""


class Task:
    """A piece of work that a `Worker` does."""

    def __init__(self, what: str) -> None:
        """With `what` in words: it ends sentences of errors."""
        self.what = what
        self._over = threading.Event()
        self._worker: Worker | None = None

    @property
    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._over.is_set()

    def wait(self, why: str) -> None:
        """Wait until it is over, for the reason `why`.

        Raises:
            Exception: what it raised, if nobody has been told of that yet.
            EngineFailedError: if it failed, or did not run because another one had.
        """
        assert why and self._worker is not None, "a task is waited for with a reason, and after its submission"
        if self._worker.is_current and not self.done:
            raise RuntimeError(
                f"an update in the background needs weights that {self.what} has not finished; an optimizer or a hook "
                "of its step that reads other parameters than its own needs eps_update='serial'"
            )
        # In short turns: a signal is handled in between, and a thread that is gone does not keep us for ever.
        where = f"waiting for {self.what}, {{seconds}} so far"
        with nullcontext() if self.done else StallLog().inside(where):
            while not self._over.wait(_POLL_S):
                if not self._worker.lives:
                    raise EngineFailedError(
                        f"{self.what} will never end: its thread is gone, or belongs to the process that this one was "
                        "forked from; use the model in the process that trains it"
                    )
        self.check()

    def check(self) -> None:
        """Raise what has gone wrong in it or in another task of its worker; see `Worker.check`."""
        assert self._worker is not None, "a task belongs to who does it"
        self._worker.check()


class Modes(NamedTuple):
    """How a thread computes."""

    grad_enabled: bool
    autocast: AutocastState
    flushes: bool
    """Whether it takes numbers that are too small to be normal for zero."""

    @classmethod
    def current(cls) -> Modes:
        """Those of this thread."""
        return cls(torch.is_grad_enabled(), AutocastState.current(HOST), _flushes_denormals())


class _State:
    """How a worker's tasks went. No idle thread refers to it, or to the worker."""

    def __init__(self) -> None:
        self.failure: str | None = None
        """What has failed, in words."""
        self._untold: BaseException | None = None
        """The failure itself, until somebody is told: its traceback refers to graphs, which refer to the model."""
        self._lock = threading.Lock()

    def fail(self, failure: BaseException) -> None:
        """Keep the first failure."""
        words = traceback.format_exception_only(failure)[0].strip()  # also of one that cannot be made a string
        with self._lock:
            if self.failure is None:
                self.failure, self._untold = words, failure

    def take_untold(self) -> BaseException | None:
        """The failure, if nobody has been told of it; it is kept no longer."""
        with self._lock:
            untold, self._untold = self._untold, None
            return untold


class Worker:
    """A few threads, started by the first task and ended by `close` or with the last reference to the worker.

    Tasks begin in the order in which they were submitted, and may end in another: at most two are under way.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        """With `num_threads` in all, those inside operations of torch included (None: `default_num_threads`)."""
        self.num_threads = num_threads or default_num_threads()
        self._tasks: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._state = _State()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._end: weakref.finalize[..., Worker] | None = None
        self._flushes = False
        self._process = os.getpid()

    @property
    def lives(self) -> bool:
        """Whether there are threads in this process that work."""
        alive = [thread.is_alive() for thread in self._threads]
        return os.getpid() == self._process and bool(alive) and all(alive)

    @property
    def is_current(self) -> bool:
        """Whether this is called by one of the worker's own threads."""
        return threading.current_thread() in self._threads

    @property
    def has_failed(self) -> bool:
        """Whether a task has raised, or `fail` was called."""
        return self._state.failure is not None

    def submit(self, task: Task, run: Callable[[], None], modes: Modes | None = None) -> None:
        """Let a thread call `run` under `modes` (None: those of now) when it is done with what it was given before.

        Raises:
            Exception: what an earlier task raised, if nobody has been told of that yet.
            EngineFailedError: if an earlier task has failed.
        """
        self.check()
        modes = modes or Modes.current()
        if not self._threads or modes.flushes != self._flushes:
            self._start(modes.flushes)
        task._worker = self
        self._tasks.put(_Job(task, run, modes, self._state, self._closing))

    def check(self) -> None:
        """Tell of a failure, once as it was and then as what it means.

        Raises:
            Exception: what a task raised.
            EngineFailedError: if that has been told of before.
        """
        if not self.has_failed:
            return
        untold = self._state.take_untold()
        try:
            if untold is not None:
                raise untold
        finally:
            del untold  # whose traceback refers to this frame, too
        raise EngineFailedError(
            f"the weights are between two steps and the engine has stopped: {self._state.failure}. Load the last "
            "checkpoint into a new model"
        )

    def fail(self, failure: BaseException) -> None:
        """Do nothing more; `failure` has been told of."""
        self._state.fail(failure)
        self._state.take_untold()

    @contextmanager
    def failing_with_errors(self) -> Iterator[None]:
        """Do nothing more if an exception leaves the block, even one like KeyboardInterrupt."""
        with ExitStack() as failure:
            failure.push(lambda kind, error, traceback: None if error is None else self.fail(error))
            yield

    def close(self) -> None:
        """End the threads; tasks that have not begun never run."""
        if self._end is not None:
            self._end()
        self._threads = []

    def _start(self, flushes: bool) -> None:
        """Start threads, in the place of those that do not treat denormals as they are treated now."""
        if self._end is not None:  # those there are do first what they were given
            self._end.detach()
            _end_after_work(self._tasks, self._threads)
        before = torch.get_num_threads()
        count = min(_AT_ONCE, self.num_threads)
        tasks, ready = queue.SimpleQueue[_Job | None](), threading.Semaphore(0)
        self._tasks, self._flushes = tasks, flushes
        self._threads = [
            threading.Thread(
                target=_work,
                args=(tasks, (self.num_threads + number) // count, flushes, ready),
                name="hf_l2l worker",
                daemon=True,
            )
            for number in range(count)
        ]
        # Also at the end of the process, before what a thread needs is taken down around it; and already now, in case
        # that one cannot be started. What threads are given must not lead to the worker, or to a failure.
        self._end = weakref.finalize(self, _end, tasks, self._closing, self._threads)
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            ready.acquire()
        # Each thread has a number of its own, but those born later take the one that was set last.
        torch.set_num_threads(before)


@dataclass
class _Job:
    task: Task
    run: Callable[[], None]
    modes: Modes
    state: _State
    closing: threading.Event


class _Reporting:
    """Marks a task as over, and keeps what it raised, with its name."""

    def __init__(self, task: Task, state: _State) -> None:
        self.task, self.state = task, state

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        try:
            if error is not None:
                error.add_note(f"raised in {self.task.what}")
                self.state.fail(error)
        finally:
            self.task._over.set()
        return True


def _work(tasks: queue.SimpleQueue[_Job | None], num_threads: int, flushes: bool, ready: threading.Semaphore) -> None:
    torch.get_num_threads()  # first: a thread takes the number of the process when it asks for the first time
    torch.set_num_threads(num_threads)
    torch.set_flush_denormal(flushes)
    ready.release()
    while (job := tasks.get()) is not None:
        with _Reporting(job.task, job.state):
            if job.state.failure is None and not job.closing.is_set():
                with torch.set_grad_enabled(job.modes.grad_enabled), job.modes.autocast.entered():
                    job.run()
        del job  # with all that it refers to, before the wait for the next one


def _end(tasks: queue.SimpleQueue[_Job | None], closing: threading.Event, threads: list[threading.Thread]) -> None:
    closing.set()
    _end_after_work(tasks, threads, within_s=_CLOSES_WITHIN_S)


def _end_after_work(
    tasks: queue.SimpleQueue[_Job | None], threads: list[threading.Thread], within_s: float = threading.TIMEOUT_MAX
) -> None:
    until = time.monotonic() + within_s
    for _ in threads:
        tasks.put(None)
    for thread in threads:
        if thread.is_alive() and thread is not threading.current_thread():  # it may not have been started
            thread.join(max(0.0, until - time.monotonic()))


def default_num_threads() -> int:
    """Threads for the host's work: those that torch uses, but one core is the driver's."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(torch.get_num_threads(), cores - 1))


def _flushes_denormals() -> bool:
    """Whether this thread takes numbers that are too small to be normal for zero; torch can set that, not tell."""
    return sys.float_info.min / 2 == 0.0  # Python's numbers are computed under the same mode
