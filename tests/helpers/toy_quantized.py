"""A toy quantized weight: int8 values with scales, a tensor subclass that follows torch's protocol of wrappers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Wrapper(torch.Tensor):
    """A tensor without memory, whose parts are in the attributes named in `PARTS`."""

    PARTS: tuple[str, ...] = ()

    @staticmethod
    def __new__(cls, *parts: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=parts[0].device)
        for name, part in zip(cls.PARTS, parts, strict=True):
            setattr(made, name, part)
        return made

    def __init__(self, *parts: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
        pass

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.PARTS), {"dtype": self.dtype}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Wrapper:
        return cls(*(inner[name] for name in cls.PARTS), shape=size, dtype=context["dtype"])

    def dequantized(self) -> torch.Tensor:
        """The values."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            rows, weight, *bias = args
            return F.linear(rows, weight.dequantized().to(rows.dtype), *bias, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("detach", "clone"):
            own = args[0]
            parts = [func(getattr(own, part)) for part in own.PARTS]
            return cls(*parts, shape=own.shape, dtype=own.dtype)
        raise NotImplementedError(f"{name} of a {cls.__name__}")


class Scales(Wrapper):
    """Scales that are quantized themselves, to 16 bits."""

    PARTS = ("short", "factor")

    def dequantized(self) -> torch.Tensor:
        return self.short.to(self.dtype) * self.factor


class ToyInt8(Wrapper):
    """Values in int8, and a scale for each row, which may be a wrapper itself."""

    PARTS = ("values", "scale")

    def dequantized(self) -> torch.Tensor:
        scale = self.scale.dequantized() if isinstance(self.scale, Scales) else self.scale
        return self.values.to(self.dtype) * scale


def quantized(weight: torch.Tensor, *, nested: bool = True) -> nn.Parameter:
    """`weight` (two dimensions) as a frozen toy parameter."""
    weight = weight.detach()
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-6) / 127
    values = (weight / scale).round().to(torch.int8)
    if nested:
        factor = torch.tensor([1.5], dtype=scale.dtype)
        scale = Scales((scale / factor).half(), factor, shape=scale.shape, dtype=scale.dtype)
    return nn.Parameter(ToyInt8(values, scale, shape=weight.shape, dtype=weight.dtype), requires_grad=False)


def quantize_linears(model: nn.Module, *, nested: bool = True) -> nn.Module:
    """Freeze `model`, quantize the weights of its linear modules with more than 8 outputs, and train their biases."""
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.out_features > 8:
            module.weight = quantized(module.weight, nested=nested)
            if module.bias is not None:
                module.bias.requires_grad_(True)
    return model
