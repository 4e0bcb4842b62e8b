"""Background threads for work of the host, whose exceptions are raised in the thread that waits for the work.

They compute like the submitting thread: with its grad mode, autocast settings and treatment of denormal numbers, which
are all per thread. They leave one core to the thread that drives the device. After a failure they run no more tasks.
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
from types import FrameType
from typing import NamedTuple

import torch

from hf_l2l.runtime.compute_state import AutocastState
from hf_l2l.runtime.stall_log import StallLog
from hf_l2l.runtime.stream import HOST

_POLL_S = 0.5  # interval at which a wait checks that the worker's threads are alive
_CLOSES_WITHIN_S = 5.0
_AT_ONCE = 2
"""Concurrent tasks: while Python prepares one, the other uses the memory bandwidth, and threads that need not
synchronise at every tensor use more of it. With more tasks, the first one, which is needed first, would end later."""


class EngineFailedError(RuntimeError):
    """The engine cannot continue: an update of the weights failed half-way. The failure itself was raised before."""


class Task:
    """A piece of work for a `Worker`."""

    def __init__(self, what: str, pieces: int = 0) -> None:
        """`what` names the work in errors and logs, as in "the update of blocks.3"; of so many pieces it tells when
        they are done."""
        self.what = what
        self._over = threading.Event()
        self._pieces = [threading.Event() for _ in range(pieces)]
        self._worker: Worker | None = None

    @property
    def done(self) -> bool:
        """Whether the task has ended, with or without success."""
        return self._over.is_set()

    def end_piece(self, number: int) -> None:
        """Called by the work: this piece is done."""
        self._pieces[number].set()

    def end(self) -> None:
        """Called by the worker: the task has ended, with or without success."""
        self._over.set()
        for piece in self._pieces:
            piece.set()

    def has_piece(self, number: int) -> bool:
        """Whether a piece of the work is done, or the task has ended."""
        return self._pieces[number].is_set()

    def wait_for_piece(self, number: int, why: str) -> None:
        """`wait` for a piece of the work."""
        self._wait(self._pieces[number], why)

    def wait(self, why: str) -> None:
        """Wait until the task has ended; `why` is one of the `wait_reasons`.

        Raises:
            Exception: the exception of a task, if it has not been raised before.
            EngineFailedError: if the task failed, or did not run because another one had failed.
        """
        self._wait(self._over, why)

    def _wait(self, event: threading.Event, why: str) -> None:
        assert why and self._worker is not None, "a wait has a reason, and follows the submission"
        if self._worker.is_current and not self.done:
            raise RuntimeError(
                f"an update in the background needs weights that {self.what} has not finished; an optimizer or a hook "
                "of its step that reads other parameters than its own needs eps_update='serial'"
            )
        # In short intervals: signals are handled in between, and a dead thread does not block this one for ever.
        where = f"waiting for {self.what}, {{seconds}} so far"
        with nullcontext() if event.is_set() else StallLog().inside(where):
            while not event.wait(_POLL_S):
                if not self._worker.lives:
                    raise EngineFailedError(
                        f"{self.what} will never end: its thread is dead, or belongs to the process that this one was "
                        "forked from; use the model in the process that trains it"
                    )
        self.check()

    def check(self) -> None:
        """Raise the failure of this or another task of the worker; see `Worker.check`."""
        assert self._worker is not None, "a task has been submitted"
        self._worker.check()


class Modes(NamedTuple):
    """Settings under which a thread computes."""

    grad_enabled: bool
    autocast: AutocastState
    flushes: bool
    """Whether it flushes denormal numbers to zero."""

    @classmethod
    def current(cls) -> Modes:
        """The settings of this thread."""
        return cls(torch.is_grad_enabled(), AutocastState.current(HOST), _flushes_denormals())


class _State:
    """The outcome of a worker's tasks. Idle threads refer neither to it nor to the worker."""

    def __init__(self) -> None:
        self.failure: str | None = None
        """The first failure, as text."""
        self._unraised: BaseException | None = None
        """The failure itself, until it is raised once: its traceback refers to graphs, which refer to the model."""
        self._lock = threading.Lock()
        self.at_failure: Callable[[BaseException], None] | None = None
        """Called with the first failure."""
        self.at_raise: Callable[[], None] | None = None
        """Called when the program gets a failure."""

    def fail(self, failure: BaseException) -> None:
        """Keep the first failure."""
        text = traceback.format_exception_only(failure)[0].strip()  # works even if `str(failure)` raises
        with self._lock:
            is_first = self.failure is None
            if is_first:
                self.failure, self._unraised = text, failure
        if is_first and self.at_failure is not None:
            self.at_failure(failure)

    def take_unraised(self) -> BaseException | None:
        """Return and drop the failure, if it has not been raised yet."""
        with self._lock:
            unraised, self._unraised = self._unraised, None
            return unraised


class OwnWork:
    """Work of a function of the program."""

    def __init__(self, what: str, frame: FrameType) -> None:
        """`what` names the work in errors; `frame` is that of the function, which runs in this thread now."""
        self.what = what
        self._frame, self._thread = frame, threading.get_ident()

    @property
    def runs(self) -> bool:
        """Whether the function has neither returned nor raised: its frame is on the stack of its thread."""
        frame = sys._current_frames().get(self._thread)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None


class _Collected:
    """Appends the exception that leaves its block to a list."""

    def __init__(self, errors: list[BaseException]) -> None:
        self._errors = errors

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is not None:
            self._errors.append(error)
        return True


class _Helpers:
    """Threads that work together on one task of a worker."""

    def __init__(self, count: int, flushes: bool, ready: threading.Semaphore) -> None:
        """`count` threads, which treat denormals as `flushes` says, and release `ready` when they have started."""
        self.count = count
        self._calls = queue.SimpleQueue[Callable[[], None] | None]()
        self.threads = [
            threading.Thread(target=_help, args=(self._calls, flushes, ready), name="hf_l2l helper", daemon=True)
            for _ in range(count)
        ]

    def run(self, call: Callable[[], None], count: int) -> None:
        """Run `call` on `count` threads, and wait for them.

        Raises:
            BaseException: the first exception of a thread.
        """
        ended, errors = threading.Semaphore(0), list[BaseException]()

        def reported() -> None:
            with ExitStack() as stack:
                stack.callback(ended.release)
                stack.enter_context(_Collected(errors))
                call()

        for _ in range(count):
            self._calls.put(reported)
        for _ in range(count):
            ended.acquire()
        if errors:
            raise errors[0]

    def end(self) -> None:
        """End the threads after what they were given."""
        for _ in self.threads:
            self._calls.put(None)


def _help(calls: queue.SimpleQueue[Callable[[], None] | None], flushes: bool, ready: threading.Semaphore) -> None:
    torch.get_num_threads()  # first: the first call in a thread sets the number of the process
    torch.set_num_threads(1)
    torch.set_flush_denormal(flushes)
    ready.release()
    while (call := calls.get()) is not None:
        call()
        del call  # frees all that it refers to before the wait for the next one


class _Helped(threading.local):
    """The helpers of a thread of a worker."""

    helpers: _Helpers | None = None


_HELPED = _Helped()


def together(call: Callable[[], None], most: int) -> None:
    """Run `call` on all threads of the worker that this thread belongs to, on `most` of them at most, and wait for
    them; on this thread, if there are no others. The calls share out the work among themselves."""
    helpers = _HELPED.helpers
    count = 1 if helpers is None else min(helpers.count, most)
    if helpers is None or count == 1:
        call()
    else:
        helpers.run(call, count)


class Worker:
    """A few threads, started by the first task and ended by `close` or with the last reference to the worker.

    Tasks begin in the order of submission; at most two run at once, and may end in either order.
    """

    def __init__(self, num_threads: int | None = None, *, finishes: bool = False) -> None:
        """`num_threads` is the total, including threads inside torch operations (None: `default_num_threads`). With
        `finishes`, all tasks run before the process ends, since other processes wait for them."""
        self.num_threads = num_threads or default_num_threads()
        self._finishes = finishes
        self._tasks: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._state = _State()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._helpers: _Helpers | None = None
        self._end: weakref.finalize[..., Worker] | None = None
        self._flushes = False
        self._process = os.getpid()
        self._own_work: OwnWork | None = None

    @property
    def lives(self) -> bool:
        """Whether the worker's threads are alive, in this process."""
        alive = [thread.is_alive() for thread in self._threads]
        return os.getpid() == self._process and bool(alive) and all(alive)

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is one of the worker's own."""
        return threading.current_thread() in self._threads

    @property
    def has_failed(self) -> bool:
        """Whether a task has raised, work of the program did not finish, or `fail` was called."""
        if self._own_work is not None and not self._own_work.runs:
            self.fail(RuntimeError(f"{self._own_work.what} did not finish"))
            self._own_work = None
        return self._state.failure is not None

    def call_at_failure(self, call: Callable[[BaseException], None], raised: Callable[[], None]) -> None:
        """Call `call` with the first failure, in the thread that has it, and `raised` whenever a thread of the program
        gets a failure, in that thread. They must not refer to the worker."""
        self._state.at_failure, self._state.at_raise = call, raised

    def begin_own_work(self, work: OwnWork) -> None:
        """The program does work itself, in the place of tasks; unless `end_own_work` follows, it has failed."""
        self._own_work = work

    def end_own_work(self) -> None:
        """It has finished, or changes nothing that is not checked otherwise."""
        self._own_work = None

    def submit(self, task: Task, run: Callable[[], None], modes: Modes | None = None) -> None:
        """Let a thread call `run` under `modes` (None: the current ones) after the tasks submitted before.

        Raises:
            Exception: the exception of an earlier task, if it has not been raised before.
            EngineFailedError: if an earlier task has failed.
        """
        task._worker = self
        with ExitStack() as at_errors:
            at_errors.callback(task.end)  # who waits for it gets the failure
            self.check()
            modes = modes or Modes.current()
            if not self._threads or modes.flushes != self._flushes:
                self._start(modes.flushes)
            at_errors.pop_all()
        self._tasks.put(_Job(task, run, modes, self._state, self._closing))

    def check(self) -> None:
        """Raise a failure: the first time as it was, later as what it means.

        Raises:
            Exception: the exception of a task.
            EngineFailedError: if that exception has been raised before.
        """
        if not self.has_failed:
            return
        self._is_raised()
        unraised = self._state.take_unraised()
        try:
            if unraised is not None:
                raise unraised
        finally:
            del unraised  # its traceback refers to this frame
        raise EngineFailedError(
            f"the weights are between two steps and the engine has stopped: {self._state.failure}. Load the last "
            "checkpoint into a new model"
        )

    def fail(self, failure: BaseException) -> None:
        """Run no more tasks; the caller raises `failure`."""
        self._state.fail(failure)
        self._state.take_unraised()
        self._is_raised()

    def _is_raised(self) -> None:
        if self._state.at_raise is not None and not self.is_current:
            self._state.at_raise()

    @contextmanager
    def failing_with_errors(self) -> Iterator[None]:
        """Run no more tasks if any exception leaves the block, KeyboardInterrupt included."""
        with ExitStack() as failure:
            failure.push(lambda kind, error, traceback: None if error is None else self.fail(error))
            yield

    def close(self) -> None:
        """End the threads; tasks that have not begun never run."""
        if self._end is not None:
            self._end()
        self._threads = []

    def _start(self, flushes: bool) -> None:
        """Start threads that treat denormals as `flushes` says, and end those that do not."""
        if self._end is not None:  # after the tasks they were given
            self._end.detach()
            _end_after_work(self._tasks, self._threads, self._helpers)
        before = torch.get_num_threads()
        count = min(_AT_ONCE, self.num_threads)
        tasks, ready = queue.SimpleQueue[_Job | None](), threading.Semaphore(0)
        helpers = _Helpers(self.num_threads, flushes, ready) if self.num_threads > 1 else None
        self._tasks, self._flushes = tasks, flushes
        self._threads = [
            threading.Thread(
                target=_work,
                args=(tasks, (self.num_threads + number) // count, flushes, ready, helpers),
                name="hf_l2l worker",
                daemon=True,
            )
            for number in range(count)
        ]
        # The finalizer also runs at the end of the process, before the interpreter is torn down. It is set before the
        # start, since a thread may fail to start. Arguments of threads must not refer to the worker, or to a failure.
        closing = None if self._finishes else self._closing
        self._end = weakref.finalize(self, _end, tasks, closing, self._threads, helpers)
        self._helpers = helpers
        threads = [*self._threads, *([] if helpers is None else helpers.threads)]
        for thread in threads:
            thread.start()
        for _ in threads:
            ready.acquire()
        # The number is per thread, but new threads inherit the one that was set last.
        torch.set_num_threads(before)


@dataclass
class _Job:
    task: Task
    run: Callable[[], None]
    modes: Modes
    state: _State
    closing: threading.Event


class _Reporting:
    """Marks a task as ended, and records its exception, with its name."""

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
            self.task.end()
        return True


def _work(
    tasks: queue.SimpleQueue[_Job | None],
    num_threads: int,
    flushes: bool,
    ready: threading.Semaphore,
    helpers: _Helpers | None,
) -> None:
    _HELPED.helpers = helpers
    torch.get_num_threads()  # first: the first call in a thread sets the number of the process
    torch.set_num_threads(num_threads)
    torch.set_flush_denormal(flushes)
    ready.release()
    while (job := tasks.get()) is not None:
        with _Reporting(job.task, job.state):
            if job.state.failure is None and not job.closing.is_set():
                with torch.set_grad_enabled(job.modes.grad_enabled), job.modes.autocast.entered():
                    job.run()
        del job  # frees all that it refers to before the wait for the next one


def _end(
    tasks: queue.SimpleQueue[_Job | None],
    closing: threading.Event | None,
    threads: list[threading.Thread],
    helpers: _Helpers | None,
) -> None:
    if closing is None:  # after the tasks that they were given
        _end_after_work(tasks, threads, helpers)
        return
    closing.set()
    _end_after_work(tasks, threads, helpers, within_s=_CLOSES_WITHIN_S)


def _end_after_work(
    tasks: queue.SimpleQueue[_Job | None],
    threads: list[threading.Thread],
    helpers: _Helpers | None,
    within_s: float = threading.TIMEOUT_MAX,
) -> None:
    until = time.monotonic() + within_s
    for _ in threads:
        tasks.put(None)
    _join(threads, until)
    if helpers is not None:
        helpers.end()
        _join(helpers.threads, until)


def _join(threads: list[threading.Thread], until: float) -> None:
    for thread in threads:
        if thread.is_alive() and thread is not threading.current_thread():  # alive: it may not have been started
            thread.join(max(0.0, until - time.monotonic()))


def started_with_threads(run: Callable[[], None], num_threads: int, name: str) -> threading.Thread:
    """Start a thread whose torch operations have so many threads; returns it."""
    ready = threading.Semaphore(0)

    def work() -> None:
        torch.get_num_threads()  # first: the first call in a thread sets the number of the process
        torch.set_num_threads(num_threads)
        ready.release()
        run()

    before = torch.get_num_threads()
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    ready.acquire()
    torch.set_num_threads(before)  # new threads inherit the number that was set last
    return thread


def default_num_threads() -> int:
    """Threads for work of the host: as many as torch uses, but one core less than there are.

    torchrun sets OMP_NUM_THREADS=1 where nobody has set it, for several processes per machine; then each has its share
    of the cores.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    if ranks.isdecimal() and os.environ.get("OMP_NUM_THREADS") == "1" and torch.get_num_threads() == 1:
        return max(1, usable_cores() // max(1, int(ranks)) - 1)
    return max(1, min(torch.get_num_threads(), usable_cores() - 1))


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(cores_of_process())


def cores_of_process() -> set[int]:
    """The numbers of the cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _flushes_denormals() -> bool:
    """Whether this thread flushes denormal numbers to zero; torch can set that, but not tell."""
    return sys.float_info.min / 2 == 0.0  # the mode of the CPU holds for Python's floats, too
