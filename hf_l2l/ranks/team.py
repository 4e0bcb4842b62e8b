"""Ranks meet, get connected, and share the memory of their host."""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from datetime import timedelta
from typing import Any, NamedTuple

from torch import distributed

from hf_l2l.compat import gloo_groups
from hf_l2l.ranks.counterparts import Counterparts
from hf_l2l.ranks.messages import BARRIER, COUNTED, MEMORY, TOLD
from hf_l2l.ranks.peers import Peers
from hf_l2l.ranks.shared_pages import IS_AVAILABLE, SharedPages, check_file, new_file, whole_pages
from hf_l2l.ranks.watch import HEADER

_MEETS_WITHIN_S = 300.0
"""Ranks load models of different speed of disks, and do other work, before they are attached."""
_POLL_MS = 500.0  # at which a wait for memory looks whether its rank is alive
_CREDENTIALS = struct.Struct("3i")
_NUMBER = struct.Struct("<I")
_SIZE = struct.Struct("<I")
_COUNT = struct.Struct("<q")
_LONGEST = 2**14  # bytes of a text


class _Introduction(NamedTuple):
    """What a rank tells the others of itself."""

    host: str
    address: str
    """Of the socket at which it can be reached: an abstract one, which is in no file system."""


def launched_processes() -> int:
    """How many processes a launcher such as torchrun has started, as the environment says; 1 without one."""
    number = os.environ.get("WORLD_SIZE", "1")
    return int(number) if number.isdigit() else 1


def process_group_size() -> int:
    """How many processes the process group has; 1 without one."""
    is_there = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if is_there else 1


def of_rank_0(text: str) -> str:
    """The text that rank 0 of the process group has; all ranks call this. In one process, its own."""
    if process_group_size() == 1:
        return text
    found = [text]
    distributed.broadcast_object_list(found, src=0)
    return found[0]


def trace_of_rank(path: str | os.PathLike[str] | None) -> str | os.PathLike[str] | None:
    """Where this rank writes its trace: `path`, with ".rank1" and so on before its suffix in ranks after the first."""
    rank = distributed.get_rank() if process_group_size() > 1 else 0
    if path is None or rank == 0:
        return path
    start, suffix = os.path.splitext(os.fspath(path))
    return f"{start}.rank{rank}{suffix}"


def refuse_other_group(size: int) -> None:
    """Raise ValueError if the process group does not have `size` processes, as when the model was attached."""
    if process_group_size() != size:
        raise ValueError(
            f"a process group is made before the model is attached (got one of {process_group_size()} afterwards); "
            "call torch.distributed.init_process_group() first, or make the Accelerator, then attach_l2l"
        )


def refuse_launcher_without_group() -> None:
    """Raise ValueError if a launcher has started several processes that know nothing of each other."""
    if launched_processes() > 1 and process_group_size() == 1:
        raise ValueError(
            f"processes of a launcher train one model (got {launched_processes()} of torchrun or another launcher, "
            "and no process group); call torch.distributed.init_process_group(), or make an Accelerator, before "
            "attach_l2l"
        )


def met_team(timeout_s: float) -> Team | None:
    """The ranks of the process group, which all call this; None for one process."""
    refuse_launcher_without_group()
    return Team.met(timeout_s) if process_group_size() > 1 else None


class Team:
    """The ranks of one process group that train one model, on one host or several, seen from one of them.

    Ranks of a host share memory. Those with the same place on each host are counterparts, which reach each other over
    the process group.
    """

    def __init__(
        self,
        peers: Peers,
        files: Mapping[int, socket.socket],
        hosts: Sequence[Sequence[int]] = (),
        counterparts: Counterparts | None = None,
    ) -> None:
        """
        Args:
            peers: the ranks of this host.
            files: the sockets over which descriptors of memory pass, of the first rank of the host to each other one;
                `peers` closes them.
            hosts: the ranks of each host; without any, there is one.
            counterparts: of this rank; None on one host.
        """
        self.peers = peers
        self.rank = peers.rank
        self.hosts = [list(ranks) for ranks in hosts] or [peers.ranks]
        """The ranks of each host. In this order they are added."""
        self.counterparts = counterparts
        self.size = sum(map(len, self.hosts))
        self.host = 0 if counterparts is None else counterparts.host
        """The number of this host."""
        self.near = self.hosts[self.host]
        """The ranks of this host."""
        self.place = self.near.index(self.rank)
        self.leads = self.place == 0
        """Whether it is the first rank of its host."""
        places = {rank: (host, place) for host, ranks in enumerate(self.hosts) for place, rank in enumerate(ranks)}
        self.host_of = {rank: host for rank, (host, _) in places.items()}
        self.stand_in = {rank: self.near[place] for rank, (_, place) in places.items()}
        """Rank -> the one with its place on this host, which is that rank itself or its counterpart."""
        self._files = files
        self._barriers = 0
        self._totals = 0
        self._told = 0
        self._shared = 0

    @classmethod
    def met(cls, timeout_s: float) -> Team:
        """Meet the other ranks of the process group. All of them call this.

        Raises:
            ValueError: if hosts have different numbers of them, or this system has no such memory.
            RuntimeError: if a process of another user answers.
        """
        if not IS_AVAILABLE:
            raise ValueError(
                "several ranks share memory that only Linux has (got another system); train in one process, which "
                "uses all visible devices"
            )
        rank, size = distributed.get_rank(), distributed.get_world_size()
        group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=_MEETS_WITHIN_S))
        with ExitStack() as at_errors:
            with ExitStack() as stack:
                stack.callback(distributed.destroy_process_group, group)
                server = stack.enter_context(closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)))
                server.settimeout(_MEETS_WITHIN_S)
                address = f"hf_l2l-{secrets.token_hex(16)}"
                server.bind(f"\0{address}")
                server.listen(2 * size)
                found: list[Any] = [None] * size
                distributed.all_gather_object(found, tuple(_Introduction(_host(), address)), group=group)
                all_ranks = [_Introduction(*each) for each in found]
                hosts = _by_host(all_ranks)
                near = next(ranks for ranks in hosts if rank in ranks)
                messages, files = _connected(rank, near, all_ranks, server, at_errors)
                distributed.barrier(group=group)  # all have connected before a server is closed
            at_errors.pop_all()
        peers = Peers(rank, messages, timeout_s, files.values())
        if len(hosts) == 1:
            return cls(peers, files, hosts)
        with ExitStack() as at_errors:
            at_errors.callback(peers.close)
            place = near.index(rank)
            same_place = [ranks[place] for ranks in hosts]
            name, within = f"{all_ranks[0].address}/{place}", timedelta(seconds=_MEETS_WITHIN_S)
            group_of = gloo_groups(name, hosts.index(near), len(hosts), within)
            counterparts = Counterparts(same_place, peers, group_of)
            at_errors.pop_all()
        return cls(peers, files, hosts, counterparts)

    def gather(self, kind: int, number: int, content: bytes, why: str) -> dict[int, bytes]:
        """As `Peers.gather`, of the ranks of all hosts."""
        near = self.peers.gather(kind, number, content, why)
        if self.counterparts is None:
            return near
        header = HEADER.pack(kind, number)
        given = b"".join([header, *(_SIZE.pack(len(near[rank])) + near[rank] for rank in self.near)])
        found: dict[int, bytes] = {}
        for ranks, theirs in zip(self.hosts, self.counterparts.exchange(given, why), strict=True):
            if not theirs.startswith(header):
                self.peers.refuse(f"rank {ranks[self.place]} has gone on while rank {self.rank} waited: {why}")
            at = len(header)
            for rank in ranks:
                (size,) = _SIZE.unpack_from(theirs, at)
                at += _SIZE.size
                found[rank] = theirs[at : at + size]
                at += size
        return found

    def barrier(self, why: str) -> None:
        """Wait until all ranks of this host have called this; `why` says what for."""
        self._barriers += 1
        self.peers.gather(BARRIER, self._barriers, b"", why)

    def total(self, number: int, why: str) -> int:
        """The sum of the numbers of all ranks, which all call this; `why` says of what."""
        self._totals += 1
        found = self.gather(COUNTED, self._totals, _COUNT.pack(number), why)
        return sum(_COUNT.unpack(each)[0] for each in found.values())

    def tell(self, text: str, why: str) -> list[str]:
        """What each rank says, by rank; all of them call this. `why` says what they wait for.

        Raises:
            RankFailedError: if a rank has failed.
        """
        self._told += 1
        found = self.gather(TOLD, self._told, text.encode()[:_LONGEST], why)
        return [found[rank].decode(errors="ignore") for rank in sorted(found)]

    def share(self, num_bytes: int, what: str) -> SharedPages:
        """Memory of the ranks of this host, all zero; all of them call this with the same arguments.

        Raises:
            RuntimeError: if the ranks do not agree on the arguments.
        """
        self._shared += 1
        asked = f"{num_bytes} bytes for {what}"
        found = self.peers.gather(MEMORY, self._shared, asked.encode(), f"ranks share memory for {what}")
        other = next((rank for rank, theirs in found.items() if theirs != asked.encode()), None)
        if other is not None:
            raise RuntimeError(
                f"all ranks must attach the same model with the same options (got {asked} on rank {self.rank}, and "
                f"{found[other].decode()} on rank {other}); load the same model in each"
            )
        size = whole_pages(num_bytes)
        if self.leads:
            descriptor = new_file(size)
            for to in self._files.values():
                socket.send_fds(to, [b"m"], [descriptor])
        else:
            descriptor = self._received(f"rank {self.near[0]} shares memory for {what}")
        with ExitStack() as stack:
            stack.callback(os.close, descriptor)
            check_file(descriptor, size)
            return SharedPages(descriptor, size)

    def _received(self, why: str) -> int:
        """The descriptor that the first rank of this host sends."""
        first, poll = self.near[0], select.poll()
        poll.register(self._files[first], select.POLLIN)
        while not poll.poll(_POLL_MS):
            self.peers.check(why, [first])
        _, descriptors, _, _ = socket.recv_fds(self._files[first], 1, 1, socket.MSG_CMSG_CLOEXEC)
        if len(descriptors) != 1:  # it has ended
            self.peers.wait(lambda: False, why, [first])
        return descriptors[0]

    def give_up(self) -> None:
        """Leave the others, which cannot attach the model without this rank."""
        self.peers.tell_failure("its model cannot be attached")
        self.close()

    def close(self) -> None:
        """Leave the others."""
        if self.counterparts is not None:
            self.counterparts.close()
        self.peers.close()


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


def _host() -> str:
    """What processes have in common that can reach each other's abstract sockets: the system, and its network."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"


def _connected(
    rank: int, near: Sequence[int], all_ranks: Sequence[_Introduction], server: socket.socket, at_errors: ExitStack
) -> tuple[dict[int, socket.socket], dict[int, socket.socket]]:
    """Connect to each other rank of this host, `near`: sockets for messages, and those of the first one for
    descriptors; `at_errors` closes them."""
    messages: dict[int, socket.socket] = {}
    files: dict[int, socket.socket] = {}
    place = near.index(rank)
    for other in near[:place]:  # the later rank connects
        for kind, found in ((0, messages), (1, files)):
            if kind == 1 and other != near[0]:
                continue
            to = at_errors.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            to.settimeout(_MEETS_WITHIN_S)
            to.connect(f"\0{all_ranks[other].address}")
            _check_user(to)
            to.send(_NUMBER.pack(rank * 2 + kind))
            to.settimeout(None)
            found[other] = to
    for _ in range((len(near) - 1 - place) * (2 if place == 0 else 1)):
        to = at_errors.enter_context(server.accept()[0])
        to.settimeout(_MEETS_WITHIN_S)
        _check_user(to)
        other, kind = divmod(int(_NUMBER.unpack(to.recv(_NUMBER.size))[0]), 2)
        to.settimeout(None)
        (files if kind else messages)[other] = to
    return messages, files


def _check_user(to: socket.socket) -> None:
    """Raise RuntimeError unless a process of the same user is at the other end."""
    found = to.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    if user != os.getuid():
        raise RuntimeError(
            f"ranks that share memory must belong to one user (got a process of user {user}, and this one is of "
            f"{os.getuid()}); start all ranks as one user"
        )
