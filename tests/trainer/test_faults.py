"""Whatever raises in a training: the program gets that exception, nothing is left behind, and the newest checkpoint is
resumed from with the bits of a training without the exception. In a step of any loop it is told with its layer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import fault_cases
from devices import DEVICE
from hf_l2l import detach_l2l
from left_over import own_threads
from memory_switches import poisoned_releases
from plain import small_bert, trained
from runs import assert_same_run, assert_same_tensors, run_of_trainer
from tiers import ALL, combinations
from training import l2l_trainer, left_in, rows

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


EVENTS = ("on_train_begin", "on_pre_optimizer_step", "on_step_end", "on_save")
MORE_EVENTS = (
    "on_train_end",
    "on_step_begin",
    "on_epoch_begin",
    "on_optimizer_step",
    "on_substep_end",
    "on_prediction_step",
    "on_evaluate",
    "on_log",
    "on_epoch_end",
)


class _Callback(hf.TrainerCallback):
    def __init__(self, event: str, armed: Armed) -> None:
        self.armed = armed
        self.is_at_begin = event in ("on_train_begin", "on_epoch_begin")  # before any step
        setattr(self, event, self._raise)

    def _raise(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.armed(whatever_the_step=self.is_at_begin)


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


def _before(made: Any, name: str, armed: Armed) -> None:
    function = getattr(made, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        armed()
        return function(*args, **kwargs)

    setattr(made, name, broken)


def in_collator(made: Any, armed: Armed) -> None:
    _before(made, "data_collator", armed)


def in_metrics(made: Any, armed: Armed) -> None:
    made.compute_metrics = lambda found: {}
    _before(made, "compute_metrics", armed)


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


# ---- in one step of any loop

NOT_ON_THE_HOST = (
    "prefetch",
    "upload, submitted",
    "download, submitted",
    "norm",
    "stash download",
    "stash upload",
    "spill read",
)
"""What there is not where host and device share memory."""


@pytest.fixture
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is read after it was given back is NaN; folders of tests count as on a disk."""
    monkeypatch.setattr("hf_l2l.stash.spill.is_in_memory", lambda folder: False)
    with poisoned_releases():
        yield


@cache
def unbroken(mode: str, cmp: str | None, host_copies: str) -> Any:
    return fault_cases.unbroken(DEVICE, mode, cmp=cmp, host_copies=host_copies)


def cases_of_a_step() -> list[Any]:
    """Each place once, with another layer, mode and step; some of them with Ctrl-C."""
    found = []
    places = {n: p for n, p in fault_cases.PLACES.items() if DEVICE != "cpu" or n not in NOT_ON_THE_HOST}
    for i, (name, place) in enumerate(places.items()):
        every = combinations(
            ("serial", "deferred", "eager"),
            range(fault_cases.LAYERS),
            (3,) if name == "prefetch" else (1, 3),  # the first step knows no order
            # Of a serial update, the optimizer's own step raises.
            where=lambda mode, index, at, place=place: not (place.is_update and mode == "serial"),
        )
        for number, each in enumerate(every if ALL else [every[(5 * i + 1) % len(every)]]):
            error = KeyboardInterrupt if (i + number) % 3 == 0 and not place.is_update else fault_cases.FaultError
            found.append(pytest.param(name, *each.values, error))
    return found


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize(("name", "mode", "index", "at", "kind"), cases_of_a_step())
def test_a_fault_is_told_with_its_layer_and_the_step_repeated_or_refused(name, mode, index, at, kind, tmp_path):
    options = fault_cases.PLACES[name].options
    same = unbroken(mode, options.get("cmp"), options.get("host_copies", "kept"))
    spill_dir = tmp_path if options.get("stash") == "disk" else None
    fault_cases.check_fault(DEVICE, name, mode, index, at, same, kind("broken"), spill_dir)
