"""A rank that dies, hangs or raises ends the others in time, with an error that names it, and leaves nothing."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_l2l import L2LConfig, attach_l2l
from host_cases import on_hosts
from models import batch_for, bert
from rank_cases import rank_here
from rank_pool import RankPool
from tiers import more, nightly

LIMIT_S = 4.0


def training(steps: int, raises_at: str = "", options: dict[str, Any] | None = None) -> str:
    """Train as a script: an exception ends the process. Rank 1 raises at a place in its third step; SIGUSR1 raises one
    anywhere."""

    def raised(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    def fail(place: str, step: int) -> None:
        if raises_at == place and rank_here() == 1 and step == 2:
            raised()

    signal.signal(signal.SIGUSR1, raised)
    try:
        model = bert(num_hidden_layers=4)
        eps = attach_l2l(model, L2LConfig(rank_timeout=LIMIT_S, eps_update="deferred", **(options or {})))
        optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
        for step in range(steps):
            fail("data", step)
            out = model(**batch_for(model, seed=step))
            out.loss.register_hook(lambda gradient, step=step: fail("backward", step))
            out.loss.backward()
            fail("step", step)
            eps.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    except torch.OutOfMemoryError:
        os._exit(1)
    return "ended"


PLACES: dict[str, tuple[bool, int, dict[str, Any]]] = {
    "host": (False, 1, {}),
    "devices": (True, 1, {}),
    "sums on devices": (True, 1, {"reduce": "device"}),
    "two hosts": (False, 2, {}),
}
"""Whether ranks have simulated devices, how many hosts there are, and options."""
SAYS = {
    "killed": "its process has ended",
    "stopped": "it has not answered",
    "out of memory": "",
}
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "out of memory": signal.SIGUSR1}


def hurt(pids: list[int], kind: str, after_s: float) -> None:
    """Send a signal to rank 1, until its program has got the error that SIGUSR1 stands for: Python ignores those in
    some places."""
    time.sleep(after_s)
    os.kill(pids[1], SIGNALS[kind])
    with suppress(ProcessLookupError):  # it has ended
        while kind == "out of memory":
            time.sleep(0.1)
            os.kill(pids[1], SIGNALS[kind])


def ended_by(kind: str, place: str, size: int, after_s: float) -> list[tuple[bool, Any]]:
    """Results of an endless training in which something happens to rank 1. Its processes are gone afterwards, and none
    of their memory is left."""
    sim, hosts, options = PLACES[place]
    pool = RankPool(size, sim=sim, within_s=60)
    pool.run(on_hosts, hosts, training, 2, "", options)  # so that what is imported at first is there
    pids = [process.pid for process in pool.processes]
    pool.begin(on_hosts, hosts, training, 10**6, "", options)
    hurt(pids, kind, after_s)
    if kind == "stopped":  # as long as it hangs, its pipe says nothing
        began = time.monotonic()
        found = pool.results(but=[1])
        assert time.monotonic() - began < 2 * LIMIT_S, "the limit, and what a busy machine takes"
        os.kill(pids[1], signal.SIGKILL)
    else:
        found = pool.results()
    pool.close()
    for pid in pids:
        maps = Path(f"/proc/{pid}/maps")
        assert not maps.exists() or "memfd:hf_l2l" not in maps.read_text()
    return found


def check_others(found: list[tuple[bool, Any]], text: str, *, may_be_ended: bool = False) -> None:
    """All ranks but 1 have raised, and name it; or they are ended, as those which wait elsewhere."""
    for rank, each in enumerate(found):
        if rank != 1:
            is_right, what = each
            is_ended = may_be_ended and what == f"rank {rank} has ended"
            assert not is_right and (f"rank 1 has failed: {text}" in what or is_ended), what


@pytest.mark.parametrize(
    ("kind", "place", "size"),
    [
        *(("killed", "host", 3), ("stopped", "host", 2)),
        *more(("killed", "devices", 3), ("killed", "sums on devices", 3), ("stopped", "sums on devices", 3)),
        *more(*((kind, "two hosts", size) for kind in ("killed", "stopped") for size in (2, 4))),
    ],
)
def test_a_rank_that_dies_or_hangs_ends_the_others(kind, place, size):
    """A simulated device lets its host wait for a collective: such a rank is ended."""
    found = ended_by(kind, place, size, 0.5)
    check_others(found, SAYS[kind], may_be_ended=place == "sums on devices")


@pytest.mark.parametrize(
    ("raises_at", "place"),
    [
        *(("step", "sums on devices"), ("backward", "two hosts")),
        *more(*((at, place) for at in ("data", "backward", "step") for place in PLACES)),
    ],
)
def test_an_exception_in_one_rank_ends_the_others(raises_at, place):
    """Out of memory, say: its process ends with the error, and the others with one that names it."""
    sim, hosts, options = PLACES[place]
    pool = RankPool(2, sim=sim, within_s=60)
    pool.begin(on_hosts, hosts, training, 4, raises_at, options)
    found = pool.results()
    pool.close()
    assert "rank 1 has ended" in found[1][1]
    check_others(found, "")


@nightly
@pytest.mark.parametrize("kind", SAYS)
@pytest.mark.parametrize("seed", range(25))
def test_a_rank_may_die_at_any_time(seed, kind):
    draw = random.Random(seed)
    size, place = draw.choice([2, 3]), draw.choice(["host", "devices"])
    found = ended_by(kind, place, size, draw.random())
    others = [each for rank, each in enumerate(found) if rank != 1]
    if any("all_gather_object" in str(what) or what == "rank 0 has ended" for _, what in others):
        # Until ranks have met, torch alone knows of the end of one, and raises an error that names none. Or it waits,
        # and what watched over the ranks of the model before ends the process.
        assert not any(is_right for is_right, _ in others)
        return
    check_others(found, SAYS[kind])
