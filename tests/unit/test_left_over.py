"""A fresh process has no more after trainings and checkpoints than before: threads, files, sockets, names, memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiers import nightly
from training import left_in

SCRIPT = """
import gc, json, sys
from pathlib import Path
import torch
import left_over
from hf_l2l import detach_l2l
from training import l2l_trainer, tiny_bert

torch.set_num_threads(1)

def train(folder, **options):
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "dataloader_num_workers": WORKERS}
    model = tiny_bert(layers=2)
    made = l2l_trainer(Path(folder), model=model, eps_update="deferred", max_steps=3, **saving, **options)
    made.train()
    detach_l2l(made.model)

def all_that_is_there():
    gc.collect()
    return {
        "sockets": left_over.sockets(), "names in /dev/shm": sorted(left_over.shared_memory()),
        "files without a name": left_over.deleted_files(), **left_over.counts(),
    }

WORKERS = int(sys.argv[2])
named = left_over.shared_memory()
train(sys.argv[1])
before = all_that_is_there()
for later in (False, True, True):
    train(sys.argv[1], l2l_async_save=later)
after = all_that_is_there()
for found in (before, after):
    found["names in /dev/shm"] = sorted(set(found["names in /dev/shm"]) - named)
print("FOUND" + json.dumps([before, after]))
"""


@nightly  # in the process of the tests: `tests/trainer/test_left_over.py`
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the counts are those of Linux")
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_trainings_leave_nothing_in_a_fresh_process(workers, tmp_path):
    root = Path(__file__).parents[2]
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(workers)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(root), str(root / "tests" / "helpers")))},
    )
    assert found.returncode == 0, found.stderr
    before, after = json.loads(found.stdout.rpartition("FOUND")[2])
    assert before["sockets"] == 0 and before["children"] == 0
    assert not before["names in /dev/shm"] and not before["files without a name"]
    assert after.pop("threads") <= before.pop("threads")
    assert after == before
    assert left_in(tmp_path) == ["checkpoint-2", "checkpoint-3"]
