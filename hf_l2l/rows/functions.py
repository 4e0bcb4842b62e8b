"""The functions of torch that a model may compute between layers, and whose rows depend on the same rows alone:
positions are added to an embedding, it is scaled, dropout runs, a head has an activation, one token is taken of each
row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def _methods(*names: str) -> list[Any]:
    """These methods of tensors, and the functions of torch that have the same names."""
    return [getattr(place, name) for name in names for place in (Tensor, torch) if hasattr(place, name)]


def _elementwise(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    is_in_place = kwargs.get("inplace") or any(each is True for each in args)
    return kwargs.get("out") is None and not is_in_place


def _dropout(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return not (kwargs.get("inplace") or len(args) > 3 and args[3])


def _to_dtype(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return all(isinstance(each, torch.dtype) for each in (*args[1:], *kwargs.values()))


def _chosen(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """An index that takes all rows, and little of each: to take most of it, a view of what waits will do."""
    source, index = args
    entries = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(each, int | slice) and not isinstance(each, bool) or each is Ellipsis for each in entries):
        return False
    if not entries:
        return False
    takes_rows = entries[0] == slice(None) or (entries[0] is Ellipsis and len(entries) <= source.dim())
    return takes_rows and 2 * torch.empty(source.shape, device="meta")[index].numel() < source.numel()


BY_ROWS: dict[Any, Callable[[Sequence[Any], dict[str, Any]], bool]] = {
    **dict.fromkeys(_methods("add", "sub", "mul", "multiply", "div", "divide", "true_divide"), _elementwise),
    **dict.fromkeys(
        _methods("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__"),
        _elementwise,
    ),
    **dict.fromkeys([*_methods("tanh", "relu"), functional.gelu, functional.silu, functional.relu], _elementwise),
    functional.dropout: _dropout,
    **dict.fromkeys(_methods("to", "float", "half", "bfloat16", "double"), _to_dtype),
    Tensor.__getitem__: _chosen,
}
"""Function -> whether, with these arguments, each row of its result depends on the same row of its arguments."""


def unchanged(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the result is the first argument as it is: a dropout that drops nothing, a conversion to its dtype."""
    if func is functional.dropout:
        given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
        return not given.get("training", True) or given.get("p", 0.5) == 0
    if BY_ROWS[func] is _to_dtype:
        sample = torch.empty(0, dtype=args[0].dtype)
        return func(sample, *args[1:], **kwargs) is sample
    return False


def rows_of(tensors: Sequence[Tensor], source: Tensor) -> list[bool] | None:
    """For the tensors of an elementwise function, whether each has the rows of `source`; None if that does not say
    the rows of the result."""
    if any(t.dim() > source.dim() for t in tensors) or len(source) < 2:
        return None
    return [t.dim() == source.dim() and t.shape[0] == source.shape[0] for t in tensors]
