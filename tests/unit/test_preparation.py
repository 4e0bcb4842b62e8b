"""What is done before a training: a bar of what takes longer than five seconds, and the devices of a rank."""

from __future__ import annotations

import threading
import types

import pytest
import torch
import tqdm.std

from hf_l2l.hf import preparation
from hf_l2l.hf.preparation import devices_of, with_progress_bar

UNITS = [[number] for number in range(8)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """The clock of tqdm, which the test puts forward."""
    now = types.SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(tqdm.std, "time", lambda: now.seconds)
    return now


def test_a_bar_appears_after_five_seconds_and_leaves_nothing_behind(clock, capfd):
    """Also where the work fails."""
    threads = threading.active_count()
    assert all(a is b for a, b in zip(with_progress_bar(UNITS, "Moving"), UNITS, strict=True))
    went_by = with_progress_bar(UNITS, "Moving")
    for done in range(4):
        next(went_by)
        clock.seconds += 2.0
        printed = capfd.readouterr().err
        assert printed == "" if done < 3 else "Moving" in printed and "3/8" in printed
    with pytest.raises(MemoryError):
        went_by.throw(MemoryError)
    assert capfd.readouterr().err.rpartition("\r")[2].strip() == "", "the line is cleared"
    assert threading.active_count() == threads


def test_each_rank_of_a_host_has_its_share_of_the_devices(monkeypatch):
    monkeypatch.setattr(preparation.stream, "device_count", lambda device: 6)
    monkeypatch.setattr(preparation, "processes_of_this_host", lambda count: count)
    monkeypatch.setattr(preparation, "execution_devices", lambda devices: [device.index for device in devices])
    of_rank = types.SimpleNamespace(device=torch.device("cuda", 1), world_size=2)
    assert [devices_of(of_rank, asked) for asked in (None, 1, 2, 3)] == [[1, 3, 5], [1], [1, 3], [1, 3, 5]]
    with pytest.raises(ValueError, match="must be at most what a rank has"):
        devices_of(of_rank, 4)
    alone = types.SimpleNamespace(device=torch.device("cuda", 0), world_size=1)
    assert devices_of(alone, 2) == [0, 1]
