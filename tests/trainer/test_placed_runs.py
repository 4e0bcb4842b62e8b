"""The Trainer with weights, graphs and stash in other places: the same run, resumed under any of them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from devices import DEVICE
from placements import PLACEMENTS
from runs import UPDATED_BY, assert_run_of_plain, train
from tiers import cpu_suffices, more, nightly
from training import SAVING, inner_optimizer, l2l_trainer, logs, plain_trainer, stopped_at_two

PLANS = {name: PLACEMENTS[name].options for name in ("streamed", "shell", "first layer", "all", "kept graphs")}
PLANS["updated on the host"] = PLACEMENTS["all, updated on the host"].options
CLIPPED = {**SAVING, "max_grad_norm": 0.5}


def as_arguments(plan: str) -> dict[str, Any]:
    return {f"l2l_{name}": value for name, value in PLANS[plan].items()}


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in trainer.model.state_dict().items()}


@nightly
@cpu_suffices
@pytest.mark.parametrize(
    ("plan", "loop", "mode"),
    [("shell", "accelerate", "serial"), ("all", "trainer", "deferred"), ("kept graphs", "trainer", "eager")],
)
def test_every_loop_trains_as_with_streamed_layers(tmp_path, plan, loop, mode):
    same = {"loop": loop, "eps_update": mode, "optimizer": UPDATED_BY[mode], "accumulation": 2, "ubatch_size": 3}
    options = as_arguments(plan) if loop == "trainer" else PLANS[plan]
    found = train(**same, steps=2, folder=tmp_path / "found", **options)
    assert_run_of_plain(found, train(**same, steps=2, folder=tmp_path / "streamed"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A training of streamed layers that nothing interrupts, and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    made = l2l_trainer(folder, **CLIPPED)
    made.train()
    return logs(made), weights_of(made), str(folder / "checkpoint-2")


@cpu_suffices
@pytest.mark.parametrize(
    ("first", "then"),
    [("all", "streamed"), ("shell", "first layer"), *more(("streamed", "shell"))],
)
def test_a_checkpoint_resumes_under_any_plan(tmp_path, whole, first, then):
    logged, expected, checkpoint = whole
    if first != "streamed":
        checkpoint = stopped_at_two(l2l_trainer, tmp_path / "cut", max_grad_norm=0.5, **as_arguments(first))
    resumed = l2l_trainer(tmp_path / "resumed", **CLIPPED, **as_arguments(then))
    resumed.train(resume_from_checkpoint=checkpoint)
    assert logs(resumed)[2:4] == logged[2:4]
    assert all(torch.equal(value, expected[name]) for name, value in weights_of(resumed).items())
    state = inner_optimizer(resumed).state
    assert all(state[p]["exp_avg"].device == p.device for p in resumed.model.parameters())


@cpu_suffices
@pytest.mark.parametrize("plan", ["all", *more("updated on the host")])
def test_plain_trainer_resumes_and_is_resumed(tmp_path, plan):
    stopped_at_two(l2l_trainer, tmp_path / "begun", **as_arguments(plan))
    plain = plain_trainer(tmp_path / "plain", **SAVING)
    plain.train(resume_from_checkpoint=str(tmp_path / "begun" / "checkpoint-2"))
    assert plain.state.global_step == SAVING["max_steps"]
    resumed = l2l_trainer(tmp_path / "resumed", **{**SAVING, "max_steps": 5}, **as_arguments(plan))
    resumed.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-4"))
    assert resumed.state.global_step == 5


@cpu_suffices
def test_bf16_moments_of_a_streamed_run_are_resumed_by_a_resident_one(tmp_path):
    options = {**SAVING, "l2l_moment_dtype": "bf16"}
    l2l_trainer(tmp_path / "begun", **options).train()
    resumed = l2l_trainer(tmp_path / "resumed", **options, l2l_resident="shell")
    resumed.train(resume_from_checkpoint=str(tmp_path / "begun" / "checkpoint-2"))
    optimizer = inner_optimizer(resumed)
    for p in resumed.model.parameters():
        average = optimizer.state[p]["exp_avg"]
        short = torch.bfloat16 if p.device.type == "cpu" else torch.float32
        assert (average.device, average.dtype) == (p.device, short)


@cpu_suffices
def test_resident_weights_stay_when_the_trainer_trains_again(tmp_path):
    trainer = l2l_trainer(tmp_path, max_steps=1, l2l_resident="shell")
    trainer.train()
    before = {name: p.device.type for name, p in trainer.model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*loss_is_scaled.*")
        trainer.train()
        trainer.evaluate()
    assert {name: p.device.type for name, p in trainer.model.named_parameters()} == before
    assert before["bert.embeddings.word_embeddings.weight"] == DEVICE
    assert before["bert.encoder.layer.0.output.dense.weight"] == "cpu"
    if DEVICE != "cpu":
        assert "stays there" in trainer.l2l_summary()
