"""A folder that is whole or absent, whenever the program that writes it ends."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from hf_l2l.checkpoint import staging
from hf_l2l.checkpoint.manifest import write_manifest
from hf_l2l.checkpoint.staging import CheckpointSaveError, Staging, remove_interrupted, staged
from rank_pool import RankPool


def write(folder: Path, content: str) -> None:
    folder.mkdir()
    (folder / "weights").write_text(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_commit_puts_it_in_place(tmp_path):
    with staged(tmp_path / "run" / "checkpoint-2") as each:
        write(each.folder, "new")
        assert not (tmp_path / "run" / "checkpoint-2").exists()
        each.commit()
    assert (tmp_path / "run" / "checkpoint-2" / "weights").read_text() == "new"
    assert names(tmp_path / "run") == ["checkpoint-2"]


def test_another_one_is_replaced_whole(tmp_path):
    write(tmp_path / "checkpoint-2", "old")
    (tmp_path / "checkpoint-2" / "more").write_text("old")
    write_manifest(tmp_path / "checkpoint-2", 2, "before", {})
    with staged(tmp_path / "checkpoint-2") as each:
        write(each.folder, "new")
        each.commit()
    assert names(tmp_path) == ["checkpoint-2"] and names(tmp_path / "checkpoint-2") == ["weights"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_error_leaves_nothing(tmp_path, error):
    write(tmp_path / "checkpoint-2", "old")
    with pytest.raises(type(error)), staged(tmp_path / "checkpoint-2") as each:
        write(each.folder, "new")
        raise error
    assert names(tmp_path) == ["checkpoint-2"] and (tmp_path / "checkpoint-2" / "weights").read_text() == "old"


def test_the_error_names_the_folder(tmp_path):
    for error in (
        OSError(28, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: File too large (os error 27)"),
        RuntimeError("basic_ios::clear: iostream error"),
    ):
        with pytest.raises(CheckpointSaveError, match=re.escape(str(error))) as told:
            with staged(tmp_path / "checkpoint-2"):
                raise error
        assert str(tmp_path / "checkpoint-2") in str(told.value)
    with pytest.raises(RuntimeError, match="^of the program$"), staged(tmp_path / "checkpoint-2"):
        raise RuntimeError("of the program")


def test_an_error_within_a_commit_puts_back_what_was_there(tmp_path, monkeypatch):
    write(tmp_path / "checkpoint-2", "old")
    renamed = os.rename

    def second_fails(source, target):
        if Path(source).name == "checkpoint-2" and Path(source).parent != tmp_path:
            raise OSError(5, "Input/output error")
        renamed(source, target)

    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(OSError, match="Input/output error"), staged(tmp_path / "checkpoint-2") as each:
        write(each.folder, "new")
        each.commit()
    assert names(tmp_path) == ["checkpoint-2"] and (tmp_path / "checkpoint-2" / "weights").read_text() == "old"


def test_nobody_else_can_read_what_is_written(tmp_path):
    with staged(tmp_path / "checkpoint-2") as each:
        assert each.parent.stat().st_mode & 0o077 == 0


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


def killed(runs: list[Path]) -> list[int]:
    """The statuses of a program for each folder, forked from this process: the first ends at its first call, the
    second at its second, until one comes to its end."""
    found = []
    for at, run in enumerate(runs, 1):
        child = os.fork()
        if child == 0:
            try:
                save(run, at)
            finally:
                os._exit(1)
        found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        if found[-1] == 0:
            break
    return found


@pytest.mark.parametrize("before", [pytest.param(None, marks=pytest.mark.slow), "old"])
def test_it_is_whole_or_absent_wherever_the_program_is_killed(tmp_path, before):
    """At every call that changes the file system."""
    runs = [tmp_path / str(at) for at in range(1, 100)]
    for run in runs:
        run.mkdir()
        if before:
            write(run / "checkpoint-2", before)
    pool = RankPool(1)
    [[*statuses, ended]] = pool.run(killed, runs)
    pool.close()
    assert ended == 0, "the program never came to its end"
    assert set(statuses) == {9} and len(statuses) >= 8
    for run in runs[: len(statuses) + 1]:
        remove_interrupted(run)
        found = (run / "checkpoint-2" / "weights").read_text() if (run / "checkpoint-2").exists() else None
        assert names(run) == (["checkpoint-2"] if found else []) and found in (before, "new")
    assert found == "new"


def test_what_another_program_is_writing_stays(tmp_path):
    each = Staging(tmp_path / "checkpoint-2")
    write(each.folder, "new")
    other = RankPool(1)
    other.run(remove_interrupted, tmp_path)
    other.close()
    each.commit()
    assert (tmp_path / "checkpoint-2" / "weights").read_text() == "new"


def test_folders_of_others_stay(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    kept = ["_l2l-saving-other-abcdefgh", "_l2l-saving-checkpoint-2-abc", "checkpoint-2", ".hidden"]
    for name in kept:
        (tmp_path / name).mkdir()
    link = tmp_path / "_l2l-saving-checkpoint-3-abcdefgh"
    link.symlink_to(tmp_path / "elsewhere")
    remove_interrupted(tmp_path)
    remove_interrupted(tmp_path / "no")
    assert names(tmp_path) == sorted([*kept, "elsewhere", link.name])


def test_without_locks_nothing_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "fcntl", None)
    (tmp_path / "_l2l-saving-checkpoint-3-abcdefgh").mkdir()
    remove_interrupted(tmp_path)
    assert names(tmp_path) == ["_l2l-saving-checkpoint-3-abcdefgh"]
