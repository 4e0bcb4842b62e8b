"""Messages among ranks: several `Peers` in this process, connected by sockets."""

from __future__ import annotations

import fcntl
import queue
import re
import socket
import threading
import time
from typing import Any

import pytest
import torch
from torch import distributed

from connected_ranks import LONG_S, TIMEOUT_S, at_once, connected, met, one_and_raw, until
from hf_l2l import RankFailedError
from hf_l2l.across_hosts.calls import failing_with_ranks
from hf_l2l.ranks import counterparts
from hf_l2l.ranks.messages import BARRIER, HEARTBEAT, LANDED, LATE, STEP, UPDATED
from hf_l2l.ranks.peers import OtherCallsError, Peers
from hf_l2l.ranks.watch import HEADER
from hf_l2l.runtime.stall_log import StallLog
from tiers import nightly

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
    with met(2) as ranks:

        def send(rank: Peers) -> None:
            for number in range(count):
                rank.send(UPDATED, number, content)

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


# ---- other calls


def test_ranks_at_different_numbers_are_told():
    with met(2) as ranks:
        found = at_once(*(lambda rank=rank: rank.gather(BARRIER, rank.rank, b"", "x") for rank in ranks))
    assert any(isinstance(error, OtherCallsError) for error in found)
    for error in found:
        assert "all ranks must run the same forwards, backwards and steps" in str(error)
        assert re.search("rank 0 is at number 0 and rank 1 at 1|rank 1 is at number 1 and rank 0 at 0", str(error))


@pytest.mark.parametrize(("waits_for", "other"), [(STEP, LANDED), (LATE, STEP)])
def test_a_rank_that_has_gone_on_is_not_waited_for(waits_for, other):
    with met(3) as ranks:
        calls = [lambda r=r: r.gather(other if r.rank == 2 else waits_for, 1, b"", "all are there") for r in ranks]
        found = at_once(*calls)
    assert any(isinstance(error, OtherCallsError) for error in found)
    for error in found:
        assert isinstance(error, RuntimeError) and "must run the same" in str(error)


@nightly
def test_a_wait_is_logged_though_heartbeats_come(monkeypatch):
    """Several in each interval in which a wait looks around."""
    began = threading.Event()
    monkeypatch.setattr(StallLog, "set_phase", lambda *_: began.set())
    with one_and_raw(1.0) as (rank, raw):
        beats = threading.Event()

        def beat() -> None:
            while not beats.wait(0.02):
                raw.send(HEADER.pack(HEARTBEAT, 0))

        thread = threading.Thread(target=beat)
        thread.start()
        try:
            ends = time.monotonic() + TIMEOUT_S
            rank.wait(lambda: began.is_set() or time.monotonic() > ends, "test")
        finally:
            beats.set()
            thread.join()
    assert began.is_set()


def test_any_error_of_a_call_to_another_host_is_told():
    calls, changed, call = queue.SimpleQueue[Any](), threading.Condition(), counterparts.Call(lambda: 1 / 0)
    calls.put(call)
    calls.put(None)
    counterparts.run_calls(calls, changed)
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
