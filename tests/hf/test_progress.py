"""A bar appears when something takes longer than five seconds, and not before."""

from __future__ import annotations

import threading
import types

import pytest
import torch

from hf_l2l.hf import progress
from hf_l2l.hf.progress import with_progress_bar

UNITS = [[torch.empty(0)] for _ in range(8)]


class Bar:
    """Stands in for tqdm."""

    made: list[Bar] = []

    def __init__(self, *, desc: str, total: int, initial: int, leave: bool):
        self.desc, self.total, self.shown, self.leave, self.closed = desc, total, [initial], leave, False
        Bar.made.append(self)

    def update(self, n: int = 1) -> None:
        assert not self.closed
        self.shown.append(self.shown[-1] + n)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A clock that the test puts forward."""
    now = types.SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now.seconds))
    return now


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    monkeypatch.setattr(Bar, "made", [])
    monkeypatch.setattr(progress, "tqdm", Bar)
    return Bar.made


def go_through(clock: types.SimpleNamespace, seconds_each: float) -> list[object]:
    found = []
    for unit in with_progress_bar(UNITS, "Moving"):
        found.append(unit)
        clock.seconds += seconds_each
    return found


def test_every_unit_comes_once_in_order(clock, bars):
    for seconds in (0.0, 2.0):
        assert all(a is b for a, b in zip(go_through(clock, seconds), UNITS, strict=True))
    assert list(with_progress_bar([], "Moving")) == []


def test_the_bar_appears_after_five_seconds_and_says_how_many_are_done(clock, bars):
    go_through(clock, 2.0)
    (bar,) = bars
    assert (bar.desc, bar.total, bar.leave, bar.closed) == ("Moving", 8, False, True)
    assert bar.shown == [2, 3, 4, 5, 6, 7, 8]  # the third was done after six seconds


@pytest.mark.parametrize(("seconds", "count"), [(5.0, 0), (5.001, 1)])
def test_what_takes_five_seconds_shows_nothing(seconds, count, clock, bars):
    go_through(clock, seconds / len(UNITS))
    assert len(bars) == count


def test_nothing_is_printed_and_no_thread_started_before(clock, capfd):
    threads = threading.active_count()
    go_through(clock, 0.6)
    assert capfd.readouterr() == ("", "") and threading.active_count() == threads


def test_the_bar_is_printed_and_leaves_nothing_behind(clock, capfd, monkeypatch):
    monkeypatch.setattr(progress.tqdm, "monitor_interval", 0)
    go_through(clock, 2.0)
    printed = capfd.readouterr().err
    assert "Moving" in printed and "2/8" in printed


def test_the_bar_is_closed_when_the_work_fails(clock, bars):
    with pytest.raises(MemoryError):
        for _ in with_progress_bar(UNITS, "Moving"):
            clock.seconds += 4.0
            if bars:
                raise MemoryError
    (bar,) = bars
    assert bar.closed
