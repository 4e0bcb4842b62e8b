"""A disk that fails while a checkpoint is saved: one error, nothing left of the checkpoint, and training can go on."""

from __future__ import annotations

import copy
import errno
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from safetensors import SafetensorError

from benchmarks.kill_points import Ended, Fault, Training, end_of
from hf_l2l.checkpoint import staging
from hf_l2l.checkpoint.finding import checkpoints_in
from hf_l2l.checkpoint.manifest import check_files, read_manifest
from hf_l2l.checkpoint.staging import CheckpointSaveError, Staging, save_errors, staged
from training import SAVING, l2l_trainer, left_in

ERRORS = [errno.ENOSPC, errno.EIO, errno.EROFS]


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training after four of six steps, with a checkpoint of another one at the sixth."""
    folder = tmp_path_factory.mktemp("before")
    end_of(Training("L2LTrainer", str(folder), seed=7, options={"save_steps": 6}))
    end_of(Training("L2LTrainer", str(folder), resumes=False, stop_at=4, options={"save_total_limit": None}))
    return folder


@pytest.fixture(scope="module")
def whole(before: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("whole")
    shutil.copytree(before, folder, dirs_exist_ok=True)
    return end_of(Training("L2LTrainer", str(folder)))


def looked_at(trainer: hf.Trainer) -> tuple[list[str], int, int]:
    """What is in the folder of a training with checkpoints that hold; the number of descriptors, and of threads that
    are not there for as long as the process is."""
    run = Path(trainer.args.output_dir)
    for folder in checkpoints_in(run):
        manifest = read_manifest(folder)
        assert manifest is not None
        check_files(folder, manifest)
    of_process = ("hf_l2l", "tqdm")
    threads = [each for each in threading.enumerate() if not each.name.startswith(of_process)]
    return left_in(run), len(os.listdir("/proc/self/fd")), len(threads)


def last_save(calls: list[str]) -> list[int]:
    """The numbers of the calls from where the folder is made that is written to, to where it is in its place. A folder
    that is there may be made again: no error comes of that."""
    made = [call.startswith("mkdir _l2l-saving-") for call in calls].index(True)
    in_place = [at for at, call in enumerate(calls, 1) if call.startswith("rename")][1]
    assert calls[in_place].startswith("fsync")
    of_save = range(made + 1, in_place + 2)
    return [at for at in of_save if not (calls[at - 1].startswith("mkdir") and calls[at - 1] in calls[: at - 1])]


def assert_told_and_survived(run: Path, fault: Fault, whole: Ended, **options: object) -> None:
    found = end_of(Training("L2LTrainer", str(run), fault=fault, goes_on=True, options=options), looked_at)
    assert found.killed_by is None and isinstance(found.error, CheckpointSaveError), (fault, found)
    assert str(run / "checkpoint-6") in str(found.error) and found.error.checkpoint == run / "checkpoint-6"
    (names, descriptors, threads), (now, descriptors_now, threads_now) = found.found
    assert now == names == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert threads_now == threads and descriptors_now <= descriptors
    assert found.digest == whole.digest
    assert left_in(run) == ["checkpoint-4", "checkpoint-6"]


@pytest.mark.parametrize("every", [200, *(pytest.param(every, marks=pytest.mark.slow) for every in (26, 1))])
def test_an_error_of_each_call(before, whole, tmp_path, every):
    """The checkpoint of the other training that was to be replaced is as it was."""
    calls = last_save(whole.calls)
    assert len(calls) > 20
    named = ("rename", "safe_save_file") if every == 200 else ("rename", "save", "safe_save_file")
    renames = {at for at in calls if whole.calls[at - 1].startswith(named)}
    for number, at in enumerate(sorted({*calls[::every], *renames, calls[-1]})):
        for error in ERRORS if every == 1 else [ERRORS[number % 3]]:
            run = Path(shutil.copytree(before, tmp_path / f"{at}-{error}"))
            assert_told_and_survived(run, Fault(at, error=error), whole)


@pytest.mark.parametrize("every", [30, *(pytest.param(every, marks=pytest.mark.slow) for every in (16, 1))])
def test_an_error_of_each_call_in_the_background(before, whole, tmp_path, every):
    run = Path(shutil.copytree(before, tmp_path / "calls"))
    unharmed = end_of(Training("L2LTrainer", str(run), options={"l2l_async_save": True}))
    assert unharmed.digest == whole.digest
    for number, at in enumerate(last_save(unharmed.calls)[::every]):
        run = Path(shutil.copytree(before, tmp_path / str(at)))
        assert_told_and_survived(run, Fault(at, error=ERRORS[number % 3]), whole, l2l_async_save=True)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("size", [0, 3000, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("background", [False, True], ids=["", "background"])
def test_files_cannot_grow(before, whole, tmp_path, size, background):
    """The system's own error in all who write: Python, `torch.save`, safetensors, and a thread in the background."""
    first = last_save(whole.calls)[0]
    run = Path(shutil.copytree(before, tmp_path / "run"))
    fault = Fault(first, error=errno.EFBIG, cut=size)
    assert_told_and_survived(run, fault, whole, l2l_async_save=background)


def test_a_full_disk_is_known_before_the_first_file(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1024))
    trainer = l2l_trainer(tmp_path, **SAVING)
    with pytest.raises(
        CheckpointSaveError, match=r"1.0 KiB free for .* of weights .* with save_total_limit"
    ) as caught:
        trainer.train()
    assert caught.value.errno == errno.ENOSPC and caught.value.checkpoint == tmp_path / "checkpoint-2"
    assert left_in(tmp_path) == []


# ---- the parts


def test_a_folder_that_is_perhaps_not_on_the_disk_is_taken_back(tmp_path, monkeypatch):
    target, calls = tmp_path / "checkpoint-2", []

    def sync(folder: Path) -> None:
        calls.append(folder)
        if folder == tmp_path:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(staging, "sync_folder", sync)
    target.mkdir()
    (target / "old").write_text("")
    with (
        pytest.raises(CheckpointSaveError, match=f"Input/output error.* while saving {target}"),
        staged(target) as each,
    ):
        each.folder.mkdir()
        each.commit()
    # What was there before is back: that its name is not known to be on the disk is no news.
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoint-2", "old"]


def test_what_is_done_is_done_once(tmp_path):
    """A descriptor that is closed twice may be somebody else's the second time."""
    each = Staging(tmp_path / "checkpoint-2")
    each.folder.mkdir()
    each.commit()
    descriptors = os.listdir("/proc/self/fd")
    other = os.open(tmp_path, os.O_RDONLY)
    each.discard()
    os.close(other)
    assert os.listdir("/proc/self/fd") == descriptors


def test_without_a_descriptor_no_folder_is_left(tmp_path, monkeypatch):
    def fails(*args: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="Too many open files"):
        patched.setattr(os, "open", fails)
        Staging(tmp_path / "checkpoint-2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.EIO, "no"), errno.EIO),
        (SafetensorError("no"), None),
        (RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"), None),
    ],
)
def test_whoever_writes_the_error_is_one(tmp_path, error, number):
    with pytest.raises(CheckpointSaveError) as caught, save_errors(tmp_path / "checkpoint-2"):
        raise error
    assert caught.value.errno == number and caught.value.__cause__ is error
    assert str(error) in str(caught.value) and "bytes free without the checkpoint" in str(caught.value)
    again = copy.copy(caught.value)  # as pickle does it
    assert str(again) == str(caught.value) and again.checkpoint == tmp_path / "checkpoint-2"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a callback's"),
        RuntimeError("a callback's"),
        torch.OutOfMemoryError("the device"),
        NotImplementedError(),
    ],
)
def test_what_is_no_error_of_a_disk_stays_what_it_is(tmp_path, error):
    with pytest.raises(type(error)) as caught, save_errors(tmp_path / "no" / "checkpoint-2"):
        raise error
    assert caught.value is error


def test_the_disk_that_has_failed_may_be_gone(tmp_path):
    with (
        pytest.raises(CheckpointSaveError, match="got .Errno 5. no, while"),
        save_errors(tmp_path / "no" / "checkpoint-2"),
    ):
        raise OSError(errno.EIO, "no")
