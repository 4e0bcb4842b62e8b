"""A checkpoint that is written in the background fails, or the training does while it is written; and a worker of the
data loader fails, or is killed."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import left_over
from hf_l2l.checkpoint.finding import newest_whole
from hf_l2l.checkpoint.reserved import Region
from hf_l2l.checkpoint.staging import Staging
from hf_l2l.eps import updates
from hf_l2l.hf import checkpoints
from slow_disk import SlowDisk
from training import assert_same_run, l2l_trainer, left_in, rows

EACH_STEP: dict[str, Any] = {
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 1,
    "lr_scheduler_type": "cosine",
    "eps_update": "deferred",
}


class FaultError(Exception):
    pass


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = l2l_trainer(tmp_path_factory.mktemp("whole"), **EACH_STEP)
    made.train()
    return made


def assert_resumed(folder: Path, step: int, whole: Any) -> None:
    """The checkpoint of `step` is the newest of the folder, nothing else is left, and it is resumed from."""
    assert newest_whole(folder) == (folder / f"checkpoint-{step}", [])
    assert left_in(folder) == [f"checkpoint-{n}" for n in range(1, step + 1)]
    for thread in threading.enumerate():
        if thread.name == "hf_l2l save":
            thread.join(60)
            assert not thread.is_alive()
    resumed = l2l_trainer(folder, **EACH_STEP)
    resumed.train(resume_from_checkpoint=True)
    assert_same_run(resumed, whole)


def in_values(patch: pytest.MonkeyPatch, error: Exception, layer: int, made: Any) -> None:
    """When the weights of one layer are written for the third checkpoint."""
    weight = made.model.bert.encoder.layer[layer].output.dense.weight
    write = Region.write

    def broken(region: Region, descriptor: int) -> None:
        if "checkpoint-3-" in str(region.file) and region.values.numel() == weight.nbytes:
            raise error
        write(region, descriptor)

    patch.setattr(Region, "write", broken)


def in_manifest(patch: pytest.MonkeyPatch, error: Exception, layer: int, made: Any) -> None:
    write = checkpoints.write_manifest

    def broken(folder: Path, step: int, *rest: Any, **options: Any) -> None:
        if step == 3:
            raise error
        write(folder, step, *rest, **options)

    patch.setattr(checkpoints, "write_manifest", broken)


def in_commit(patch: pytest.MonkeyPatch, error: Exception, layer: int, made: Any) -> None:
    commit = Staging.commit

    def broken(staging: Staging) -> None:
        if staging.target.name == "checkpoint-3":
            raise error
        commit(staging)

    patch.setattr(Staging, "commit", broken)


CASES = [(in_values, layer) for layer in (0, 3)] + [(in_manifest, 0), (in_commit, 0)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("install", "layer"), CASES)
def test_a_checkpoint_that_fails_leaves_those_before_it(install, layer, tmp_path, monkeypatch, whole):
    error = FaultError("broken")
    made = l2l_trainer(tmp_path, **EACH_STEP, l2l_async_save=True)
    with monkeypatch.context() as patch:
        install(patch, error, layer, made)
        with pytest.raises(FaultError) as told:
            made.train()
    assert told.value is error
    assert_resumed(tmp_path, 2, whole)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_an_update_that_fails_while_a_checkpoint_is_written(layer, tmp_path, monkeypatch, whole):
    """Other updates wait until their layers are written. The checkpoint has the values from before all of them."""
    SlowDisk(monkeypatch)
    carry_out, made = updates.carry_out, l2l_trainer(tmp_path, **EACH_STEP, l2l_async_save=True)
    victim = made.model.bert.encoder.layer[layer].output.dense.weight

    def broken(part: Any, masters: Any, *rest: Any) -> None:
        if made.state.global_step >= 2 and any(m.parameter is victim for m in masters):
            raise FaultError("no update")
        carry_out(part, masters, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(updates, "carry_out", broken)
        with pytest.raises(FaultError) as told:
            made.train()
    assert f"layer.{layer}" in " ".join(told.value.__notes__)
    monkeypatch.undo()
    assert_resumed(tmp_path, len(left_in(tmp_path)), whole)
    assert made.state.global_step in (2, 3)


class _Rows(torch.utils.data.Dataset[Any]):
    """Rows, the 30th of which ends the worker that reads it, or raises there."""

    def __init__(self, kills: bool) -> None:
        self.rows, self.kills, self.read = rows(), kills, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        self.read += 1
        if self.read == 12:  # of this worker
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise FaultError("no row")
        return self.rows[number]


@pytest.mark.parametrize("kills", [True, False])
def test_a_worker_of_the_data_loader_that_fails_or_is_killed(kills, tmp_path, whole):
    children = left_over.children()
    made = l2l_trainer(tmp_path, **EACH_STEP, l2l_async_save=True, dataloader_num_workers=2)
    made.train_dataset = _Rows(kills)
    words = r"DataLoader worker \(pid.*\) (is killed by signal|exited unexpectedly)" if kills else "no row"
    with pytest.raises(RuntimeError if kills else FaultError, match=words) as told:
        made.train()
    del told
    found = newest_whole(tmp_path)[0]
    if found is None:  # it came before the first step was over
        assert left_in(tmp_path) == []
    else:
        assert_resumed(tmp_path, int(found.name.partition("-")[2]), whole)
    assert left_over.children() <= children
