"""The spill file: made, locked, grown, used again and removed; what is wrong with a folder is one sentence."""

from __future__ import annotations

import atexit
import errno
import gc
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.memory import host_limits
from hf_l2l.runtime.flat_memory import Room
from hf_l2l.stash import spill
from hf_l2l.stash.rooms import RoomPool
from hf_l2l.stash.spill import PREFIX, SpillFile
from models import Toy
from rank_pool import forked_context
from tiers import times


@pytest.fixture(autouse=True)
def on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of tests count as such, wherever they are."""
    monkeypatch.setattr(spill, "is_in_memory", lambda folder: False)


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def filled(room: Room, value: float, count: int) -> torch.Tensor:
    return room.tensor_like(torch.empty(count)).fill_(value)


# ---- the file


def test_the_file_is_private_has_its_space_and_is_outlived_by_tensors(tmp_path):
    made = SpillFile(tmp_path, 3)
    assert files(tmp_path) == []
    rooms = made.new_rooms(3, 10_000)
    [file] = files(tmp_path)
    status = file.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600 and file.name.startswith(f"{PREFIX}{os.getpid()}-")
    assert status.st_size >= 30_000 and status.st_blocks * 512 >= status.st_size  # else a write may end the process
    kept = [filled(room, number, 2500) for number, room in enumerate(rooms)]
    assert b"\0\0\0\x40" in file.read_bytes()  # 2.0: the tensors are in the file
    made.release()
    assert files(tmp_path) == [] and kept[2].add_(1).eq(3).all()
    again = made.new_rooms(1, 4000)  # what has a graph still may need more
    assert len(files(tmp_path)) == 1 and again[0].is_free
    del made
    gc.collect()
    assert files(tmp_path) == []


def keep_a_file(folder: Path, told: Connection) -> None:
    """In a process of its own: have a spill file until it is told to end. One that it has forked has ended before."""
    made = SpillFile(folder, 1)
    kept = made.new_rooms(1, 4096)
    if os.fork() == 0:
        atexit._run_exitfuncs()  # as an interpreter does at its end, of which a forked process has none
        os._exit(0)
    os.wait()
    told.send(len(kept))
    told.recv()
    atexit._run_exitfuncs()


@contextmanager
def another_process(folder: Path) -> Iterator[tuple[Any, Connection]]:
    """A process that has a spill file, until it is told to end."""
    context = forked_context()
    here, there = context.Pipe()
    process = context.Process(target=keep_a_file, args=(folder, there))
    process.start()
    try:
        assert here.poll(60) and here.recv() == 1
        yield process, here
    finally:
        process.kill()
        process.join()


def test_the_file_of_a_process_that_lives_stays_until_its_end(tmp_path):
    """Not only until the end of a process that it has forked."""
    with another_process(tmp_path) as (process, told):
        before = files(tmp_path)
        assert len(before) == 1
        SpillFile(tmp_path, 1).check()
        assert files(tmp_path) == before
        told.send("the end")
        process.join(60)
        assert process.exitcode == 0 and files(tmp_path) == []


def test_the_file_of_a_crashed_process_is_removed_at_the_next_start(tmp_path, monkeypatch):
    """What is no file, is a link, or belongs to another user stays."""
    (tmp_path / "other").write_text("")
    (tmp_path / f"{PREFIX}folder").mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "other")
    others = files(tmp_path)
    with another_process(tmp_path):
        pass  # it is killed
    user, before = os.getuid(), files(tmp_path)
    assert len(before) == len(others) + 1
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: user + 1)
        SpillFile(tmp_path, 1).check()
        assert files(tmp_path) == before
    SpillFile(tmp_path, 1).check()
    assert files(tmp_path) == others


def test_a_file_that_is_taken_for_one_left_behind_is_made_again(tmp_path, monkeypatch):
    """Another process starts between the making of the file and its lock."""
    flock, calls = spill.fcntl.flock, []

    def late(file: int, operation: int) -> None:
        calls.append(operation)
        if len(calls) == 1:
            SpillFile(tmp_path, 1).check()  # with a lock of its own
        if len(calls) == 4:
            raise BlockingIOError
        flock(file, operation)

    monkeypatch.setattr(spill.fcntl, "flock", late)
    made = SpillFile(tmp_path, 1)
    made.new_rooms(1, 1)
    assert len(calls) == 5 and len(files(tmp_path)) == 1


# ---- rooms


_SIZES = st.lists(st.integers(0, 40_000), min_size=1, max_size=12)


@settings(deadline=None, max_examples=times(25, 200))
@given(batches=st.lists(_SIZES, min_size=1, max_size=5), first=st.integers(1, 4))
def test_rooms_never_overlap_and_space_is_used_again(tmp_path_factory, batches, first):
    folder = tmp_path_factory.mktemp("spill")
    made = SpillFile(folder, first)
    pool = RoomPool(made.new_rooms, first)
    for sizes in batches:
        pool.drop_surplus()
        kept = []
        for number, size in enumerate(sizes):
            like = torch.empty(size, dtype=torch.uint8)
            kept.append(pool.take(size).tensor_like(like).fill_(number))
        assert all(tensor.eq(number).all() for number, tensor in enumerate(kept))
        pool.settle()
        del kept
    made.release()
    assert files(folder) == []


def test_longer_batches_take_the_space_of_shorter_ones(tmp_path):
    made = SpillFile(tmp_path, 4)
    pool = RoomPool(made.new_rooms, 4)
    sizes = []
    for pages in (1, 2, 4, 8, 16, 16, 16):
        pool.drop_surplus()
        kept = [filled(pool.take(4096 * pages), pages, 1024 * pages) for _ in range(4)]
        pool.settle()
        sizes.append(files(tmp_path)[0].stat().st_size // 4096)
        assert all(tensor.eq(pages).all() for tensor in kept)
        del kept
    assert sizes[-1] == sizes[-3] < 2 * 4 * 16


def test_rows_are_read_ahead_where_they_are(tmp_path, monkeypatch):
    made = SpillFile(tmp_path, 2)
    _, room = made.new_rooms(2, 2**20)
    rows = room.tensor_like(torch.empty(4, 2**16))
    advice = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, start, count, kind: advice.append((start, count, kind)))
    made.read_ahead(rows[1:3])
    made.read_ahead(torch.ones(3))
    half = 2**19
    assert advice == [(2**20 + 2**18, half, os.POSIX_FADV_WILLNEED)]
    advice.clear()
    made.read_ahead(rows)
    assert [start for start, _, _ in advice] == [2**20, 2**20 + half]


# ---- what is wrong with a folder


def refused(folder: object, reason: str) -> None:
    model = Toy(2)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with pytest.raises(ValueError, match="spill_dir") as error:
        attach_l2l(model, L2LConfig(stash="disk", spill_dir=folder, layer_classes=("Block",)))
    assert reason in str(error.value)
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())
    attach_l2l(model, L2LConfig(layer_classes=("Block",)))


def failing(number: int):
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_folder_that_refuses(tmp_path, monkeypatch):
    """Missing, a file, not writable, read-only, full, over its quota, a network mount without locks, one without
    maps, one whose locks are always taken."""
    refused(tmp_path / "missing", os.strerror(errno.ENOENT))
    for module, function, number in (
        ("os", "open", errno.EACCES),
        ("os", "open", errno.EROFS),
        ("os", "scandir", errno.EACCES),
        ("os", "posix_fallocate", errno.ENOSPC),
        ("os", "posix_fallocate", errno.EDQUOT),
        ("fcntl", "flock", errno.ENOLCK),
        ("fcntl", "flock", errno.EOPNOTSUPP),
        ("mmap", "mmap", errno.ENODEV),
        ("fcntl", "flock", errno.EWOULDBLOCK),
    ):
        taken = number == errno.EWOULDBLOCK
        with monkeypatch.context() as patch:
            patch.setattr(getattr(spill, module), function, failing(number))
            refused(tmp_path, "always locked by something else" if taken else os.strerror(number))
        assert files(tmp_path) == [], (function, number)
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", os.strerror(errno.ENOTDIR))


def test_a_system_without_locks_and_a_folder_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(spill, "is_in_memory", lambda folder: folder == str(tmp_path))
    with pytest.warns(UserWarning, match="spill_dir is in host memory"):
        SpillFile(tmp_path, 1).check()
    monkeypatch.setattr(spill, "fcntl", None)
    with pytest.raises(ValueError, match="stash='host'"):
        SpillFile(tmp_path, 1).check()
    attach_l2l(Toy(1), L2LConfig(stash="auto", spill_dir=tmp_path, layer_classes=("Block",)))


def test_which_folders_are_in_memory(tmp_path, monkeypatch):
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    kinds = [(Path("/"), "ext4"), (tmp_path / "a", "ext4"), (tmp_path / "a", "tmpfs")]
    mounts = [SimpleNamespace(mountpoint=str(place), fstype=kind) for place, kind in kinds]
    monkeypatch.setattr(host_limits.psutil, "disk_partitions", lambda all: mounts)
    monkeypatch.setattr(os.path, "ismount", lambda path: path in {mount.mountpoint for mount in mounts})
    assert host_limits.is_in_memory(str(below)) and not host_limits.is_in_memory(str(tmp_path))
