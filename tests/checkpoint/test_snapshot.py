"""Values that are written while they change: each file has those of the beginning."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from hf_l2l.checkpoint import reserved
from hf_l2l.checkpoint.reserved import Region
from hf_l2l.checkpoint.snapshot import Snapshot


class Slow(NamedTuple):
    """A region whose writing begins and ends when the test says so."""

    file: Path
    offset: int
    values: torch.Tensor
    begun: threading.Event
    may_write: threading.Event
    written: list[tuple[int, int]]
    """Offset and first byte of all that was written, in order."""

    def write(self, descriptor: int) -> None:
        self.begun.set()
        assert self.may_write.wait(60)
        self.written.append((self.offset, int(self.values[0])))


class Run:
    """A snapshot of `count` groups of `num_bytes` bytes, and the thread that writes it."""

    def __init__(self, folder: Path, count: int, num_bytes: int = 8, room: int = 0) -> None:
        file = folder / "values"
        file.touch()
        self.written: list[tuple[int, int]] = []
        self.values = [torch.full((num_bytes,), number, dtype=torch.uint8) for number in range(count)]
        self.regions = [
            Slow(file, number, value, threading.Event(), threading.Event(), self.written)
            for number, value in enumerate(self.values)
        ]
        self.snapshot = Snapshot([[region] for region in self.regions], room)  # type: ignore[list-item]
        self.pool = ThreadPoolExecutor(4)
        self.writing = self.pool.submit(self.snapshot.write)
        assert self.regions[0].begun.wait(60)

    def let_all_write(self) -> None:
        for region in self.regions:
            region.may_write.set()
        self.writing.result(60)
        self.pool.shutdown()


def test_groups_are_written_in_order(tmp_path):
    run = Run(tmp_path, 4)
    run.let_all_write()
    assert run.written == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_what_changes_while_it_waits_to_be_written_is_copied(tmp_path):
    run = Run(tmp_path, 4, num_bytes=8, room=16)
    for number in (3, 2):
        run.snapshot.secure(number)
        run.values[number].fill_(99)
    assert run.snapshot.copied_bytes == 16
    run.let_all_write()
    assert sorted(run.written) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert run.written[1:3] == [(2, 2), (3, 3)], "copies come first, since others may wait for their memory"
    assert run.snapshot.copied_bytes == 0


def test_a_change_waits_when_there_is_no_room_for_a_copy(tmp_path):
    run = Run(tmp_path, 4, num_bytes=8, room=8)
    run.snapshot.secure(1)
    third = run.pool.submit(run.snapshot.secure, 3)
    run.regions[0].may_write.set()
    assert run.regions[1].begun.wait(60)
    assert not third.done(), "the copy of another group has the room, and nothing of this one is written"
    run.regions[3].may_write.set()  # the thread may be faster than the copy
    run.regions[1].may_write.set()
    third.result(60)
    run.let_all_write()
    assert sorted(run.written) == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_a_group_larger_than_the_room_is_written_before_its_turn(tmp_path):
    run = Run(tmp_path, 4, num_bytes=8, room=4)
    last = run.pool.submit(run.snapshot.secure, 3)
    while not run.snapshot._groups[3].is_urgent:
        threading.Event().wait(0.001)
    run.regions[0].may_write.set()
    assert run.regions[3].begun.wait(60)
    assert not last.done(), "it is being written"
    run.regions[3].may_write.set()
    last.result(60)
    run.values[3].fill_(99)
    run.let_all_write()
    assert run.written == [(0, 0), (3, 3), (1, 1), (2, 2)]


def test_a_group_that_is_being_written_is_waited_for(tmp_path):
    run = Run(tmp_path, 2, room=1000)
    first = run.pool.submit(run.snapshot.secure, 0)
    run.snapshot.secure(1)
    assert not first.done()
    run.regions[0].may_write.set()
    first.result(60)
    run.let_all_write()


def test_two_threads_may_secure_one_group(tmp_path):
    run = Run(tmp_path, 2, room=8)
    waiting = [run.pool.submit(run.snapshot.secure, 1) for _ in range(3)]
    for each in waiting:
        each.result(60)
    assert run.snapshot.copied_bytes == 8
    run.let_all_write()


def test_nobody_waits_for_what_cannot_be_written(tmp_path, monkeypatch):
    run = Run(tmp_path, 3)
    waiting = [run.pool.submit(run.snapshot.secure, number) for number in (0, 1, 2)]

    def fail(self: Slow, descriptor: int) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(Slow, "write", fail)
    run.regions[0].may_write.set()
    with pytest.raises(OSError, match="the disk is full"):
        run.writing.result(60)
    for each in waiting:
        each.result(60)
    run.snapshot.wait()
    run.pool.shutdown()


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_without_memory_for_a_copy_a_change_waits_until_the_values_are_written(tmp_path, monkeypatch, error):
    run, tried = Run(tmp_path, 3, room=16), threading.Event()

    def fail(self: torch.Tensor) -> torch.Tensor:
        tried.set()
        raise error

    monkeypatch.setattr(torch.Tensor, "clone", fail)
    waiting = run.pool.submit(run.snapshot.secure, 2)
    assert tried.wait(60)
    run.regions[0].may_write.set()
    assert run.regions[2].begun.wait(60), "somebody waits for it"
    assert not waiting.done()
    run.regions[2].may_write.set()
    waiting.result(60)
    run.values[2].fill_(99)
    run.let_all_write()
    assert sorted(run.written) == [(0, 0), (1, 1), (2, 2)]
    assert run.snapshot.copied_bytes == 0


def test_a_change_that_is_interrupted_while_it_copies_leaves_the_values_to_be_written(tmp_path, monkeypatch):
    run = Run(tmp_path, 2, room=8)

    def interrupted(self: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(torch.Tensor, "clone", interrupted)
        run.snapshot.secure(1)
    run.snapshot.secure(1)
    run.values[1].fill_(99)
    run.let_all_write()
    assert run.written == [(0, 0), (1, 1)]


def test_a_group_of_nothing_may_change_at_once():
    """As the layers of a model of which adapters alone are saved."""
    snapshot = Snapshot([[], []], room=0)
    snapshot.secure(1)
    snapshot.write()


def test_no_file_stays_open(tmp_path):
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    Run(tmp_path, 3).let_all_write()
    assert (len(os.listdir("/proc/self/fd")) if before else 0) <= before


def test_one_that_has_ended_refers_to_nobody():
    """Else who is told, which has it, would stay until the next garbage collection."""

    class Told:
        def __init__(self) -> None:
            self.snapshot = Snapshot([[]], 0, self.secured)

        def secured(self, number: int | None) -> None:
            pass

    told = Told()
    told.snapshot.write()
    found = weakref.ref(told)
    gc.disable()
    try:
        del told
        assert found() is None
    finally:
        gc.enable()


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
