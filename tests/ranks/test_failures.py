"""A rank that dies, hangs or raises ends the others in time, with an error that names it, and leaves nothing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_l2l import L2LConfig, attach_l2l
from host_cases import on_hosts
from models import batch_for, bert
from rank_cases import rank_here
from tiers import more

LIMIT_S = 4.0


def training(steps: int, raises_at: str = "", options: dict[str, Any] | None = None) -> str:
    """Train as a script: an exception ends the process. Rank 1 raises at a place in its third step."""

    def fail(place: str, step: int) -> None:
        if raises_at == place and rank_here() == 1 and step == 2:
            raise torch.OutOfMemoryError("no memory")

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


def check_others(found: list[tuple[bool, Any]], text: str, *, may_be_ended: bool = False) -> None:
    """All ranks but 1 have raised, and name it; or they are ended, as those which wait elsewhere."""
    for rank, each in enumerate(found):
        if rank != 1:
            is_right, what = each
            is_ended = may_be_ended and what == f"rank {rank} has ended"
            assert not is_right and (f"rank 1 has failed: {text}" in what or is_ended), what


@pytest.mark.parametrize(
    ("sent", "place", "size"),
    [
        *((signal.SIGKILL, "host", 3), (signal.SIGSTOP, "host", 2)),
        *more(
            (signal.SIGKILL, "sums on devices", 3), (signal.SIGKILL, "two hosts", 4), (signal.SIGSTOP, "two hosts", 2)
        ),
    ],
)
def test_a_rank_that_dies_or_hangs_ends_the_others(pool, sent, place, size):
    """Its processes are gone afterwards, and none of their memory is left. A simulated device lets its host wait for a
    collective: such a rank is ended."""
    sim, hosts, options = PLACES[place]
    ranks = pool(size, sim=sim)
    ranks.run(on_hosts, hosts, training, 2, "", options)  # so that what is imported at first is there
    pids = [process.pid for process in ranks.processes]
    ranks.begin(on_hosts, hosts, training, 10**6, "", options)
    time.sleep(0.5)
    os.kill(pids[1], sent)
    if sent == signal.SIGSTOP:  # as long as it hangs, its pipe says nothing
        began = time.monotonic()
        found = ranks.results(but=[1])
        assert time.monotonic() - began < 2 * LIMIT_S, "the limit, and what a busy machine takes"
        os.kill(pids[1], signal.SIGKILL)
    else:
        found = ranks.results()
    ranks.close()
    for pid in pids:
        maps = Path(f"/proc/{pid}/maps")
        assert not maps.exists() or "memfd:hf_l2l" not in maps.read_text()
    text = "its process has ended" if sent == signal.SIGKILL else "it has not answered"
    check_others(found, text, may_be_ended=place == "sums on devices")


@pytest.mark.parametrize(
    ("raises_at", "place"),
    [("step", "sums on devices"), ("backward", "two hosts"), *more(("data", "host"), ("backward", "devices"))],
)
def test_an_exception_in_one_rank_ends_the_others(pool, raises_at, place):
    """Out of memory, say: its process ends with the error, and the others with one that names it."""
    sim, hosts, options = PLACES[place]
    ranks = pool(2, sim=sim)
    ranks.begin(on_hosts, hosts, training, 4, raises_at, options)
    found = ranks.results()
    ranks.close()
    assert "rank 1 has ended" in found[1][1]
    check_others(found, "")
