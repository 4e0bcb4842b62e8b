"""What is told of a plan while it runs."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch

from hf_l2l.budget.watch import PlanWatch
from hf_l2l.config import L2LConfig
from hf_l2l.memory.memory_report import MemoryReport
from hf_l2l.plan.planner import Plan
from hf_l2l.plan.step_time import StepTime

MIB = 2**20


def plan(**peak: int) -> Plan:
    held = {name: size * MIB for name, size in peak.items()}
    return Plan(L2LConfig(), {"stash": "host"}, 100 * MIB, "head", held, StepTime(2.0, 1.0, 1.0, {"upload": 2.0}))


def watch(of: Plan, told: list[str] | None = None, **now: int) -> PlanWatch:
    device = {name: {"now": size * MIB, "peak": 0} for name, size in now.items()}
    # A step takes half a second; after the tenth, an evaluation takes 100.
    times = (step / 2 + 100 * (step >= 10) for step in count())
    report = MemoryReport("", {"device": device}, {}, {"now": 0, "peak": 0})
    return PlanWatch(of, lambda: report, (told if told is not None else []).append, lambda: next(times))


def test_after_20_steps_the_measured_stands_beside_the_planned():
    told: list[str] = []
    watched = watch(plan(slots=50, stash=30), told, slots=50)
    for step in range(1, 60):
        watched.step_ended()
        assert len(told) == (step >= 20)
    assert told == ["measured in 20 steps: 0.5 s per step, 0 bytes of the device at the peak (planned: 2 s, 80.0 MiB)"]


def notes(watched: PlanWatch) -> Any:
    error = torch.OutOfMemoryError("none left")
    watched.explain(error)
    return error.__notes__


def test_out_of_memory_the_term_that_was_larger_is_named():
    [note] = notes(watch(plan(slots=50, stash=30), slots=50, stash=45))
    assert "stash took 45.0 MiB (30.0 MiB planned)" in note
    assert "80.0 MiB within 100.0 MiB" in note


def test_an_error_is_explained_once():
    error, watched = torch.OutOfMemoryError("none left"), watch(plan(slots=50), slots=70)
    watched.explain(error)
    watched.explain(error)
    assert len(error.__notes__) == 1


def test_out_of_memory_though_nothing_was_larger():
    [note] = notes(watch(plan(slots=50, stash=30), slots=50, stash=30))
    assert "other programs" in note


def test_what_was_not_planned_at_all_is_named():
    [note] = notes(watch(plan(slots=50), slots=50, mask=9))
    assert "mask took 9.0 MiB (0 bytes planned)" in note
