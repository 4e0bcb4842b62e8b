"""Ctrl-C and SIGTERM at a drawn moment of a training that saves in the background and has its stash on disk."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_l2l.checkpoint.finding import newest_whole
from hf_l2l.stash import spill
from training import l2l_trainer, left_in

SCRIPT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored
from pathlib import Path
import torch
from hf_l2l.checkpoint.reserved import Region
from hf_l2l.stash import spill
from training import l2l_trainer

spill.is_in_memory = lambda folder: False  # the folder counts as one on a disk
torch.set_num_threads(1)

def tells(owner, name):
    original = getattr(owner, name)
    def told(*args, **kwargs):
        os.write(1, b"event\\n")
        return original(*args, **kwargs)
    setattr(owner, name, told)

folder, spilled, workers = sys.argv[1:]
made = l2l_trainer(
    Path(folder), eps_update="deferred", max_steps=1000, save_strategy="steps", save_steps=1, save_total_limit=3,
    l2l_async_save=True, stash="disk", l2l_spill_dir=spilled, dataloader_num_workers=int(workers),
)
tells(Region, "write")
tells(made, "training_step")
tells(made, "_save_checkpoint")
tells(made, "_finish_saving")
tells(made.model.bert.encoder.layer[1].output.__class__, "forward")
made.train()
"""


def interrupted(folder: Path, spilled: Path, sent: int, events: int, workers: int) -> tuple[int, str]:
    """Send a signal to a training with so many events and a checkpoint; its status, and its errors."""
    root = Path(__file__).parents[2]
    program = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), str(spilled), str(workers)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(root), str(root / "tests" / "helpers")))},
    )
    with program:
        assert program.stdout is not None
        try:
            told = [program.stdout.readline() for _ in range(events)]
            while told[-1] and not list(folder.glob("checkpoint-*")):
                told.append(program.stdout.readline())
            program.send_signal(sent)
            _, errors = program.communicate(timeout=300)  # a net: it has ended long before
        finally:
            program.kill()
    assert told[-1].startswith(b"event") or program.returncode != 0, errors.decode()
    return program.returncode, errors.decode()


def cases() -> list[Any]:
    """One draw in the normal tier."""
    return [
        pytest.param(
            sent, seed, marks=() if (sent, seed) == (signal.SIGINT, 0) else pytest.mark.slow, id=f"{sent.name}-{seed}"
        )
        for sent in (signal.SIGINT, signal.SIGTERM)
        for seed in range(8)
    ]


@pytest.mark.parametrize(("sent", "seed"), cases())
def test_a_signal_ends_a_training_that_is_resumed(sent, seed, tmp_path, monkeypatch):
    draw = random.Random(f"{sent} {seed}")
    folder, spilled = tmp_path / "run", tmp_path / "spilled"
    spilled.mkdir()
    status, errors = interrupted(folder, spilled, sent, draw.randint(60, 400), workers=seed % 3)
    assert status == -sent, errors
    newest, passed_over = newest_whole(folder)
    assert newest is not None and not passed_over
    if sent == signal.SIGINT:
        assert "KeyboardInterrupt" in errors
        assert all(name.startswith("checkpoint-") for name in left_in(folder))
        assert not list(spilled.iterdir())
    # The system ends a program at SIGTERM, as at SIGKILL: what it was writing is removed by the next training there.
    monkeypatch.setattr(spill, "is_in_memory", lambda folder: False)
    step = int(newest.name.partition("-")[2])
    on_disk = {"stash": "disk", "l2l_spill_dir": str(spilled)}
    made = l2l_trainer(folder, max_steps=step + 2, save_strategy="steps", save_steps=1, **on_disk)
    made.train(resume_from_checkpoint=True)
    assert made.state.global_step == step + 2
    assert all(name.startswith("checkpoint-") for name in left_in(folder))
    assert len(list(spilled.iterdir())) == 1, "that of this training"
