"""A checkpoint whose disk, thread or training fails while it is written: one error, nothing left of it, no thread that
waits, and the one before is resumed from."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import left_over
from hf_l2l import detach_l2l
from hf_l2l.checkpoint.finding import newest_whole
from hf_l2l.checkpoint.reserved import Region
from hf_l2l.checkpoint.staging import CheckpointSaveError, Staging, bytes_to_save
from hf_l2l.eps import updates
from runs import assert_same_run
from saving import EACH_STEP, At, Stopped, disk_is_full, saving, steps_in, stop, trained, with_methods, write_fails
from slow_disk import SlowDisk, assert_same_checkpoints
from tiers import more
from training import left_in, rows, tiny_bert

DEFERRED = {**EACH_STEP, "eps_update": "deferred"}
LATER = {**DEFERRED, "l2l_async_save": True}


def savers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hf_l2l save"]


def assert_resumed(folder: Path, step: int, whole: Any) -> None:
    """The checkpoint of `step` is the newest of the folder, nothing else is left, and it is resumed from."""
    assert newest_whole(folder) == (folder / f"checkpoint-{step}", [])
    assert left_in(folder) == [f"checkpoint-{n}" for n in range(1, step + 1)]
    for thread in savers():
        thread.join(60)
        assert not thread.is_alive()
    assert_same_run(trained(folder, resumes=True, **DEFERRED), whole)


def test_a_full_disk_is_known_before_the_first_file(tmp_path, monkeypatch):
    disk_is_full(monkeypatch)
    with pytest.raises(CheckpointSaveError, match="1.0 KiB free") as told:
        trained(tmp_path)
    assert told.value.errno == errno.ENOSPC and told.value.checkpoint == tmp_path / "checkpoint-1"
    assert left_in(tmp_path) == []


def test_room_is_asked_for_what_is_saved():
    """Of a model with adapters, these alone."""
    model = tiny_bert(layers=2)
    num_bytes = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    assert bytes_to_save(model, None) == num_bytes
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.requires_grad_(False).classifier.weight.requires_grad_(True)
    model.classifier.weight.grad = torch.ones_like(model.classifier.weight)
    optimizer.step()
    own = model.classifier.weight.nbytes
    assert bytes_to_save(model, optimizer) == num_bytes + own
    model._hf_peft_config_loaded = True  # of the adapters that transformers adds
    assert bytes_to_save(model, optimizer) == 2 * own


class FaultError(Exception):
    pass


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("step", "error"), [(4, FaultError("in values")), (3, NO_SPACE)], ids=["values", "commit"])
def test_an_error_in_the_background_ends_the_training_at_the_next_step_or_at_its_end(
    tmp_path, monkeypatch, whole, step, error
):
    name, commit = f"checkpoint-{step}", Staging.commit

    def broken(staging: Staging) -> None:
        if staging.target.name == name:
            raise error
        commit(staging)

    made, before = saving(tmp_path, **LATER), set(savers())
    with monkeypatch.context() as patch:
        if error is NO_SPACE:
            patch.setattr(Staging, "commit", broken)
        else:
            write_fails(patch, error, lambda region: f"{name}-" in str(region.file) and region.values.numel() > 1000)
        with pytest.raises(CheckpointSaveError if error is NO_SPACE else FaultError) as told:
            made.train()
    assert told.value is error or told.value.errno == errno.ENOSPC
    assert made.state.global_step in (step, min(step + 1, 4))
    assert {thread for thread in savers() if thread.is_alive()} <= before
    assert_resumed(tmp_path, step - 1, whole)


def test_an_update_that_fails_leaves_no_checkpoint_of_its_step(tmp_path, monkeypatch, whole):
    """The one that is written meanwhile has the values from before all updates."""
    made, carry_out = saving(tmp_path, **LATER), updates.carry_out
    victim = made.model.bert.encoder.layer[0].output.dense.weight

    def broken(part: Any, masters: Any, *rest: Any) -> None:
        if made.state.global_step >= 2 and any(m.parameter is victim for m in masters):
            raise FaultError("no update")
        carry_out(part, masters, *rest)

    with monkeypatch.context() as patch:
        SlowDisk(patch)
        patch.setattr(updates, "carry_out", broken)
        with pytest.raises(FaultError) as told:
            made.train()
    assert "layer.0" in " ".join(told.value.__notes__) and made.state.global_step in (2, 3)
    assert steps_in(tmp_path) in ([1], [1, 2])
    assert_resumed(tmp_path, steps_in(tmp_path)[-1], whole)


@pytest.mark.parametrize(
    ("error", "has_started"), [(KeyboardInterrupt, True), *more((RuntimeError, False), (KeyboardInterrupt, False))]
)
def test_nobody_waits_for_a_thread_that_did_not_start(tmp_path, monkeypatch, error, has_started):
    """Ctrl-C while it starts; or the system has no more threads."""
    before, start, errors = set(savers()), threading.Thread.start, [error("can't start new thread")]

    def interrupted(thread: threading.Thread) -> None:
        fails = thread.name == "hf_l2l save" and errors
        if not fails or has_started:
            start(thread)
        if fails:
            raise errors.pop()

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    made = saving(tmp_path, **LATER)
    with pytest.raises(error):
        made.train()
    assert left_in(tmp_path) == []
    for thread in savers():
        thread.join(60)
    assert {thread for thread in savers() if thread.is_alive()} <= before
    trained(tmp_path, model=made.model, **{**LATER, "max_steps": 2})
    assert newest_whole(tmp_path) == (tmp_path / "checkpoint-2", [])


def test_a_checkpoint_that_was_begun_is_finished_when_the_training_is_interrupted(tmp_path, monkeypatch, whole):
    """By two Ctrl-C, while the program waits for the disk: Python ends when the thread that writes it has ended."""
    result, interrupted = Future.result, []

    def twice(future: Future[Any], timeout: float | None = None) -> Any:
        if len(interrupted) < 2:
            assert not future.done()
            interrupted.append(future)
            raise KeyboardInterrupt
        may_write.set()
        return result(future, timeout)

    made = saving(tmp_path / "run", **LATER)
    may_write, write = threading.Event(), Region.write
    with monkeypatch.context() as patch:
        patch.setattr(Region, "write", lambda *args: (may_write.wait(60), write(*args))[1])
        patch.setattr(Future, "result", twice)
        with pytest.raises(KeyboardInterrupt):
            made.train()
    assert len(interrupted) == 2
    may_write.set()
    for thread in savers():
        assert not thread.daemon
        thread.join(60)
    shutil.copytree(Path(whole.args.output_dir) / "checkpoint-1", tmp_path / "expected" / "checkpoint-1")
    assert_same_checkpoints(tmp_path / "run", tmp_path / "expected")


class _Rows(list):
    """Rows, the 12th of which ends the worker that reads it, or raises there."""

    read, kills = 0, True

    def __getitem__(self, number: int) -> Any:
        self.read += 1
        if self.read == 12:  # of this worker
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("no row")
        return super().__getitem__(number)


@pytest.mark.parametrize(
    ("kills", "error", "words"),
    [
        (True, RuntimeError, r"DataLoader worker \(pid.*\) (is killed by signal|exited unexpectedly)"),
        (False, ArithmeticError, "no row"),
    ],
    ids=["killed", "raises"],
)
def test_a_worker_of_the_data_loader_that_ends(tmp_path, monkeypatch, whole, kills, error, words):
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)  # so long it waits for their end
    children = left_over.children()
    made = saving(tmp_path, **LATER, dataloader_num_workers=2)
    made.train_dataset = _Rows(rows())
    made.train_dataset.kills = kills
    with pytest.raises(error, match=words) as told:
        made.train()
    del told
    if steps_in(tmp_path):
        assert_resumed(tmp_path, steps_in(tmp_path)[-1], whole)
    else:  # it came before the first step was over
        assert left_in(tmp_path) == []
    assert left_over.children() <= children


def test_errors_of_the_program_in_a_save_are_its_own_and_a_folder_that_vanishes_is_one_of_the_disk(tmp_path):
    for error in (ConnectionError("the server is away"), OSError("mine")):
        with pytest.raises(OSError) as caught:
            with_methods(saving(tmp_path), _save=Mock(side_effect=error)).train()
        assert caught.value is error and left_in(tmp_path) == []

    def vanishes(trainer: Any, output_dir: str) -> None:
        shutil.rmtree(output_dir)
        open(os.path.join(output_dir, "scaler.pt"), "wb").close()

    with pytest.raises(CheckpointSaveError, match="No such file"):
        with_methods(saving(tmp_path), _save_scaler=vanishes).train()


def test_an_error_after_a_save_does_not_replace_that_of_the_training(tmp_path, monkeypatch, caplog):
    refuses = At("on_save", 3, Mock(side_effect=ValueError("a callback of ours failed")))
    made = saving(tmp_path, **{**LATER, "save_steps": 3}, callbacks=[refuses, At("on_step_begin", 3, stop)])
    SlowDisk(monkeypatch)
    with pytest.raises(Stopped):
        made.train()
    assert "a callback of ours failed" in caplog.messages and steps_in(tmp_path) == [3]


@pytest.mark.parametrize("workers", [1, *more(0, 2)])
def test_trainings_with_checkpoints_leave_nothing(workers, tmp_path):
    """Of steps alone: `tests/trainer/test_measure.py`."""
    options = {**EACH_STEP, "eps_update": "deferred", "max_steps": 3, "save_total_limit": 2}
    named, found = left_over.shared_memory(), []
    for turn in range(4):
        made = trained(tmp_path, **options, dataloader_num_workers=workers, l2l_async_save=turn % 2 == 0)
        detach_l2l(made.model)
        del made
        found.append({**left_over.counts(), "names in /dev/shm": len(left_over.shared_memory() - named)})
    left_over.assert_flat(found)
    assert left_in(tmp_path) == ["checkpoint-2", "checkpoint-3"]
