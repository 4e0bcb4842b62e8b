"""A bar appears when something takes longer than five seconds, and not before."""

from __future__ import annotations

import gc
import threading
import types

import pytest
import tqdm.std

from hf_l2l.hf.preparation import with_progress_bar

UNITS = [[number] for number in range(8)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """The clock of tqdm, which the test puts forward."""
    now = types.SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(tqdm.std, "time", lambda: now.seconds)
    return now


@pytest.mark.parametrize(("seconds", "shown"), [(0.0, False), (4.999, False), (5.001, True), (16.0, True)])
def test_a_bar_is_shown_of_what_takes_longer_and_leaves_nothing_behind(seconds, shown, clock, capfd):
    threads, found = threading.active_count(), []
    for unit in with_progress_bar(UNITS, "Moving"):
        found.append(unit)
        clock.seconds += seconds / len(UNITS)
    assert all(a is b for a, b in zip(found, UNITS, strict=True))
    assert threading.active_count() == threads
    printed = capfd.readouterr()
    assert printed.out == "" and bool(printed.err) == shown
    if shown:
        *_, last_line, end = printed.err.split("\r")
        assert (last_line.strip(), end) == ("", "")
    assert list(with_progress_bar([], "Moving")) == []


def test_the_bar_appears_after_five_seconds_and_says_how_many_are_done(clock, capfd):
    went_by = with_progress_bar(UNITS, "Moving")
    for done in range(4):
        next(went_by)
        clock.seconds += 2.0
        printed = capfd.readouterr().err
        assert printed == "" if done < 3 else "Moving" in printed and "3/8" in printed
    went_by.close()


def test_the_bar_is_closed_when_the_work_fails(clock, capfd):
    with pytest.raises(MemoryError):
        for done, _ in enumerate(with_progress_bar(UNITS, "Moving")):
            clock.seconds += 4.0
            if done == 3:
                raise MemoryError
    gc.collect()
    assert capfd.readouterr().err.rpartition("\r")[2].strip() == "", "the line is cleared"
