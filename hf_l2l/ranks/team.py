"""Ranks meet, get connected, and share the memory of their host."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta

from torch import distributed

from hf_l2l.compat import gloo_groups
from hf_l2l.ranks.counterparts import Counterparts
from hf_l2l.ranks.meeting import MEETS_WITHIN_S, Meeting, meeting
from hf_l2l.ranks.messages import BARRIER, MEMORY, STEP, TOLD
from hf_l2l.ranks.peers import Peers
from hf_l2l.ranks.shared_pages import IS_AVAILABLE, SharedPages, check_file, new_file, whole_pages
from hf_l2l.ranks.watch import HEADER, LARGEST

_POLL_MS = 500.0  # at which a wait for memory looks whether its rank is alive
_SIZE = struct.Struct("<I")
_AT_STEP = struct.Struct("<qQ")
_PIECE = LARGEST // 4
"""Bytes of a text at once."""
_GOES_ON, _ENDS = b"+", b"."
"""What a piece of a text begins with."""


def launched_processes() -> int:
    """How many processes a launcher such as torchrun has started, as the environment says; 1 without one."""
    number = os.environ.get("WORLD_SIZE", "1")
    return int(number) if number.isdigit() else 1


def process_group_size() -> int:
    """How many processes the process group has; 1 without one."""
    is_there = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if is_there else 1


def processes_of_this_host(count: int) -> int:
    """How many of `count` processes a launcher has started on this host, as the environment says; all of them without
    a launcher."""
    number = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(number) if number.isdigit() else count


def has_values_that_count() -> bool:
    """Whether the values of a model in this process are used: with ranks, all get those of rank 0 by attaching it."""
    return process_group_size() == 1 or distributed.get_rank() == 0


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
        self._steps = 0
        self.counts = 0
        """What this rank has counted since its last step, such as tokens."""
        self.counted = 0
        """What all ranks had counted at their last step, since somebody has set this to 0."""
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
        with ExitStack() as at_errors, meeting(timeout_s) as met:
            at_errors.callback(met.peers.close)
            # Those that have connected hear here of one that fails; only then the process group may be ended.
            met.peers.gather(BARRIER, 0, b"", "all ranks attach the model")
            team = cls(met.peers, met.files, met.hosts, _counterparts(met) if len(met.hosts) > 1 else None)
            at_errors.pop_all()
        return team

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

    def come_to_step(self, why: str, updated: int) -> bool:
        """Wait until all ranks have called this, and add up what they have counted since the last time.

        Args:
            why: what they wait for.
            updated: a number that stands for the parameters that the step updates.

        Returns whether all ranks update the same ones; else a rank would wait for ever for updates of others.
        """
        self._steps += 1
        found = self.gather(STEP, self._steps, _AT_STEP.pack(self.counts, updated), why)
        self.counts = 0
        counts, of_ranks = zip(*map(_AT_STEP.unpack, found.values()), strict=True)
        self.counted += sum(counts)
        return len(set(of_ranks)) == 1

    def tell(self, text: str, why: str) -> list[str]:
        """What each rank says, by rank; all of them call this. `why` says what they wait for.

        Raises:
            RankFailedError: if a rank has failed.
        """
        rest, told = text.encode(), dict.fromkeys(sorted(self.host_of), b"")
        goes_on = True
        while goes_on:  # until the longest text has been told
            piece, rest = rest[:_PIECE], rest[_PIECE:]
            self._told += 1
            found = self.gather(TOLD, self._told, (_GOES_ON if rest else _ENDS) + piece, why)
            told = {rank: before + found[rank][1:] for rank, before in told.items()}
            goes_on = any(each.startswith(_GOES_ON) for each in found.values())
        return [each.decode() for each in told.values()]

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
        content, descriptors, _, _ = socket.recv_fds(self._files[first], 1, 1, socket.MSG_CMSG_CLOEXEC)
        if content and not descriptors:
            raise OSError(errno.EMFILE, "this process has too many open files for the memory that ranks share")
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


def _counterparts(met: Meeting) -> Counterparts:
    """Those of this rank, connected to it."""
    peers, place = met.peers, met.near.index(met.peers.rank)
    ranks = [each[place] for each in met.hosts]
    within = timedelta(seconds=MEETS_WITHIN_S)
    group_of = gloo_groups(f"{met.name}/{place}", met.hosts.index(met.near), len(met.hosts), within)
    try:
        return Counterparts(ranks, peers, group_of)
    except RuntimeError as error:
        others = [rank for rank in ranks if rank != peers.rank]
        peers.cannot_reach(error, "the ranks of all hosts connect to each other", others)
