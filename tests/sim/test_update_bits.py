"""Serial, deferred and eager updates give the same bits on a device that computes beside the host."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from memory_switches import poisoned_releases
from update_cases import OPTIMIZERS, Run, accelerate_loop, assert_same, raw_loop, trainer_loop

CLIPS = {"deferred": 0.5, "eager": 0.0}
AT_ONCE = {"num_threads": 2}
"""Two layers are updated at once: what may come in any order must change no bit."""


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """What is read after it was given back is NaN, in every test here."""
    with poisoned_releases():
        yield


@cache
def serial(optimizer: str, steps: int, accumulation: int, max_norm: float) -> Run:
    """That stash and prefetch change no bit of it is shown elsewhere."""
    return raw_loop("sim", "serial", optimizer, steps=steps, accumulation=accumulation, max_norm=max_norm)


PLACES = (("device", True, 3), ("host", True, 1), ("host", False, 3), ("device", False, 1))
"""Stash, prefetch and accumulation."""
RAW = [
    pytest.param(steps, name, *place, mode, marks=() if steps == 3 and (i + j + k) % 2 == 0 else pytest.mark.slow)
    for steps in (3, 100)
    for i, name in enumerate(OPTIMIZERS)
    for j, place in enumerate(PLACES)
    for k, mode in enumerate(CLIPS)
]
"""Half of them in few steps: each optimizer in each place, with one of the modes."""


@pytest.mark.at_most(10)
@pytest.mark.one_in(6)
@pytest.mark.parametrize(("steps", "optimizer", "stash", "prefetch", "accumulation", "mode"), RAW)
def test_a_raw_loop_trains_as_with_serial_updates(steps, optimizer, stash, prefetch, accumulation, mode):
    same = {"steps": steps, "accumulation": accumulation, "max_norm": CLIPS[mode]}
    found = raw_loop("sim", mode, optimizer, stash=stash, prefetch=prefetch, **same, **AT_ONCE)
    assert_same(found, serial(optimizer, **same))


@pytest.mark.at_most(5)
@pytest.mark.one_in(6)
@pytest.mark.parametrize("mode", CLIPS)
@pytest.mark.parametrize(("optimizer", "accumulation"), [("AdamW", 3), ("SGD", 1), ("LAMB", 3)])
@pytest.mark.parametrize("steps", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_a_loop_with_accelerate_trains_as_with_serial_updates(steps, optimizer, accumulation, mode):
    same = {"steps": steps, "accumulation": accumulation, "max_norm": CLIPS[mode], "ubatch_size": 5}
    expected = accelerate_loop("sim", "serial", optimizer, **same)
    assert_same(accelerate_loop("sim", mode, optimizer, **same, **AT_ONCE, stash="host"), expected)


@pytest.mark.at_most(5)
@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("steps", "optimizer", "accumulation", "mode"),
    [
        *((2, *case) for case in (("AdamW", 3, "deferred"), ("SGD", 1, "eager"), ("LAMB", 1, "deferred"))),
        *(
            pytest.param(steps, *case, mode, marks=pytest.mark.slow)
            for steps in (3, 100)
            for case in (("AdamW", 3), ("SGD", 1), ("LAMB", 1))
            for mode in CLIPS
        ),
    ],
)
def test_the_trainer_trains_as_with_serial_updates(tmp_path, steps, optimizer, accumulation, mode):
    same = {"steps": steps, "accumulation": accumulation, "max_norm": CLIPS[mode], "ubatch_size": 2, "rows": 4}
    expected = trainer_loop(tmp_path / "serial", "serial", optimizer, **same)
    assert_same(trainer_loop(tmp_path / mode, mode, optimizer, **same, l2l_num_threads=2, stash="host"), expected)
