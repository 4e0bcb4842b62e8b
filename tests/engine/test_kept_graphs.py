"""Graphs that layers keep: the recompute is saved. If all do, and the model is resident, it runs as in plain torch."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from devices import DEVICE
from hf_l2l import L2LConfig, NonFiniteError, attach_l2l
from models import (
    FAMILIES,
    Toy,
    attached,
    batch_for,
    gradients,
    train_once,
)
from runs import assert_same_run, assert_same_tensors, attach, on_host, run_of, seed_all
from tiers import cpu_suffices, more, nightly, on_a_device
from training import settled_memory, tiny_bert

PLAIN: dict[str, Any] = {"resident": "all", "kept_graphs": 3, "ubatch_size": None}
"""With a `Toy`."""


def on_device(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(DEVICE) for name, value in batch.items()}


class Inner(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda each: super(Inner, self).forward(each).tanh(), x, use_reentrant=False)


@pytest.mark.parametrize("options", [{}, {"kept_graphs": 3}], ids=str)
def test_a_layer_with_checkpoints_of_its_own(options):
    model = Toy().eval()
    model.blocks[2].down = nn.Sequential(model.blocks[2].down, Inner(8, 8))
    plain, batch = copy.deepcopy(model).to(DEVICE), batch_for(model, masked=False)
    attached(model, device=DEVICE, layer_classes=("Block",), **options)
    model(**batch).loss.backward()
    plain(**on_device(batch)).loss.backward()
    assert_same_tensors(gradients(model), on_host(gradients(plain)))


def test_gradients_of_inputs_alone():
    """`torch.autograd.grad` for an input of a layer adds none to its weights."""
    model, plain = Toy().eval(), Toy().eval().blocks[2].to(DEVICE)
    attached(model, device=DEVICE, layer_classes=("Block",), kept_graphs=3)
    x = torch.randn(3, 4, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(model.blocks[2](x).sum(), x)
    y = x.detach().to(DEVICE).requires_grad_()
    plain(y).sum().backward()
    assert torch.equal(gradient, y.grad.cpu())
    assert all(p.grad is None for p in model.parameters())


# ---- a resident model that keeps all its graphs


def in_a_loop(*, plain: bool, steps: int = 2, accumulation: int = 1, **options: Any) -> Any:
    """What AdamW leaves of a `Toy` with dropout and buffers, in plain torch on the device or layer to layer."""
    model = Toy(buffers=True).train()
    batch = batch_for(model, masked=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if plain:
        model, batch = model.to(DEVICE), on_device(batch)
    else:
        eps = attach_l2l(model, L2LConfig(device=DEVICE, layer_classes=("Block",), **PLAIN, **options))
        eps.wrap(optimizer)
    found: list[Any] = []
    seed_all()
    for _ in range(steps):
        for _ in range(accumulation):
            loss = model(**batch).loss
            loss.backward()
            found.append(loss.item())
        found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    run = run_of(model, optimizer, found)
    assert plain or {b.device.type for b in model.buffers()} == {"cpu"}
    return run


@nightly
@on_a_device
@pytest.mark.parametrize("family", ["deberta_v2", "t5", *more(*FAMILIES)])
def test_every_family_has_the_gradients_of_plain_torch_on_the_device(family):
    torch.manual_seed(0)
    model = FAMILIES[family]()
    plain, batch = copy.deepcopy(model).to(DEVICE), batch_for(model)
    attached(model, device=DEVICE, resident="all", kept_graphs={"t5": 4}.get(family, 2))
    assert torch.equal(train_once(model, batch), train_once(plain, on_device(batch)))
    assert_same_tensors(gradients(model), on_host(gradients(plain)))


@pytest.mark.parametrize(("mode", "accumulation"), [("serial", 1), ("deferred", 2)])
def test_it_trains_as_plain_torch_on_the_device(mode, accumulation):
    expected = in_a_loop(plain=True, accumulation=accumulation)
    found = in_a_loop(plain=False, accumulation=accumulation, eps_update=mode)
    assert found.logged == expected.logged
    assert_same_tensors(found.weights, expected.weights)


class Operations(TorchDispatchMode):
    """Counts the operations that are dispatched inside."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operations(*, plain: bool) -> int:
    model = tiny_bert(layers=8, dropout=0.0).train()
    batch = batch_for(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if plain:
        model, batch = model.to(DEVICE), on_device(batch)
    else:
        attach_l2l(model, L2LConfig(device=DEVICE, resident="all", kept_graphs=8)).wrap(optimizer)
    for _ in range(2):
        with Operations() as counted:
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return sum(counted.found.values())


@nightly
@on_a_device
def test_a_step_has_the_operations_of_plain_torch():
    """And a few more: inputs that go to the device, and the vote on the norm. Batches of several micro-batches, which
    run layer by layer, have many more."""
    expected = operations(plain=True)
    assert expected <= operations(plain=False) <= 1.05 * expected


@cpu_suffices
def test_batches_of_one_and_of_several_micro_batches_take_turns_and_add_to_one_gradient():
    """As where no graphs are kept."""
    found = []
    for kept_graphs in (0, 3):
        model, eps, optimizer, _ = attach(eps_update="deferred", resident="all", kept_graphs=kept_graphs)
        logged = []
        for sizes in ((2,), (7,), (3, 8), (8, 3)):
            for rows in sizes:
                loss = model(**batch_for(model, masked=False, rows=rows)).loss
                loss.backward()
                logged.append(loss.item())
            logged.append(eps.grad_norm().item())
            assert logged[-1] == torch.nn.utils.get_total_norm([p.grad.clone() for p in model.parameters()]).item()
            eps.clip_grad_norm_(0.5)
            optimizer.step()
        eps.synchronize()
        found.append(run_of(model, optimizer, logged))
    assert_same_run(found[1], found[0])


@on_a_device
def test_gradients_of_parameters_and_several_graphs():
    """What L2L cannot do with copies of the weights, plain torch can."""
    model, _, _, batch = attach(Toy(dropout=0.0), **PLAIN)
    first, second = model(**batch).loss, model(**batch).loss
    (by_name,) = torch.autograd.grad(first, [model.blocks[0].up.weight], create_graph=True)
    assert by_name.requires_grad
    second.backward(retain_graph=True)
    second.backward()
    torch.testing.assert_close(model.blocks[0].up.weight.grad, 2 * by_name)


def test_the_last_vote_does_not_count_for_new_gradients():
    model, eps, optimizer, batch = attach(**PLAIN)
    model(**batch).loss.backward()
    eps.clip_grad_norm_(1.0)
    optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    (model(**batch).loss * torch.inf).backward()
    with pytest.raises(NonFiniteError):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_an_evaluation_and_a_call_of_a_layer():
    model = Toy().eval()
    batch = batch_for(model, masked=False)
    with torch.no_grad():
        expected = copy.deepcopy(model).to(DEVICE)(**on_device(batch)).loss
    attached(model, device=DEVICE, layer_classes=("Block",), **PLAIN)
    held = settled_memory() if DEVICE == "sim" else 0
    with torch.no_grad():
        assert torch.equal(model(**batch).loss, expected)
    model.blocks[1](torch.ones(2, 3, 8)).sum().backward()
    assert model.blocks[1].up.weight.grad is not None
    for p in model.parameters():
        p.grad = None
    assert DEVICE != "sim" or settled_memory() == held
