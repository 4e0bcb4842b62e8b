"""Programs that change the model, or a copy of its parameters, between the parts of a step.

`eps/test_masters.py` runs these on the CPU, `sim/test_masters.py` on the simulated accelerator.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l import L2LConfig, NonFiniteError, attach_l2l
from models import batch_for
from update_cases import Toy, toy

CLIP = 1e-3


def under(device: str, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """A model that is attached, its EPS, and a batch."""
    model = toy() if model is None else model
    model.eval()
    eps = attach_l2l(model, L2LConfig(device=device, layer_classes=("Block",), **options))
    return model, eps, batch_for(model, masked=False)


def evaluated_with(model: nn.Module, values: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return torch.func.functional_call(model, values, args=(), kwargs=batch).loss


def average_of(model: nn.Module, kind: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: kind(p.detach() * 0.5) for name, p in model.named_parameters()}


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"tensors": torch.Tensor.clone, "parameters": nn.Parameter}


def an_evaluation_with_other_weights_changes_nothing_of_the_step(device: str, kind: str, **options: Any) -> None:
    model, eps, batch = under(device, eps_update="deferred", **options)
    plain = copy.deepcopy(model)
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    model(**batch).loss.backward()
    expected = eps.grad_norm()
    values = average_of(model, KINDS[kind])
    with torch.no_grad():
        found, wanted = evaluated_with(model, values, batch), evaluated_with(plain, values, batch)
    if not options:
        assert torch.equal(found.cpu(), wanted)
    assert expected > 0 and torch.equal(eps.grad_norm(), expected)
    eps.clip_grad_norm_(CLIP)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    steps = torch.stack([(p.detach() - old).norm() for p, old in zip(model.parameters(), before, strict=True)])
    assert 0 < steps.norm() <= 0.1 * CLIP * 1.01


def an_evaluation_with_other_weights_hides_no_gradient_that_is_not_finite(device: str) -> None:
    model, eps, batch = under(device, eps_update="deferred")
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    (model(**batch).loss * float("nan")).backward()
    evaluated_with(model, average_of(model, torch.Tensor.clone), batch)
    with pytest.raises(NonFiniteError):
        eps.clip_grad_norm_(CLIP)
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


def weights_of_an_evaluation_are_freed(device: str, **options: Any) -> None:
    model, eps, batch = under(device, **options)
    eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    model(**batch).loss.backward()
    values = average_of(model, torch.Tensor.clone)
    alive = [weakref.ref(value) for value in values.values()]
    evaluated_with(model, values, batch)
    del values
    gc.collect()
    assert not any(each() is not None for each in alive)


def a_replaced_parameter_is_freed(device: str, **options: Any) -> None:
    model, _, batch = under(device, **options)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())  # not tied any more
    model(**batch)
    gone = weakref.ref(model.blocks[0].up.weight)
    model.blocks[0].up.weight = nn.Parameter(torch.zeros(16, 8))
    with torch.no_grad():
        model(**batch)
    model(**batch).loss.backward()
    gc.collect()
    assert gone() is None and model.blocks[0].up.weight.grad is not None


def what_is_frozen_after_the_forward_is_not_trained(device: str, **options: Any) -> None:
    model, eps, batch = under(device, **options)
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = model(**batch).loss
    model.blocks[1].requires_grad_(False)
    before = [p.detach().clone() for p in model.blocks[1].parameters()]
    loss.backward()
    assert all(p.grad is None for p in model.blocks[1].parameters())
    assert model.blocks[0].up.weight.grad is not None
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.blocks[1].parameters(), before, strict=True))


class Late(Toy):
    """Its layers make a module in their first forward."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        for block in self.blocks:
            block.register_forward_pre_hook(lambda block, _: block.add_module("late", nn.GELU()))


def a_layer_may_add_a_module_without_parameters(device: str) -> None:
    model, _, batch = under(device, Late())
    for _ in range(2):
        model(**batch).loss.backward()
    assert model.blocks[0].up.weight.grad is not None


def a_parameter_that_grew_after_the_backward_is_refused(device: str) -> None:
    model, eps, batch = under(device, eps_update="deferred")
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
    model(**batch).loss.backward()
    optimizer.step()
    model(**batch).loss.backward()
    model.blocks[0].up.bias.data = torch.zeros(20)
    with pytest.raises(ValueError, match=r"must keep its shape .* \[20\] for blocks\.0\.up\.bias, which was \[16\]"):
        optimizer.step()
    model.blocks[0].up.bias.data = torch.zeros(16)
    optimizer.step()
    model(**batch)


class Copying(torch.optim.SGD):
    """Deep-copies the parameters that it updates."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            copies = [copy.deepcopy(p) for p in group["params"]]
            assert all(type(each) in (torch.Tensor, nn.Parameter) for each in copies)
        super().step()


def an_optimizer_may_copy_its_parameters(device: str, **options: Any) -> None:
    model, eps, batch = under(device, eps_update="deferred", **options)
    optimizer = eps.wrap(Copying(model.parameters(), lr=0.1))
    for _ in range(3):
        model(**batch).loss.backward()
        optimizer.step()
    eps.synchronize()


def a_refused_call_in_an_eager_step_leaves_the_step_as_it_is(device: str) -> None:
    model, eps, batch = under(device, eps_update="eager")
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    model(**batch).loss.backward()
    with pytest.raises(ValueError, match="must be its own parameters"):
        torch.func.functional_call(model, average_of(model, torch.Tensor.clone), args=(), kwargs=batch)
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    model(**batch).loss.backward()
    optimizer.step()


def two_forwards_in_the_first_step_have_the_gradients_of_both(device: str, **options: Any) -> None:
    first, eps, batch = under(device, ubatch_size=4, **options)
    optimizers = [eps.wrap(torch.optim.SGD(first.parameters()))]
    (first(**batch).loss + first(**batch).loss).backward()
    second, eps, batch = under(device, ubatch_size=4, **options)
    optimizers.append(eps.wrap(torch.optim.SGD(second.parameters())))  # an EPS keeps no optimizer alive
    for _ in range(2):
        second(**batch).loss.backward()
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-2, atol=1e-4)
