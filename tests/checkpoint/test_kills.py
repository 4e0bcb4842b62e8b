"""A training that is killed, or whose disk fails, while it saves, at whatever call: it is resumed by itself and ends
as one that was not.

Each is a process, forked from one that has imported torch (`benchmarks/kill_points.py`), that is killed by SIGKILL
before a call that changes its folder, or by the system in the middle of a file; or that gets an error there.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import random
import re
import shutil
import signal
import threading
import traceback
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from benchmarks import kills
from benchmarks.kill_points import SAVING, Ended, Fault, Training, cuts, end_of
from hf_l2l.checkpoint.background import BackgroundSave
from hf_l2l.checkpoint.finding import check_whole, checkpoints_in, newest_of, newest_whole
from hf_l2l.checkpoint.reserved import Region
from hf_l2l.checkpoint.staging import CheckpointSaveError
from hf_l2l.stash import spill
from rank_pool import forked_context
from saving import saving, steps_in, trained
from tiers import more, nightly
from training import left_in

BOTH = ["checkpoint-4", "checkpoint-6"]


def finished(folder: Path, **how: Any) -> Ended:
    found = end_of(Training("L2LTrainer", str(folder), **how))
    assert (found.killed_by, found.error) == (None, None), found
    return found


def killed(folder: Path, *, before: Path | None = None, **how: Any) -> bool:
    """Train in a folder, perhaps a copy of another one, and be killed there. Whether it was: a file may end before its
    cut."""
    if before is not None:
        shutil.copytree(before, folder)
    found = end_of(Training("L2LTrainer", str(folder), **how))
    assert found.error is None and found.killed_by in (None, signal.SIGKILL, signal.SIGXFSZ), found
    return found.killed_by is not None


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """The process from which all are forked runs: it is the one of the tests' ranks, too."""
    forked_context()


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training after four of six steps; what will be saved last is in the place of another one."""
    folder = tmp_path_factory.mktemp("before")
    finished(folder, seed=7, options={"save_steps": 6})
    finished(folder, resumes=False, stop_at=4, options={"save_total_limit": None})
    assert left_in(folder) == ["checkpoint-2", *BOTH]
    return folder


@pytest.fixture(scope="module")
def whole(before: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """How it ends if nothing happens to it."""
    return finished(Path(shutil.copytree(before, tmp_path_factory.mktemp("whole") / "run")))


@pytest.fixture(scope="module")
def calls_of_background(before: Path, whole: Ended, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Those of a training that saves in the background, which ends as the other one does."""
    run = Path(shutil.copytree(before, tmp_path_factory.mktemp("background") / "run"))
    found = finished(run, options={"l2l_async_save": True})
    assert found.digest == whole.digest
    return found.calls


def assert_all_whole(run: Path) -> None:
    assert all(check_whole(folder) is not None for folder in checkpoints_in(run)), "each has a manifest that holds"


def assert_resumed(run: Path, whole: Ended, **how: Any) -> None:
    assert_all_whole(run)
    found = finished(run, **how)
    assert found.digest == whole.digest
    # The oldest one is deleted when another one is saved.
    has_saved = any(call.startswith("rename") for call in found.calls)
    assert set(left_in(run)) - (set() if has_saved else {"checkpoint-2"}) == set(BOTH)
    assert_all_whole(run)


def changing(calls: list[str]) -> list[Fault]:
    """Before each call, but for those that find the same files as the one before: fsync changes none."""
    return [Fault(at) for at in range(1, len(calls) + 1) if at == 1 or not calls[at - 2].startswith("fsync")]


def one_of_each(calls: list[str], faults: Iterable[Fault]) -> dict[str, Fault]:
    """The last fault of each kind: before a call of each name, before the rename that puts a folder in its place, and
    in the middle of a file."""
    found: dict[str, Fault] = {}
    for fault in faults:
        name, _, path = calls[fault.at - 1].partition(" ")
        is_put_in_place = name == "rename" and re.search("_l2l-saving-.*/checkpoint-[0-9]+$", path)
        found["put in place" if is_put_in_place else name if not fault.cut else "cut"] = fault
    return found


@nightly
@pytest.mark.parametrize(("background", "kind"), [(True, "put in place"), (False, "cut"), (False, "")])
@pytest.mark.timeout(1800)
def test_a_save_is_killed_at_calls_that_change_files(before, whole, calls_of_background, tmp_path, background, kind):
    """The save replaces a checkpoint of another training, and the oldest one is deleted after it. Without a kind, at
    each call."""
    how = {"options": {"l2l_async_save": background}}
    calls = calls_of_background if background else whole.calls
    writers = {"open", "save"} if background else {"open", "save", "safe_save_file"}  # its own, for weights
    assert {"rename", "fsync", "rmdir", "remove", "mkdir", *writers} == {call.split(" ")[0] for call in calls}
    faults = [*changing(calls), *cuts(calls, before / "checkpoint-4")]
    assert len(faults) >= 30
    chosen = [one_of_each(calls, faults)[kind]] if kind else faults
    count = 0
    for number, fault in enumerate(chosen):
        run = tmp_path / str(number)
        count += killed(run, before=before, fault=fault, **how)
        assert_resumed(run, whole, **how)
        shutil.rmtree(run)
    assert count >= max(1, len(chosen) - 2)


@nightly
def test_the_resume_after_a_kill_is_killed(before, whole, tmp_path):
    """The save is killed when it was about to put the new folder in its place; the resume, when it has put back what
    was to be replaced, and has removed the rest."""
    second = [at for at, call in enumerate(whole.calls, 1) if call.startswith("rename")][1]
    interrupted = tmp_path / "interrupted"
    assert killed(interrupted, before=before, fault=Fault(second)) and len(left_in(interrupted)) == 3
    assert not (interrupted / "checkpoint-6").exists()
    again = finished(Path(shutil.copytree(interrupted, tmp_path / "again")))
    assert again.digest == whole.digest
    saved = [call.startswith("mkdir _l2l-saving-") for call in again.calls].index(True)
    assert saved >= 10
    run = tmp_path / "run"
    assert killed(run, before=interrupted, fault=changing(again.calls[:saved])[-1])
    assert (run / "checkpoint-6").exists(), "before it was replaced again"
    assert_resumed(run, whole)


def of_generations(run: Path, **options: Any) -> dict[str, Any]:
    """With a generation after each step, and no other checkpoint."""
    given = {"save_strategy": "no", "l2l_realtime_checkpoint": str(run / "now"), "l2l_realtime_every": 1}
    return {"options": {**given, **options}}


@nightly
@pytest.mark.timeout(1800)
def test_a_generation_is_killed_at_calls_that_change_files(tmp_path):
    """At most two that were begun are lost: files of weights and state have no values until updates are done."""
    run = tmp_path / "whole"
    whole = finished(run, **of_generations(run, eps_update="deferred"))
    calls = whole.calls
    faults = [*map(Fault, range(1, len(calls) + 1)), *cuts(calls, checkpoints_in(run / "now")[0])]
    assert len(faults) > 100
    chosen, count = [one_of_each(calls, faults)["put in place"], *faults[::9]], 0
    for number, fault in enumerate(chosen):
        run = tmp_path / str(number)
        count += killed(run, fault=fault, **of_generations(run, eps_update="deferred"))
        begun = {call.split("-")[3] for call in calls[: fault.at - 1] if call.startswith("mkdir now/_l2l-saving-")}
        if len(begun) > 2:
            assert_all_whole(run / "now")
            assert check_whole(newest_of([run / "now"])[0]).step >= len(begun) - 2
        assert finished(run, **of_generations(run)).digest == whole.digest
        # If it was killed before the older one was deleted, and has made all its steps, there are two.
        steps = steps_in(run / "now")
        assert steps[-1] == SAVING["max_steps"] and len(steps) <= 2
        shutil.rmtree(run)
    assert count


# ---- errors of a disk


def looked_at(trainer: hf.Trainer) -> tuple[list[str], int, int]:
    """What is in the folder of a training with checkpoints that hold; the number of descriptors, and of threads that
    are not there for as long as the process is."""
    run = Path(trainer.args.output_dir)
    assert_all_whole(run)
    of_process = ("hf_l2l", "tqdm")
    threads = [each for each in threading.enumerate() if not each.name.startswith(of_process)]
    return left_in(run), len(os.listdir("/proc/self/fd")), len(threads)


@nightly
@pytest.mark.parametrize(("background", "cut"), [(False, None), (True, 3000), (False, 0), (True, None)])
def test_a_disk_that_fails_is_told_and_survived(before, whole, calls_of_background, tmp_path, background, cut):
    """The checkpoint of the other training that was to be replaced is as it was. Where files cannot grow, it is the
    system's own error in all who write: Python, `torch.save`, safetensors, and a thread in the background."""
    calls = calls_of_background if background else whole.calls
    begins = [call.startswith("mkdir _l2l-saving-") for call in calls].index(True)
    in_place = [at for at, call in enumerate(calls, 1) if call.startswith("rename")][1]
    assert calls[in_place].startswith("fsync")
    # From where the folder is made that is written to. One that is there may be made again: no error comes of that.
    save = range(begins + 1, in_place + 2)
    save = [at for at in save if not (calls[at - 1].startswith("mkdir") and calls[at - 1] in calls[: at - 1])]
    assert len(save) > 20
    fault = Fault(save[-2], error=errno.ENOSPC) if cut is None else Fault(save[0], error=errno.EFBIG, cut=cut)
    run = Path(shutil.copytree(before, tmp_path / "run"))
    found = end_of(
        Training("L2LTrainer", str(run), fault=fault, goes_on=True, options={"l2l_async_save": background}), looked_at
    )
    assert found.killed_by is None and isinstance(found.error, CheckpointSaveError), found
    assert str(run / "checkpoint-6") in str(found.error) and found.error.checkpoint == run / "checkpoint-6"
    (names, descriptors, threads), (now, descriptors_now, threads_now) = found.found
    assert now == names == ["checkpoint-2", *BOTH]
    assert threads_now == threads and descriptors_now <= descriptors
    assert found.digest == whole.digest and left_in(run) == BOTH


def test_the_benchmark_counts_what_is_resumed(capsys, tmp_path, monkeypatch):
    def counted_only(training: Training) -> Ended:
        """In place of a training: it is killed if it is to be, else ends well, and leaves an empty checkpoint."""
        (Path(training.folder) / "checkpoint-6").mkdir(parents=True, exist_ok=True)
        return Ended(training.fault and signal.SIGKILL, calls=["fsync ."] * 100, digest="the same")

    monkeypatch.setattr(kills, "end_of", counted_only)
    result = kills.main(["--scenes", "calls", "--every", "40", "--out", str(tmp_path / "kills.md")])
    theirs, *both = result["scenes"]["calls"].values()
    assert len(both) == 2
    for ours in both:
        assert ours["kills"] == ours["resumed"] == ours["right"] >= 2 and ours["errors"] == {}
    assert 0 <= theirs["right"] <= theirs["resumed"] == theirs["kills"] - sum(theirs["errors"].values())
    printed, last = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert json.loads(last) == result and printed in (tmp_path / "kills.md").read_text()


# ---- Ctrl-C and SIGTERM at a drawn moment, of a training that has its stash on disk, too


def train(folder: Path, spilled: Path, workers: int, events: Connection) -> None:
    """In a process of its own: train, and tell of each event."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    spill.is_in_memory = lambda folder: False  # the folder counts as one on a disk
    torch.set_num_threads(1)
    made = saving(
        folder,
        **{"eps_update": "deferred", "max_steps": 1000, "save_total_limit": 3, "l2l_async_save": True},
        **{"stash": "disk", "l2l_spill_dir": str(spilled), "dataloader_num_workers": workers},
    )

    def tells(owner: Any, name: str) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: (events.send(name), original(*args, **kwargs))[1])

    tells(Region, "write")
    tells(BackgroundSave, "result")
    tells(made, "training_step")
    tells(made, "_save_checkpoint")
    tells(type(made.model.bert.encoder.layer[1].output), "forward")
    try:
        made.train()
    except KeyboardInterrupt:
        events.send(traceback.format_exc())
        raise
    finally:
        atexit._run_exitfuncs()  # as an interpreter does at its end, of which a forked process has none


def ended_by_signal(folder: Path, spilled: Path, sent: int, count: int, workers: int) -> tuple[int | None, str]:
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
    status, told = ended_by_signal(folder, spilled, sent, draw.randint(20, 100), workers=seed % 3)
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
