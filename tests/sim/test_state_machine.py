"""The state machine on the simulated accelerator: weights, moments and gradients have the bits of plain torch."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from state_machine import Machine

DRAWN = settings(deadline=None, print_blob=True, suppress_health_check=list(HealthCheck), stateful_step_count=15)


class OnSim(Machine):
    """Without dropout: the accelerator has random numbers of its own."""

    device = "sim"
    dropout = 0.0


def test_any_program_trains_as_in_plain_torch():
    run_state_machine_as_test(OnSim, settings=settings(DRAWN, max_examples=3, derandomize=True))


@pytest.mark.slow
def test_many_programs_train_as_in_plain_torch():
    run_state_machine_as_test(OnSim, settings=settings(DRAWN, max_examples=100))
