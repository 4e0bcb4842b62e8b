"""A rank that dies, hangs or raises ends the others in time, and leaves nothing."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from failing_ranks import LIMIT_S, check_others, ended_by, hurt, nothing_is_left, raising, training
from rank_pool import RankPool


@pytest.mark.parametrize("sim", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_others(sim):
    pool = RankPool(3, sim=sim, within_s=60)
    pool.run(training, 2)  # so that what is imported at first is there
    check_others(ended_by(pool, hurt(signal.SIGKILL, 0.5), 10**6), "its process has ended")


def test_a_stopped_rank_ends_the_others():
    pool = RankPool(2, within_s=60)
    pool.run(training, 2)
    pool.start()
    pids = [process.pid for process in pool.processes]
    pool.begin(training, 10**6)
    time.sleep(0.5)
    os.kill(pids[1], signal.SIGSTOP)
    began = time.monotonic()
    found = pool._pipes[0].poll(4 * LIMIT_S) and pool._pipes[0].recv()
    seconds = time.monotonic() - began
    os.kill(pids[1], signal.SIGKILL)
    pool.close()
    nothing_is_left(pids)
    assert found and not found[0] and "rank 1 has failed: it has not answered" in found[1]
    assert seconds < 2 * LIMIT_S  # the limit, and what a busy machine takes


@pytest.mark.one_in(6)
@pytest.mark.parametrize("sim", [False, True])
@pytest.mark.parametrize("place", ["data", "backward", "step"])
def test_an_exception_in_one_rank_ends_the_others(place, sim):
    """Out of memory, say: its process ends with the error, and the others with one that names it."""
    pool = RankPool(2, sim=sim, within_s=60)
    pool.begin(raising, 4, place)
    found = pool.results()
    pool.close()
    assert f"no memory in the {place}" in found[1][1] or "rank 1 has ended" in found[1][1]
    check_others(found, "")


KINDS = {
    signal.SIGKILL: "its process has ended",
    signal.SIGSTOP: "it has not answered",
    signal.SIGUSR1: "",  # raises out of memory
}


@pytest.mark.slow
@pytest.mark.at_most(75)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(50))
def test_a_rank_may_die_at_any_time(kind, seed):
    draw = random.Random(seed)
    pool = RankPool(draw.choice([2, 3]), sim=draw.random() < 0.5, within_s=60)
    pool.run(training, 1)
    found = ended_by(pool, hurt(kind, draw.random()), 10**6, run=raising)
    if any("all_gather_object" in str(what) or what == "rank 0 has ended" for _, what in found):
        # Until ranks have met, torch alone knows of the end of one, and raises an error that names none. Or it waits,
        # and what watched over the ranks of the model before ends the process.
        assert not any(is_right for is_right, _ in found)
        return
    check_others(found, KINDS[kind])
