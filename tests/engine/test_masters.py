"""The records of a model are right whatever a program does to the model, and between which parts of a step."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from devices import DEVICE
from hf_l2l import EagerParamServer, L2LConfig, NonFiniteError, attach_l2l
from models import Block, Toy, batch_for, has_bits_of_plain
from runs import config_for
from tiers import cpu_suffices, on_a_device

CLIP = 1e-3


def under(model: nn.Module | None = None, **options: Any) -> tuple[Any, EagerParamServer, dict[str, torch.Tensor]]:
    """A model that is attached, its EPS, and a batch."""
    model = Toy() if model is None else model
    eps = attach_l2l(model.eval(), config_for(model, device=DEVICE, **options))
    return model, eps, batch_for(model, masked=False)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# ---- evaluations with other weights


def evaluated_with(model: nn.Module, values: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return torch.func.functional_call(model, values, args=(), kwargs=batch).loss


def average_of(
    model: nn.Module, kind: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone
) -> dict[str, torch.Tensor]:
    return {name: kind(p.detach() * 0.5) for name, p in model.named_parameters()}


@pytest.mark.parametrize(("kind", "options"), [(torch.Tensor.clone, {}), (nn.Parameter, {"cmp": "bf16"})])
def test_an_evaluation_with_other_weights_changes_nothing_of_the_step(kind, options):
    model, eps, batch = under(eps_update="deferred", **options)
    plain = copy.deepcopy(model)
    optimizer = eps.wrap(sgd(model))
    model(**batch).loss.backward()
    expected = eps.grad_norm()
    values = average_of(model, kind)
    found, wanted = evaluated_with(model, values, batch), evaluated_with(plain, values, batch)
    assert options or has_bits_of_plain(found, wanted)
    assert expected > 0 and torch.equal(eps.grad_norm(), expected)
    eps.clip_grad_norm_(CLIP)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    steps = torch.stack([(p.detach() - old).norm() for p, old in zip(model.parameters(), before, strict=True)])
    assert 0 < steps.norm() <= 0.1 * CLIP * 1.01
    alive = [weakref.ref(value) for value in values.values()]
    del values
    gc.collect()
    assert not any(each() is not None for each in alive)


def test_an_evaluation_with_other_weights_hides_no_gradient_that_is_not_finite():
    model, eps, batch = under(eps_update="deferred")
    optimizer = eps.wrap(sgd(model))
    (model(**batch).loss * float("nan")).backward()
    evaluated_with(model, average_of(model), batch)
    with pytest.raises(NonFiniteError):
        eps.clip_grad_norm_(CLIP)
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


@cpu_suffices
def test_a_refused_call_in_an_eager_step_leaves_the_step_as_it_is():
    model, eps, batch = under(eps_update="eager")
    optimizer = eps.wrap(sgd(model))
    model(**batch).loss.backward()
    with pytest.raises(ValueError, match="must be its own parameters"):
        torch.func.functional_call(model, average_of(model), args=(), kwargs=batch)
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    model(**batch).loss.backward()
    optimizer.step()


# ---- changes of the model


def test_a_replaced_parameter_is_freed():
    model, _, batch = under()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())  # not tied any more
    model(**batch)
    gone = weakref.ref(model.blocks[0].up.weight)
    model.blocks[0].up.weight = nn.Parameter(torch.zeros(16, 8))
    with torch.no_grad():
        model(**batch)
    model(**batch).loss.backward()
    gc.collect()
    assert gone() is None and model.blocks[0].up.weight.grad is not None


@pytest.mark.parametrize("options", [{}, {"cmp": "bf16"}], ids=str)
def test_what_is_frozen_after_the_forward_is_not_trained(options):
    model, eps, batch = under(**options)
    optimizer = eps.wrap(sgd(model))
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


@cpu_suffices
def test_a_layer_may_add_a_module_without_parameters():
    model, _, batch = under()
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, _: block.add_module("late", nn.GELU()))
    for _ in range(2):
        model(**batch).loss.backward()
    assert model.blocks[0].up.weight.grad is not None


class Copying(torch.optim.SGD):
    """Deep-copies the parameters that it updates."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            copies = [copy.deepcopy(p) for p in group["params"]]
            assert all(type(each) in (torch.Tensor, nn.Parameter) for each in copies)
        super().step()


@cpu_suffices
def test_an_optimizer_may_copy_its_parameters():
    model, eps, batch = under(eps_update="deferred", cmp="bf16")
    optimizer = eps.wrap(Copying(model.parameters(), lr=0.1))
    for _ in range(2):
        model(**batch).loss.backward()
        optimizer.step()
    eps.synchronize()


@cpu_suffices
@pytest.mark.parametrize("options", [{"cmp": "bf16"}, {"cmp": "fp16", "loss_scale_init": 8.0}], ids=str)
def test_two_forwards_in_the_first_step_have_the_gradients_of_both(options):
    first, eps, batch = under(ubatch_size=4, **options)
    optimizers = [eps.wrap(sgd(first))]
    (first(**batch).loss + first(**batch).loss).backward()
    second, eps, batch = under(ubatch_size=4, **options)
    optimizers.append(eps.wrap(sgd(second)))  # an EPS keeps no optimizer alive
    for _ in range(2):
        second(**batch).loss.backward()
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-2, atol=1e-4)


class Keeping(Block):
    """Keeps something that its weight is in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.up.weight.square().sum()
        return super().forward(x)


@on_a_device  # the weight is not the master itself
def test_a_backward_through_a_weight_that_a_layer_kept_disturbs_no_other():
    model = Toy(2)
    model.blocks = nn.ModuleList(Keeping(8, 0.0, buffers=False) for _ in range(2))
    model, _, batch = under(model, layer_classes=("Keeping",))
    model(**batch).loss.backward()
    expected = model.blocks[0].up.weight.grad.clone()
    model.blocks[0].kept.backward()
    model.zero_grad()
    model(**batch).loss.backward()
    assert torch.equal(model.blocks[0].up.weight.grad, expected)


@cpu_suffices
def test_strides_that_change_are_those_of_the_layer_and_its_gradients():
    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(self.convolution.weight.is_contiguous(memory_format=torch.channels_last))
            return self.convolution(x)

    seen: list[bool] = []
    model = nn.Sequential(Convolved(), Convolved())
    attach_l2l(model, L2LConfig(device=DEVICE, layer_classes=("Convolved",)))
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model.to(memory_format=memory_format)
        model(torch.randn(2, 4, 5, 5)).square().mean().backward()
        assert {*seen} == {memory_format == torch.channels_last}
        weight = model[0].convolution.weight
        assert weight.grad.stride() == weight.stride()
        seen.clear()
        model.zero_grad()
