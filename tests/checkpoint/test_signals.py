"""Ctrl-C and SIGTERM at a drawn moment of a training that saves in the background and has its stash on disk."""

from __future__ import annotations

import atexit
import os
import random
import signal
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_l2l.checkpoint.background import BackgroundSave
from hf_l2l.checkpoint.finding import newest_whole
from hf_l2l.checkpoint.reserved import Region
from hf_l2l.stash import spill
from rank_pool import forked_context
from saving import saving, trained
from tiers import more
from training import left_in


def train(folder: Path, spilled: Path, workers: int, events: Connection) -> None:
    """In a process of its own: train, and tell of each event."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    spill.is_in_memory = lambda folder: False  # the folder counts as one on a disk
    torch.set_num_threads(1)

    def tells(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def told(*args: Any, **kwargs: Any) -> Any:
            events.send(name)
            return original(*args, **kwargs)

        setattr(owner, name, told)

    made = saving(
        folder,
        **{"eps_update": "deferred", "max_steps": 1000, "save_total_limit": 3, "l2l_async_save": True},
        **{"stash": "disk", "l2l_spill_dir": str(spilled), "dataloader_num_workers": workers},
    )
    tells(Region, "write")
    tells(BackgroundSave, "result")
    for name in ("training_step", "_save_checkpoint"):
        tells(made, name)
    tells(type(made.model.bert.encoder.layer[1].output), "forward")
    try:
        made.train()
    except KeyboardInterrupt:
        events.send(traceback.format_exc())
        raise
    finally:
        atexit._run_exitfuncs()  # as an interpreter does at its end, of which a forked process has none


def interrupted(folder: Path, spilled: Path, sent: int, count: int, workers: int) -> tuple[int | None, str]:
    """Send a signal to a training with so many events and a checkpoint; its status, and what it told last."""
    context = forked_context()
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=train, args=(folder, spilled, workers, there))
    process.start()
    there.close()
    told = ""
    try:
        while count > 0 or not list(folder.glob("checkpoint-*")):
            told, count = here.recv(), count - 1
        os.kill(process.pid, sent)
        while True:  # until its end
            told = here.recv()
    except EOFError:
        process.join(300)  # a net: it has ended long before
    finally:
        process.kill()
    return process.exitcode, told


@pytest.mark.parametrize(
    ("sent", "seed"),
    [(signal.SIGINT, 0), *more(*((sent, seed) for sent in (signal.SIGINT, signal.SIGTERM) for seed in range(1, 6)))],
)
def test_a_signal_ends_a_training_that_is_resumed(sent, seed, tmp_path, monkeypatch):
    draw = random.Random(f"{sent} {seed}")
    folder, spilled = tmp_path / "run", tmp_path / "spilled"
    spilled.mkdir()
    status, told = interrupted(folder, spilled, sent, draw.randint(20, 200), workers=seed % 3)
    newest, passed_over = newest_whole(folder)
    assert newest is not None and not passed_over
    if sent == signal.SIGINT:
        assert status == 1 and "KeyboardInterrupt" in told
        assert all(name.startswith("checkpoint-") for name in left_in(folder))
        assert not list(spilled.iterdir())
    else:
        assert status == -sent, told
    # The system ends a program at SIGTERM, as at SIGKILL: what it was writing is removed by the next training there.
    monkeypatch.setattr(spill, "is_in_memory", lambda folder: False)
    step = int(newest.name.partition("-")[2])
    on_disk = {"stash": "disk", "l2l_spill_dir": str(spilled)}
    made = trained(folder, max_steps=step + 2, **on_disk, resumes=True)
    assert made.state.global_step == step + 2
    assert all(name.startswith("checkpoint-") for name in left_in(folder))
    assert len(list(spilled.iterdir())) == 1, "that of this training"
