"""Where the stash is kept: as asked, or the first tier that it fits; and when rows that were sent there are there."""

from __future__ import annotations

import atexit
import errno
import gc
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.eps.host_memory import HostMemory
from hf_l2l.memory import host_limits
from hf_l2l.runtime import stream
from hf_l2l.runtime.flat_memory import Room
from hf_l2l.runtime.stream import HOST
from hf_l2l.stash import spill, tiers
from hf_l2l.stash.arrivals import Arrivals
from hf_l2l.stash.rooms import RoomPool
from hf_l2l.stash.spill import PREFIX, SpillFile
from hf_l2l.stash.tiers import Tiers
from memory_switches import forced_copies
from models import Toy
from rank_pool import forked_context
from runs import assert_same_tensors
from tiers import times

GIB = 2**30


@pytest.fixture
def apart() -> Iterator[None]:
    """The device has memory of its own."""
    with forced_copies():
        yield


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tiers]:
    """Tiers of a model of 10 layers on a device of 8 GiB, beside 40 GiB of host memory."""
    monkeypatch.setattr(stream, "memory_of", lambda device: 8 * GIB)
    monkeypatch.setattr(tiers, "available_host_bytes", lambda: 40 * GIB)

    def make(stash: str = "auto", to_come: int = 0, devices: int = 1, **options: Any) -> Tiers:
        config = L2LConfig(stash=stash, spill_dir=tmp_path if stash in ("disk", "auto") else None, **options)
        memory = HostMemory(HOST, nn.Module())
        return Tiers(config, [HOST] * devices, memory, layers=10, bytes_to_come=lambda: to_come)

    return make


def of_bytes(num_bytes: float) -> torch.Tensor:
    return torch.empty(int(num_bytes), dtype=torch.uint8, device="meta")


def choice(of: Tiers, needed: float) -> str:
    """For a stash of so many bytes in all."""
    of.start_forward()
    return of.tier_of(of_bytes(needed // 10))


def test_the_first_place_that_it_fits_is_taken(apart, made, monkeypatch):
    for options, expected in (
        # Of 10 layers, one of 4 devices has at most 3; an eighth of the device, three quarters of the host.
        ({"devices": 4}, {10 / 3: "device", 3.35: "host", 30: "host", 30.01: "disk"}),
        # What the first step will take is left free.
        ({"to_come": 20 * GIB}, {15: "host", 15.01: "disk", 30: "disk"}),
        ({"to_come": 50 * GIB}, {2: "disk"}),
        ({"boundary": "host"}, {1: "host", 31: "disk"}),
        *(({"stash": stash}, {1e-9: stash, 99: stash}) for stash in ("device", "host", "disk")),
    ):
        of = made(**options)
        assert {size: choice(of, size * GIB) for size in expected} == expected, options
    monkeypatch.setattr(stream, "memory_of", lambda device: None)
    assert [choice(made(), size) for size in (1, 31 * GIB)] == ["host", "disk"], "a place may be missing"
    monkeypatch.setattr(tiers, "can_spill", lambda: False)
    assert choice(made(), 31 * GIB) == "host"


def test_host_memory_that_the_stash_has_already_counts_as_free(apart, made, monkeypatch):
    """Ten rooms of a MiB each, which a device has that copies beside the host."""
    monkeypatch.setattr(stream, "is_asynchronous", lambda device: True)
    monkeypatch.setattr(tiers, "available_host_bytes", lambda: 0)
    like = torch.empty(2**20, dtype=torch.uint8)
    of = made(boundary="host")
    assert choice(of, 7 * 2**20) == "disk"
    monkeypatch.setattr(tiers, "available_host_bytes", lambda: GIB)
    assert choice(of, 10 * 2**20) == "host"
    kept = [of.tensor_like(like) for _ in range(10)]
    of.settle()
    assert of.host_bytes() == sum(each.nbytes for each in kept)
    monkeypatch.setattr(tiers, "available_host_bytes", lambda: 0)
    assert [choice(of, size) for size in (7.4 * 2**20, 7.6 * 2**20, 15 * 2**20)] == ["host", "disk", "disk"]


def test_the_first_layer_input_decides_for_a_forward(apart, made):
    of = made()
    of.start_forward()
    assert [of.tier_of(of_bytes(size)) for size in (4 * GIB, 1)] == ["disk", "disk"]
    of.start_forward()
    assert [of.tier_of(of_bytes(size)) for size in (1, 4 * GIB)] == ["device", "device"]


def test_where_memory_is_shared_only_a_file_is_another_place(made):
    assert [choice(made(stash), 99 * GIB) for stash in ("device", "host", "auto", "disk")] == ["device"] * 3 + ["disk"]
    assert made().file is None


def test_rows_have_the_point_of_their_copy():
    arrivals, memory = Arrivals(), torch.empty(6, 2)
    assert arrivals.of(memory) == []
    arrivals.begin(memory)
    arrivals.add(memory[:2], "first")
    arrivals.add(memory[2:4], "second")
    assert [arrivals.of(memory[i : i + 2]) for i in (0, 2)] == [["first"], ["second"]]
    for rows in (memory[:3], memory.view(-1)[:4], memory[4:]):
        assert arrivals.of(rows) == ["first", "second"], "cut in another way, or not sent: there when all are"
    arrivals.add(memory[4:], None)  # it was there at once
    assert arrivals.of(memory[4:]) == [] and arrivals.of(memory) == ["first", "second"]


def test_memory_that_lies_across_earlier_memory_replaces_it():
    arrivals, memory = Arrivals(), torch.empty(12)
    for start in (0, 4, 8):
        arrivals.begin(memory[start : start + 4])
        arrivals.add(memory[start : start + 4], f"from {start}")
        arrivals.was_read(memory[start : start + 4], f"read {start}")
    arrivals.begin(memory[3:9], "allocated")
    assert arrivals.free(memory[4:6]) == ["allocated", "read 8", "read 4", "read 0"]
    assert arrivals.of(memory[:3]) == arrivals.of(memory[10:]) == []  # their memory is no more theirs
    arrivals.add(memory[3:9], "across")
    assert arrivals.of(memory[4:6]) == ["across"]


# ---- the spill file


@pytest.fixture(autouse=True)
def on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of tests count as such, wherever they are."""
    monkeypatch.setattr(spill, "is_in_memory", lambda folder: False)


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def filled(room: Room, value: float, count: int) -> torch.Tensor:
    return room.tensor_like(torch.empty(count)).fill_(value)


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


def test_a_folder_that_refuses(tmp_path, monkeypatch):
    """Not writable, read-only, full, over its quota, a network mount without locks, one without maps, one whose locks
    are always taken; or a file."""
    model = Toy(2)
    before = {name: p.clone() for name, p in model.state_dict().items()}

    def assert_refused(folder: Path, reason: str) -> None:
        with pytest.raises(ValueError, match="spill_dir") as error:
            attach_l2l(model, L2LConfig(stash="disk", spill_dir=folder, layer_classes=("Block",)))
        assert reason in str(error.value)

    for module, function, *numbers in (
        ("os", "open", errno.EACCES, errno.EROFS),
        ("os", "scandir", errno.EACCES),
        ("os", "posix_fallocate", errno.ENOSPC, errno.EDQUOT),
        ("fcntl", "flock", errno.ENOLCK, errno.EOPNOTSUPP, errno.EWOULDBLOCK),
        ("mmap", "mmap", errno.ENODEV),
    ):
        for number in numbers:
            says = os.strerror(number) if number != errno.EWOULDBLOCK else "always locked by something else"
            with monkeypatch.context() as patch:
                patch.setattr(getattr(spill, module), function, Mock(side_effect=OSError(number, os.strerror(number))))
                assert_refused(tmp_path, says)
            assert files(tmp_path) == [], (function, number)
    (tmp_path / "file").write_text("")
    assert_refused(tmp_path / "file", os.strerror(errno.ENOTDIR))
    assert_same_tensors(model.state_dict(), before)
    attach_l2l(model, L2LConfig(layer_classes=("Block",)))


def test_a_system_without_locks_has_no_stash_on_disk_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(spill, "fcntl", None)
    attach_l2l(Toy(1), L2LConfig(stash="auto", spill_dir=tmp_path, layer_classes=("Block",)))


def test_which_folders_are_in_memory(tmp_path, monkeypatch):
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    kinds = [(Path("/"), "ext4"), (tmp_path / "a", "ext4"), (tmp_path / "a", "tmpfs")]
    mounts = [SimpleNamespace(mountpoint=str(place), fstype=kind) for place, kind in kinds]
    monkeypatch.setattr(host_limits.psutil, "disk_partitions", lambda all: mounts)
    monkeypatch.setattr(os.path, "ismount", lambda path: path in {mount.mountpoint for mount in mounts})
    assert host_limits.is_in_memory(str(below)) and not host_limits.is_in_memory(str(tmp_path))
