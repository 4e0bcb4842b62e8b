"""A training that is resumed at any step ends with the bits of the one that was never interrupted."""

from __future__ import annotations

import gc
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
from resumed import (
    STEPS,
    Augmented,
    MaskingCollator,
    Recorded,
    Streamed,
    assert_resumes_at,
    assert_same_checkpoint,
    drawn,
    recorded,
)
from tiers import combined
from training import StopAt, tiny_bert

pytestmark = [
    # torch warns of the scheduler's order when the optimizer is loaded; plain Trainer does the same.
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*moves the weights:UserWarning"),
    pytest.mark.filterwarnings("ignore:the master weights are torch.bfloat16:UserWarning"),
]


def whole_run(folder: Path, **options: Any) -> Recorded:
    whole = recorded(folder, **options)
    whole.made.train()
    return whole


@pytest.mark.parametrize("each", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some steps", "each step"])
def test_each_step(tmp_path, each):
    """Dropout, an order that is drawn, and random changes of rows and batches, two epochs."""
    whole = whole_run(tmp_path / "whole")
    for at in range(1, STEPS) if each else (5, 6):
        assert_resumes_at(whole, at, tmp_path / f"at {at}")


@pytest.mark.slow  # a resume at some steps: `test_each_step`
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"dataloader_num_workers": 2}, marks=pytest.mark.slow)], ids=["here", "by workers"]
)
def test_interrupted_after_each_step(tmp_path, options):
    whole = whole_run(tmp_path / "whole", **options)
    batches = []
    for at in range(STEPS):
        again = recorded(tmp_path / "parts", callbacks=[StopAt(at + 1)], **options)
        if at:
            drawn()  # another program draws something else before it trains
        again.made.train(resume_from_checkpoint=at > 0)
        batches += again.batches
    assert batches == whole.batches
    assert_same_checkpoint(*(tmp_path / name / f"checkpoint-{STEPS}" for name in ("parts", "whole")))


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


class _EpochsOfFour(hf.TrainerCallback):
    """Ends each epoch after four steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step % 4 == 0


CASES: dict[str, dict[str, Any]] = {
    "accumulated": {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 4},
    "merged": {
        **{"gradient_accumulation_steps": 3, "per_device_train_batch_size": 4},
        **{"model": LLAMA, "data": partial(Augmented, causal=True)},
    },
    "linear": {"lr_scheduler_type": "linear", "warmup_steps": 3, "ubatch_size": 3, "stash": "host"},
    "plateau": PLATEAU,
    "logged seldom": {"logging_steps": 5, "eval_strategy": "epoch"},
    "logged at the end of epochs": {"logging_strategy": "epoch", "gradient_accumulation_steps": 2},
    "epochs that are cut": {
        **{"max_steps": -1, "num_train_epochs": 3, "logging_strategy": "epoch", "eval_strategy": "epoch"},
        "callbacks": [_EpochsOfFour()],
    },
    "fp16": FP16,
    "workers": {"dataloader_num_workers": 2},
    "streamed": {"data": Streamed},
    "streamed by workers": {"data": Streamed, "dataloader_num_workers": 1},
    "an order drawn of the program's generator": {"accelerator_config": {"use_seedable_sampler": False}},
    "own loader": {"kind": _OwnLoader},
    "eager": {"eps_update": "eager", "max_grad_norm": 0.0},
    "a model in 16 bits, masters in 32": {"model": lambda: tiny_bert(layers=2).bfloat16(), "cmp": "bf16"},
    "a model in 16 bits": {"model": lambda: tiny_bert(layers=2).bfloat16()},
    "saved while training goes on": {"l2l_async_save": True, "eps_update": "deferred"},
    "bf16 moments": {"cmp": "bf16", "l2l_moment_dtype": "bf16", "l2l_grad_dtype": "16bit"},
}


# The first step, one within the first epoch, its last one, one within the second; and where epochs are cut.
SOME = {"epochs that are cut": (4, 6)}


FAST = (
    *("merged", "epochs that are cut", "fp16", "workers", "a model in 16 bits, masters in 32"),
    "saved while training goes on",
)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("each", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some steps", "each step"])
@pytest.mark.parametrize("case", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in CASES])
def test_options(tmp_path, case, each):
    whole = whole_run(tmp_path / "whole", **CASES[case])
    if case == "fp16":
        assert 1 < whole.made.eps.loss_scale.skipped < STEPS
    for at in range(1, STEPS) if each else SOME.get(case, (1, 5, 6, 10)):
        assert_resumes_at(whole, at, tmp_path / f"at {at}", **CASES[case])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", ["whole epochs", "epochs that are cut"])
def test_saved_at_the_end_of_an_epoch(tmp_path, case):
    options = {**CASES.get(case, {}), "save_strategy": "epoch", "eval_strategy": "epoch"}
    whole = whole_run(tmp_path / "whole", **options)
    at = 6 if case == "whole epochs" else 4
    assert_resumes_at(whole, at, tmp_path / "again", **options)


def test_saved_when_a_callback_ends_the_training_within_an_epoch(tmp_path):
    """The checkpoint is that of the end of an epoch, of which batches are left."""
    options = {"save_strategy": "epoch"}
    whole = whole_run(tmp_path / "whole", **options)
    parts = recorded(tmp_path / "parts", **options, callbacks=[StopAt(4)])
    parts.made.train()
    again = recorded(tmp_path / "parts", **options)
    drawn()
    again.made.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-4"))
    assert parts.batches + again.batches == whole.batches
    assert_same_checkpoint(*(tmp_path / name / f"checkpoint-{STEPS}" for name in ("parts", "whole")))


def test_after_the_last_step_of_an_epoch_its_end_is_saved(tmp_path):
    """Of four steps, the last of which has fewer batches."""
    options = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 4, "eval_strategy": "epoch"}
    whole_run(tmp_path / "whole", **options, save_strategy="epoch")
    recorded(tmp_path / "parts", **options, callbacks=[StopAt(4)], save_steps=4).made.train()
    again = recorded(tmp_path / "parts", **options, save_strategy="epoch")
    drawn()
    again.made.train(resume_from_checkpoint=True)
    for step in (4, 8, STEPS):
        assert_same_checkpoint(*(tmp_path / name / f"checkpoint-{step}" for name in ("parts", "whole")))


class _SaveBeforeStep(hf.TrainerCallback):
    """Saves between backward and step, as transformers does when a machine is about to be taken away."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            self.save()


def test_a_checkpoint_of_a_step_that_is_not_made_yet_makes_it(tmp_path, caplog):
    callback = _SaveBeforeStep()
    first = recorded(tmp_path, callbacks=[callback], save_strategy="no")
    callback.save = lambda: first.made._save_checkpoint(first.made.model, None)
    first.made.train()
    again = recorded(tmp_path, save_strategy="no")
    with caplog.at_level(logging.WARNING, "hf_l2l"):
        again.made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert len(again.batches) == STEPS - 4 and "has no rng_state_data.pth" in caplog.text


# Options under which the arithmetic is the same, so that the bits are.
OTHERS: tuple[dict[str, Any], ...] = (
    {"eps_update": "serial"},
    {"eps_update": "deferred", "l2l_num_threads": 2, "stash": "host"},
    {"eps_update": "eager", "l2l_num_threads": 1, "l2l_prefetch": False},
    {"stash": "disk", "l2l_boundary": "host"},
    {"l2l_state_tier": "disk", "l2l_state_window": 3, "eps_update": "deferred"},
    {"ubatch_size": 8, "eps_update": "deferred", "stash": "host", "l2l_device_stash": 2},
)


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("first", "then"), combined(range(len(OTHERS)), range(len(OTHERS)), one_in=5))
def test_with_other_options(tmp_path, first, then):
    same = {"max_grad_norm": 0.0}
    whole = whole_run(tmp_path / "whole", **OTHERS[first], **same)
    assert_resumes_at(whole, 5, tmp_path / "again", **OTHERS[then], **same)


# ---- what is not the same is told


def said_at(tmp_path: Path, caplog: Any, at: int, *, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What the warnings of a resumed training say."""
    whole_run(tmp_path / "whole", **{"save_steps": at, **before})
    again = recorded(tmp_path / "again", **{"save_steps": STEPS, **after})
    with caplog.at_level(logging.WARNING, "hf_l2l"):
        again.made.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{at}"))
    assert again.made.state.global_step == STEPS
    return [
        record.message for record in caplog.records if record.name == "hf_l2l" and record.levelno >= logging.WARNING
    ]


def test_other_batches_are_told(tmp_path, caplog):
    after = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "seed": 3}
    assert said_at(tmp_path, caplog, 4, before={}, after=after) == [
        "the rest of this epoch's batches are others than without the interruption: per_device_train_batch_size (got "
        "4, and the checkpoint has 8), seed (got 3, and the checkpoint has 42), gradient_accumulation_steps (got 2, "
        "and the checkpoint has 1)"
    ]


def test_a_checkpoint_of_the_other_trainer_does_not_tell_what_was_drawn(tmp_path, caplog):
    before = {"kind": hf.Trainer}
    said = said_at(tmp_path, caplog, 4, before=before, after={})
    begins_anew = "checkpoint-4 has no rng_state_data.pth: what is drawn for the rest of this epoch's batches"
    assert [begins_anew in each for each in said].count(True) == 1
    caplog.clear()
    said = said_at(tmp_path, caplog, 6, before=before, after={})  # an epoch is over
    assert not any("drawn" in each for each in said)


class _OwnGenerator(MaskingCollator):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)


def test_generators_of_a_collator_are_told(tmp_path, caplog):
    options = {"collator": _OwnGenerator}
    assert said_at(tmp_path, caplog, 4, before=options, after=options) == [
        "generators of data set and collator are in no checkpoint, and begin anew (_OwnGenerator.generator): what "
        "they draw is something else than without the interruption"
    ]
    caplog.clear()
    # Each worker begins an epoch with a copy of the one here.
    options["dataloader_num_workers"] = 1
    (said,) = said_at(tmp_path / "workers", caplog, 4, before=options, after=options)
    assert said.startswith("the workers of the data loader make the first 4 batches of the epoch again")


def test_workers_that_live_on_are_told(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)  # so long it waits for their end
    options = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    said = said_at(tmp_path, caplog, 8, before=options, after=options)
    assert said[0].startswith("dataloader_persistent_workers=True: workers that live longer than an epoch begin anew")
    gc.collect()


def test_an_order_that_depends_on_the_draws_of_the_training_is_told(tmp_path, caplog):
    (said,) = said_at(tmp_path, caplog, 4, before={"data": Streamed}, after={"data": Streamed})
    assert said == (
        "the data set or its sampler draws random numbers as it goes on, and so does the training (torch): an order "
        "of rows that depends on them is another one from here on"
    )
