"""Ranks that are killed, stopped, or raise while they train."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from hf_l2l import L2LConfig, attach_l2l
from models import batch_for, bert
from rank_pool import RankPool

LIMIT_S = 4.0


def training(steps: int, raises_at: str | None = None, options: dict[str, Any] | None = None) -> str:
    """Train; rank 1 raises at a place in its third step."""
    rank = distributed.get_rank()
    model = bert(num_hidden_layers=4)
    eps = attach_l2l(model, L2LConfig(rank_timeout=LIMIT_S, eps_update="deferred", **(options or {})))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))

    def fail(place: str, step: int) -> None:
        if raises_at == place and rank == 1 and step == 2:
            raise torch.OutOfMemoryError(f"no memory in the {place}")

    for step in range(steps):
        fail("data", step)
        out = model(**batch_for(model, seed=step))
        out.loss.register_hook(lambda gradient, step=step: fail("backward", step))
        out.loss.backward()
        fail("step", step)
        eps.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return "ended"


def nothing_is_left(pids: list[int]) -> None:
    """No process of a rank, and no shared memory of one in another process of this program."""
    for pid in pids:
        maps = Path(f"/proc/{pid}/maps")
        assert not maps.exists() or "memfd:hf_l2l" not in maps.read_text()


def ended_by(pool: RankPool, action: Any, *args: Any, run: Any = training) -> list[tuple[bool, Any]]:
    """Results of a training in which `action` is done to the processes; they are gone afterwards."""
    pool.start()
    pids = [process.pid for process in pool.processes]
    pool.begin(run, *args)
    action(pids)
    found = pool.results()
    pool.close()
    nothing_is_left(pids)
    return found


def hurt(number: signal.Signals, after_s: float) -> Any:
    """Send a signal to rank 1. One that it stops is killed when the others must have ended, and SIGUSR1 is sent until
    its program has got the error that it stands for: Python ignores those in some places."""

    def action(pids: list[int]) -> None:
        time.sleep(after_s)
        os.kill(pids[1], number)
        if number == signal.SIGSTOP:
            time.sleep(1.5 * LIMIT_S)
            os.kill(pids[1], signal.SIGKILL)
        with suppress(ProcessLookupError):  # it has ended
            while number == signal.SIGUSR1:
                time.sleep(0.1)
                os.kill(pids[1], number)

    return action


def check_others(found: list[tuple[bool, Any]], text: str) -> None:
    """All ranks but 1 have raised, and name it."""
    for rank, (is_right, what) in enumerate(found):
        if rank != 1:
            assert not is_right and f"rank 1 has failed: {text}" in what, what


def raising(steps: int, place: str | None = None, options: dict[str, Any] | None = None) -> str:
    """As a script: an exception ends the process. SIGUSR1 raises one anywhere."""

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    signal.signal(signal.SIGUSR1, fail)
    try:
        return training(steps, place, options)
    except torch.OutOfMemoryError:
        os._exit(1)
