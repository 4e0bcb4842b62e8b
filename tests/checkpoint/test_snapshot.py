"""Values that are written while they change, into files with room for them: each file has those of the beginning."""

from __future__ import annotations

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hf_l2l.checkpoint import reserved
from hf_l2l.checkpoint.background import ReservedFiles
from hf_l2l.checkpoint.reserved import Region, can_reserve, reserve_safetensors, reserve_torch
from hf_l2l.checkpoint.snapshot import Snapshot
from left_over import files
from saving import no_space
from tiers import times


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

    def interrupted(self: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(torch.Tensor, "clone", interrupted)
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


# ---- files with room for values


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
