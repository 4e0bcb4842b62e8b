"""Whatever raises in a training: the program gets that exception, nothing is left behind, and the newest checkpoint is
resumed from with the bits of a training without the exception."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l import detach_l2l
from left_over import own_threads
from plain import small_bert, trained
from runs import assert_same_run, assert_same_tensors, run_of_trainer
from tiers import ALL, cpu_suffices, more
from training import l2l_trainer, left_in, on

RUN: dict[str, Any] = {
    "max_steps": 3,
    "save_strategy": "steps",
    "save_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "lr_scheduler_type": "cosine",
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 4,
}
pytestmark = pytest.mark.filterwarnings("ignore:batch 4 x accumulation 2 moves the weights")


class FaultError(Exception):
    pass


class Armed:
    """Raises an error once, after two steps."""

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error
        self.trainer: Any = None

    def __call__(self, *, whatever_the_step: bool = False) -> None:
        if self.error is not None and (whatever_the_step or self.trainer.state.global_step >= 2):
            error, self.error = self.error, None
            raise error


def install(made: Any, place: str, armed: Armed) -> None:
    """Something in this place of the training, or a callback for this event, calls `armed`."""
    layer: nn.Module = made.model.bert.encoder.layer[1].intermediate
    collate, compute_loss = made.data_collator, made.compute_loss

    def in_loss(*args: Any, **kwargs: Any) -> Any:
        loss = compute_loss(*args, **kwargs)
        armed()
        return loss

    def in_recompute(*_: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            armed()

    def in_backward(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda gradient: armed())

    if place == "data":
        made.data_collator = lambda found: armed() or collate(found)
    elif place == "metrics":
        made.compute_metrics = lambda found: armed() or {}
    elif place == "loss":
        made.compute_loss = in_loss
    elif place in ("forward", "recompute"):
        layer.register_forward_pre_hook(in_recompute if place == "recompute" else lambda *_: armed())
    elif place == "backward":
        layer.register_forward_hook(in_backward)
    else:
        is_at_begin = place in ("on_train_begin", "on_epoch_begin")  # before any step
        made.add_callback(on(place, lambda *_, **__: armed(whatever_the_step=is_at_begin)))


PLACES = [
    *("data", "metrics", "loss", "forward", "recompute", "backward"),
    *("on_train_begin", "on_step_end", "on_save"),
    *more("on_train_end", "on_epoch_begin", "on_pre_optimizer_step", "on_substep_end", "on_log", "on_epoch_end"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = trained(l2l_trainer, tmp_path_factory.mktemp("whole"), model=small_bert(0.1), **RUN)
    detach_l2l(made.model)
    return run_of_trainer(made)


MODES: list[dict[str, Any]] = [
    {"eps_update": "deferred", "l2l_async_save": True},
    {"eps_update": "serial"},
    {"eps_update": "deferred"},
]
CASES = [
    pytest.param(place, kind, i % 4 < 2, MODES[(i + j) % 3], id=f"{place}-{kind.__name__}")
    for i, place in enumerate(PLACES)
    for j, kind in enumerate((FaultError, KeyboardInterrupt))
    if ALL or i % 2 == j
]
"""Each place with one error; `make test-all` has both."""


@cpu_suffices
@pytest.mark.parametrize(("place", "kind", "is_same_trainer", "options"), CASES)
def test_an_exception_leaves_a_training_that_is_resumed(tmp_path, whole, place, kind, is_same_trainer, options):
    """By a new trainer, or by the one that was left, whose weights and moments are no longer those of a checkpoint."""
    before, error = own_threads(), kind("stop")
    armed = Armed(error)
    made = armed.trainer = l2l_trainer(tmp_path, model=small_bert(0.1), **RUN, **options)
    install(made, place, armed)
    with pytest.raises(kind) as told:
        made.train()
    assert told.value is error
    del told
    at, kept = made.state.global_step, len(left_in(tmp_path))
    assert left_in(tmp_path) == [f"checkpoint-{n}" for n in range(1, kept + 1)]
    assert at - 1 <= kept <= at
    if not is_same_trainer:
        detach_l2l(made.model)
        made = l2l_trainer(tmp_path, model=small_bert(0.1), **RUN, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")  # of a scheduler that is loaded
        made.train(resume_from_checkpoint=kept > 0)
    if kept == RUN["max_steps"]:
        assert_same_tensors(run_of_trainer(made).weights, whole.weights)
    else:
        assert_same_run(run_of_trainer(made), whole)
    detach_l2l(made.model)
    for thread in own_threads() - before:
        thread.join(60)  # what has nothing to do any more may need a moment to end
    assert own_threads() <= before
