"""Calls of torch.distributed, of which the errors are those of ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from hf_l2l.ranks.peers import Peers


@contextmanager
def failing_with_ranks(others: Collection[int], peers: Peers, why: str) -> Iterator[None]:
    """Inside, a call to `others` that fails raises RankFailedError, which names the rank that has failed; `why` says
    what for. Errors of another type than those of lost connections are raised as they are; see `Peers.cannot_reach`.

    Only calls of torch.distributed belong inside: torch raises RuntimeError of no other type for much else.
    """
    try:
        yield
    except RuntimeError as error:
        peers.cannot_reach(error, why, others)
