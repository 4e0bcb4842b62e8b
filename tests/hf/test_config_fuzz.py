"""Any arguments, transformers' and ours together: `L2LTrainer` trains as `Trainer` does, or raises a clear error."""

from __future__ import annotations

from typing import Any

import pytest

from config_draws import OF_SCHEDULER, OPTIMIZERS, SCHEDULERS, arguments_of, check, outcome
from hf_l2l import L2LTrainer
from tiers import combined


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "seed", [*range(30), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(30, 600))]
)
def test_drawn_arguments(tmp_path, seed):
    check(tmp_path, *arguments_of(seed))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("optim", "update"), combined(OPTIMIZERS, ["serial", "deferred", "eager"], one_in=6))
def test_every_optimizer_by_name(tmp_path, optim, update):
    theirs: dict[str, Any] = {"optim": optim, "max_grad_norm": 0.0}
    if optim.startswith(("galore", "apollo")):
        theirs["optim_target_modules"] = ["attention"]
    check(tmp_path, theirs, {"eps_update": update})


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("scheduler", "update"), combined(SCHEDULERS, ["serial", "deferred"], one_in=2))
def test_every_scheduler_by_name(tmp_path, scheduler, update):
    theirs: dict[str, Any] = {"lr_scheduler_type": scheduler, "warmup_steps": 1, "max_steps": 4}
    theirs["lr_scheduler_kwargs"] = OF_SCHEDULER.get(scheduler)
    if scheduler in ("reduce_lr_on_plateau", "greedy"):  # they read the metric of an evaluation
        theirs |= {"eval_strategy": "steps", "eval_steps": 1}
    check(tmp_path, theirs, {"eps_update": update})
    assert outcome(L2LTrainer, tmp_path / "again", theirs).error is None
