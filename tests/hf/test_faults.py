"""Whatever raises in a training: the program gets that exception, nothing is left behind, and the newest checkpoint is
resumed from with the bits of a training without the exception."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from hf_l2l import detach_l2l
from hf_l2l.checkpoint.finding import newest_whole
from left_over import own_threads
from training import assert_same_run, l2l_trainer, left_in, rows

pytestmark = pytest.mark.filterwarnings("ignore:batch 4 x accumulation 2 moves the weights")

RUN: dict[str, Any] = {
    "max_steps": 4,
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


class FaultError(Exception):
    pass


class Armed:
    """Raises an error once, from the step after `AFTER` on."""

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error
        self.trainer: Any = None

    def __call__(self) -> None:
        if self.trainer.state.global_step >= AFTER:
            self.now()

    def now(self) -> None:
        """Raise it, whatever the step."""
        error, self.error = self.error, None
        if error is not None:
            raise error


EVENTS = (
    "on_train_begin",
    "on_epoch_begin",
    "on_step_begin",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_substep_end",
    "on_step_end",
    "on_prediction_step",
    "on_evaluate",
    "on_log",
    "on_save",
    "on_epoch_end",
    "on_train_end",
)


class _Callback(hf.TrainerCallback):
    def __init__(self, event: str, armed: Armed) -> None:
        self.armed = armed
        self.is_at_begin = event in ("on_train_begin", "on_epoch_begin")  # before any step
        setattr(self, event, self._raise)

    def _raise(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.is_at_begin:
            self.armed.now()
        self.armed()


class _Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, armed: Armed) -> None:
        self.rows, self.armed = rows(), armed

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        self.armed()
        return self.rows[number]


def in_data(made: Any, armed: Armed) -> None:
    made.train_dataset = _Rows(armed)


def in_collator(made: Any, armed: Armed) -> None:
    collate = made.data_collator

    def broken(features: Any) -> Any:
        armed()
        return collate(features)

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


def in_hook(made: Any, armed: Armed) -> None:
    made.model.bert.pooler.register_forward_hook(lambda *_: armed())


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


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, armed: Armed) -> torch.Tensor:
        ctx.armed = armed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.armed()
        return gradient, None


def in_backward(made: Any, armed: Armed) -> None:
    _layer(made).register_forward_hook(lambda _, args, out: _InBackward.apply(out, armed))  # type: ignore[no-untyped-call]


PLACES: dict[str, Callable[[Any, Armed], None]] = {
    "data": in_data,
    "collator": in_collator,
    "metrics": in_metrics,
    "loss": in_loss,
    "hook": in_hook,
    "forward": in_forward,
    "recompute": in_recompute,
    "backward": in_backward,
}


def assert_same_weights(found: Any, expected: Any) -> None:
    weights = expected.model.state_dict()
    for name, value in found.model.state_dict().items():
        assert torch.equal(value, weights[name]), name


@cache
def unbroken(folder: Path) -> Any:
    whole = l2l_trainer(folder, **RUN)
    whole.train()
    return whole


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return unbroken(tmp_path_factory.mktemp("whole"))


MODES: tuple[dict[str, Any], ...] = (
    {"eps_update": "deferred", "l2l_async_save": True},
    {"eps_update": "serial"},
    {"eps_update": "deferred"},
)


def cases() -> list[Any]:
    """Each other place with one error in the normal tier."""
    found = []
    for i, place in enumerate((*PLACES, *EVENTS)):
        for j, error in enumerate((FaultError, KeyboardInterrupt)):
            marks = () if i % 4 == 2 * j else pytest.mark.slow
            values = place, error, i % 4 < 2, MODES[(i + j) % len(MODES)]
            found.append(pytest.param(*values, marks=marks, id=f"{place}-{error.__name__}"))
    return found


@pytest.mark.one_in(10)
@pytest.mark.parametrize(("place", "kind", "is_same_trainer", "options"), cases())
def test_an_exception_leaves_a_training_that_is_resumed(tmp_path, whole, place, kind, is_same_trainer, options):
    """By a new trainer, or by the one that was left, whose weights and moments are no longer those of a checkpoint."""
    before, error = own_threads(), kind("stop")
    armed = Armed(error)
    made = armed.trainer = l2l_trainer(tmp_path, **RUN, **options)
    if place in PLACES:
        PLACES[place](made, armed)
    else:
        made.add_callback(_Callback(place, armed))
    with pytest.raises(kind) as told:
        made.train()
    assert told.value is error
    del told
    at = made.state.global_step
    newest, passed_over = newest_whole(tmp_path)
    assert not passed_over
    kept = 0 if newest is None else int(newest.name.partition("-")[2])
    assert at - 1 <= kept <= at
    assert left_in(tmp_path) == [f"checkpoint-{n}" for n in range(1, kept + 1)]
    assert "on_save" not in vars(made.callback_handler)
    if not is_same_trainer:
        detach_l2l(made.model)
        made = l2l_trainer(tmp_path, **RUN, **options)
    made.train(resume_from_checkpoint=newest is not None)
    assert_same_weights(made, whole) if kept == RUN["max_steps"] else assert_same_run(made, whole)
    detach_l2l(made.model)
    for thread in own_threads() - before:
        thread.join(60)  # what has nothing to do any more may need a moment to end
    assert own_threads() <= before
