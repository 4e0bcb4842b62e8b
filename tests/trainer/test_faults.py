"""Whatever raises in a training: the program gets that exception, nothing is left behind, and the newest checkpoint is
resumed from with the bits of a training without the exception."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from hf_l2l import detach_l2l
from left_over import own_threads
from plain import small_bert, trained
from runs import assert_same_run, assert_same_tensors, run_of_trainer
from tiers import ALL, cpu_suffices
from training import l2l_trainer, left_in

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
AFTER = 2
"""Steps that are finished when something raises."""
pytestmark = pytest.mark.filterwarnings("ignore:batch 4 x accumulation 2 moves the weights")


class FaultError(Exception):
    pass


class Armed:
    """Raises an error once, from the step after `AFTER` on."""

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error
        self.trainer: Any = None

    def __call__(self, *, whatever_the_step: bool = False) -> None:
        if self.error is not None and (whatever_the_step or self.trainer.state.global_step >= AFTER):
            error, self.error = self.error, None
            raise error


EVENTS = ("on_train_begin", "on_step_end", "on_save")
MORE_EVENTS = ("on_train_end", "on_epoch_begin", "on_pre_optimizer_step", "on_substep_end", "on_log", "on_epoch_end")


class _Callback(hf.TrainerCallback):
    def __init__(self, event: str, armed: Armed) -> None:
        self.armed = armed
        self.is_at_begin = event in ("on_train_begin", "on_epoch_begin")  # before any step
        setattr(self, event, self._raise)

    def _raise(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.armed(whatever_the_step=self.is_at_begin)


def in_data(made: Any, armed: Armed) -> None:
    collate = made.data_collator

    def broken(found: Any) -> Any:
        armed()
        return collate(found)

    made.data_collator = broken


def in_metrics(made: Any, armed: Armed) -> None:
    def broken(found: Any) -> dict[str, float]:
        armed()
        return {}

    made.compute_metrics = broken


def in_loss(made: Any, armed: Armed) -> None:
    compute = made.compute_loss

    def broken(*args: Any, **kwargs: Any) -> Any:
        loss = compute(*args, **kwargs)
        armed()
        return loss

    made.compute_loss = broken


def _layer(made: Any) -> nn.Module:
    found: nn.Module = made.model.bert.encoder.layer[1].intermediate
    return found


def in_forward(made: Any, armed: Armed) -> None:
    _layer(made).register_forward_pre_hook(lambda *_: armed())


def in_recompute(made: Any, armed: Armed) -> None:
    def broken(*_: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            armed()

    _layer(made).register_forward_pre_hook(broken)


def in_backward(made: Any, armed: Armed) -> None:
    def hooked(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda gradient: armed())

    _layer(made).register_forward_hook(hooked)


PLACES: dict[str, Callable[[Any, Armed], None]] = {
    "data": in_data,
    "metrics": in_metrics,
    "loss": in_loss,
    "forward": in_forward,
    "recompute": in_recompute,
    "backward": in_backward,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = trained(l2l_trainer, tmp_path_factory.mktemp("whole"), model=small_bert(0.1), **RUN)
    detach_l2l(made.model)
    return run_of_trainer(made)


MODES: tuple[dict[str, Any], ...] = (
    {"eps_update": "deferred", "l2l_async_save": True},
    {"eps_update": "serial"},
    {"eps_update": "deferred"},
)


def cases() -> list[Any]:
    """Each place, and some of the events, with one error; `make test-all` has all of them with both."""
    found = []
    for i, place in enumerate((*PLACES, *EVENTS, *(MORE_EVENTS if ALL else ()))):
        for j, error in enumerate((FaultError, KeyboardInterrupt)):
            values = place, error, i % 4 < 2, MODES[(i + j) % len(MODES)]
            if ALL or i % 2 == j:
                found.append(pytest.param(*values, id=f"{place}-{error.__name__}"))
    return found


@cpu_suffices
@pytest.mark.parametrize(("place", "kind", "is_same_trainer", "options"), cases())
def test_an_exception_leaves_a_training_that_is_resumed(tmp_path, whole, place, kind, is_same_trainer, options):
    """By a new trainer, or by the one that was left, whose weights and moments are no longer those of a checkpoint."""
    before, error = own_threads(), kind("stop")
    armed = Armed(error)
    made = armed.trainer = l2l_trainer(tmp_path, model=small_bert(0.1), **RUN, **options)
    if place in PLACES:
        PLACES[place](made, armed)
    else:
        made.add_callback(_Callback(place, armed))
    with pytest.raises(kind) as told:
        made.train()
    assert told.value is error
    del told
    at = made.state.global_step
    folders = left_in(tmp_path)
    assert folders == [f"checkpoint-{n}" for n in range(1, len(folders) + 1)]
    kept = len(folders)
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
