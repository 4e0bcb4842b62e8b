"""A folder that is whole or absent, whenever the program that writes it ends, and whatever its disk does."""

from __future__ import annotations

import copy
import errno
import gc
import itertools
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import save_file

from hf_l2l.checkpoint import reserved, staging
from hf_l2l.checkpoint.background import ReservedFiles
from hf_l2l.checkpoint.manifest import write_manifest
from hf_l2l.checkpoint.reserved import Region, can_reserve, reserve_safetensors, reserve_torch
from hf_l2l.checkpoint.snapshot import Snapshot
from hf_l2l.checkpoint.staging import CheckpointSaveError, Staging, remove_interrupted, save_errors, staged
from left_over import files
from saving import EACH_STEP, Synced, no_space, trained
from tiers import times
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


@pytest.mark.parametrize("fails", ["writing", "rename", "sync"])
def test_an_error_leaves_what_was_there(tmp_path, monkeypatch, fails):
    """While files are written, or within the commit; or nobody knows whether the new name is on the disk."""
    rename, eio = os.rename, OSError(errno.EIO, "Input/output error")

    def second_fails(source: Any, target: Any) -> None:
        if Path(source).name == "checkpoint-2" and Path(source).parent != tmp_path:
            raise eio
        rename(source, target)

    def sync(synced: Path) -> None:
        if synced == tmp_path:
            raise eio

    write(tmp_path / "checkpoint-2", "old")
    expected = KeyboardInterrupt if fails == "writing" else CheckpointSaveError
    with monkeypatch.context() as patch, pytest.raises(expected), staged(tmp_path / "checkpoint-2") as each:
        write(each.folder, "new")
        if fails == "writing":
            raise KeyboardInterrupt
        patch.setattr(*((os, "rename", second_fails) if fails == "rename" else (staging, "sync_folder", sync)))
        each.commit()
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
    calls = itertools.count(1)

    def counted(made: Any) -> Any:
        return lambda *args, **kwargs: os._exit(9) if next(calls) == at else made(*args, **kwargs)

    for name in ("mkdir", "open", "fsync", "rename", "unlink", "rmdir", "close"):
        setattr(os, name, counted(getattr(os, name)))
    each = Staging(run / "checkpoint-2")
    write(each.folder, "new")
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

    fails = Mock(side_effect=OSError(errno.EMFILE, "Too many open files"))
    with monkeypatch.context() as patched, pytest.raises(OSError, match="Too many open files"):
        patched.setattr(os, "open", fails)
        Staging(tmp_path / "checkpoint-4")
    assert names(tmp_path) == ["checkpoint-2", "other"]


def test_all_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Files, to their last bytes, and folders; then the name is."""
    synced = Synced(monkeypatch)
    for background in (False, True):
        trained(tmp_path / f"run {background}", max_steps=2, l2l_async_save=background)
        assert synced.missing == [set(), set()] and f"run {background}" in synced.names
        synced.missing.clear()


def test_a_checkpoint_has_the_modes_of_transformers_trainer(tmp_path):
    modes, before = [], os.umask(0o027)
    try:
        for make in (l2l_trainer, plain_trainer):
            folder = tmp_path / make.__name__ / "checkpoint-1"
            trained(folder.parent, make, **{**EACH_STEP, "max_steps": 1})
            modes.append({path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())})
    finally:
        os.umask(before)
    ours, theirs = modes
    assert {ours.pop(name) for name in ours.keys() - theirs.keys()} == {0o640}  # the manifest above all
    assert ours == theirs and ours["checkpoint-1"] == 0o750


# ---- values that are written while they change: each file has those of the beginning


class Slow(NamedTuple):
    """A region whose writing begins and ends when the test says so."""

    file: Path
    offset: int
    values: torch.Tensor
    begun: threading.Event
    may_write: threading.Event
    written: list[tuple[int, int]]
    """Offset and first byte of all that was written, in order."""

    def clone(self) -> Slow:
        return self._replace(values=self.values.clone())

    def write(self, descriptor: int) -> None:
        self.begun.set()
        assert self.may_write.wait(60)
        self.written.append((self.offset, int(self.values[0])))


class Run:
    """A snapshot of `count` groups of 8 bytes, and the thread that writes it."""

    def __init__(self, folder: Path, count: int, room: int = 0) -> None:
        file = folder / "values"
        file.touch()
        self.written: list[tuple[int, int]] = []
        self.values = [torch.full((8,), number, dtype=torch.uint8) for number in range(count)]
        self.regions = [
            Slow(file, number, value, threading.Event(), threading.Event(), self.written)
            for number, value in enumerate(self.values)
        ]
        self.snapshot = Snapshot([[region] for region in self.regions], room)  # type: ignore[list-item]
        self.pool = ThreadPoolExecutor(4)
        self.writing = self.pool.submit(self.snapshot.write)
        assert self.regions[0].begun.wait(60)

    def let_all_write(self) -> list[tuple[int, int]]:
        """What was written in the end, in its order."""
        for region in self.regions:
            region.may_write.set()
        self.writing.result(60)
        self.pool.shutdown()
        return self.written


def test_what_changes_while_it_waits_to_be_written_is_copied(tmp_path):
    """Copies are written first, since others may wait for their memory; several threads may ask for one."""
    open_before = files()
    run = Run(tmp_path, 4, room=16)
    for number in (3, 2):
        run.snapshot.secure(number)
        run.values[number].fill_(99)
    for each in [run.pool.submit(run.snapshot.secure, 2) for _ in range(3)]:
        each.result(60)
    assert run.snapshot.copied_bytes == 16
    written = run.let_all_write()
    assert sorted(written) == [(0, 0), (1, 1), (2, 2), (3, 3)] and written[1:3] == [(2, 2), (3, 3)]
    assert run.snapshot.copied_bytes == 0 and run.snapshot.most_copied_bytes == 16
    assert files() <= open_before
    assert Run(tmp_path, 4).let_all_write() == [(0, 0), (1, 1), (2, 2), (3, 3)], "else in their order"


@pytest.mark.parametrize("error", [None, RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_a_group_that_cannot_be_copied_is_written_before_its_turn(tmp_path, monkeypatch, error):
    """Without room for it, or without memory: the change waits until its values are written."""
    tried = threading.Event()

    class Condition(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            tried.set()
            return super().wait(timeout)

    if error is None:
        monkeypatch.setattr("hf_l2l.checkpoint.snapshot.Condition", Condition)
    run = Run(tmp_path, 4, room=4 if error is None else 16)

    def fail(self: torch.Tensor) -> torch.Tensor:
        tried.set()
        assert error is not None
        raise error

    monkeypatch.setattr(torch.Tensor, "clone", fail)
    last = run.pool.submit(run.snapshot.secure, 3)
    assert tried.wait(60)
    run.regions[0].may_write.set()
    assert run.regions[3].begun.wait(60), "somebody waits for it"
    assert not last.done(), "it is being written"
    run.regions[3].may_write.set()
    last.result(60)
    run.values[3].fill_(99)
    assert run.let_all_write() == [(0, 0), (3, 3), (1, 1), (2, 2)]
    assert run.snapshot.copied_bytes == 0


def test_nobody_waits_for_what_cannot_be_written(tmp_path, monkeypatch):
    run = Run(tmp_path, 3)
    waiting = [run.pool.submit(run.snapshot.secure, number) for number in (0, 1, 2)]
    monkeypatch.setattr(Slow, "write", no_space)
    run.regions[0].may_write.set()
    with pytest.raises(OSError, match="No space"):
        run.writing.result(60)
    for each in waiting:
        each.result(60)
    run.snapshot.wait()
    run.pool.shutdown()


def test_a_change_that_is_interrupted_while_it_copies_leaves_the_values_to_be_written(tmp_path, monkeypatch):
    run = Run(tmp_path, 2, room=8)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(torch.Tensor, "clone", Mock(side_effect=KeyboardInterrupt))
        run.snapshot.secure(1)
    run.snapshot.secure(1)
    run.values[1].fill_(99)
    assert run.let_all_write() == [(0, 0), (1, 1)]


def test_files_of_several_hosts_are_locked_where_they_are_written(tmp_path, monkeypatch):
    """A region at a time, and nothing stays locked."""
    calls: list[tuple[int, int, int]] = []
    lockf = reserved.fcntl.lockf

    def noted(descriptor: int, kind: int, length: int, start: int) -> None:
        calls.append((kind, length, start))
        lockf(descriptor, kind, length, start)

    monkeypatch.setattr(reserved.fcntl, "lockf", noted)
    (tmp_path / "file").write_bytes(bytes(64))
    regions = [Region(tmp_path / "file", at, torch.full((8,), at, dtype=torch.uint8)) for at in (8, 40)]
    Snapshot([regions], 0, locks=True).write()
    ex, un = reserved.fcntl.LOCK_EX, reserved.fcntl.LOCK_UN
    assert calls == [(ex, 8, 8), (un, 8, 8), (ex, 8, 40), (un, 8, 40)]
    assert (tmp_path / "file").read_bytes() == bytes(8) + bytes([8] * 8) + bytes(24) + bytes([40] * 8) + bytes(16)


def fill(regions: list[Region]) -> None:
    Snapshot([regions], 0).write()


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)


FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = (*FLOATS, torch.int64, torch.uint8, torch.bool, torch.int8)
NAMES = st.text(min_size=1, max_size=6).filter(lambda name: name != "__metadata__")
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
TABLES = st.dictionaries(NAMES, st.builds(tensor_of, st.sampled_from(DTYPES), SHAPES, st.integers(0, 9)), max_size=6)


@settings(max_examples=times(20, 200), deadline=None)
@given(TABLES, st.sampled_from([{}, {"format": "pt"}]))
def test_a_file_of_weights_is_the_one_of_safetensors(tmp_path_factory, tensors, metadata):
    folder = tmp_path_factory.mktemp("files")
    save_file(tensors, folder / "theirs.safetensors", metadata=metadata or None)
    fill(reserve_safetensors(tensors, folder / "ours.safetensors", metadata))
    assert (folder / "ours.safetensors").read_bytes() == (folder / "theirs.safetensors").read_bytes()


class Holder:
    """An object of the program that has a tensor."""

    def __init__(self) -> None:
        self.tensor = torch.ones(3)


def test_a_file_of_state_is_read_as_the_one_of_torch(tmp_path):
    """Values are those of the moment at which they are written; state in other objects is written at once."""
    shared = torch.randn(6)
    state: dict[str, Any] = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(3, 4), "half": torch.randn(5).bfloat16()}},
        "views": [shared[:2], shared[2:]],
        "empty": [torch.empty(0), torch.empty(0, 2)],
        "param": [torch.nn.Parameter(torch.randn(2))],
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}],
    }
    regions = reserve_torch(state, tmp_path / "ours.pt")
    assert len(regions) == 5, "one per storage that has bytes"
    before = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert not before["state"][0]["exp_avg"].any(), "values are written later"
    state["state"][0]["exp_avg"].add_(1.0)
    fill(regions)
    torch.save(state, tmp_path / "theirs.pt")
    ours, theirs = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("ours", "theirs"))
    assert str(ours) == str(theirs)
    assert torch.equal(ours["state"][0]["exp_avg"], state["state"][0]["exp_avg"])
    assert ours["views"][0].untyped_storage().data_ptr() == ours["views"][1].untyped_storage().data_ptr()
    assert reserve_torch({"a": torch.ones(2), "b": Holder()}, tmp_path / "s.pt") == []
    with torch.serialization.safe_globals([Holder]):
        assert torch.load(tmp_path / "s.pt", weights_only=True)["b"].tensor.tolist() == [1, 1, 1]


def test_what_is_not_known_is_left_to_those_who_write_it(tmp_path):
    """Dtypes of few programs; and weights that another thread writes with the function it has taken."""
    assert can_reserve([torch.ones(2), torch.ones(2, dtype=torch.bfloat16)])
    assert not can_reserve([torch.ones(2), torch.ones(2, dtype=torch.complex64)])
    assert not can_reserve([torch.ones(2, 2).to_sparse()])
    later = ReservedFiles()
    with later.weights():
        from safetensors.torch import save_file as kept
    kept({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    save_file({"a": torch.ones(3)}, tmp_path / "b.safetensors")
    assert later.regions == []
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_a_disk_without_room_is_known_at_once_and_nothing_stays_in_memory(tmp_path, monkeypatch):
    """torch keeps what it has looked up for tensors without values as long as the process lives."""
    counts = []
    for _ in range(4):
        reserve_torch({"w": [torch.ones(4) for _ in range(20)]}, tmp_path / "w")
        gc.collect()
        counts.append(len([each for each in gc.get_objects() if type(each) is torch.UntypedStorage]))
    assert counts[-1] <= counts[1]
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(OSError, match="No space left"):
        reserve_safetensors({"w": torch.ones(4)}, tmp_path / "w", {})
    with pytest.raises(OSError, match="No space left"):
        reserve_torch([torch.ones(4)], tmp_path / "w")
