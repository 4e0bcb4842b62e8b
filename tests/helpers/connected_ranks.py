"""Ranks that tests connect in this process, by `Peers`."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

from hf_l2l.ranks.peers import Peers, RankFailedError

TIMEOUT_S = 2.0
LONG_S = 60.0
"""For tests in which no rank may be late."""
Sockets = dict[int, dict[int, socket.socket]]


def connected(count: int) -> Sockets:
    """For each rank, its sockets to the others."""
    found: Sockets = {rank: {} for rank in range(count)}
    for a, b in combinations(range(count), 2):
        found[a][b], found[b][a] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return found


@contextlib.contextmanager
def some(count: int, *numbers: int, timeout_s: float = LONG_S) -> Iterator[tuple[list[Peers], Sockets]]:
    """The ranks of these numbers, and the sockets of all: the test plays the others."""
    sockets = connected(count)
    ranks = [Peers(number, sockets[number], timeout_s) for number in numbers]
    try:
        yield ranks, sockets
    finally:
        for each in ranks:
            each.close()
        for number in set(sockets).difference(numbers):
            for raw in sockets[number].values():
                raw.close()


@contextlib.contextmanager
def met(count: int) -> Iterator[list[Peers]]:
    """So many ranks."""
    with some(count, *range(count)) as (ranks, _):
        yield ranks


@contextlib.contextmanager
def one_and_raw(timeout_s: float = LONG_S) -> Iterator[tuple[Peers, socket.socket]]:
    """Rank 0, and the socket of rank 1, which the test plays."""
    with some(2, 0, timeout_s=timeout_s) as ([rank], sockets):
        yield rank, sockets[1][0]


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What the calls return or raise, each in a thread."""
    found: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            found[number] = calls[number]()
        except (RuntimeError, ValueError) as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return found


def until(is_true: Callable[[], Any]) -> None:
    """Wait until something that is about to happen has happened."""
    limit = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < limit
        time.sleep(0.001)


def until_failed(rank: Peers) -> RankFailedError:
    """The error that `check` raises soon."""

    until(lambda: rank.has_failed)
    try:
        rank.check()
    except RankFailedError as error:
        return error
    raise AssertionError("no error is raised")
