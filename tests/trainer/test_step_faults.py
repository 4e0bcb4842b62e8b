"""A fault in a step of any loop is told with its layer; the step is repeated, or the engine says that it failed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from devices import DEVICE
from hf_l2l import EagerParamServer, EngineFailedError, L2LConfig, attach_l2l, detach_l2l
from hf_l2l.device.slots import WeightSlots
from hf_l2l.eps import updates
from hf_l2l.eps.gradients import Gradients
from hf_l2l.eps.weight_copies import Copies, Stage
from hf_l2l.runtime import stream
from left_over import own_threads
from memory_switches import poisoned_releases
from models import Toy, batch_for
from runs import Run, assert_same_run, run_of, seed_all
from tiers import ALL, combinations

LAYERS = 3
STEPS = 3


class FaultError(Exception):
    """What is raised; nothing else raises it."""


class Failing:
    """Raises its error as often as it is asked to, while it is armed."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.count = 0

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

    def install(patch: pytest.MonkeyPatch, model: Any, index: int, failing: Failing) -> None:
        _around(patch, owner, name, lambda *args, **_: is_it(model.blocks[index], *args), failing)

    return install


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


def _of_layer(model: Any, index: int, of: Any) -> bool:
    layer, of = model.blocks[index], getattr(of, "layer", of)
    return of is layer or any(of is p for p in layer.parameters())


def _in_copy(row: str, *, submitted: bool = False) -> Install:
    """When the lane gets the copies of a layer; with `submitted`, right after that."""

    def install(patch: pytest.MonkeyPatch, model: Any, index: int, failing: Failing) -> None:
        span = stream.span

        @contextmanager
        def broken(device: torch.device, kind: str, of: Any) -> Iterator[None]:
            fails = kind == row and _of_layer(model, index, of)
            if fails and not submitted:
                failing.now()
            with span(device, kind, of):
                yield
            if fails:
                failing.now()

        patch.setattr(stream, "span", broken)

    return install


def _in_forward(patch: pytest.MonkeyPatch, model: Any, index: int, failing: Failing) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        failing.now()
        return x

    _in_norm(patch, model, index, broken)


def _in_recompute(patch: pytest.MonkeyPatch, model: Any, index: int, failing: Failing) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        if torch._C._current_graph_task_id() != -1:
            failing.now()
        return x

    _in_norm(patch, model, index, broken)


def _in_norm(
    patch: pytest.MonkeyPatch, model: Any, index: int, broken: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """`broken` gets what the first module of the layer is called with, and returns what that computes with."""
    of_layer, norm = model.blocks[index].norm, nn.LayerNorm.forward
    patch.setattr(nn.LayerNorm, "forward", lambda module, x: norm(module, broken(x) if module is of_layer else x))


def _in_backward(patch: pytest.MonkeyPatch, model: Any, index: int, failing: Failing) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x.view_as(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: failing.now())
        return x

    _in_norm(patch, model, index, broken)


class Place(NamedTuple):
    """Where a fault is."""

    install: Install
    options: dict[str, Any] = {}
    """Of `L2LConfig`."""
    is_update: bool = False
    """It is in the background, after a step that changes the weights."""
    after_updates: bool = False
    """Eager updates of some layers have been made by then."""
    names_layer: bool = True
    """The layer is named, and not only one that computes meanwhile."""


HOST, DISK = {"stash": "host"}, {"stash": "disk"}
PLACES: dict[str, Place] = {
    "update": Place(
        _at(updates, "carry_out", lambda block, part, masters, *_: _holds(block, masters)), is_update=True
    ),
    "renewal": Place(
        _at(Copies, "renew", lambda block, copies, masters: _holds(block, masters)), {"cmp": "bf16"}, is_update=True
    ),
    "upload": Place(_at(Copies, "of_unit", lambda block, copies, unit, *_: unit.module is block)),
    "conversion": Place(_in_conversion, {"cmp": "bf16", "host_copies": "per_sweep"}),
    "prefetch": Place(_at(WeightSlots, "prefetch", lambda block, slots, unit: unit.module is block)),
    "upload, submitted": Place(_in_copy("upload", submitted=True)),
    "download": Place(
        _at(Gradients, "receive", lambda block, kept, sums, *_: _holds(block, [m for m, _ in sums])),
        after_updates=True,
    ),
    "download, submitted": Place(_in_copy("download", submitted=True), after_updates=True),
    "norm": Place(_in_copy("norm", submitted=False), after_updates=True),
    "stash download": Place(_in_copy("stash download"), HOST),
    "stash upload": Place(_in_copy("stash upload"), HOST, after_updates=True, names_layer=False),
    "spill write": Place(_in_copy("stash download"), DISK),
    "spill read": Place(_in_copy("stash upload"), DISK, after_updates=True, names_layer=False),
    "forward": Place(_in_forward),
    "recompute": Place(_in_recompute, after_updates=True),
    "backward": Place(_in_backward, after_updates=True),
    "loss": Place(_at(nn.functional, "cross_entropy", lambda *_: True), names_layer=False),
}


class _Training:
    """A model that is trained, its engine, and its state."""

    def __init__(self, mode: str, options: dict[str, Any]) -> None:
        self.model = Toy().train()
        config = L2LConfig(device=DEVICE, eps_update=mode, ubatch_size=3, layer_classes=("Block",), **options)
        self.eps: EagerParamServer = attach_l2l(self.model, config)
        self.optimizer = self.eps.wrap(torch.optim.AdamW(self.model.parameters(), lr=1e-2))
        self.batch = batch_for(self.model, masked=False)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(**self.batch).loss.backward()
        self.optimizer.step()

    def state(self) -> tuple[Run, list[torch.Tensor]]:
        """Weights and optimizer state, and the states of generators."""
        self.eps.synchronize()
        generators = [torch.get_rng_state()]
        if DEVICE != "cpu":
            generators.append(torch.get_device_module(DEVICE).get_rng_state())
        return run_of(self.model, self.optimizer, []), generators

    def draw_again(self, generators: list[torch.Tensor]) -> None:
        torch.set_rng_state(generators[0])
        for each in generators[1:]:
            torch.get_device_module(DEVICE).set_rng_state(each)

    def load(self, state: tuple[Run, list[torch.Tensor]]) -> None:
        self.model.load_state_dict(state[0].weights)
        self.optimizer.load_state_dict(copy.deepcopy(state[0].state))
        self.draw_again(state[1])


@cache
def unbroken(mode: str, cmp: str | None, host_copies: str) -> Run:
    """What a training without a fault ends with."""
    training = _Training(mode, {"cmp": cmp, "host_copies": host_copies})
    seed_all()
    for _ in range(STEPS):
        training.step()
    found, _ = training.state()
    detach_l2l(training.model)
    return found


def is_lost(place: Place, mode: str) -> bool:
    """Whether weights have been changed that cannot be put back: those of an update that fails; and in an eager step,
    whose head and last layers are updated first."""
    return place.is_update or (mode == "eager" and place.after_updates)


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


def cases_of_a_step() -> list[Any]:
    """Each place once, with another layer, mode and step; some of them with Ctrl-C."""
    found = []
    places = {n: p for n, p in PLACES.items() if DEVICE != "cpu" or n not in NOT_ON_THE_HOST}
    for i, (name, place) in enumerate(places.items()):
        every = combinations(
            ("serial", "deferred", "eager"),
            range(LAYERS),
            (3,) if name == "prefetch" else (1, 3),  # the first step knows no order
            # Of a serial update, the optimizer's own step raises.
            where=lambda mode, index, at, place=place: not (place.is_update and mode == "serial"),
        )
        for number, each in enumerate(every if ALL else [every[(5 * i + 1) % len(every)]]):
            error = KeyboardInterrupt if (i + number) % 3 == 0 and not place.is_update else FaultError
            found.append(pytest.param(name, *each.values, error))
    return found


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize(("name", "mode", "index", "at", "kind"), cases_of_a_step())
def test_a_fault_is_told_with_its_layer_and_the_step_repeated_or_refused(name, mode, index, at, kind, tmp_path):
    """At step `at`, with its type; then the step can be repeated, or a new engine goes on from the state before that
    step. Either way, the end is that of a training without a fault."""
    place, before_threads, error = PLACES[name], own_threads(), kind("broken")
    options = place.options
    expected = unbroken(mode, options.get("cmp"), options.get("host_copies", "kept"))
    if options.get("stash") == "disk":
        options = {**options, "spill_dir": tmp_path}
    training, failing = _Training(mode, options), Failing(error)
    seed_all()
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
    if is_lost(place, mode):
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
        training.draw_again(state[1])
    for _ in range(at, STEPS + 1):
        training.step()
    assert_same_run(training.state()[0], expected)
    detach_l2l(training.model)
    assert own_threads() <= before_threads, "no thread is left"
    assert not list(tmp_path.iterdir()), "no file is left"
