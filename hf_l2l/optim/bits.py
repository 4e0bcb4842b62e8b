"""Whether two objects have the same bits, whatever they are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_MANY = 2**12  # number of elements above which a tensor's version counter is compared instead of its bits


def are_equal(one: Any, other: Any) -> bool:
    """Whether two values, tensors or others, are the same."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    return torch.equal(one.detach(), other.detach())


def bits_of(value: Any, within: tuple[int, ...] = ()) -> Any:
    """A value to compare by: equal for two objects if all values found in them have the same bits."""
    if isinstance(value, torch.nn.Parameter):
        return id(value)  # weights are compared separately
    if isinstance(value, torch.Tensor):
        many = value.numel() > _MANY
        return (value.shape, value.is_inference() or value._version) if many else tensor_bits(value)
    if isinstance(value, torch.Generator):
        return tensor_bits(value.get_state())
    if id(value) in within:
        return "itself"
    within = (*within, id(value))
    if isinstance(value, Mapping):
        keys = [id(key) if isinstance(key, torch.Tensor) else bits_of(key, within) for key in value]
        return list(zip(keys, [bits_of(v, within) for v in value.values()], strict=True))
    if isinstance(value, (list, tuple, set, frozenset)):
        return [type(value), *(bits_of(v, within) for v in value)]
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return type(value), repr(value)
    if callable(value) or not hasattr(value, "__dict__"):
        return type(value)
    return type(value), bits_of(vars(value), within)


def tensor_bits(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor, with dtype and shape."""
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return dense.dtype, dense.shape, bytes(dense.contiguous().reshape(-1).view(torch.uint8).tolist())
