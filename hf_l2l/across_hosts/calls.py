"""Calls to other hosts, of which the errors are those of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hf_l2l.ranks.counterparts import Counterparts
from hf_l2l.ranks.peers import Peers


@contextmanager
def failing_with_ranks(counterparts: Counterparts, peers: Peers, why: str) -> Iterator[None]:
    """Inside, a call that fails raises RankFailedError, which names the rank that has failed; `why` says what for."""
    try:
        yield
    except RuntimeError as error:
        peers.cannot_reach(error, why, counterparts.others)
