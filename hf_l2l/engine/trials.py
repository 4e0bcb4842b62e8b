"""Running a layer or another module to find something out: without dropout, and comparing what it returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hf_l2l.model.hook_writes import Collected


class Trial(NamedTuple):
    """What one run of a layer has given."""

    outputs: list[torch.Tensor]
    collected: list[Collected]
    """What hooks inside the layer have put into containers."""


def same_results(one: Sequence[torch.Tensor], two: Sequence[torch.Tensor]) -> bool:
    """Whether half of the digits agree: kernels may add in another order each time."""
    for a, b in zip(one, two, strict=True):
        tolerance = torch.finfo(a.dtype).eps ** 0.5 if a.is_floating_point() else 0.0
        if not torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
            return False
    return True


class WithoutDropout(TorchFunctionMode):
    """Inside, dropout does nothing, whatever the mode of the modules."""

    _functions = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._functions:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            kwargs = {**kwargs, **dict(zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False))}
            return func(*args[:3], **{**kwargs, "dropout_p": 0.0})
        return func(*args, **kwargs)


@contextmanager
def evaluating(layer: nn.Module) -> Iterator[None]:
    """Set a layer to evaluation mode for the block."""
    modules = [m for m in layer.modules() if m.training]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module in modules:
            module.training = True
