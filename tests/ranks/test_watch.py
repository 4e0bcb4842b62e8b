"""Messages among ranks, which rank counts as failed, and who is told: several `Peers` in this process, connected by
sockets."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import queue
import re
import select
import signal
import socket
import threading
import time
from typing import Any

import pytest
import torch
from torch import distributed

from connected_ranks import LONG_S, TIMEOUT_S, at_once, connected, met, one_and_raw, some, until, until_failed
from hf_l2l import RankFailedError
from hf_l2l.across_hosts.calls import failing_with_ranks
from hf_l2l.ranks import counterparts, watch
from hf_l2l.ranks.messages import BARRIER, FAILED, HEARTBEAT, LANDED, LATE, LEAVING, STEP, UPDATED
from hf_l2l.ranks.peers import OtherCallsError, Peers
from hf_l2l.ranks.watch import HEADER
from hf_l2l.runtime.stall_log import StallLog
from rank_programs import Program, Programs
from tiers import nightly


def test_the_end_of_a_rank_ends_a_wait_with_its_number():
    with some(3, 0, 2) as ([first, last], sockets):

        def die() -> None:
            for each in sockets[1].values():
                each.close()

        waits = (lambda: first.gather(BARRIER, 1, b"", "the test"), lambda: last.gather(BARRIER, 1, b"", "it"))
        found = at_once(*waits, die)
    assert pickle.loads(pickle.dumps(found[0])).rank == 1  # noqa: S301
    for rank, error, why in ((0, found[0], "the test"), (2, found[1], "it")):
        assert isinstance(error, RankFailedError) and error.rank == 1
        assert str(error) == f"rank 1 has failed: its process has ended, while rank {rank} waited: {why}"


def test_a_silent_rank_fails_after_half_of_the_timeout_and_not_before():
    began = time.monotonic()
    with one_and_raw(TIMEOUT_S) as (rank, _), pytest.raises(RankFailedError) as error:
        rank.gather(BARRIER, 1, b"", "the test")
    assert TIMEOUT_S / 2 <= time.monotonic() - began < 4 * TIMEOUT_S
    assert str(error.value).startswith("rank 1 has failed: it has not answered for 1 seconds")


def test_a_rank_that_leaves_is_a_failure_only_for_who_waits_for_it():
    """Rank 1 has left; a wait for another rank goes on."""
    with met(3) as ranks:
        at_once(*(lambda rank=rank: rank.gather(BARRIER, 1, b"", "test") for rank in ranks))
        ranks[1].close()
        waiting = ranks[2]
        until(lambda: 1 in waiting.state.left)
        waiting.check()
        waiting.check("another rank", [0])
        done: list[int] = []
        at_once(lambda: waiting.wait(lambda: bool(done), "rank has come", [0]), lambda: done.append(1))
        with pytest.raises(RankFailedError, match="rank 1 has failed: it has ended its training") as error:
            waiting.gather(BARRIER, 2, b"", "the last step")
    assert error.value.rank == 1
    assert "the last step" in str(error.value)


def test_a_rank_that_has_left_does_not_end_the_wait_for_a_slower_one():
    """Rank 2 has all that it needs, and leaves; rank 1 does not have the message of rank 0 yet."""
    with some(3, 1) as ([one], sockets):

        def others() -> None:
            sockets[2][1].send(HEADER.pack(BARRIER, 1))
            sockets[2][1].send(HEADER.pack(LEAVING, 0))
            until(lambda: 2 in one.state.left)
            sockets[0][1].send(HEADER.pack(BARRIER, 1))

        found = at_once(lambda: one.gather(BARRIER, 1, b"", "test"), others)
    assert found[0] == {0: b"", 1: b"", 2: b""}


def test_what_a_rank_has_sent_before_it_left_is_taken():
    with met(2) as (rank, other):
        other.send(BARRIER, 1, b"last")
        other.close()
        until(lambda: 1 in rank.state.left)
        assert rank.gather(BARRIER, 1, b"own", "test") == {0: b"own", 1: b"last"}
        rank.send(UPDATED, 1)  # to nobody
        rank.check()


def test_a_rank_that_leaves_with_a_full_socket_has_left_in_order():
    with one_and_raw() as (rank, raw):
        raw.settimeout(30)
        closing = threading.Thread(target=rank.close)
        with contextlib.suppress(BlockingIOError):
            while True:
                rank.state.sockets[1].send(HEADER.pack(UPDATED, 0) + bytes(2**12), socket.MSG_DONTWAIT)
        closing.start()
        time.sleep(0.05)  # it finds no room
        *_, last = iter(lambda: raw.recv(2**16), b"")
        closing.join(30)
    assert HEADER.unpack_from(last)[0] == LEAVING


def test_a_message_to_a_rank_that_is_leaving_does_not_make_it_failed():
    """The socket is closed at the other end, and why has not been read yet."""
    with one_and_raw() as (rank, raw):
        with rank.state.changed:  # the thread of the rank cannot take a message
            raw.send(HEADER.pack(LEAVING, 0))
            raw.shutdown(socket.SHUT_RDWR)
            rank.send(UPDATED, 1)
        until(lambda: 1 in rank.state.left)
        rank.check()


def test_the_first_cause_is_told_not_the_messenger():
    """Rank 0 hears only of rank 1, which fails because of rank 2."""
    with one_and_raw() as (rank, raw):
        raw.send(HEADER.pack(FAILED, 2) + b"its process has ended")
        raw.shutdown(socket.SHUT_RDWR)
        assert str(until_failed(rank)) == "rank 2 has failed: its process has ended"


def test_a_rank_that_leaves_while_its_thread_tells_of_another_one_waits_for_that(monkeypatch):
    """Else who hears of its end only would take it for the cause."""
    send_all, has_left = watch.send_to_all, threading.Event()

    def late(state: watch.State, message: bytes) -> None:
        if threading.current_thread().name == "hf_l2l ranks":
            has_left.wait(1.0)  # it may not leave before
        send_all(state, message)

    monkeypatch.setattr(watch, "send_to_all", late)
    with some(3, 0) as ([rank], sockets):
        sockets[1][0].close()
        until(lambda: rank.state.is_announced)
        rank.tell_failure("its model cannot be attached")
        rank.close()
        has_left.set()
        messages = [each for each in iter(lambda: sockets[2][0].recv(1024), b"") if each[0] != HEARTBEAT]
    assert [HEADER.unpack_from(message) for message in messages] == [(FAILED, 1)]


def test_a_rank_that_ends_because_of_another_tells_which():
    with one_and_raw() as (rank, raw):
        raw.send(HEADER.pack(FAILED, 7) + b"why")
        until_failed(rank)
        rank.tell_failure("a backward of it has raised an exception")
        rank.close()
        raw.settimeout(30)
        found = [message for message in iter(lambda: raw.recv(2**16), b"") if message[0] != HEARTBEAT]
    assert found == [HEADER.pack(FAILED, 7) + b"why"]


def test_an_error_in_a_handler_is_a_failure_of_this_rank():
    """Else its thread would end, and its waits never."""

    def received(*_: object) -> None:
        raise ValueError("state must be in its own memory")

    with met(2) as ranks:
        ranks[0].on(UPDATED, received)
        ranks[1].send(UPDATED, 1)
        with pytest.raises(RankFailedError, match="rank 0 has failed: it cannot take a message: ValueError"):
            ranks[0].gather(BARRIER, 1, b"", "test")
        assert until_failed(ranks[1]).rank == 0


def test_a_wait_ends_when_its_own_rank_leaves():
    """As that of the thread that adds gradients when the model is detached."""
    with met(2) as (rank, _):
        found = at_once(lambda: rank.gather(BARRIER, 1, b"", "test"), rank.close)
    assert isinstance(found[0], RankFailedError) and "rank 0 has left the others" in str(found[0])


def test_an_error_that_is_kept_has_not_been_told():
    """The process is ended unless some thread of the program has got the error."""
    with met(2) as (rank, _):
        rank.state.fail(1, "test")
        told = rank.state.told

        def kept() -> None:
            with contextlib.suppress(RankFailedError):
                rank.check()
            rank.error_is_kept()

        at_once(kept)
        assert not told
        with pytest.raises(RankFailedError):
            rank.check()
        assert told
        at_once(kept)
        assert told  # by another thread
        rank.error_is_kept()
        assert not told
        rank.error_is_raised()  # or the thread would end this process


def test_nothing_is_left_of_ranks_that_leave_or_are_given_up():
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with met(3):
            pass
    with some(2, 0) as ([other], sockets):
        Peers(1, sockets[1], LONG_S)  # is given up at once
        until(lambda: 1 in other.state.left)
        until(lambda: threading.active_count() == threads + 1)
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, files)


# ---- processes


def test_forked_processes_do_not_keep_connections_open():
    """As the workers of a data loader, which may live longer than their parent."""
    other, further = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sockets = connected(2)
    rank = Peers(0, sockets[0], LONG_S, [further])
    with sockets[1][0] as raw, other:
        raw.settimeout(30)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        os.close(read)
        try:
            rank.close()
            while raw.recv(100):
                pass
            other.settimeout(30)
            assert other.recv(1) == b""
        finally:
            os.close(write)
            os.waitpid(child, 0)


_RANK = """
import os, signal, socket, sys, threading, time
from hf_l2l.ranks.peers import Peers, RankFailedError
rank = Peers(NUMBER, {to: socket.socket(fileno=file) for to, file in zip(OTHERS, FILES)}, TIMEOUT_S)
print("ready", flush=True)
"""


def begun(programs: Programs, text: str, number: int, to: dict[int, socket.socket], timeout_s: float) -> Program:
    """A process that is a rank, with these sockets of it, which runs a program."""
    names = f"NUMBER, OTHERS, TIMEOUT_S = {number}, {list(to)}, {timeout_s}"
    found = programs.start(f"{names}\n{_RANK}{text}", tuple(to.values()))
    assert found.stdout.readline() == "ready\n"
    return found


KEEPS = """
def keeps():
    try:
        rank.gather(3, 1, b"", "test")
    except RankFailedError:
        rank.error_is_kept()
threading.Thread(target=keeps).start()
time.sleep(100)
"""


def test_a_process_that_waits_elsewhere_is_ended(programs):
    """The error is raised in a thread that keeps it: the program has not got it."""
    sockets = connected(2)
    process = begun(programs, KEEPS, 0, sockets[0], TIMEOUT_S)
    began = time.monotonic()
    sockets[1][0].close()
    assert process.wait(30) == 1  # its standard input stays open
    assert time.monotonic() - began < 2 * TIMEOUT_S
    assert "rank 1 has failed: its process has ended" in process.stderr.read()


ENDS = {
    "pid = os.fork()\nif pid == 0: sys.exit(0)\nos.waitpid(pid, 0); sys.exit(3)": "it has ended its training",
    "raise MemoryError('none')": "its program has raised MemoryError",
    "os.kill(os.getpid(), signal.SIGKILL)": "its process has ended",
}


@nightly
@pytest.mark.parametrize("program", ENDS)
def test_how_a_program_has_ended(programs, program):
    """One that raises is a failure, also for ranks that do not wait for it. A forked process is no rank."""
    expected = ENDS[program]
    with some(2, 0) as ([rank], sockets):
        process = begun(programs, program, 1, sockets[1], LONG_S)
        process.ended(30)
        if "ended its training" in expected:
            until(lambda: 1 in rank.state.left)
            rank.check()
            with pytest.raises(RankFailedError, match=f"rank 1 has failed: {expected}"):
                rank.check("test")
        else:
            assert str(until_failed(rank)).startswith(f"rank 1 has failed: {expected}")


_ANSWERS = """
number = 0
while True:
    print(rank.gather(3, (number := number + 1), b"", "test") and number, flush=True)
    if sys.stdin.readline() == "": break
rank.close()
"""


@nightly
def test_ranks_that_are_all_stopped_go_on(programs):
    """As by Ctrl-Z of a launcher: nobody takes the pause for a failure of the others."""
    sockets = connected(2)
    processes = [begun(programs, _ANSWERS, rank, sockets[rank], TIMEOUT_S) for rank in range(2)]
    assert [process.stdout.readline() for process in processes] == ["1\n"] * 2
    for number, seconds in ((signal.SIGSTOP, 0.75 * TIMEOUT_S), (signal.SIGCONT, 0.2)):
        for process in processes:
            process.kill(number)
        time.sleep(seconds)  # in which a failure would be noticed
    for process in processes:
        process.stdin.write("go on\n")
        process.stdin.flush()
    assert [process.ended(30) for process in processes] == [(0, "2\n", "")] * 2


@nightly
def test_a_stopped_rank_is_a_failure_and_wakes_up_to_an_error(programs):
    limit_s = 2 * TIMEOUT_S  # on a busy machine, a rank that runs may be late for seconds
    with some(2, 0, timeout_s=limit_s) as ([rank], sockets):
        process = begun(programs, _ANSWERS, 1, sockets[1], limit_s)
        rank.gather(BARRIER, 1, b"", "test")
        process.kill(signal.SIGSTOP)
        with pytest.raises(RankFailedError, match="rank 1 has failed: it has not answered for 2 seconds"):
            rank.gather(BARRIER, 2, b"", "test")
    process.kill(signal.SIGCONT)
    status, _, text = process.ended(30, "go on\n" * 3)
    assert status != 0 and "rank 1 has failed: it has not answered" in text


def test_the_reason_of_a_rank_is_heard_that_has_not_read_what_it_was_sent():
    """Its socket was closed with messages in it: the reset comes before what it had said."""
    with one_and_raw(TIMEOUT_S) as (rank, other):
        assert select.select([other], [], [], TIMEOUT_S)[0], "a heartbeat is in its socket"
        other.send(HEADER.pack(FAILED, 1) + b"no memory")
        other.close()
        with pytest.raises(RankFailedError, match="rank 1 has failed: no memory"):
            rank.gather(BARRIER, 1, b"", "test")


# ---- messages


def test_messages_of_a_rank_are_handled_in_their_order_early_ones_first():
    """Some come before there is a handler, some while the early ones are handled."""
    found: list[tuple[int, int]] = []
    handles = threading.Event()

    def received(rank: int, number: int, content: bytes) -> None:
        handles.set()
        time.sleep(0.002 if number < 10 else 0)
        assert content == bytes(number)
        found.append((rank, number))

    with met(3) as ranks:
        for number in range(10):
            for sender in (1, 2):
                ranks[sender].send(UPDATED, number, bytes(number))
        until(lambda: sum(len(each) for each in ranks[0].state.waiting.values()) == 20)

        def later() -> None:
            handles.wait(30)
            for number in range(10, 20):
                ranks[1].send(UPDATED, number, bytes(number))
                ranks[2].send(UPDATED, number, bytes(number))

        at_once(lambda: ranks[0].on(UPDATED, received), later)
        until(lambda: len(found) == 40)
    for sender in (1, 2):
        assert [number for rank, number in found if rank == sender] == list(range(20))


def test_a_full_socket_does_not_stop_two_ranks_that_send_to_each_other():
    """More than the buffers of the sockets have room for, while neither takes anything."""
    content, count = bytes(2**15), 200

    def send(rank: Peers) -> None:
        for number in range(count):
            rank.send(UPDATED, number, content)

    with met(2) as ranks:
        at_once(lambda: send(ranks[0]), lambda: send(ranks[1]))
        for rank in ranks:
            until(lambda rank=rank: len(rank.state.waiting[UPDATED, 1 - rank.rank]) == count)


def test_a_rank_that_does_not_read_is_waited_for_until_it_fails():
    """Its socket is full: `send` ends with an error, not never."""
    with one_and_raw(TIMEOUT_S) as (rank, _), pytest.raises(RankFailedError, match="rank 1 has failed") as error:
        for number in range(10**6):
            rank.send(UPDATED, number, bytes(2**15))
    assert error.value.rank == 1


def test_descriptors_from_1024_on_are_watched(monkeypatch):
    """As of programs with many open files."""
    sockets = connected(2)
    before = sockets[0][1]
    high = fcntl.fcntl(before.fileno(), fcntl.F_DUPFD_CLOEXEC, 1100)
    before.close()
    ranks = [Peers(0, {1: socket.socket(fileno=high)}, LONG_S), Peers(1, sockets[1], LONG_S)]
    try:
        found = at_once(*(lambda rank=rank: rank.gather(BARRIER, 1, b"x", "test") for rank in ranks))
    finally:
        for rank in ranks:
            rank.close()
    assert found == [{0: b"x", 1: b"x"}] * 2


@pytest.mark.parametrize(
    ("kinds", "numbers"),
    [((STEP, STEP, LANDED), (1, 1, 1)), ((LATE, LATE, STEP), (1, 1, 1)), ((BARRIER, BARRIER), (0, 1))],
    ids=["a rank has gone on", "a rank is in a step", "ranks are at different numbers"],
)
def test_ranks_that_wait_for_different_things_are_told(kinds, numbers):
    with met(len(kinds)) as ranks:
        calls = zip(ranks, kinds, numbers, strict=True)
        found = at_once(*(lambda r=r, k=k, n=n: r.gather(k, n, b"", "all are there") for r, k, n in calls))
    assert any(isinstance(error, OtherCallsError) for error in found)
    for error in found:
        assert isinstance(error, RuntimeError) and "all ranks must run the same forwards, backwards" in str(error)
        either = "rank 0 is at number 0 and rank 1 at 1|rank 1 is at number 1 and rank 0 at 0"
        assert len(kinds) > 2 or re.search(either, str(error))


@nightly
def test_a_wait_is_logged_though_heartbeats_come(monkeypatch):
    """Several in each interval in which a wait looks around."""
    began = threading.Event()
    monkeypatch.setattr(StallLog, "set_phase", lambda *_: began.set())
    with one_and_raw(1.0) as (rank, raw):
        ends = time.monotonic() + TIMEOUT_S

        def is_over() -> bool:
            return began.is_set() or time.monotonic() > ends

        def beat() -> None:
            while not is_over():
                raw.send(HEADER.pack(HEARTBEAT, 0))
                time.sleep(0.02)

        at_once(beat, lambda: rank.wait(is_over, "test"))
    assert began.is_set()


def test_any_error_of_a_call_to_another_host_is_told():
    calls, call = queue.SimpleQueue[Any](), counterparts.Call(lambda: 1 / 0)
    calls.put(call)
    calls.put(None)
    counterparts.run_calls(calls, threading.Condition())
    assert call.is_over and isinstance(call.error, ZeroDivisionError)


def test_errors_of_a_call_come_through_at_once_or_name_the_lost_rank_that_makes_it():
    with met(2) as ranks:
        since = time.monotonic()
        for error in (torch.OutOfMemoryError("no memory"), ValueError("wrong")):
            with pytest.raises(type(error)) as raised, failing_with_ranks([1], ranks[0], "test"):
                raise error
            assert raised.value is error and not ranks[0].has_failed
        assert time.monotonic() - since < LONG_S / 2
        ranks[1].tell_failure("it has no memory left")
        for error in (RuntimeError("closed"), distributed.DistNetworkError("closed")):
            with pytest.raises(RankFailedError, match="rank 1 has failed: it has no memory left"):
                with failing_with_ranks([1], ranks[0], "test"):
                    raise error


def test_a_reason_that_is_too_long_says_so():
    with met(2) as ranks:
        ranks[1].tell_failure("\N{SNOWMAN}" * 50_000)
        with pytest.raises(RankFailedError, match=r"rank 1 has failed: \N{SNOWMAN}{10000,} \[\.\.\.\]$"):
            ranks[0].gather(BARRIER, 1, b"", "")
