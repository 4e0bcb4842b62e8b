"""When generations begin, how many steps a crash loses at most, and what is written in a day."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hf_l2l.realtime.schedule import Schedule


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def played(every: Any, step_s: float, write_s: float, steps: int) -> tuple[Schedule, list[int], list[int]]:
    """A training on a virtual clock: the steps at which generations begin, and how many steps a crash at the end of
    each step loses, once there is a generation. With a number of steps, a step waits for the generation before."""
    clock = Clock()
    schedule = Schedule(every, 0, clock)
    begun: list[int] = []
    lost: list[int] = []
    ends, whole = None, None
    for step in range(1, steps + 1):
        clock.now += step_s
        if ends is not None and clock.now >= ends:
            schedule.end(step)
            ends, whole = None, begun[-1]
        if whole is not None:
            lost.append(step - whole)
        schedule.made(step)
        if schedule.is_due(step):
            if ends is not None:
                clock.now = ends
                schedule.end(step)
                whole = begun[-1]
            schedule.begin(step)
            begun.append(step)
            ends = clock.now + write_s
    return schedule, begun, lost


@given(every=st.one_of(st.just("auto"), st.integers(1, 9)), step_s=st.integers(1, 20), write_s=st.integers(1, 60))
def test_a_crash_loses_no_more_steps_than_were_said(every, step_s, write_s):
    schedule, begun, lost = played(every, step_s, write_s, 200)
    assert begun
    assert max(lost, default=0) <= schedule.most_lost(step_s, write_s)
    if every != "auto" and write_s <= step_s * every:
        assert all(b - a == every for a, b in pairwise(begun))


def test_what_is_said():
    schedule = Schedule("auto", 0)
    assert schedule.most_lost(2.0, 5.0) == 6  # three steps between two, and three until the next one is there
    assert schedule.bytes_per_day(10**9, 2.0, 5.0) == 10**9 * 86_400 / 6
    assert Schedule(10, 0).most_lost(2.0, 5.0) == 13
    assert Schedule(10, 0).bytes_per_day(10**9, 2.0, 5.0) == 10**9 * 86_400 / 20


def test_after_a_failure_it_begins_again_later():
    schedule = Schedule("auto", 0)
    schedule.begin(1)
    schedule.end(2, failed=True)
    assert not schedule.is_due(3)
    assert schedule.is_due(102)
    assert schedule.seconds is None


def test_the_first_step_is_not_like_others():
    clock = Clock()
    schedule = Schedule("auto", 10, clock)
    for step, seconds in ((11, 5.0), (12, 0.25), (13, 0.75)):
        clock.now += seconds
        schedule.made(step)
        schedule.made(step)  # at the end of an epoch
    assert schedule.step_seconds() == 0.5
