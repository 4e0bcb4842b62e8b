"""State on disk: files without names whose memory can be freed, and the window of what is in memory, whose bytes are
bounded."""

from __future__ import annotations

import gc
import hashlib
import os
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.memory.host_limits import own_bytes
from hf_l2l.state_tier.disk import Disk
from hf_l2l.state_tier.files import Segment
from hf_l2l.state_tier.window import Window
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
    is_over = False

    def done(self) -> bool:
        return self.is_over

    def result(self) -> None:
        self.is_over = True


def made(limit: int, reserve: int = 1) -> tuple[Window, SlowDisk]:
    disk = SlowDisk()
    window = Window(disk)
    window.resize(limit, reserve)
    return window, disk


def test_what_was_used_longest_ago_leaves_and_only_what_has_changed_is_written():
    window, disk = made(limit=3)
    a, b, c = (Piece(1, name) for name in "abc")
    window.use([a], changes=True, is_new=True)
    window.use([b])
    window.use([a])
    window.use([c])
    window.use([b])
    assert disk.log == [("read", "b"), ("free", "b"), ("read", "c"), ("write", "a"), ("read", "b")]
    assert (window.bytes_read, window.bytes_written) == (3, 1)


def test_what_is_being_written_is_read_again_only_when_it_has_been():
    window, disk = made(limit=2)
    a, b = Piece(1, "a"), Piece(1, "b")
    window.use([a], changes=True, is_new=True)
    window.use([b])
    leaving = disk.leaving[a]
    window.read_ahead([a], [b])
    assert not leaving.is_over and ("read", "a") not in disk.log  # a hint waits for nothing
    window.use([a])
    assert leaving.is_over and disk.log[-1] == ("read", "a")


USES = st.lists(st.tuples(st.integers(0, 7), st.booleans(), st.booleans()), max_size=60)


@nightly
@given(USES, st.lists(st.integers(1, 9), min_size=8, max_size=8), st.integers(2, 4))
def test_the_bytes_are_bounded(uses, sizes, layers):
    """By the limit, or by what is used alone; and what is used is there."""
    largest = max(sizes)
    window, disk = made(layers * largest, reserve=largest)
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
    window, disk = made(limit=2)
    failed = Future[None]()
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


def test_two_updates_do_not_hold_more_than_fits():
    """The second one waits for the first."""
    (window, _), order, may_end = made(limit=10), list[str](), threading.Event()

    def hold(name: str, size: int) -> None:
        with window.held([Piece(size, name)]):
            order.append(name)
            assert may_end.wait(timeout=30)
            order.append(f"{name} ended")

    first, second = (threading.Thread(target=hold, args=given) for given in (("large", 7), ("other", 6)))
    first.start()
    while not order:
        pass
    second.start()
    second.join(timeout=0.2)
    assert order == ["large"]
    may_end.set()
    first.join()
    second.join()
    assert order == ["large", "large ended", "other", "other ended"] and window.peak <= 10


def test_values_stay_when_the_memory_is_freed_and_tensors_keep_the_file(tmp_path, monkeypatch):
    calls: list[str] = []
    for name, call in (("fdatasync", os.fdatasync), ("posix_fadvise", os.posix_fadvise)):
        monkeypatch.setattr(os, name, lambda *args, name=name, call=call: (calls.append(name), call(*args))[1])
    before = len(os.listdir("/proc/self/fd"))
    segment = Segment(str(tmp_path), 100_000)
    tensor = segment.room(0, 40_000).tensor_like(torch.empty(10_000))
    tensor.copy_(torch.arange(10_000))
    for is_changed in (True, False):
        segment.leave(is_changed=is_changed)
        assert torch.equal(tensor, torch.arange(10_000.0))
    assert calls == ["fdatasync", "posix_fadvise", "posix_fadvise"], "what has changed is written before it is freed"
    segment.read()
    assert list(tmp_path.iterdir()) == [], "no name is left behind, whatever ends the process"
    segment.leave(is_changed=True)
    del segment
    gc.collect()
    assert torch.equal(tensor, torch.arange(10_000.0))
    del tensor
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_space_is_allocated_before_it_is_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(OSError, match="No space left on device"):
        Segment(str(tmp_path), 1)


@pytest.mark.filterwarnings("ignore:.*is in host memory:UserWarning")
def test_the_benchmark_has_figures_and_what_was_expected(capsys):
    from benchmarks import state_tier

    sizes = ["--layers", "4", "--hidden", "64", "--steps", "2", "--window", "3", "--probed", str(2**20)]
    found = state_tier.main(sizes)
    for what, rel in (("window", 0.05), ("read", 0.1), ("written", 0.1)):
        assert found["disk"][what] == pytest.approx(found["estimate"][what], rel=rel)
    assert "expected" in capsys.readouterr().out


# ---- a process that has less memory than state


WIDTH, LAYERS = 768, 16
LAYER = 4 * (2 * 4 * WIDTH**2 + 5 * WIDTH)
"""Bytes of the masters of one of the layers; with gradients and moments four times that."""
LIMIT = 950 * 2**20
"""What Python, torch, gradients (16 layers) and the window (four layers with state) take, and a little."""


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))


def trained(**options: Any) -> tuple[str, int, int]:
    """In a process of its own: a digest of weights and state, the most anonymous memory beside that of libraries, the
    bytes of the window."""
    torch.manual_seed(0)
    before = own_bytes()
    model, most, is_over = nn.Sequential(*(Block() for _ in range(LAYERS))), [0], threading.Event()
    eps = attach_l2l(model, L2LConfig(layer_classes=("Block",), device="cpu", eps_update="deferred", **options))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), foreach=False))

    def watch() -> None:
        while not is_over.wait(0.005):
            most[0] = max(most[0], own_bytes())

    threading.Thread(target=watch, daemon=True).start()
    for step in range(3):
        torch.manual_seed(step)
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
    eps.synchronize()
    is_over.set()
    digest = hashlib.sha256()
    for p in model.parameters():
        for each in (p, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]):
            digest.update(memoryview(each.detach().numpy()))
    return digest.hexdigest(), most[0] - before, eps.state.window.peak if options else 0


@nightly
def test_a_model_whose_state_exceeds_the_limit_trains_to_the_same_bits(tmp_path):
    """Anonymous memory and the window stay below the limit, which masters, gradients and moments alone exceed."""
    found = []
    for options in ({}, {"state_tier": "disk", "state_dir": str(tmp_path)}):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found.append(pool.submit(partial(trained, **options)).result(300))
    (expected, in_memory, _), (digest, anonymous, window) = found
    assert in_memory > LIMIT > 16 * LAYER * 2
    assert digest == expected
    assert anonymous + window < LIMIT
    assert window <= 4 * 3 * LAYER * 1.05
