"""When copies land changes no bit, wherever weights, graphs and stash are."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from hf_l2l.testing import sim_stream
from memory_switches import poisoned_releases
from placements import PLACEMENTS
from runs import UPDATED_BY, Run, assert_same_run, train
from tiers import combinations, more

PLACES: dict[str, dict[str, Any]] = {name: each.options for name, each in PLACEMENTS.items()}
PLACES |= {"stash on disk": {"stash": "disk"}, "all on disk": {"stash": "disk", "boundary": "host"}}
SOME = ("streamed", "boundary on the host", "layers, updated on the host", "some of each")


@cache
def with_late_copies(name: str, mode: str) -> Run:
    return train(**PLACES[name], eps_update=mode, accumulation=2, steps=2)


@pytest.mark.parametrize(
    ("name", "mode", "seed"),
    combinations(
        [*SOME, *more(*(name for name in PLACES if name not in SOME))],
        UPDATED_BY,
        [0, *more(1, 2)],
        together=1,
    ),
)
def test_when_copies_land_changes_no_bit(name, mode, seed):
    with sim_stream.random_landing(seed), poisoned_releases():
        found = train(**PLACES[name], eps_update=mode, accumulation=2, steps=2)
    assert_same_run(found, with_late_copies(name, mode))
