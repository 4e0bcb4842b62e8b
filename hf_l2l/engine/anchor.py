"""The anchor: what leads from the graph of a call to the masters, of which only copies compute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hf_l2l.eps.gradients import Gradients
from hf_l2l.runtime.tensors import untouched

FUNCTIONAL_CALL = (
    "torch.func.functional_call, which replaces them for one call, is for torch.no_grad() only under L2L: write the "
    "values into the parameters, or train this model without L2L"
)


def anchor_of(parameters: Iterable[torch.Tensor], gradients: Gradients) -> torch.Tensor:
    """A tensor without elements that requires a gradient, and comes from those of `parameters` that are trained.

    Raises:
        ValueError: if other tensors than parameters stand in their places.
    """
    with untouched():
        trained = [p for p in parameters if p.requires_grad]
    strange = next((p for p in trained if not isinstance(p, nn.Parameter)), None)
    if strange is not None:
        raise ValueError(
            "the weights of a model that trains under L2L must be its own parameters, where gradients arrive (got a "
            f"{type(strange).__name__} of shape {list(strange.shape)} in place of one); {FUNCTIONAL_CALL}"
        )
    gradients.trained = trained
    itself = torch.empty(0, requires_grad=True)
    anchor: torch.Tensor = _Anchor.apply(gradients, itself, *trained)  # type: ignore[no-untyped-call]
    return anchor


class _Anchor(torch.autograd.Function):
    """A tensor without elements that comes from the masters, for the graph of a call.

    Copies of the masters compute, so that nothing else in the graph leads to them. A whole backward takes no gradient
    from here; one that asks for those of masters by name comes here, and would be left without. All layers of the call
    have run backwards by then, and nothing has been added to a gradient by autograd itself.
    """

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, itself: torch.Tensor, *masters: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.gradients, ctx.count = gradients, 1 + len(masters)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: None) -> tuple[Any, ...]:
        with ctx.gradients.backwards.joined():
            if not torch.autograd._is_checkpoint_valid():
                raise RuntimeError(
                    "gradients of the parameters of a model under L2L are in p.grad after loss.backward() (got "
                    "parameters as inputs of torch.autograd.grad or backward); call loss.backward() without inputs"
                )
            ctx.gradients.keep_apart(node for node, _ in ctx.next_functions[1:])
        return None, *[None] * ctx.count
