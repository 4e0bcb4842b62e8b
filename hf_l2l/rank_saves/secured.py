"""What each rank of a host has written of a checkpoint, or copied: others may change it then."""

from __future__ import annotations

import struct
from collections.abc import Callable
from weakref import WeakKeyDictionary

from hf_l2l.ranks.messages import SECURED
from hf_l2l.ranks.peers import Peers, RankFailedError

_GROUP = struct.Struct("<I")
ALL = 2**32 - 1
"""Instead of a group: all values may change."""
WRITTEN = 2**32 - 2
"""Instead of a group: all values of a rank are in the files."""


def _nothing() -> None:
    """Do nothing."""


class Secured:
    """The messages about that among the ranks of a host."""

    def __init__(self, peers: Peers) -> None:
        self._numbers = dict.fromkeys(peers.ranks, 0)
        """Rank -> the number of the last checkpoint of which it has told something."""
        self._groups: dict[int, set[int]] = {rank: set() for rank in peers.ranks}
        """Rank -> the groups of values of that checkpoint which it has told."""
        self._others = [rank for rank in peers.ranks if rank != peers.rank]
        self._number = 0
        self._when_written = _nothing
        peers.on(SECURED, self._received)

    def begin(self) -> int:
        """The number of the next checkpoint: the same in all ranks, which all call this."""
        self._number += 1
        self._when_written = _nothing
        return self._number

    def when_written(self, call: Callable[[], None]) -> None:
        """Call this once the other ranks have written all values of the checkpoint begun last; perhaps now."""
        self._when_written = call
        self._call_if_written()

    def _received(self, rank: int, number: int, content: bytes) -> None:
        if number < self._numbers[rank]:
            return  # of a checkpoint before the last one of that rank
        if number > self._numbers[rank]:
            self._groups[rank], self._numbers[rank] = set(), number
        self._groups[rank].add(_GROUP.unpack(content)[0])
        self._call_if_written()

    def _call_if_written(self) -> None:
        if all(self._numbers[r] == self._number and WRITTEN in self._groups[r] for r in self._others):
            self._when_written()

    def has(self, rank: int, number: int, group: int) -> bool:
        """Whether a rank has secured a group of values (or `ALL`) of the checkpoint with this number."""
        if self._numbers[rank] != number:
            return self._numbers[rank] > number
        return not self._groups[rank].isdisjoint((group, ALL))


_of_peers: WeakKeyDictionary[Peers, Secured] = WeakKeyDictionary()


def secured_of(peers: Peers) -> Secured:
    """What the other ranks have told; messages come from the first checkpoint on."""
    if peers not in _of_peers:
        _of_peers[peers] = Secured(peers)
    return _of_peers[peers]


def tell_secured(peers: Peers, number: int, group: int) -> None:
    """Tell the others that this rank has secured a group of values of a checkpoint, or `ALL`, or has them `WRITTEN`.

    That a rank has failed is no failure of the checkpoint, and is raised by the next call of the program.
    """
    try:
        peers.send(SECURED, number, _GROUP.pack(group))
    except RankFailedError:
        peers.error_is_kept()
