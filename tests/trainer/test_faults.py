"""A fault in a step of any loop is told with its layer; the step is repeated, or the engine says that it failed. What
raises in a training of the Trainer leaves nothing behind but checkpoints, which are resumed from with the bits of a
training without the exception."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from devices import DEVICE
from hf_l2l import EngineFailedError, L2LConfig, detach_l2l
from hf_l2l.device.slots import WeightSlots
from hf_l2l.eps import updates
from hf_l2l.eps.gradients import Gradients
from hf_l2l.eps.weight_copies import Copies, Stage
from hf_l2l.runtime import stream
from left_over import own_threads
from memory_switches import poisoned_releases
from plain import small_bert, trained
from runs import Run, assert_same_run, assert_same_tensors, attach, run_of, run_of_trainer
from tiers import ALL, combinations, cpu_suffices, more
from training import l2l_trainer, left_in, on

pytestmark = pytest.mark.filterwarnings("ignore:batch 4 x accumulation 2 moves the weights")

STEPS = 3
GENERATORS: list[Any] = [torch, *([] if DEVICE == "cpu" else [torch.get_device_module(DEVICE)])]
CHECKED = {"check_recompute": L2LConfig().check_recompute}


class FaultError(Exception):
    """What is raised; nothing else raises it."""


class Failing:
    """Raises its error as often as it is asked to."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.count = error, 0

    def now(self) -> None:
        self.count += 1
        raise self.error


Install = Callable[[pytest.MonkeyPatch, Any, int, Failing], None]
"""Makes layer `int` of the model fail in one place."""


def _around(patch: pytest.MonkeyPatch, owner: Any, name: str, is_it: Callable[..., bool], failing: Failing) -> None:
    """`owner.name` fails when `is_it`, which gets its arguments, is true."""
    original = getattr(owner, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        if is_it(*args, **kwargs):
            failing.now()
        return original(*args, **kwargs)

    patch.setattr(owner, name, broken)


def _at(owner: Any, name: str, is_it: Callable[..., bool]) -> Install:
    """In a call of `owner.name`, of a layer: `is_it` gets the layer and the arguments."""
    return lambda patch, model, index, failing: _around(
        patch, owner, name, lambda *args, **_: is_it(model.blocks[index], *args), failing
    )


def _holds(block: Any, masters: Any) -> bool:
    return any(master.parameter is block.down.weight for master in masters)


def _in_conversion(patch: pytest.MonkeyPatch, model: Any, index: int, failing: Failing) -> None:
    """When 16-bit weights are made for an upload: in memory that is kept for that, or in new tensors."""
    of_unit, made_now = Copies.of_unit, {"of": None}

    def noted(copies: Any, unit: Any, *rest: Any) -> Any:
        made_now["of"] = unit.module
        try:
            return of_unit(copies, unit, *rest)
        finally:
            made_now["of"] = None

    patch.setattr(Copies, "of_unit", noted)
    for owner, name in ((Stage, "memory"), (torch.Tensor, "to")):
        _around(patch, owner, name, lambda *_, **__: made_now["of"] is model.blocks[index], failing)


def _in_copy(row: str, *, submitted: bool = False) -> Install:
    """When the lane gets the copies of a layer; with `submitted`, right after that."""

    def install(patch: pytest.MonkeyPatch, model: Any, index: int, failing: Failing) -> None:
        span, layer = stream.span, model.blocks[index]

        @contextmanager
        def broken(device: torch.device, kind: str, of: Any) -> Iterator[None]:
            owner = getattr(of, "layer", of)
            fails = kind == row and any(owner is each for each in (layer, *layer.parameters()))
            if fails and not submitted:
                failing.now()
            with span(device, kind, of):
                yield
            if fails:
                failing.now()

        patch.setattr(stream, "span", broken)

    return install


def _computing(when: str) -> Install:
    """In the forward of the layer, in its recompute or in its backward."""

    def install(patch: pytest.MonkeyPatch, model: Any, index: int, failing: Failing) -> None:
        of_layer, norm = model.blocks[index].norm, nn.LayerNorm.forward

        def broken(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
            if module is of_layer and when == "backward":
                x = x.view_as(x)
                if x.requires_grad:
                    x.register_hook(lambda gradient: failing.now())
            elif module is of_layer and (when == "forward" or torch._C._current_graph_task_id() != -1):
                failing.now()
            return norm(module, x)

        patch.setattr(nn.LayerNorm, "forward", broken)

    return install


class Place(NamedTuple):
    """Where a fault is."""

    install: Install
    options: dict[str, Any] = {}
    is_update: bool = False
    """It is in the background, after a step that changes the weights."""
    after_updates: bool = False
    """Eager updates of some layers have been made by then."""
    names_layer: bool = True
    """The layer is named, and not only one that computes meanwhile."""
    on_the_host: bool = True
    """It is there where host and device share memory."""

    def is_lost(self, mode: str) -> bool:
        """Whether weights have been changed that cannot be put back: those of an update that fails; and in an eager
        step, whose head and last layers are updated first."""
        return self.is_update or (mode == "eager" and self.after_updates)


HOST, DISK = {"stash": "host"}, {"stash": "disk"}
AWAY: Any = {"on_the_host": False}
PLACES: dict[str, Place] = {
    "update": Place(
        _at(updates, "carry_out", lambda block, part, masters, *_: _holds(block, masters)), is_update=True
    ),
    "renewal": Place(
        _at(Copies, "renew", lambda block, copies, masters, written: _holds(block, masters)),
        {"cmp": "bf16"},
        is_update=True,
    ),
    "upload": Place(_at(Copies, "of_unit", lambda block, copies, unit, *_: unit.module is block)),
    "conversion": Place(_in_conversion, {"cmp": "bf16", "host_copies": "per_sweep"}),
    "prefetch": Place(_at(WeightSlots, "prefetch", lambda block, slots, unit: unit.module is block), **AWAY),
    "upload, submitted": Place(_in_copy("upload", submitted=True), **AWAY),
    "download": Place(
        _at(Gradients, "receive", lambda block, kept, sums, *_: _holds(block, [m for m, _ in sums])),
        after_updates=True,
    ),
    "download, submitted": Place(_in_copy("download", submitted=True), after_updates=True, **AWAY),
    "norm": Place(_in_copy("norm"), after_updates=True, **AWAY),
    "stash download": Place(_in_copy("stash download"), HOST, **AWAY),
    "stash upload": Place(_in_copy("stash upload"), HOST, after_updates=True, names_layer=False, **AWAY),
    "spill write": Place(_in_copy("stash download"), DISK),
    "spill read": Place(_in_copy("stash upload"), DISK, after_updates=True, names_layer=False, **AWAY),
    "forward": Place(_computing("forward")),
    "recompute": Place(_computing("recompute"), after_updates=True),
    "backward": Place(_computing("backward"), after_updates=True),
    "loss": Place(_at(nn.functional, "cross_entropy", lambda *_: True), names_layer=False),
}


State = tuple[Run, list[torch.Tensor]]
"""Weights and optimizer state, and the states of generators."""


class _Training:
    """A model that is trained, its engine, and its state."""

    def __init__(self, mode: str, options: dict[str, Any]) -> None:
        self.model, self.eps, self.optimizer, self.batch = attach(
            None, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), eps_update=mode, **CHECKED, **options
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(**self.batch).loss.backward()
        self.optimizer.step()

    def state(self) -> State:
        self.eps.synchronize()
        return run_of(self.model, self.optimizer, []), [each.get_rng_state() for each in GENERATORS]

    def draw_again(self, state: State) -> None:
        for module, generator in zip(GENERATORS, state[1], strict=True):
            module.set_rng_state(generator)

    def load(self, state: State) -> None:
        self.model.load_state_dict(state[0].weights)
        self.optimizer.load_state_dict(copy.deepcopy(state[0].state))
        self.draw_again(state)


@cache
def unbroken(mode: str, cmp: str | None, host_copies: str) -> Run:
    """What a training without a fault ends with."""
    training = _Training(mode, {"cmp": cmp, "host_copies": host_copies})
    for _ in range(STEPS):
        training.step()
    found, _ = training.state()
    detach_l2l(training.model)
    return found


def cases_of_a_step() -> list[Any]:
    """Each place once, with another layer, mode and step; some of them with Ctrl-C."""
    found = []
    places = {name: place for name, place in PLACES.items() if DEVICE != "cpu" or place.on_the_host}
    for i, (name, place) in enumerate(places.items()):
        every = combinations(
            ("serial", "deferred", "eager"),
            range(3),
            (3,) if name == "prefetch" else (1, 3),  # the first step knows no order
            at_night=2,
            # Of a serial update, the optimizer's own step raises.
            where=lambda mode, index, at, place=place: not (place.is_update and mode == "serial"),
        )
        for number, each in enumerate(every if ALL else [every[(5 * i + 1) % len(every)]]):
            error = KeyboardInterrupt if (i + number) % 3 == 0 and not place.is_update else FaultError
            found.append(pytest.param(name, *each.values, error))
    return found


@pytest.mark.parametrize(("name", "mode", "index", "at", "kind"), cases_of_a_step())
@poisoned_releases()
def test_a_fault_is_told_with_its_layer_and_the_step_repeated_or_refused(
    name, mode, index, at, kind, tmp_path, monkeypatch
):
    """At step `at`, with its type; then the step can be repeated, or a new engine goes on from the state before that
    step. Either way, the end is that of a training without a fault."""
    monkeypatch.setattr("hf_l2l.stash.spill.is_in_memory", lambda folder: False)  # folders of tests count as on a disk
    place, before_threads, error = PLACES[name], own_threads(), kind("broken")
    options = place.options
    expected = unbroken(mode, options.get("cmp"), options.get("host_copies", "kept"))
    if options.get("stash") == "disk":
        options = {**options, "spill_dir": tmp_path}
    training, failing = _Training(mode, options), Failing(error)
    for _ in range(at - 1):
        training.step()
    state = training.state()
    is_late = place.is_update and mode == "deferred"
    with pytest.MonkeyPatch.context() as patch:
        place.install(patch, training.model, index, failing)
        with pytest.raises(type(error)) as told:
            training.step()
            assert is_late or (place.is_update and mode == "eager"), "in the same call"
            training.step()
    assert told.value is error and failing.count > 0
    if place.names_layer:
        assert f"blocks.{index}" in " ".join(error.__notes__)
    elif name != "loss":
        assert "blocks." in " ".join(error.__notes__)
    # A graph of autograd refers to it, and it to the graph: nobody would ever collect them.
    del told, failing.error
    if place.is_lost(mode):
        for again in (training.step, training.eps.synchronize):
            with pytest.raises(EngineFailedError, match="Load the last checkpoint"):
                again()
        with pytest.warns(UserWarning, match="an update failed"):
            detach_l2l(training.model)
        training = _Training(mode, options)
        training.load(state)
    else:
        training.optimizer.zero_grad()
        assert_same_run(training.state()[0], state[0])
        training.draw_again(state)
    for _ in range(at, STEPS + 1):
        training.step()
    assert_same_run(training.state()[0], expected)
    detach_l2l(training.model)
    assert own_threads() <= before_threads, "no thread is left"
    assert not list(tmp_path.iterdir()), "no file is left"


# ---- trainings of the Trainer

RUN: dict[str, Any] = {"max_steps": 3, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
RUN |= {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}


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


OF_THE_TRAINER = [
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
    for i, place in enumerate(OF_THE_TRAINER)
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
