"""Ranks meet: those of a host find each other, and connect."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

from torch import distributed

from hf_l2l.ranks.messages import FAILED
from hf_l2l.ranks.peers import Peers, RankFailedError
from hf_l2l.ranks.watch import HEADER

MEETS_WITHIN_S = 1800.0
"""As the default of torch.distributed: one rank loads a model, which may take long, and the others come at once."""
_CREDENTIALS = struct.Struct("3i")
_NUMBER = struct.Struct("<I")


class _Introduction(NamedTuple):
    """What a rank tells the others of itself."""

    host: str
    address: str
    """Of the socket at which it can be reached: an abstract one, which is in no file system."""


class Meeting(NamedTuple):
    """What a rank knows of the others."""

    peers: Peers
    """Those of this host."""
    files: Mapping[int, socket.socket]
    """Sockets over which descriptors pass, of the first rank of the host to each other one."""
    hosts: list[list[int]]
    """The ranks of each host; hosts in the order of their first ranks."""
    near: list[int]
    """Those of this host."""
    name: str
    """Of this meeting alone, the same in all ranks."""


@contextmanager
def meeting(timeout_s: float) -> Iterator[Meeting]:
    """Meet the ranks of the process group, and connect to those of this host. All ranks call this; inside, they are to
    wait for each other over their own connections, since the process group that they have met in ends with it.

    Raises:
        ValueError: if hosts have different numbers of ranks.
        RankFailedError: if a rank does not connect within `timeout_s` seconds after all have met.
        RuntimeError: if a process of another user answers.
    """
    rank, size = distributed.get_rank(), distributed.get_world_size()
    with _told_when_late():
        group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=MEETS_WITHIN_S))
    with ExitStack() as stack:
        stack.callback(distributed.destroy_process_group, group)
        server = stack.enter_context(closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)))
        server.settimeout(timeout_s)
        address = f"hf_l2l-{secrets.token_hex(16)}"
        server.bind(f"\0{address}")
        server.listen(2 * size)
        found: list[Any] = [None] * size
        with _told_when_late():
            distributed.all_gather_object(found, tuple(_Introduction(host_of_this_process(), address)), group=group)
        all_ranks = [_Introduction(*each) for each in found]
        hosts = _by_host(all_ranks)
        near = next(ranks for ranks in hosts if rank in ranks)
        with ExitStack() as at_errors:
            messages, files = connected(rank, near, [each.address for each in all_ranks], server, at_errors, timeout_s)
            at_errors.pop_all()
        peers = Peers(rank, messages, timeout_s, files.values())
        yield Meeting(peers, files, hosts, near, all_ranks[0].address)


@contextmanager
def _told_when_late() -> Iterator[None]:
    """Inside, that another rank does not come is told as that."""
    since = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        # A store has a type for that; gloo has none.
        if not isinstance(error, distributed.DistStoreError) and time.monotonic() - since < MEETS_WITHIN_S:
            raise
        raise RuntimeError(
            f"all ranks attach the model within {MEETS_WITHIN_S:g} seconds of each other (got none of a rank); "
            "call attach_l2l, or train(), in all of them"
        ) from error


def _by_host(all_ranks: Sequence[_Introduction]) -> list[list[int]]:
    """The ranks of each host; hosts in the order of their first ranks."""
    found: dict[str, list[int]] = {}
    for rank, each in enumerate(all_ranks):
        found.setdefault(each.host, []).append(rank)
    numbers = [len(ranks) for ranks in found.values()]
    if len(set(numbers)) > 1:
        raise ValueError(
            "each host must have as many ranks as the others (got "
            + ", ".join(map(str, numbers))
            + "); start the same number on each, as torchrun --nproc_per_node does"
        )
    return list(found.values())


def host_of_this_process() -> str:
    """What processes have in common that can reach each other's abstract sockets: the system, and its network."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"


def connected(
    rank: int,
    near: Sequence[int],
    addresses: Sequence[str],
    server: socket.socket,
    at_errors: ExitStack,
    timeout_s: float,
) -> tuple[dict[int, socket.socket], dict[int, socket.socket]]:
    """Connect to each other rank of this host, `near`: sockets for messages, and those of the first one for
    descriptors; `at_errors` closes them.

    Raises:
        RankFailedError: if a rank has ended, or does not connect; those that have are told which one.
    """
    messages: dict[int, socket.socket] = {}
    files: dict[int, socket.socket] = {}
    try:
        _call(rank, near, addresses, (messages, files), at_errors, timeout_s)
        _answer(rank, near, server, (messages, files), at_errors, timeout_s)
    except RankFailedError as error:
        text = "it has ended, or does not answer, while the ranks of a host connect to each other"
        for to in messages.values():
            with suppress(OSError):  # it has ended
                to.send(HEADER.pack(FAILED, error.rank) + text.encode())
        raise RankFailedError(f"rank {error.rank} has failed: {text}", error.rank) from error.__cause__
    for to in (*messages.values(), *files.values()):
        to.settimeout(None)
    return messages, files


_Found = tuple[dict[int, socket.socket], dict[int, socket.socket]]


def _call(
    rank: int, near: Sequence[int], addresses: Sequence[str], found: _Found, at_errors: ExitStack, timeout_s: float
) -> None:
    """Connect to the earlier ranks."""
    for other in near[: near.index(rank)]:
        for kind in (0, 1) if other == near[0] else (0,):
            to = at_errors.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            to.settimeout(timeout_s)
            try:
                to.connect(f"\0{addresses[other]}")
                _check_user(to)
                to.send(_NUMBER.pack(rank * 2 + kind))
            except OSError as error:
                raise RankFailedError("", other) from error
            found[kind][other] = to


def _answer(
    rank: int, near: Sequence[int], server: socket.socket, found: _Found, at_errors: ExitStack, timeout_s: float
) -> None:
    """Let the later ranks connect."""
    place = near.index(rank)
    missing = {(other, kind) for other in near[place + 1 :] for kind in ((0, 1) if place == 0 else (0,))}
    while missing:
        try:
            to = at_errors.enter_context(server.accept()[0])
            to.settimeout(timeout_s)
            if _user_of(to) != os.getuid():  # who else has found the address is no rank
                to.close()
                continue
            content = to.recv(_NUMBER.size)
        except OSError as error:
            raise RankFailedError("", min(missing)[0]) from error
        if len(content) == _NUMBER.size:  # else that rank has ended
            other, kind = divmod(int(_NUMBER.unpack(content)[0]), 2)
            missing.discard((other, kind))
            found[kind][other] = to


def _check_user(to: socket.socket) -> None:
    """Raise RuntimeError unless a process of the same user is at the other end."""
    user = _user_of(to)
    if user != os.getuid():
        raise RuntimeError(
            f"ranks that share memory must belong to one user (got a process of user {user}, and this one is of "
            f"{os.getuid()}); start all ranks as one user"
        )


def _user_of(to: socket.socket) -> int:
    """The user whose process is at the other end, as the system says."""
    found = to.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1])
