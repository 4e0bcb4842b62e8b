"""Resumed at any step on a device with memory and a generator of its own: the bits of the unbroken training."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest

from budgeted import bert, plan_of, use_machine_of_8_mib
from resumed import STEPS, Streamed, assert_resumes_at, recorded

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")

CASES: dict[str, dict[str, Any]] = {
    "streamed weights": {"ubatch_size": 3, "stash": "host"},
    "eager": {"eps_update": "eager", "max_grad_norm": 0.0},
    "resident": {"l2l_resident": "all"},
    "boundary": {"l2l_boundary": "host", "stash": "host", "ubatch_size": 2},
    "fp16": {"cmp": "fp16", "l2l_loss_scale_init": 2.0**24, "l2l_loss_scale_interval": 3},
    "workers": {"dataloader_num_workers": 2},
    "rows from a stream": {"data": Streamed},
}


FAST = ("streamed weights", "fp16", "rows from a stream")


@pytest.mark.at_most(5)
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("case", "steps"),
    [
        *(pytest.param(case, (5,), id=case, marks=() if case in FAST else pytest.mark.slow) for case in CASES),
        *(pytest.param(case, range(1, STEPS), id=f"{case}, each step", marks=pytest.mark.slow) for case in CASES),
    ],
)
def test_with_dropout_of_the_device(tmp_path, caplog, case, steps):
    whole = recorded(tmp_path / "whole", **CASES[case])
    whole.made.train()
    assert (tmp_path / "whole" / "checkpoint-1" / "rng_state_sim.pth").is_file()
    with caplog.at_level(logging.WARNING, "hf_l2l"):
        for at in steps:
            assert_resumes_at(whole, at, tmp_path / f"at {at}", **CASES[case])
    assert "an order of rows" not in caplog.text  # the training draws of the device's generator alone


@pytest.mark.slow
def test_with_a_budget(tmp_path, monkeypatch):
    use_machine_of_8_mib(monkeypatch, tmp_path)
    options = {"model": partial(bert, dropout=0.1), "device_memory_budget": "1MiB"}
    whole = recorded(tmp_path / "whole", **options)
    whole.made.train()
    again = assert_resumes_at(whole, 5, tmp_path / "again", **options)
    assert plan_of(again.made).chosen == plan_of(whole.made).chosen
