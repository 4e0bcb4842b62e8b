"""Downloads and updates that fail outside the layers, or in the program; nothing keeps a model whose engine has
failed. Of the layers: `tests/trainer/test_faults.py`."""

from __future__ import annotations

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
from late_updates import late_updates
from left_over import gone
from memory_switches import poisoned_releases
from models import train_once
from runs import attach
from tiers import combinations

MODES = ("serial", "deferred", "eager")


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """What is read after it was given back is NaN, in every test here."""
    with poisoned_releases() if DEVICE == "sim" else nullcontext():
        yield


class FaultError(Exception):
    pass


@contextmanager
def failing(what: str, victims: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, each download or update that one of these parameters takes part in raises."""
    addresses = {id(each) for each in victims}
    owner, name, masters = {
        "download": (Gradients, "receive", lambda arguments: [master for master, _ in arguments[1]]),
        "update": (updates, "carry_out", lambda arguments: arguments[1]),
    }[what]
    original: Callable[..., Any] = getattr(owner, name)

    def broken(*arguments: Any) -> Any:
        if any(id(master.parameter) in addresses for master in masters(arguments)):
            raise FaultError(f"no {what}")
        return original(*arguments)

    with mock.patch.object(owner, name, broken):
        yield


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    model(**batch).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("fault", ["download", "update"])
def test_a_model_whose_engine_has_failed_can_be_collected(fault):
    """The error refers to frames of the backward, and those to its graph: nothing of the engine may refer to it."""

    def failed() -> weakref.ref[nn.Module]:
        model, _, optimizer, batch = attach(eps_update="eager", num_threads=2)
        with failing(fault, model.blocks[1].parameters()), pytest.raises(FaultError):
            for _ in range(2):
                make_step(model, optimizer, batch)
        return weakref.ref(model)

    left = failed()
    assert gone(lambda: left() is None)


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
