"""A training that is resumed at any step ends with the bits of the one that was never interrupted."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch.utils.data import DataLoader

from accumulated import tiny_llama
from hf_l2l import L2LTrainer
from resumed import STEPS, Augmented, MaskingCollator, Recorded, Streamed, assert_resumes_at, recorded
from tiers import combined

pytestmark = [
    # torch warns of the scheduler's order when the optimizer is loaded; plain Trainer does the same.
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*moves the weights:UserWarning"),
]

ANEW = "begin"


def whole_run(folder: Path, **options: Any) -> Recorded:
    whole = recorded(folder, **options)
    whole.made.train()
    return whole


def test_each_step(tmp_path):
    """Dropout, an order that is drawn, and random changes of rows and batches, two epochs."""
    whole = whole_run(tmp_path / "whole")
    for at in range(1, STEPS):
        assert_resumes_at(whole, at, tmp_path / f"at {at}")


class _OwnLoader(L2LTrainer):
    """Has a data loader that Accelerate has not prepared."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=8, shuffle=True, collate_fn=self.data_collator)


LLAMA = partial(tiny_llama, attention_dropout=0.1)
# The first scales are so large that steps are skipped, and growth begins anew.
FP16 = {"cmp": "fp16", "l2l_loss_scale_init": 2.0**24, "l2l_loss_scale_interval": 3}
PLATEAU = {
    **{"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5}},
    **{"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"},
}
CASES: dict[str, dict[str, Any]] = {
    "accumulated": {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 4},
    "merged": {
        **{"gradient_accumulation_steps": 3, "per_device_train_batch_size": 4},
        **{"model": LLAMA, "data": partial(Augmented, causal=True)},
    },
    "linear": {"lr_scheduler_type": "linear", "warmup_steps": 3, "ubatch_size": 3, "stash": "host"},
    "plateau": PLATEAU,
    "fp16": FP16,
    "workers": {"dataloader_num_workers": 2},
    "streamed": {"data": Streamed},
    "streamed by workers": {"data": Streamed, "dataloader_num_workers": 1},
    "an order drawn of the program's generator": {"accelerator_config": {"use_seedable_sampler": False}},
    "own loader": {"kind": _OwnLoader},
    "eager": {"eps_update": "eager", "max_grad_norm": 0.0},
    "bf16 moments": {"cmp": "bf16", "l2l_moment_dtype": "bf16", "l2l_grad_dtype": "16bit"},
}


@pytest.mark.parametrize("steps", [(1, 5, 6, 10), pytest.param(range(1, STEPS), marks=pytest.mark.slow)], ids=["some", "each"])
@pytest.mark.parametrize("case", CASES)
def test_options(tmp_path, case, steps):
    whole = whole_run(tmp_path / "whole", **CASES[case])
    if case == "fp16":
        assert 1 < whole.made.eps.loss_scale.skipped < STEPS
    for at in steps:
        assert_resumes_at(whole, at, tmp_path / f"at {at}", **CASES[case])
