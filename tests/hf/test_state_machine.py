"""Whatever a program does to a model under L2L, in any order: it trains as in plain torch, and nothing is left."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from state_machine import Machine

DRAWN = settings(deadline=None, print_blob=True, suppress_health_check=list(HealthCheck), stateful_step_count=20)


@pytest.mark.parametrize("count", [5, *(pytest.param(count, marks=pytest.mark.slow) for count in (12, 25))])
def test_any_program_trains_as_in_plain_torch(count):
    run_state_machine_as_test(Machine, settings=settings(DRAWN, max_examples=count, derandomize=True))


@pytest.mark.slow
def test_many_programs_train_as_in_plain_torch():
    run_state_machine_as_test(Machine, settings=settings(DRAWN, max_examples=300))
