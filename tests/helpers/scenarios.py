"""Small programs around a model that trains layer to layer: what each finds has to be the same wherever weights are.

A scenario returns what it has found by name, on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from hf_l2l import EagerParamServer, L2LConfig, attach_l2l, detach_l2l
from models import batch_for

Batch = dict[str, torch.Tensor]
Found = dict[str, Any]


class Case(NamedTuple):
    """A model that trains layer to layer, a `Toy`, and what belongs to it."""

    model: nn.Module
    eps: EagerParamServer
    optimizer: torch.optim.Optimizer
    batch: Batch
    config: L2LConfig


Scenario = Callable[[Case], Found]


def gradients_of(model: nn.Module, told: str = "") -> Found:
    return {f"{name}{told}": p.grad.to("cpu", copy=True) for name, p in model.named_parameters() if p.grad is not None}


def weights_of(model: nn.Module) -> Found:
    return {f"{name} after": value.to("cpu", copy=True) for name, value in model.state_dict().items()}


def two_forwards(case: Case) -> Found:
    """One backward of the sum of two losses, and one after the other in the order of the forwards."""
    model, _, optimizer, batch, *_ = case
    first, second = model(**batch).loss, model(**batch_for(model, masked=False, seed=2)).loss
    (first + second).backward()
    optimizer.step(), optimizer.zero_grad()
    for loss in [model(**batch_for(model, masked=False, seed=seed)).loss for seed in (3, 4)]:
        loss.backward()
    return gradients_of(model)


def retained_graph(case: Case) -> Found:
    """Three backwards of one forward, and none more."""
    model, _, _, batch, *_ = case
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    once = gradients_of(model, " once")
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()
    return once | gradients_of(model)


def failing_hook(case: Case) -> Found:
    """Errors in a forward, at the start of a backward and in the middle of one leave nothing behind."""
    model, _, optimizer, batch, *_ = case
    up = model.blocks[1].up

    def failing(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda gradient: 1 / 0)

    for register in (lambda: up.register_forward_hook(lambda *_: 1 / 0), lambda: up.register_forward_hook(failing)):
        with register(), pytest.raises(ZeroDivisionError):
            model(**batch).loss.backward()
    loss = model(**batch).loss
    loss.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    del loss
    optimizer.zero_grad()
    model.eval()(**batch).loss.backward()
    return gradients_of(model)


def frozen_later(case: Case) -> Found:
    """A weight, whole layers, all but the layers, and everything but one weight."""
    model, _, optimizer, batch, *_ = case
    found: Found = {}
    parts: Iterable[tuple[str, nn.Module]] = [
        ("a weight", model.blocks[1].up),
        ("layers", model.blocks),
        ("the rest", model.embed),
    ]
    for told, part in parts:
        model(**batch).loss.backward()
        optimizer.step(), optimizer.zero_grad()
        part.requires_grad_(False)
        model(**batch).loss.backward()
        found |= gradients_of(model, f" without {told}")
        optimizer.step(), optimizer.zero_grad()
    model.blocks.requires_grad_(True)
    model(**batch).loss.backward()
    return found | gradients_of(model, " again")


def evaluation_between(case: Case) -> Found:
    """Between forward and backward, and between a step and the next forward."""
    model, _, optimizer, batch, *_ = case
    loss = model(**batch).loss
    with torch.no_grad():
        found = {"between": model(**batch_for(model, masked=False, rows=5)).logits.cpu()}
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        found["after"] = model.eval()(**batch).logits.cpu()
        zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        found["of other weights"] = torch.func.functional_call(model, zeros, kwargs=batch).loss.cpu()
    optimizer.zero_grad()
    model.train()(**batch).loss.backward()
    return found | gradients_of(model)


def accumulation(case: Case) -> Found:
    """Two batches a step, and a gradient that a penalty on a master adds to."""
    model, eps, optimizer, batch, *_ = case
    found: Found = {}
    for step in range(2):
        with eps.accumulate():
            model(**batch).loss.backward()
        penalty = model.embed.weight.square().sum().cpu()
        (model(**batch_for(model, masked=False, seed=step)).loss.cpu() + penalty).backward()
        found[f"norm {step}"] = eps.clip_grad_norm_(0.1).cpu()
        optimizer.step(), optimizer.zero_grad()
    return found | weights_of(model)


def interrupted(case: Case) -> Found:
    """Forwards that nothing follows, batches whose gradients are thrown away, and a step without any."""
    model, _, optimizer, batch, *_ = case
    model(**batch)
    model(**batch).loss.backward()
    optimizer.zero_grad()
    optimizer.step()
    held = model(**batch).loss
    model(**batch).loss.backward()
    optimizer.step(), optimizer.zero_grad()
    del held
    model(**batch).loss.backward()
    return gradients_of(model)


def resumed(case: Case) -> Found:
    """A run goes on detached, and attached again with other objects that loaded its state; parameters stay what they
    are."""
    model, _, optimizer, batch, config = case
    before = list(model.parameters())

    def steps() -> Found:
        losses = []
        for _ in range(2):
            losses.append(model.eval()(**batch).loss)
            losses[-1].backward()
            optimizer.step(), optimizer.zero_grad()
        return {"losses": torch.stack(losses).detach().cpu()}

    found = steps()
    detach_l2l(model)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    found |= {f"{name}, detached": value for name, value in steps().items()}
    saved = {name: value.clone() for name, value in model.state_dict().items()}, optimizer.state_dict()
    attach_l2l(model, config).wrap(optimizer)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    found |= {f"{name}, again": value for name, value in steps().items()}
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    return found | weights_of(model)


def written(case: Case) -> Found:
    """What the program writes is used by the next forward, however it does so; none may come before a backward."""
    model, _, optimizer, batch, *_ = case
    losses = []

    def look() -> None:
        losses.append(model.eval()(**batch).loss.detach().cpu())

    model(**batch).loss.backward()
    optimizer.step()
    for _ in range(2):
        look()  # there is a copy of all masters now
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(2)
        model.embed.weight.mul_(2)
    look()
    model.blocks[0].up.weight.data.mul_(2)
    look()
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
    look()
    loss = model.train()(**batch).loss
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="must not change between its forward and its backward"):
        loss.backward()
    assert len({loss.item() for loss in losses}) == len(losses) - 1
    return {"losses": torch.stack(losses)}


SCENARIOS: dict[str, Scenario] = {
    each.__name__: each
    for each in (
        two_forwards,
        retained_graph,
        failing_hook,
        frozen_later,
        evaluation_between,
        accumulation,
        interrupted,
        resumed,
        written,
    )
}
