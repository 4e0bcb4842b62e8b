"""Messages between ranks, and what is taken for a failure of one; in one process, by threads."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hf_l2l.ranks.messages import BARRIER, LANDED, STEP, UPDATED
from hf_l2l.ranks.peers import OtherCallsError, Peers, RankFailedError

LIMIT_S = 2.0


def pairs(count: int) -> list[dict[int, socket.socket]]:
    """For each rank, a socket to each other one."""
    found: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    for one in range(count):
        for other in range(one):
            found[one][other], found[other][one] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return found


@contextmanager
def ranks(count: int, limit_s: float = LIMIT_S) -> Iterator[list[Peers]]:
    made = [Peers(rank, sockets, limit_s) for rank, sockets in enumerate(pairs(count))]
    yield made
    for each in made:
        each.close()


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """What each call returns, or raises, run at once."""
    found: list[Any] = [None] * len(calls)

    def run(place: int) -> None:
        try:
            found[place] = calls[place]()
        except Exception as error:  # noqa: BLE001  # for the test to look at
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10 * LIMIT_S)
        assert not thread.is_alive()
    return found


def gathers(each: Peers, number: int, content: bytes, kind: int = BARRIER) -> Callable[[], Any]:
    return lambda: each.gather(kind, number, content, "all have come")


@pytest.mark.parametrize("count", [2, 3, 4])
def test_all_get_what_all_have_sent(count):
    with ranks(count) as made:
        for number in range(1, 30):
            contents = [bytes([rank, number]) * rank for rank in range(count)]
            found = in_threads(*(gathers(each, number, contents[each.rank]) for each in made))
            assert found == [dict(enumerate(contents))] * count


def test_messages_come_in_their_order_to_whoever_wants_them():
    with ranks(2) as (one, other):
        for number in range(50):
            one.send(UPDATED, number, bytes([number]))
        found: list[tuple[int, int, bytes]] = []
        other.wait(lambda: len(other._state.waiting[UPDATED, 0]) == 50, "all have come")
        other.on(UPDATED, lambda *message: found.append(message))
        for number in range(50, 100):
            one.send(UPDATED, number, bytes([number]))
        other.wait(lambda: len(found) == 100, "the rest has come")
        assert found == [(0, number, bytes([number])) for number in range(100)]


def test_ranks_at_different_numbers_are_told():
    with ranks(2) as (one, other):
        found = in_threads(gathers(one, 1, b""), gathers(other, 2, b""))
        assert all(isinstance(error, OtherCallsError | RankFailedError) for error in found)
        assert any("at number 1 and rank 1 at 2" in str(error) for error in found) or any(
            "at number 2 and rank 0 at 1" in str(error) for error in found
        )


def test_a_rank_that_has_gone_on_is_not_waited_for():
    """It has come to its step, and lands nothing more before."""
    with ranks(2) as (one, other):
        found = in_threads(gathers(one, 1, b"", LANDED), gathers(other, 1, b"", STEP))
        assert any("has gone on" in str(error) for error in found)
        assert all(isinstance(error, OtherCallsError | RankFailedError) for error in found)


def test_a_rank_that_ends_is_a_failure_with_its_number():
    made = pairs(3)
    two = [Peers(rank, made[rank], LIMIT_S) for rank in (0, 1)]
    threading.Timer(0.2, lambda: [each.close() for each in made[2].values()]).start()
    for error in in_threads(*(gathers(each, 1, b"") for each in two)):
        assert isinstance(error, RankFailedError) and error.rank == 2
        assert str(error).startswith("rank 2 has failed: its process has ended")
    for each in two:
        each.close()


def test_a_rank_that_does_not_answer_is_a_failure():
    """It neither reads nor writes, as a stopped process."""
    made = pairs(2)
    began = time.monotonic()
    one = Peers(0, made[0], LIMIT_S)
    with pytest.raises(RankFailedError, match=r"rank 1 has failed: it has not answered for 1 seconds, while rank 0"):
        one.gather(BARRIER, 1, b"", "all have come")
    assert 0.9 * LIMIT_S / 2 <= time.monotonic() - began
    one.close()
    made[1][0].close()


def test_a_rank_that_leaves_in_order_is_a_failure_for_who_waits_only():
    with ranks(2) as (one, other):
        other.close()
        one.wait(lambda: 1 in one._state.left, "it has left")
        one.check()
        with pytest.raises(RankFailedError, match="it has ended its training, or detached its model"):
            one.gather(BARRIER, 1, b"", "all have come")


def test_what_was_sent_before_leaving_counts():
    with ranks(2) as (one, other):
        other.send(BARRIER, 1, b"last")
        other.close()
        assert one.gather(BARRIER, 1, b"", "all have come") == {0: b"", 1: b"last"}


def test_a_failure_that_is_told_is_raised_by_the_others():
    with ranks(2) as (one, other):
        other.tell_failure("out of memory")
        with pytest.raises(RankFailedError, match="rank 1 has failed: out of memory"):
            one.gather(BARRIER, 1, b"", "all have come")
        with pytest.raises(RankFailedError):
            one.check()


def test_many_messages_pass_while_nobody_waits():
    """More than sockets hold: the receiving thread takes them."""
    with ranks(2) as (one, other):
        for number in range(2000):
            one.send(UPDATED, number, bytes(1000))
        other.wait(lambda: len(other._state.waiting[UPDATED, 0]) == 2000, "all have come")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_holds_no_connection():
    """As the workers of a data loader: else the end of their parent would not be noticed."""
    made = pairs(2)
    one = Peers(0, made[0], LIMIT_S)
    child = os.fork()
    if child == 0:
        os._exit(0 if all(each.fileno() == -1 for each in made[0].values()) else 1)
    assert os.waitpid(child, 0)[1] == 0
    one.close()
    made[1][0].close()


ELSEWHERE = """
import socket, sys, time
from hf_l2l.ranks.peers import Peers
one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
peers = Peers(0, {1: one}, 2.0)
other.close()
time.sleep(60)
"""


def test_a_process_that_waits_elsewhere_is_ended():
    began = time.monotonic()
    found = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, check=False, timeout=50)
    assert found.returncode == 1 and time.monotonic() - began < 45
    assert found.stderr.strip().endswith(
        "hf_l2l: rank 1 has failed: its process has ended; rank 0 waits for something else, and is ended"
    )
