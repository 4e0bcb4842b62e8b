"""State on disk: files without names whose memory can be freed, and the window of what is in memory, whose bytes are
bounded."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_l2l.state_tier.disk import Disk
from hf_l2l.state_tier.files import Segment
from hf_l2l.state_tier.window import Order, Window
from saving import no_space
from tiers import nightly


@dataclass(eq=False)
class Piece:
    num_bytes: int
    name: str = ""


@dataclass
class SlowDisk:
    """Transfers are over when they are waited for."""

    log: list[tuple[str, str]] = field(default_factory=list)
    leaving: dict[Piece, Waited] = field(default_factory=dict)

    def read(self, piece: Piece) -> Waited:
        self.log.append(("read", piece.name))
        return Waited()

    def leave(self, piece: Piece, *, is_changed: bool) -> Waited:
        self.log.append(("write" if is_changed else "free", piece.name))
        self.leaving[piece] = Waited()
        return self.leaving[piece]


class Waited:
    def __init__(self) -> None:
        self.is_over = False

    def done(self) -> bool:
        return self.is_over

    def result(self) -> None:
        self.is_over = True


def made(limit: int, reserve: int) -> tuple[Window, SlowDisk]:
    disk = SlowDisk()
    window = Window(disk)
    window.resize(limit, reserve)
    return window, disk


def test_what_was_used_longest_ago_leaves_and_only_what_has_changed_is_written():
    window, disk = made(limit=3, reserve=1)
    a, b, c = (Piece(1, name) for name in "abc")
    window.use([a], changes=True, is_new=True)
    window.use([b])
    window.use([a])
    window.use([c])
    window.use([b])
    assert disk.log == [("read", "b"), ("free", "b"), ("read", "c"), ("write", "a"), ("read", "b")]
    assert (window.bytes_read, window.bytes_written) == (3, 1)


def test_what_is_being_written_is_read_again_only_when_it_has_been():
    window, disk = made(limit=2, reserve=1)
    a, b = Piece(1, "a"), Piece(1, "b")
    window.use([a], changes=True, is_new=True)
    window.use([b])
    leaving = disk.leaving[a]
    window.read_ahead([a], [b])
    assert not leaving.is_over and ("read", "a") not in disk.log  # a hint waits for nothing
    window.use([a])
    assert leaving.is_over and disk.log[-1] == ("read", "a")


USES = st.lists(st.tuples(st.integers(0, 7), st.booleans(), st.booleans()), max_size=60)


@given(USES, st.lists(st.integers(1, 9), min_size=8, max_size=8), st.integers(2, 4))
def test_the_bytes_are_bounded(uses, sizes, layers):
    """By the limit, or by what is used alone; and what is used is there."""
    largest = max(sizes)
    window, disk = made(layers * largest, largest)
    pieces = [Piece(size) for size in sizes]
    for number, ahead, changes in uses:
        if ahead:
            window.read_ahead([pieces[number]], [])
        else:
            window.use([pieces[number]], changes=changes)
            reads = disk.log.count(("read", ""))
            window.use([pieces[number]])
            assert disk.log.count(("read", "")) == reads
        assert window.num_bytes() <= window.limit
    assert window.peak <= window.limit


def test_a_failed_disk_is_told_to_who_uses_the_window():
    window, disk = made(limit=2, reserve=1)
    failed: Future[None] = Future()
    failed.set_exception(OSError(5, "Input/output error"))
    disk.leave = lambda piece, is_changed: failed
    window.use([Piece(1)], changes=True, is_new=True)
    with pytest.raises(OSError, match="Input/output error"):
        for _ in range(2):
            window.use([Piece(1)], is_new=True)


def test_threads_that_use_more_than_the_window_holds_go_on(tmp_path):
    disk = Disk()
    window = Window(disk)
    window.resize(2 * 4096, 4096)
    segments = [Segment(str(tmp_path), 4096) for _ in range(6)]

    def use(first: int) -> None:
        for number in range(40):
            window.use([segments[(first + number) % 6]], changes=number % 2 == 0)

    threads = [threading.Thread(target=use, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert window.peak <= 2 * 4096
    disk.close()


def test_an_order_tells_what_followed_the_last_time():
    """Also where a sweep turns round, and a layer has another one after it."""
    order: Order[str] = Order()
    step = "shabcdhdcba"
    assert [order.next_after(each) for each in step].count(None) == len(step)
    again = [order.next_after(each) for each in step]
    assert again[2:] == [*step[3:], "s"] or again[2:-1] == list(step[3:])


def test_two_updates_do_not_hold_more_than_fits():
    """The second one waits for the first."""
    (window, _), order, may_end = made(limit=10, reserve=1), list[str](), threading.Event()

    def hold(name: str, size: int) -> None:
        with window.held([Piece(size, name)]):
            order.append(name)
            assert may_end.wait(timeout=30)
            order.append(f"{name} ended")

    first = threading.Thread(target=hold, args=("large", 7))
    first.start()
    while not order:
        pass
    second = threading.Thread(target=hold, args=("other", 6))
    second.start()
    second.join(timeout=0.2)
    assert order == ["large"]
    may_end.set()
    first.join()
    second.join()
    assert order == ["large", "large ended", "other", "other ended"] and window.peak <= 10


# ---- files


def test_values_stay_when_the_memory_is_freed(tmp_path):
    segment = Segment(str(tmp_path), 100_000)
    tensor = segment.room(0, 40_000).tensor_like(torch.empty(10_000))
    tensor.copy_(torch.arange(10_000))
    for is_changed in (True, False):
        segment.leave(is_changed=is_changed)
        assert torch.equal(tensor, torch.arange(10_000.0))
    segment.read()
    assert list(tmp_path.iterdir()) == [], "no name is left behind, whatever ends the process"


def test_tensors_keep_the_file(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    segment = Segment(str(tmp_path), 4096)
    tensor = segment.room(0, 4096).tensor_like(torch.empty(1024)).fill_(3.0)
    segment.leave(is_changed=True)
    del segment
    gc.collect()
    assert torch.equal(tensor, torch.full((1024,), 3.0))
    del tensor
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_space_is_allocated_before_it_is_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(OSError, match="No space left on device"):
        Segment(str(tmp_path), 1)


def test_changed_pages_are_written_before_they_are_freed(tmp_path, monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(os, "fdatasync", lambda file: calls.append("write"))
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: calls.append("free"))
    segment = Segment(str(tmp_path), 4096)
    segment.leave(is_changed=True)
    segment.leave(is_changed=False)
    assert calls == ["write", "free", "free"]


@pytest.mark.filterwarnings("ignore:.*is in host memory:UserWarning")
def test_the_benchmark_has_figures_and_what_was_expected(capsys):
    from benchmarks import state_tier

    sizes = ["--layers", "4", "--hidden", "64", "--steps", "2", "--window", "3", "--probed", str(2**20)]
    found = state_tier.main(sizes)
    assert found["disk"]["window"] == pytest.approx(found["estimate"]["window"], rel=0.05)
    assert found["disk"]["read"] == pytest.approx(found["estimate"]["read"], rel=0.1)
    assert found["disk"]["written"] == pytest.approx(found["estimate"]["written"], rel=0.1)
    assert "expected" in capsys.readouterr().out


# ---- a process whose memory is limited


SCRIPT = Path(__file__).parent.parent / "helpers" / "limited_state.py"
LAYER = 4 * (2 * 4 * 768**2 + 5 * 768)
"""Bytes of the masters of one of the 16 layers; with gradients and moments four times that."""
LIMIT = 950 * 2**20
"""What Python, torch, gradients (16 layers) and the window (four layers with state) take, and a little."""


@contextmanager
def group(limit: int) -> Iterator[Path | None]:
    """A control group with so much memory; None where none can be made."""
    own = Path("/proc/self/cgroup").read_text().splitlines()
    first = next((line.split(":", 2)[2] for line in own if ":memory:" in line), None)
    version_1 = Path("/sys/fs/cgroup/memory")
    parent, name = (
        (version_1, "memory.limit_in_bytes") if first is not None else (Path("/sys/fs/cgroup"), "memory.max")
    )
    made = parent / f"hf_l2l-test-{uuid.uuid4().hex}"
    try:
        made.mkdir()
        (made / name).write_text(str(limit))
    except OSError:
        yield None
        return
    try:
        yield made
    finally:
        made.rmdir()


def result(tier: str, folder: Path, within: Path | None) -> tuple[int, list[str]]:
    """The exit status, and digest, anonymous bytes and bytes of the window."""
    where = {"PYTHONPATH": str(SCRIPT.parents[2]), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    # It joins the group before it allocates anything.
    join = "" if within is None else f"echo $$ > {within / 'cgroup.procs'} && "
    command = ["sh", "-c", f'{join}exec "$0" "$@"', sys.executable, str(SCRIPT), tier, str(folder)]
    found = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env={**os.environ, **where}
    )
    lines = [line.split()[1:] for line in found.stdout.splitlines() if line.startswith("RESULT")]
    assert found.returncode in (0, -signal.SIGKILL), found.stderr[-3000:]
    return found.returncode, lines[0] if lines else []


@nightly
def test_a_model_whose_state_exceeds_the_limit_trains_to_the_same_bits(tmp_path):
    """Anonymous memory and the window stay below the limit, which masters, gradients and moments alone exceed; in
    memory, the same training is ended by the system."""
    status, (expected, in_memory, _) = result("host", tmp_path, None)
    assert status == 0 and int(in_memory) > LIMIT > 16 * LAYER * 2
    with group(LIMIT) as made:
        status, (digest, anonymous, window) = result("disk", tmp_path, made)
        assert status == 0 and digest == expected
        assert int(anonymous) + int(window) < LIMIT
        assert int(window) <= 4 * 3 * LAYER * 1.05
        if made is not None:
            assert result("host", tmp_path, made)[0] == -signal.SIGKILL
