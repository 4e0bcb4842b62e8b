"""Uploads, downloads, norms and updates that fail are told with their layer; the step can be made again, or the engine
says that it has failed."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
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
FAULTS = ("download", "update") if DEVICE == "cpu" else ("upload", "download", "norm", "update")
"""On the CPU weights stay where they are, and norms are computed when they are needed."""


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """What is read after it was given back is NaN, in every test here."""
    with poisoned_releases() if DEVICE == "sim" else nullcontext():
        yield


class FaultError(Exception):
    pass


@contextmanager
def failing(what: str, victim: torch.Tensor) -> Iterator[None]:
    """Inside, each upload, download, norm or update that this parameter takes part in raises."""

    def of_unit(arguments: Any) -> Any:
        return arguments[1].module.parameters()

    def of_pairs(arguments: Any) -> Any:
        return [master.parameter for master, _ in arguments[1]]

    def of_masters(arguments: Any) -> Any:
        return [master.parameter for master in arguments[1]]

    receive, received = Gradients.receive, []

    def receiving(gradients: Gradients, sums: Any, *rest: Any) -> None:
        received[:] = [master.parameter for master, _ in sums]
        receive(gradients, sums, *rest)

    def of_norms(arguments: Any) -> Any:
        return received if arguments[1] == "norm" else []

    owner, name, parameters = {
        "upload": (Copies, "of_unit", of_unit),
        "download": (Gradients, "receive", of_pairs),
        "norm": (stream, "span", of_norms),
        "update": (updates, "carry_out", of_masters),
    }[what]
    original: Callable[..., Any] = getattr(owner, name)

    def broken(*arguments: Any) -> Any:
        if any(each is victim for each in parameters(arguments)):
            raise FaultError(f"no {what}")
        return original(*arguments)

    with mock.patch.object(Gradients, "receive", receiving), mock.patch.object(owner, name, broken):
        yield


@pytest.mark.parametrize(
    ("fault", "mode", "index"),
    # A serial update is the optimizer's own step.
    combinations(FAULTS, MODES, range(3), where=lambda fault, mode, _: (fault, mode) != ("update", "serial")),
)
def test_a_fault_is_told_with_its_layer(fault, mode, index):
    """With its type; in its own step, or in the next one if the update is deferred. Then the step can be made again,
    or the engine says that it has failed."""
    model, eps, optimizer, batch = attach(eps_update=mode, num_threads=1 + index % 2)

    def step() -> None:
        model.zero_grad()
        train_once(model, batch)
        optimizer.step()
        if mode == "eager":  # the updates of the first layers, which come last, may still be under way
            eps.synchronize()

    step()
    before_told = 0
    with failing(fault, model.blocks[index].down.weight), pytest.raises(FaultError) as told:
        for _ in range(2):
            step()
            before_told += 1
    assert before_told == 0 or (fault, mode) == ("update", "deferred")
    assert f"blocks.{index}" in " ".join(told.value.__notes__)
    # Masters that have been updated cannot be put back; in an eager step, the head's and those of the layers above.
    if not (fault == "update" or (mode == "eager" and fault in ("download", "norm"))):
        step()
        return
    with pytest.raises(EngineFailedError, match="Load the last checkpoint"):
        step()
    with pytest.raises(EngineFailedError):
        eps.synchronize()
    with pytest.warns(UserWarning, match="an update failed"):
        detach_l2l(model)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert not eps.updates.worker.lives


@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_whose_engine_has_failed_can_be_collected(fault):
    """The error refers to frames of the backward, and those to its graph: nothing of the engine may refer to it."""

    def failed() -> weakref.ref[nn.Module]:
        model, _, optimizer, batch = attach(eps_update="eager", num_threads=2)
        with failing(fault, model.blocks[1].down.weight), pytest.raises(FaultError):
            for _ in range(2):
                train_once(model, batch)
                optimizer.step()
        return weakref.ref(model)

    gone, until = failed(), time.monotonic() + 60
    while gone() is not None and time.monotonic() < until:  # a thread may still be at its end
        gc.collect()
        time.sleep(0.02)
    assert gone() is None


def test_the_step_after_a_fault_has_the_bits_of_one_without():
    runs = []
    for broken in (False, True):
        model, _, optimizer, batch = attach(eps_update="deferred")
        model.eval()
        for step in range(3):
            if broken and step == 1:
                for fault in FAULTS[:-1]:
                    with failing(fault, model.blocks[1].down.weight), pytest.raises(FaultError):
                        model(**batch).loss.backward()
                    model.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
        runs.append(run_of(model, optimizer, []))
    assert_same_run(*runs)


def test_a_sum_is_in_its_place_again_after_a_backward_that_failed():
    model, _, _, batch = attach()
    train_once(model, batch)
    kept = {name: p.grad for name, p in model.named_parameters()}
    with failing("download", model.blocks[0].down.weight), pytest.raises(FaultError):
        train_once(model, batch)
    assert all(p.grad is kept[name] for name, p in model.named_parameters())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["embed.weight", "head.bias"])
def test_a_fault_outside_the_layers_is_told_with_its_name(name, mode):
    model, _, optimizer, batch = attach(eps_update=mode)
    with failing("download", dict(model.named_parameters())[name]), pytest.raises(FaultError) as told:
        model(**batch).loss.backward()
        optimizer.step()
    assert f"raised in the download of {name}" in told.value.__notes__
    if mode == "eager" and name == "embed.weight":  # the last that comes
        with pytest.raises(EngineFailedError):
            optimizer.step()


def test_an_update_outside_the_layers_that_fails_is_told_in_the_next_forward():
    model, _, optimizer, batch = attach(eps_update="deferred")
    train_once(model, batch)
    with failing("update", model.head.bias), late_updates():
        optimizer.step()
        with pytest.raises(FaultError) as told:
            model(**batch)
    assert "non-layer modules" in " ".join(told.value.__notes__)
    with pytest.raises(EngineFailedError):
        model(**batch)


class Broken(torch.optim.AdamW):
    """Fails in the update of one parameter."""

    victim: int | None = None  # its address

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"]]
        if any(p.data_ptr() == self.victim and p.grad is not None for p in held):
            raise FaultError("no update")
        super().step(closure)


def test_a_step_that_raises_in_the_program_stops_the_engine():
    """Serial updates are the optimizer's own: some layers have made the step, and others have not."""
    model, _, optimizer, batch = attach(make=Broken, eps_update="serial")  # its step calls that of its base class
    for _ in range(2):
        train_once(model, batch)
        optimizer.step()
    optimizer.victim = model.blocks[1].down.bias.data_ptr()
    train_once(model, batch)
    with pytest.raises(FaultError):
        optimizer.step()
    with pytest.raises(EngineFailedError, match="Broken"):
        model(**batch)
    with pytest.raises(EngineFailedError):
        optimizer.state_dict()
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
