"""The records of a model on the simulated accelerator, whatever a program does to the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import changing_cases as cases
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.device.slots import GradientSlots
from models import batch_for
from update_cases import Block, Toy

DEVICE = "sim"
CMP = [{}, {"cmp": "bf16"}]


@pytest.mark.parametrize("kind", cases.KINDS)
def test_an_evaluation_with_other_weights_changes_nothing_of_the_step(kind):
    cases.an_evaluation_with_other_weights_changes_nothing_of_the_step(DEVICE, kind)


def test_weights_of_an_evaluation_are_freed():
    cases.weights_of_an_evaluation_are_freed(DEVICE)


@pytest.mark.parametrize("options", CMP, ids=str)
def test_what_is_frozen_after_the_forward_is_not_trained(options):
    cases.what_is_frozen_after_the_forward_is_not_trained(DEVICE, **options)


def test_a_layer_may_add_a_module_without_parameters():
    cases.a_layer_may_add_a_module_without_parameters(DEVICE)


def test_a_refused_call_in_an_eager_step_leaves_the_step_as_it_is():
    cases.a_refused_call_in_an_eager_step_leaves_the_step_as_it_is(DEVICE)


def test_an_error_of_a_hook_is_not_raised_by_a_later_backward(monkeypatch):
    model, _, batch = cases.under(DEVICE)
    add, errors = GradientSlots.add, [MemoryError("in the hook"), MemoryError("in the layer")]

    def failing(slots, number, leaf):
        if errors and slots._errors is not None:
            with slots._errors:
                raise errors.pop(0)
        if errors:
            raise errors.pop(0)
        add(slots, number, leaf)

    class Failing(torch.autograd.Function):
        """Fails in the backward, once."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if errors:
                raise errors.pop(0)
            return gradient

    monkeypatch.setattr(GradientSlots, "add", failing)
    model.blocks[1].register_forward_pre_hook(lambda _, args: (Failing.apply(args[0]),))
    with pytest.raises(MemoryError):
        model(**batch).loss.backward()
    errors.clear()
    model.zero_grad()
    model(**batch).loss.backward()  # and raises nothing


class Keeping(Block):
    """Keeps something that its weight is in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.up.weight.square().sum()
        return super().forward(x)


def test_a_backward_through_a_weight_that_a_layer_kept_disturbs_no_other():
    model = Toy()
    model.blocks = nn.ModuleList(Keeping(8) for _ in range(2))
    model.eval()
    attach_l2l(model, L2LConfig(device=DEVICE, layer_classes=("Keeping",)))
    batch = batch_for(model, masked=False)
    model(**batch).loss.backward()
    expected = model.blocks[0].up.weight.grad.clone()
    model.blocks[0].kept.backward()
    model.zero_grad()
    model(**batch).loss.backward()
    assert torch.equal(model.blocks[0].up.weight.grad, expected)


def test_strides_that_change_are_those_of_the_layer_and_its_gradients():
    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(self.convolution.weight.is_contiguous(memory_format=torch.channels_last))
            return self.convolution(x)

    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Convolved() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    seen: list[bool] = []
    model = Image()
    attach_l2l(model, L2LConfig(device=DEVICE, layer_classes=("Convolved",)))
    model(torch.randn(2, 4, 5, 5)).backward()
    model.zero_grad()
    assert not any(seen)
    seen.clear()
    model.to(memory_format=torch.channels_last)
    model(torch.randn(2, 4, 5, 5)).backward()
    assert all(seen)
    weight = model.layers[0].convolution.weight
    assert weight.grad.stride() == weight.stride()
