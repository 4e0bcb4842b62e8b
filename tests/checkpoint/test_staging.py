"""A folder that is whole or absent, whenever the program that writes it ends, and whatever its disk does."""

from __future__ import annotations

import copy
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from hf_l2l.checkpoint import staging
from hf_l2l.checkpoint.manifest import write_manifest
from hf_l2l.checkpoint.staging import CheckpointSaveError, Staging, remove_interrupted, save_errors, staged
from saving import EACH_STEP, Synced, trained
from training import l2l_trainer, plain_trainer


def write(folder: Path, content: str) -> None:
    folder.mkdir()
    (folder / "weights").write_text(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_commit_puts_a_folder_in_its_place(tmp_path):
    """Another one that was there is replaced whole. Until then, nobody else can read what is written."""
    target = tmp_path / "run" / "checkpoint-2"
    for content in ("old", "new"):
        with staged(target) as each:
            write(each.folder, content)
            assert not target.exists() or (target / "weights").read_text() == "old"
            assert each.parent.stat().st_mode & 0o077 == 0
            if content == "old":
                (each.folder / "more").write_text("old")
                write_manifest(each.folder, 2, "before", {})
            each.commit()
    assert names(tmp_path / "run") == ["checkpoint-2"] and names(target) == ["weights"]
    assert (target / "weights").read_text() == "new"


def rename_fails(patch: pytest.MonkeyPatch, folder: Path) -> None:
    rename = os.rename

    def second_fails(source: Any, target: Any) -> None:
        if Path(source).name == "checkpoint-2" and Path(source).parent != folder:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    patch.setattr(os, "rename", second_fails)


def sync_fails(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Nobody knows whether the new name is on the disk."""

    def sync(synced: Path) -> None:
        if synced == folder:
            raise OSError(errno.EIO, "Input/output error")

    patch.setattr(staging, "sync_folder", sync)


def nothing_fails(patch: pytest.MonkeyPatch, folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("fails", "error"),
    [
        (nothing_fails, KeyboardInterrupt()),
        (rename_fails, OSError(errno.ENOSPC, "No space left on device")),
        (sync_fails, OSError(errno.ENOSPC, "No space left on device")),
    ],
)
def test_an_error_leaves_what_was_there(tmp_path, monkeypatch, fails, error):
    """While files are written, or within the commit."""
    write(tmp_path / "checkpoint-2", "old")
    with monkeypatch.context() as patch, pytest.raises((CheckpointSaveError, type(error))) as told:
        fails(patch, tmp_path)
        with staged(tmp_path / "checkpoint-2") as each:
            write(each.folder, "new")
            if fails is not nothing_fails:
                each.commit()
            raise error
    assert isinstance(told.value, CheckpointSaveError) or not isinstance(error, OSError) or fails is nothing_fails
    assert names(tmp_path) == ["checkpoint-2"] and (tmp_path / "checkpoint-2" / "weights").read_text() == "old"


OF_DISKS = (
    OSError(errno.EIO, "no"),
    SafetensorError("Error while serializing: I/O error: File too large (os error 27)"),
    RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"),  # torch
    RuntimeError("basic_ios::clear: iostream error"),
)
OF_OTHERS = (
    *(ValueError("a callback's"), RuntimeError("a callback's"), torch.OutOfMemoryError("the device")),
    *(NotImplementedError(), ConnectionError("away"), TimeoutError(110, "timed out"), OSError("mine")),
)


def test_whoever_writes_the_error_of_a_disk_is_one(tmp_path):
    """The disk may be gone, too. Other errors stay what they are."""
    target = tmp_path / "no" / "checkpoint-2"
    for error in OF_DISKS:
        with pytest.raises(CheckpointSaveError) as told, save_errors(target):
            raise error
        assert told.value.errno == getattr(error, "errno", None) and told.value.__cause__ is error
        assert str(error) in str(told.value) and str(target) in str(told.value)
        again = copy.copy(told.value)  # as pickle does it
        assert str(again) == str(told.value) and again.checkpoint == target
    for error in (*OF_OTHERS, told.value):
        with pytest.raises(type(error)) as told, save_errors(target):
            raise error
        assert told.value is error


def save(run: Path, at: int) -> None:
    """A program that saves, and ends at its call of the system of this number, if it makes as many."""
    calls = 0

    def counted(name: str) -> Any:
        made = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                os._exit(9)
            return made(*args, **kwargs)

        return call

    for name in ("mkdir", "open", "fsync", "rename", "unlink", "rmdir", "close"):
        setattr(os, name, counted(name))
    each = Staging(run / "checkpoint-2")
    each.folder.mkdir()
    (each.folder / "weights").write_text("new")
    each.commit()
    os._exit(0)


def status_of(program: Callable[..., object], *args: Any) -> int:
    """The status of a process of its own."""
    child = os.fork()
    if child == 0:
        try:
            program(*args)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_it_is_whole_or_absent_wherever_the_program_is_killed(tmp_path):
    """At every call that changes the file system."""
    statuses = []
    while 0 not in statuses and len(statuses) < 100:
        run = tmp_path / str(len(statuses))
        run.mkdir()
        write(run / "checkpoint-2", "old")
        statuses.append(status_of(save, run, len(statuses) + 1))
        remove_interrupted(run)
        assert names(run) == ["checkpoint-2"]
        found = (run / "checkpoint-2" / "weights").read_text()
        assert found in ("old", "new")
    assert statuses[-1] == 0 and set(statuses[:-1]) == {9} and len(statuses) >= 9
    assert found == "new"


def test_what_is_removed_was_left_by_a_program_that_is_gone(tmp_path, monkeypatch):
    """What another one is writing stays, as do folders with other names, and what cannot be opened."""
    each = Staging(tmp_path / "checkpoint-2")
    write(each.folder, "new")
    assert status_of(remove_interrupted, tmp_path) == 0
    each.commit()
    assert (tmp_path / "checkpoint-2" / "weights").read_text() == "new"
    kept = ["_l2l-saving-other-abcdefgh", "_l2l-saving-checkpoint-2-abc", "checkpoint-2", ".hidden", "elsewhere"]
    removed = ["_l2l-saving-checkpoint-4-abcdefgh", "_l2l-removing-checkpoint-4-0123abcd"]
    link, locked = (tmp_path / f"_l2l-saving-checkpoint-{number}-abcdefgh" for number in (3, 5))
    for name in {*kept, *removed, locked.name} - {"checkpoint-2"}:
        (tmp_path / name).mkdir()
    link.symlink_to(tmp_path / "elsewhere")
    with monkeypatch.context() as patch:
        patch.setattr(staging, "fcntl", None)  # a system without locks
        remove_interrupted(tmp_path)
    assert names(tmp_path) == sorted([*kept, link.name, locked.name, removed[0]])
    opened = os.open

    def refuses(path: Any, *args: Any, **kwargs: Any) -> int:
        if Path(path) == locked:
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuses)
    remove_interrupted(tmp_path)
    remove_interrupted(tmp_path / "no")
    assert names(tmp_path) == sorted([*kept, link.name, locked.name])


def test_a_descriptor_is_closed_once(tmp_path, monkeypatch):
    """The second time, it may be somebody else's. Without one, no folder is left."""
    each = Staging(tmp_path / "checkpoint-2")
    each.folder.mkdir()
    each.commit()
    with (tmp_path / "other").open("w") as other:
        each.discard()
        other.write("is open")

    def fails(*args: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="Too many open files"):
        patched.setattr(os, "open", fails)
        Staging(tmp_path / "checkpoint-4")
    assert names(tmp_path) == ["checkpoint-2", "other"]


# ---- of a training


def test_all_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Files, to their last bytes, and folders; then the name is."""
    synced = Synced(monkeypatch)
    for background in (False, True):
        trained(tmp_path / f"run {background}", max_steps=2, l2l_async_save=background)
        assert synced.missing == [set(), set()] and f"run {background}" in synced.names
        synced.missing.clear()


def modes(checkpoint: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in (checkpoint, *checkpoint.iterdir())}


def test_a_checkpoint_has_the_modes_of_transformers_trainer(tmp_path):
    before = os.umask(0o027)
    try:
        for name, make in {"plain": plain_trainer, "ours": l2l_trainer}.items():
            trained(tmp_path / name, make, **{**EACH_STEP, "max_steps": 1})
    finally:
        os.umask(before)
    ours, theirs = (modes(tmp_path / name / "checkpoint-1") for name in ("ours", "plain"))
    own = {ours.pop(name) for name in ours.keys() - theirs.keys()}
    assert own == {0o640}  # the manifest above all
    assert ours == theirs and ours["checkpoint-1"] == 0o750
