"""Segments: files without names whose memory can be freed, and whose values stay."""

from __future__ import annotations

import errno
import gc
import os

import pytest
import torch

from hf_l2l.state_tier.files import Segment


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
    def full(*args: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
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


def test_the_benchmark_has_figures_and_what_was_expected(capsys, monkeypatch):
    from benchmarks import state_tier

    monkeypatch.setattr("hf_l2l.state_tier.server.is_in_memory", lambda folder: False)
    sizes = ["--layers", "4", "--hidden", "64", "--steps", "2", "--window", "3", "--probed", str(2**20)]
    found = state_tier.main(sizes)
    assert found["disk"]["window"] == pytest.approx(found["estimate"]["window"], rel=0.05)
    assert found["disk"]["read"] == pytest.approx(found["estimate"]["read"], rel=0.1)
    assert found["disk"]["written"] == pytest.approx(found["estimate"]["written"], rel=0.1)
    assert "expected" in capsys.readouterr().out
