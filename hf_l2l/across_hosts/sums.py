"""Reduce-scatter of gradient sums over hosts: each host sends the sums of its ranks to the host of the owner, which
adds those of all hosts in their order."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from hf_l2l.across_hosts.calls import failing_with_ranks
from hf_l2l.eps.masters import Master
from hf_l2l.ranks.counterparts import Counterparts
from hf_l2l.ranks.peers import Peers
from hf_l2l.ranks.team import Team

_LENGTH = struct.Struct("<I")
_ALIGNMENT = 64  # bytes, for tensors in what is sent


class Part(NamedTuple):
    """A range of one gradient sum, of which this rank has added those of its host."""

    total: torch.Tensor
    """The range of the sum over all hosts (one dimension, host); its values count on the host of the owner alone."""
    host: int
    """Of the owner."""
    givers: Sequence[int]
    """The hosts whose ranks have gradients of it, ascending."""
    continues: bool
    """Whether `total` has a sum already."""
    add_ranks: Callable[[torch.Tensor], None]
    """Writes the sum of the ranks of this host to a tensor like `total`."""


class HostSums:
    """Adds sums over hosts, together with the counterparts of this rank, which all make the same calls."""

    def __init__(self, counterparts: Counterparts, peers: Peers, longest: int) -> None:
        """`longest` is the number of bytes for which `exchange` has room: the same in all ranks."""
        self._counterparts, self._peers = counterparts, peers
        self._own = torch.zeros(_LENGTH.size + longest, dtype=torch.uint8)
        self._of_hosts = [torch.empty_like(self._own) for _ in counterparts.ranks]
        self._given = self._taken = torch.empty(0, dtype=torch.uint8)

    def exchange(self, bits: bytes, why: str) -> list[bytes]:
        """What the ranks of each host tell of an item, by host."""
        content = _LENGTH.pack(len(bits)) + bits
        self._own[: len(content)].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        with failing_with_ranks(self._counterparts.others, self._peers, why):
            # One call: it waits behind what is sent before.
            self._counterparts.sums.allgather([self._of_hosts], [self._own]).wait()
        found = [each.numpy().tobytes() for each in self._of_hosts]
        return [each[_LENGTH.size : _LENGTH.size + _LENGTH.unpack_from(each)[0]] for each in found]

    def add(self, parts: Sequence[Part], why: str) -> None:
        """Add the sums of all hosts to the totals that this host owns; `why` says what for."""
        own, hosts = self._counterparts.host, range(self._counterparts.count)
        given_to = [[p for p in parts if p.host == host and own in p.givers] for host in hosts]
        taken_from = [[p for p in parts if p.host == own and host in p.givers] for host in hosts]
        self._given, given_sizes = _room(self._given, given_to)
        self._taken, taken_sizes = _room(self._taken, taken_from)
        given, taken = self._given[: sum(given_sizes)], self._taken[: sum(taken_sizes)]
        for part, into in _placed(given, given_to):
            part.add_ranks(into)
        self._send_all(given.split(given_sizes), taken.split(taken_sizes), why)
        begun: set[int] = set()
        for part, from_host in _placed(taken, taken_from):  # host after host
            if part.continues or id(part) in begun:
                part.total.add_(from_host)
            else:
                part.total.copy_(from_host)
            begun.add(id(part))

    def _send_all(self, given: Sequence[torch.Tensor], taken: Sequence[torch.Tensor], why: str) -> None:
        """Send `given[host]` to each host, and wait for `taken[host]` from each; `why` says what for."""
        up, down, own = self._counterparts.sums, self._counterparts.sums_back, self._counterparts.host
        taken[own].copy_(given[own])
        # Two groups, so that values pass one way on each connection: gloo sends them when the other side has told that
        # it is ready, and that message must not wait behind values.
        with failing_with_ranks(self._counterparts.others, self._peers, why):
            works = [
                (up if host < own else down).recv([each], host, 0)
                for host, each in enumerate(taken)
                if host != own and each.numel()
            ]
            works += [
                (up if own < host else down).send([each], host, 0)
                for host, each in enumerate(given)
                if host != own and each.numel()
            ]
            for work in works:
                work.wait()


def of_all_hosts(norms: torch.Tensor, team: Team, masters: Iterable[Master]) -> torch.Tensor:
    """The norms of the sums of `masters` (float64, one dimension), each from the host of the owner; `norms` are those
    of this host. All ranks call this."""
    if team.counterparts is None:
        return norms
    why = "all hosts have added their share of the gradients"
    tables = team.counterparts.exchange(norms.numpy().tobytes(), why)
    by_host = torch.stack([torch.frombuffer(bytearray(table), dtype=norms.dtype) for table in tables])
    owners = torch.tensor([team.host_of[master.owner] for master in masters])
    return by_host.gather(0, owners[None])[0]


def _num_bytes(part: Part) -> int:
    return -(-part.total.nbytes // _ALIGNMENT) * _ALIGNMENT


def _room(memory: torch.Tensor, parts: Sequence[Sequence[Part]]) -> tuple[torch.Tensor, list[int]]:
    """Memory (uint8, one dimension) with room for parts by host, `memory` if that is enough, and the bytes of each."""
    sizes = [sum(map(_num_bytes, each)) for each in parts]
    enough = memory.numel() >= sum(sizes)
    return memory if enough else torch.empty(sum(sizes), dtype=torch.uint8), sizes


def _placed(memory: torch.Tensor, parts: Sequence[Sequence[Part]]) -> Iterator[tuple[Part, torch.Tensor]]:
    """Each part, and its place in memory for parts by host."""
    at = 0
    for part in chain.from_iterable(parts):
        yield part, memory[at : at + part.total.nbytes].view(part.total.dtype)
        at += _num_bytes(part)
