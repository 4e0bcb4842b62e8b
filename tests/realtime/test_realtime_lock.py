"""Two trainings do not write to one folder of real-time checkpoints at the same time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hf_l2l.realtime import lock
from hf_l2l.realtime.lock import FolderLock
from training import SAVING, l2l_trainer

HOLDS = """
import os, sys, time
from pathlib import Path
from hf_l2l.realtime.lock import FolderLock
held = FolderLock(Path(sys.argv[1]))
if sys.argv[2] == "forks" and os.fork() == 0:
    time.sleep(60)
print("held", flush=True)
sys.stdin.read()
"""


def holder(folder: Path, how: str = "") -> subprocess.Popen[str]:
    """Another process that holds the lock until its input ends."""
    made = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert made.stdout is not None and made.stdout.readline() == "held\n"
    return made


def end(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def realtime(folder: Path, steps: int = 2) -> None:
    options = {**SAVING, "save_strategy": "no", "max_steps": steps, "l2l_realtime_every": 1}
    l2l_trainer(folder / "run", **options, l2l_realtime_checkpoint=str(folder / "now")).train()


def test_a_second_training_is_refused_while_the_first_one_lives(tmp_path):
    other = holder(tmp_path / "now")
    try:
        with pytest.raises(ValueError, match=r"one training at a time \(got .*now, to which another process writes\)"):
            realtime(tmp_path)
    finally:
        end(other)
    realtime(tmp_path)
    assert [path.name for path in (tmp_path / "now").iterdir()] == ["checkpoint-2"]


def test_a_training_that_was_killed_holds_nothing_though_its_workers_live(tmp_path):
    other = holder(tmp_path / "now", "forks")
    try:
        other.kill()
        other.wait()
        FolderLock(tmp_path / "now").release()
    finally:
        end(other)


def test_two_trainings_of_one_process_are_not_one(tmp_path):
    held = FolderLock(tmp_path / "now")
    (tmp_path / "same").symlink_to(tmp_path / "now")
    with pytest.raises(ValueError, match="to which this process writes"):
        FolderLock(tmp_path / "same")
    held.release()
    FolderLock(tmp_path / "same").release()


def test_after_an_error_others_may_write(tmp_path, monkeypatch):
    release, released = FolderLock.release, []
    monkeypatch.setattr(FolderLock, "release", lambda self: released.append(release(self)))
    with pytest.raises(ZeroDivisionError):
        options = {**SAVING, "save_strategy": "no", "l2l_realtime_checkpoint": str(tmp_path / "now")}
        made = l2l_trainer(tmp_path / "run", **options)
        monkeypatch.setattr(made, "training_step", lambda *args, **kwargs: 1 / 0)
        made.train()
    assert released == [None] and list((tmp_path / "now").iterdir()) == []
    end(holder(tmp_path / "now"))


def test_one_who_waited_for_a_removed_file_does_not_hold_it(tmp_path, monkeypatch):
    """The file is removed between its opening and the lock."""
    lockf, calls = lock.fcntl.lockf, []

    def late(file, kind):
        if not calls:
            (tmp_path / "l2l_realtime.lock").unlink()
        calls.append(file)
        lockf(file, kind)

    monkeypatch.setattr(lock.fcntl, "lockf", late)
    held = FolderLock(tmp_path)
    assert len(calls) == 2 and calls[0].closed and (tmp_path / "l2l_realtime.lock").exists()
    held.release()
    held.release()
    assert list(tmp_path.iterdir()) == []
