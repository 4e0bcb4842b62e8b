"""A bar appears when something takes longer than five seconds, and not before."""

from __future__ import annotations

import threading
import types

import pytest
import torch
import tqdm.std

from hf_l2l.hf import preparation
from hf_l2l.hf.preparation import with_progress_bar

UNITS = [[torch.empty(0)] for _ in range(8)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """The clock of tqdm, which the test puts forward."""
    now = types.SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(tqdm.std, "time", lambda: now.seconds)
    return now


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[preparation._Bar]:
    """The bars that are made."""
    made: list[preparation._Bar] = []

    class Bar(preparation._Bar):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(preparation, "_Bar", Bar)
    return made


def go_through(clock: types.SimpleNamespace, seconds_each: float) -> list[object]:
    found = []
    for unit in with_progress_bar(UNITS, "Moving"):
        found.append(unit)
        clock.seconds += seconds_each
    return found


@pytest.mark.parametrize("seconds", [0.0, 2.0])
def test_every_unit_comes_once_in_order(seconds, clock):
    assert all(a is b for a, b in zip(go_through(clock, seconds), UNITS, strict=True))
    assert list(with_progress_bar([], "Moving")) == []


@pytest.mark.parametrize(("seconds", "shown"), [(0.0, False), (4.999, False), (5.001, True)])
def test_what_takes_less_than_five_seconds_prints_nothing(seconds, shown, clock, capfd):
    go_through(clock, seconds / len(UNITS))
    printed = capfd.readouterr()
    assert printed.out == "" and bool(printed.err) == shown


def test_the_bar_appears_after_five_seconds_and_says_how_many_are_done(clock, capfd):
    went_by = with_progress_bar(UNITS, "Moving")
    for done in range(4):
        next(went_by)
        clock.seconds += 2.0
        printed = capfd.readouterr().err
        assert printed == "" if done < 3 else "Moving" in printed and "3/8" in printed
    went_by.close()


def test_the_bar_leaves_nothing_behind(clock, capfd):
    go_through(clock, 2.0)
    *_, last_line, end = capfd.readouterr().err.split("\r")
    assert (last_line.strip(), end) == ("", "")


def test_no_thread_is_started(clock):
    threads = threading.active_count()
    go_through(clock, 2.0)
    assert threading.active_count() == threads


def test_the_bar_is_closed_when_the_work_fails(clock, bars):
    with pytest.raises(MemoryError):
        for done, _ in enumerate(with_progress_bar(UNITS, "Moving")):
            clock.seconds += 4.0
            if done == 3:
                raise MemoryError
    (bar,) = bars
    assert bar.disable  # as `close` leaves it
