"""Serial, deferred and eager updates give the same bits on the CPU, and those of plain training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from memory_switches import forced_copies
from update_cases import OPTIMIZERS, accelerate_loop, assert_same, raw_loop, trainer_loop

COUNTS = [4, pytest.param(100, marks=pytest.mark.slow)]
CLIPS = {"deferred": 0.5, "eager": 0.0}
PAIRED = {(1, "deferred"): ("AdamW", "LAMB"), (3, "deferred"): ("SGD",), (1, "eager"): ("SGD",)}
PAIRED[3, "eager"] = ("AdamW", "LAMB")
"""Accumulation and mode -> the optimizers with which they are tried in few steps, too."""
CASES = [
    pytest.param(steps, name, *pair, marks=() if steps == 4 and name in PAIRED[pair] else pytest.mark.slow)
    for steps in (4, 100)
    for name in OPTIMIZERS
    for pair in PAIRED
]
AT_ONCE = {"num_threads": 2}
"""Two layers are updated at once: what may come in any order must change no bit."""


@pytest.fixture(params=["views", "copies"])
def _copies(request: pytest.FixtureRequest) -> Iterator[None]:
    with forced_copies() if request.param == "copies" else nullcontext():
        yield


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("steps", "optimizer", "accumulation", "mode"), CASES)
def test_the_trainer_trains_as_the_plain_one(tmp_path, steps, optimizer, accumulation, mode):
    """Weights, moments, and logged losses, norms and learning rates."""
    same = {"steps": steps, "accumulation": accumulation, "max_norm": CLIPS[mode]}
    expected = trainer_loop(tmp_path / "plain", "plain", optimizer, **same)
    assert len(expected.logged) == steps + 1
    assert all(entry["grad_norm"] > CLIPS[mode] / 10 for entry in expected.logged[:-1])
    assert_same(trainer_loop(tmp_path / "l2l", mode, optimizer, **same, l2l_num_threads=2), expected)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("steps", "optimizer", "accumulation", "mode"), CASES)
def test_a_loop_with_accelerate_trains_as_a_plain_one(steps, optimizer, accumulation, mode):
    same = {"steps": steps, "accumulation": accumulation, "max_norm": CLIPS[mode]}
    expected = accelerate_loop("cpu", "plain", optimizer, **same)
    assert_same(accelerate_loop("cpu", mode, optimizer, **same, **AT_ONCE), expected)


@pytest.mark.one_in(8)
@pytest.mark.usefixtures("_copies")
@pytest.mark.parametrize("mode", CLIPS)
@pytest.mark.parametrize(("stash", "accumulation"), [("device", 3), ("host", 1)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps", COUNTS)
def test_a_raw_loop_trains_as_with_serial_updates(steps, optimizer, stash, accumulation, mode):
    same = {"steps": steps, "stash": stash, "accumulation": accumulation, "max_norm": CLIPS[mode]}
    assert_same(raw_loop("cpu", mode, optimizer, **same, **AT_ONCE), raw_loop("cpu", "serial", optimizer, **same))


def test_where_layers_run_on_the_host_nothing_is_to_be_moved():
    same = {"steps": 3, "max_norm": 0.5}
    found = raw_loop("cpu", "serial", "AdamW", resident="shell", **same)
    assert_same(found, raw_loop("cpu", "serial", "AdamW", **same))
