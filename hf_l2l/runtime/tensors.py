"""Tensors and the containers they come in: bytes, shapes, rows, leaves."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils import _pytree as pytree


def size_text(num_bytes: int) -> str:
    """A number of bytes as people read it."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of all elements of `tensors`."""
    return sum(t.numel() * t.element_size() for t in tensors)


def is_cache(value: object) -> bool:
    """Whether `value` is a key-value cache of transformers."""
    return any(base.__name__ == "Cache" for base in type(value).__mro__)


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of nested containers, and their structure. A key-value cache is one leaf: it is changed in place."""
    return pytree.tree_flatten(value, is_leaf=is_cache)


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value`, what a model is called with or returns, with `fn` of every tensor in its place.

    Key-value caches are left alone. Mappings that pytree does not know, such as transformers' `BatchEncoding`, are
    copied where something in them changes, and keep their type unless it cannot be made of a dict.
    """

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return fn(leaf)
        if not isinstance(leaf, Mapping):
            return leaf
        before = dict(leaf.items())
        after = {key: map_tensors(fn, item) for key, item in before.items()}
        return leaf if all(after[key] is before[key] for key in before) else _remade(leaf, after)

    return pytree.tree_map(of_leaf, value, is_leaf=is_cache)


def leaves_of(value: Any) -> Iterator[Any]:
    """The leaves of nested containers, those of every kind of mapping included; a key-value cache is one leaf."""
    for leaf in pytree.tree_leaves(value, is_leaf=is_cache):
        if isinstance(leaf, Mapping):
            yield from leaves_of(dict(leaf.items()))
        else:
            yield leaf


def _remade(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the type of `mapping`, if it can be, with other values."""
    try:
        if not isinstance(mapping, dict | UserDict):  # a shallow copy of others may share what holds the values
            return type(mapping)(items)  # type: ignore[call-arg]
        made = copy.copy(mapping)
    except TypeError:
        return items
    made.update(items)
    return made


_SPLITTABLE = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


def is_opaque(leaf: Any) -> bool:
    """Whether an argument of a layer is an object in which there may be tensors that are not flattened."""
    return not isinstance(leaf, (torch.Tensor, *_SPLITTABLE)) and not callable(leaf)


def tensors_within(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """The tensors that an object holds, in containers and attributes."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        yield value
        return
    if not is_opaque(value) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        inner: Iterable[Any] = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        inner = value
    else:
        inner = getattr(value, "__dict__", {}).values()
    for each in inner:
        yield from tensors_within(each, seen)


def narrow(tensor: torch.Tensor, dim: int | None, rows: int, start: int, stop: int) -> torch.Tensor:
    """A view of rows `start` to `stop` of a tensor with `rows` rows along `dim`."""
    if dim is None:
        return tensor
    per_row = tensor.shape[dim] // rows
    return tensor.narrow(dim, start * per_row, (stop - start) * per_row)


def on_meta(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Shape and strides of `tensor` with another dtype."""
    with untouched():
        return torch.empty_like(tensor, dtype=dtype, device="meta", requires_grad=False)


def untouched() -> AbstractContextManager[Any]:
    """Inside, this thread uses held tensors as they are."""
    manager: AbstractContextManager[Any] = torch._C.DisableTorchFunctionSubclass()
    return manager
