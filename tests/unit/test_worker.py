"""The background threads: modes of their submitter, failures, their end."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hf_l2l import EngineFailedError
from hf_l2l.runtime import stall_log
from hf_l2l.runtime.worker import Task, Worker, together
from tiers import more, times


@pytest.fixture
def worker():
    made = Worker()
    yield made
    made.close()


def submitted(worker: Worker, run, what: str = "some work") -> Task:
    task = Task(what)
    worker.submit(task, run)
    return task


def modes() -> tuple[bool, bool, torch.dtype, bool]:
    """Of this thread: grad mode, autocast, its dtype, whether small numbers are flushed to zero."""
    flushed = bool((torch.ones(1) * 1e-39).item() == 0.0)
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), flushed


def test_the_thread_computes_as_its_submitter(worker):
    def check() -> None:
        found: list[Any] = []
        submitted(worker, lambda: found.append(modes())).wait("its modes")
        assert found == [modes()]

    check()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert modes()[:2] == (False, True)
        check()
    check()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor flushes nothing to zero")
    try:
        assert modes()[3]
        check()
    finally:
        torch.set_flush_denormal(False)
    check()


@pytest.mark.parametrize("asked", [3, *more(1, 2)])
def test_threads_within_an_operation_are_bounded_and_the_callers_stay(asked):
    before, found = torch.get_num_threads(), {}
    worker, at_once = Worker(asked), threading.Barrier(min(asked, 2))

    def look() -> None:
        at_once.wait(60.0)
        found[threading.get_ident()] = torch.get_num_threads()

    for task in [submitted(worker, look) for _ in range(min(asked, 2))]:
        task.wait("its threads")
    assert len(found) == min(asked, 2) and sum(found.values()) == asked
    assert torch.get_num_threads() == before
    born: list[int] = []
    later = threading.Thread(target=lambda: born.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert born == [before]
    worker.close()


def fail(*_: Any) -> Any:
    raise KeyError("broken")


def own_threads() -> set[threading.Thread]:
    """Those of all workers."""
    return {thread for thread in threading.enumerate() if thread.name == "hf_l2l worker"}


def test_a_failure_is_told_once_as_it_was_and_then_as_what_it_means(worker):
    ran: list[int] = []
    task = submitted(worker, fail, "the update of layer 3")
    after = Task("another")
    try:
        worker.submit(after, lambda: ran.append(1))
    except KeyError as told:
        found = told
    else:
        with pytest.raises(KeyError) as told:
            task.wait("it fails")
        found = told.value
    assert found.__notes__ == ["raised in the update of layer 3"]
    assert worker.has_failed
    with pytest.raises(EngineFailedError, match=r"KeyError: 'broken'. Load the last checkpoint"):
        worker.check()
    # Masters are held for the next update already: whoever uses them waits for nothing, and gets the failure.
    later = Task("later")
    for use in (lambda: worker.submit(later, lambda: ran.append(2)), later.check, lambda: later.wait("a test")):
        with pytest.raises(EngineFailedError):
            use()
        assert later.done
    worker.close()
    assert not ran, "nothing runs after a failure"


def test_of_many_waits_one_raises_the_failure_itself():
    """Whether they wait already when it fails, or begin to."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads take turns all the time
    try:
        for _ in range(times(30, 100)):
            worker, go = Worker(2), threading.Event()
            told: list[type] = []
            task = submitted(worker, lambda go=go: go.wait() and fail())

            def wait(task: Task = task, told: list[type] = told) -> None:
                try:
                    task.wait("all of them")
                except (KeyError, EngineFailedError) as error:
                    told.append(type(error))

            threads = [threading.Thread(target=wait, daemon=True) for _ in range(3)]
            for thread in threads:
                thread.start()
            go.set()
            for thread in threads:
                thread.join(120.0)  # on a machine that is busy, switches take their time
            worker.close()
            assert sorted(map(str, told)) == sorted(map(str, [KeyError, EngineFailedError, EngineFailedError]))
    finally:
        sys.setswitchinterval(before)


def test_an_exception_without_words_is_told_too(worker):
    class Unprintable(Exception):
        __str__ = fail

    with pytest.raises(Unprintable):
        submitted(worker, Mock(side_effect=Unprintable)).wait("it fails")
    with pytest.raises(EngineFailedError, match="Unprintable"):
        worker.check()


def test_a_thread_that_cannot_be_started_leaves_none(monkeypatch):
    worker, original, started = Worker(2), threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        original(thread)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start"):
        patch.setattr(threading.Thread, "start", start)
        submitted(worker, lambda: None)
    assert not worker.lives
    worker.close()
    assert not started[0].is_alive()


def test_both_threads_together_are_given_some_seconds_to_end(monkeypatch):
    worker, over, began = Worker(2), threading.Event(), threading.Barrier(3)
    for _ in range(2):
        submitted(worker, lambda: (began.wait(60.0), over.wait(60.0)))
    began.wait(60.0)
    now, waited = [100.0], []

    def join(thread: threading.Thread, timeout: float) -> None:
        waited.append(timeout)
        now[0] += timeout

    with monkeypatch.context() as patch:
        patch.setattr("hf_l2l.runtime.worker.time", SimpleNamespace(monotonic=lambda: now[0]))
        patch.setattr(threading.Thread, "join", join)
        worker.close()
    over.set()
    assert waited[0] > 0 and not any(waited[1:])


def test_a_failure_ends_the_work_of_both_threads():
    worker, failed, ran = Worker(2), threading.Event(), []
    beside = submitted(worker, lambda: failed.wait(60.0) and ran.append("begun before"))
    with pytest.raises(KeyError):
        submitted(worker, fail).wait("it fails")
    failed.set()
    for use in (lambda: beside.wait("it was under way"), lambda: submitted(worker, lambda: ran.append("after"))):
        with pytest.raises(EngineFailedError):
            use()
    worker.close()
    assert ran == ["begun before"]


def test_what_has_not_begun_when_it_is_closed_never_runs():
    worker, ran = Worker(), []
    for work in (lambda: time.sleep(0.2), *[lambda: ran.append(1)] * 5):
        submitted(worker, work)
    worker.close()
    assert not worker.lives and not ran


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("count", [2, *more(1)])
def test_threads_end_with_the_worker_and_a_failure_keeps_nothing_alive(count, fails):
    """The exception refers to the frames it went through."""

    class Held:
        pass

    before, worker, held = own_threads(), Worker(count), Held()
    assert not worker.lives, "none before there is work"

    def work(of: Held = held, by: Worker = worker) -> None:
        if fails:
            raise KeyError(f"{of} {by}")

    task = submitted(worker, work)
    with pytest.raises(KeyError) if fails else nullcontext():
        task.wait("it has begun")
    threads, gone = own_threads() - before, weakref.ref(held)
    assert len(threads) == count and all(thread.daemon for thread in threads)
    assert fails or all(thread.is_alive() for thread in threads)
    del worker, held, task, work
    gc.collect()
    for thread in threads if fails else ():
        thread.join(60.0)
    assert gone() is None and not any(thread.is_alive() for thread in threads)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked on POSIX systems")
def test_a_forked_process_is_told_soon(worker):
    """Whatever the thread that says where a program is held at that moment."""
    task = submitted(worker, lambda: time.sleep(1.0), "the update of layer 3")
    with stall_log.StallThread.lock:
        child = os.fork()
        if child == 0:
            try:
                task.wait("it has no thread")
            except EngineFailedError as error:
                os._exit(7 if "the update of layer 3 will never end" in str(error) else 2)
            finally:
                os._exit(1)
    until = time.monotonic() + 60.0
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(ended[1]) == 7


@pytest.mark.parametrize(("ranks", "omp", "threads"), [("2", "1", 7), ("1", "1", 15), ("2", "3", 3), (None, "1", 1)])
def test_each_process_of_torchrun_has_its_share_of_the_cores(ranks, omp, threads, monkeypatch):
    """torchrun sets one thread where the program has set none."""
    monkeypatch.setattr("hf_l2l.runtime.worker.usable_cores", lambda: 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: int(omp))
    monkeypatch.setenv("OMP_NUM_THREADS", omp)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert Worker().num_threads == threads


def test_helpers_share_a_task_and_report_what_fails():
    worker, taken, at_once = Worker(3), [], threading.Barrier(3)

    def together_once() -> None:
        together(lambda: taken.append(at_once.wait(60.0)), 5)

    submitted(worker, together_once).wait("all take part")
    assert sorted(taken) == [0, 1, 2]
    with pytest.raises(KeyError):
        submitted(worker, lambda: together(fail, 2)).wait("one of them fails")
