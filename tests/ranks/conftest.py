"""Processes that play ranks, started once for all tests here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from rank_pool import RankPool
from rank_programs import Programs


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[..., RankPool]]:
    """`pool(3)` and `pool(3, sim=True)` are three ranks."""
    pools: dict[tuple[int, bool], RankPool] = {}

    def of(size: int, *, sim: bool = False) -> RankPool:
        if (size, sim) not in pools:
            pools[size, sim] = RankPool(size, sim=sim)
        return pools[size, sim]

    yield of
    for each in pools.values():
        each.close()


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """For scripts that end by themselves."""
    with Programs("rank_cases", "hf_l2l.ranks.peers") as made:
        yield made
