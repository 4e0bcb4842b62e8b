"""What each rank of a host has written of a checkpoint, or copied: others may change it then."""

from __future__ import annotations

import struct
from weakref import WeakKeyDictionary

from hf_l2l.ranks.messages import SECURED
from hf_l2l.ranks.peers import Peers, RankFailedError

_GROUP = struct.Struct("<I")


class Secured:
    """The messages about that among the ranks of a host."""

    def __init__(self, peers: Peers) -> None:
        self._numbers = dict.fromkeys(peers.ranks, 0)
        """Rank -> the number of the last checkpoint of which it has told something."""
        self._groups: dict[int, set[int] | None] = {rank: None for rank in peers.ranks}
        """Rank -> the groups of values of that checkpoint which it has told; None for all."""
        self.number = 0
        """Of the last checkpoint that this rank has begun; all ranks begin the same ones."""
        numbers, groups = self._numbers, self._groups

        def received(rank: int, number: int, content: bytes) -> None:
            if number > numbers[rank]:
                groups[rank], numbers[rank] = set(), number
            of_rank = groups[rank]
            if not content:
                groups[rank] = None
            elif of_rank is not None:
                of_rank.add(_GROUP.unpack(content)[0])

        peers.on(SECURED, received)

    def has(self, rank: int, number: int, group: int | None) -> bool:
        """Whether a rank has secured a group of values (None: all) of the checkpoint with this number."""
        if self._numbers[rank] != number:
            return self._numbers[rank] > number
        groups = self._groups[rank]
        return groups is None or group in groups


_of_peers: WeakKeyDictionary[Peers, Secured] = WeakKeyDictionary()


def secured_of(peers: Peers) -> Secured:
    """What the other ranks have told; messages come from the first checkpoint on."""
    if peers not in _of_peers:
        _of_peers[peers] = Secured(peers)
    return _of_peers[peers]


def tell_secured(peers: Peers, number: int, group: int | None) -> None:
    """Tell the others that this rank has secured a group of values (None: all) of a checkpoint.

    That a rank has failed is no failure of the checkpoint, and is raised by the next call of the program.
    """
    try:
        peers.send(SECURED, number, b"" if group is None else _GROUP.pack(group))
    except RankFailedError:
        peers.error_is_kept()
