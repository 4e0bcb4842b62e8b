"""Uploads, downloads, norms and updates that fail are told with their layer; the step can be made again, or the engine
says that it has failed."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from devices import DEVICE
from hf_l2l import EngineFailedError, detach_l2l
from hf_l2l.eps import updates
from hf_l2l.eps.gradients import Gradients
from hf_l2l.eps.weight_copies import Copies
from hf_l2l.runtime import stream
from late_updates import late_updates
from memory_switches import poisoned_releases
from models import train_once
from runs import assert_same_run, attach, run_of
from tiers import combinations

MODES = ("serial", "deferred", "eager")
FAULTS: dict[str, dict[str, Any]] = {
    "upload": {},
    "download": {},
    "norm": {},
    "stash download": {"stash": "host"},
    "stash upload": {"stash": "host"},
    "update": {},
    "renewal": {"cmp": "bf16"},
}
"""What fails: with which options."""
if DEVICE == "cpu":  # where weights and the stash stay where they are, and norms are computed when they are needed
    FAULTS = {name: FAULTS[name] for name in ("download", "update", "renewal")}
IN_THE_BACKGROUND = ("update", "renewal")
"""After a step that changes the weights; a serial one is the optimizer's own."""


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """What is read after it was given back is NaN, in every test here."""
    with poisoned_releases() if DEVICE == "sim" else nullcontext():
        yield


class FaultError(Exception):
    pass


def of_masters(arguments: Any) -> list[torch.Tensor]:
    return [master.parameter for master in arguments[1]]


@contextmanager
def failing(what: str, victims: Iterable[torch.Tensor], error: type[BaseException] = FaultError) -> Iterator[None]:
    """Inside, each such thing that one of these parameters takes part in raises."""
    addresses = {id(each) for each in victims}

    def of_span(arguments: Any) -> Any:
        of = getattr(arguments[2], "layer", arguments[2])
        parameters = of.parameters() if isinstance(of, nn.Module) else [of]
        return parameters if arguments[1] == what else []

    owner, name, parameters = {
        "upload": (Copies, "of_unit", lambda arguments: arguments[1].module.parameters()),
        "download": (Gradients, "receive", lambda arguments: [master.parameter for master, _ in arguments[1]]),
        "update": (updates, "carry_out", of_masters),
        "renewal": (Copies, "renew", of_masters),
    }.get(what, (stream, "span", of_span))
    original: Callable[..., Any] = getattr(owner, name)

    def broken(*arguments: Any) -> Any:
        if any(id(each) in addresses for each in parameters(arguments)):
            raise error(f"no {what}")
        return original(*arguments)

    with mock.patch.object(owner, name, broken):
        yield


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    model(**batch).loss.backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("fault", "mode", "index"),
    combinations(
        FAULTS,
        MODES,
        range(3),
        where=lambda fault, mode, index: (
            (mode != "serial" or fault not in IN_THE_BACKGROUND)
            and (fault != "stash upload" or index < 2)  # what the last layer is given stays on the device
        ),
    ),
)
def test_a_fault_is_told_with_its_layer_and_the_step_repeated_or_refused(fault, mode, index):
    """With its type, Ctrl-C, too; in its own step, or in the next one if the update is deferred. Then the step can be
    made again, with the bits of a training without the fault, or the engine says that it has failed."""
    is_update = fault in IN_THE_BACKGROUND
    error = KeyboardInterrupt if index == 1 and not is_update else FaultError
    runs = []
    for breaks in (False, True):
        model, eps, optimizer, batch = attach(eps_update=mode, num_threads=1 + index % 2, **FAULTS[fault])
        model.eval()

        def step(model: Any = model, eps: Any = eps, optimizer: Any = optimizer, batch: Any = batch) -> None:
            optimizer.zero_grad()
            make_step(model, optimizer, batch)
            if mode == "eager":  # the updates of the first layers, which come last, may still be under way
                eps.synchronize()

        step()
        if breaks:
            with failing(fault, model.blocks[index].parameters(), error), pytest.raises(error) as told:
                step()
                assert is_update and mode == "deferred"
                step()
            # A layer that computes meanwhile, if what it will need is uploaded.
            assert ("blocks." if fault == "stash upload" else f"blocks.{index}") in " ".join(told.value.__notes__)
            # Masters that have been updated cannot be put back; in an eager step, those of the head and last layers.
            if is_update or (mode == "eager" and fault in ("download", "norm", "stash upload")):
                for again in (step, eps.synchronize):
                    with pytest.raises(EngineFailedError, match="Load the last checkpoint"):
                        again()
                with pytest.warns(UserWarning, match="an update failed"):
                    detach_l2l(model)
                assert all(type(p) is nn.Parameter for p in model.parameters())
                assert not eps.updates.worker.lives
                return
        step()
        eps.synchronize()
        runs.append(run_of(model, optimizer, []))
    assert_same_run(*runs)


@pytest.mark.parametrize("fault", ["download", "update"])
def test_a_model_whose_engine_has_failed_can_be_collected(fault):
    """The error refers to frames of the backward, and those to its graph: nothing of the engine may refer to it."""

    def failed() -> weakref.ref[nn.Module]:
        model, _, optimizer, batch = attach(eps_update="eager", num_threads=2)
        with failing(fault, model.blocks[1].parameters()), pytest.raises(FaultError):
            for _ in range(2):
                make_step(model, optimizer, batch)
        return weakref.ref(model)

    gone, until = failed(), time.monotonic() + 60
    while gone() is not None and time.monotonic() < until:  # a thread may still be at its end
        gc.collect()
        time.sleep(0.02)
    assert gone() is None


def test_a_sum_is_in_its_place_again_after_a_backward_that_failed():
    model, _, _, batch = attach()
    train_once(model, batch)
    kept = {name: p.grad for name, p in model.named_parameters()}
    with failing("download", model.blocks[0].parameters()), pytest.raises(FaultError):
        train_once(model, batch)
    assert all(p.grad is kept[name] for name, p in model.named_parameters())


@pytest.mark.parametrize(("name", "mode"), combinations(["embed.weight", "head.bias"], MODES, together=1))
def test_a_fault_outside_the_layers_is_told_with_its_name(name, mode):
    model, _, optimizer, batch = attach(eps_update=mode)
    with failing("download", [dict(model.named_parameters())[name]]), pytest.raises(FaultError) as told:
        make_step(model, optimizer, batch)
    assert f"raised in the download of {name}" in told.value.__notes__
    if mode == "eager" and name == "embed.weight":  # the last that comes
        with pytest.raises(EngineFailedError):
            optimizer.step()


def test_an_update_outside_the_layers_that_fails_is_told_in_the_next_forward():
    model, _, optimizer, batch = attach(eps_update="deferred")
    train_once(model, batch)
    with failing("update", [model.head.bias]), late_updates():
        optimizer.step()
        with pytest.raises(FaultError) as told:
            model(**batch)
    assert "non-layer modules" in " ".join(told.value.__notes__)
    with pytest.raises(EngineFailedError):
        model(**batch)


class Broken(torch.optim.AdamW):
    """Fails in the update of one parameter."""

    victim: int | None = None  # its address

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"]]
        if any(p.data_ptr() == self.victim and p.grad is not None for p in held):
            raise FaultError("no update")
        super().step(closure)


def test_a_step_that_raises_in_the_program_stops_the_engine():
    """Serial updates are the optimizer's own: some layers have made the step, and others have not."""
    model, _, optimizer, batch = attach(make=Broken, eps_update="serial")  # its step calls that of its base class
    for _ in range(2):
        make_step(model, optimizer, batch)
    optimizer.victim = model.blocks[1].down.bias.data_ptr()
    train_once(model, batch)
    with pytest.raises(FaultError):
        optimizer.step()
    for again in (lambda: model(**batch), optimizer.state_dict):
        with pytest.raises(EngineFailedError, match="Broken"):
            again()
    with pytest.warns(UserWarning, match="an update failed"):
        detach_l2l(model)


class Curious(torch.optim.SGD):
    """Reads a parameter that is not its own."""

    other: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        if Curious.other is not None:
            Curious.other.sum()


def test_the_worker_does_not_wait_for_itself(monkeypatch):
    model, eps, optimizer, batch = attach(make=lambda ps: Curious(ps, lr=0.1), eps_update="deferred")
    monkeypatch.setattr(Curious, "other", model.blocks[2].down.weight)
    train_once(model, batch)
    with pytest.raises(RuntimeError, match=r"needs weights that the update of blocks\.2 has not finished"):
        optimizer.step()
        eps.synchronize()
