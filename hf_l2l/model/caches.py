"""Key-value caches in a forward that trains: a recompute would write into them a second time.

So models are told not to make any, layers are not given empty ones, and one with content (a prefix that trains, or
tokens of an earlier call) is given to a layer anew for each run, with its tensors as arguments of the layer.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_l2l.runtime.tensors import is_cache, tensors_within

Sizes = dict[Any, Any]
"""Per entry of a cache, a copy of it without memory."""


class FilledCache:
    """A cache with content, as a node of pytree: flattened into its tensors, unflattened into a new cache.

    Of a cache with an entry per layer, a layer that says which entry it reads is given only the tensors of that one.
    """

    def __init__(self, cache: Any, layer: nn.Module, sizes: Sizes) -> None:
        entries, others = _entries_of(cache, layer)
        self.tensors = list(dict.fromkeys(tensors_within(cache if entries is None else entries)))
        self.empty = _EmptyCache(cache, self.tensors, {entry: _size_of(entry, sizes) for entry in others})


class _EmptyCache:
    """A cache with placeholders for tensors. Two are equal if caches of the same kind have as many tensors."""

    def __init__(self, cache: Any, tensors: list[torch.Tensor], others: Sizes) -> None:
        self.placeholders = [torch.empty(0, device="meta") for _ in tensors]
        # Entries of other layers keep their sizes alone; their tensors would be inputs of this layer, too.
        self.others = list(others.values())
        self.cache = _copied(cache, [*tensors, *others], [*self.placeholders, *self.others])

    def filled_with(self, tensors: list[torch.Tensor]) -> Any:
        return _copied(self.cache, [*self.placeholders, *self.others], [*tensors, *self.others])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _EmptyCache) and self._kind == other._kind

    @property
    def _kind(self) -> tuple[object, ...]:
        return type(self.cache), len(self.placeholders)

    def __hash__(self) -> int:
        return hash(self._kind)


def _entries_of(cache: Any, layer: nn.Module) -> tuple[list[Any] | None, list[Any]]:
    """The entries of a cache that a layer reads, and the others; None if the layer does not say which it reads."""
    numbers = {getattr(module, "layer_idx", None) for module in layer.modules()} - {None}
    parts = [part for part in (cache, *vars(cache).values()) if isinstance(getattr(part, "layers", None), list)]
    if len(numbers) != 1:
        return None, []
    [number] = numbers
    entries = [(i == number, entry) for part in parts for i, entry in enumerate(part.layers)]
    return [entry for is_read, entry in entries if is_read], [entry for is_read, entry in entries if not is_read]


def _size_of(entry: Any, sizes: Sizes) -> Any:
    """A copy of an entry of a cache with tensors on the meta device; the same one for all layers."""
    if entry not in sizes:
        tensors = list(dict.fromkeys(tensors_within(entry)))
        sizes[entry] = _copied(entry, tensors, [torch.empty_like(t, device="meta") for t in tensors])
    return sizes[entry]


def map_cache(fn: Callable[[torch.Tensor], torch.Tensor], cache: Any) -> Any:
    """A copy of a cache with other tensors; one without content is returned as it is."""
    tensors = list(dict.fromkeys(tensors_within(cache)))
    return _copied(cache, tensors, [fn(tensor) for tensor in tensors]) if tensors else cache


def _copied(cache: Any, parts: list[Any], others: list[Any]) -> Any:
    """A copy of a cache, or of an entry, with these others in place of its parts."""
    memo: dict[int, Any] = {id(part): other for part, other in zip(parts, others, strict=True)}
    return copy.deepcopy(cache, memo)


pytree.register_pytree_node(
    FilledCache,
    lambda held: (held.tensors, held.empty),
    lambda tensors, empty: empty.filled_with(list(tensors)),  # what the layer is given
    serialized_type_name="hf_l2l.FilledCache",
)


def without_caches(layer: nn.Module, args: Any, kwargs: Any, sizes: Sizes) -> Any:
    """Arguments of a layer that trains: None for empty key-value caches, `FilledCache` for others.

    `sizes` is the same dict for all layers of a call of the model.
    """

    def replaced(leaf: Any) -> Any:
        if not is_cache(leaf):
            return leaf
        return FilledCache(leaf, layer, sizes) if leaf.get_seq_length() > 0 else None

    args, kwargs = pytree.tree_map(replaced, (args, kwargs), is_leaf=is_cache)
    if kwargs.get("use_cache"):
        kwargs = {**kwargs, "use_cache": False}
    return args, kwargs


def warn_of_cache(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Warn if a forward that trains is given a cache, to which it adds nothing; unless the cache is a prefix that
    trains."""
    given = [leaf for leaf in (*args, *kwargs.values()) if is_cache(leaf)]
    if any(not any(tensor.requires_grad for tensor in tensors_within(cache)) for cache in given):
        warnings.warn(
            f"a model under L2L adds nothing to a key-value cache in a forward that trains (a {type(module).__name__} "
            "got one): a later call finds no keys and values of this one. Call the model under torch.no_grad(), or "
            "leave out the cache",
            stacklevel=2,
        )


def without_use_cache(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Arguments of a module outside the layers in a forward that trains, with `use_cache=False` if it has that option.

    Many models make a cache by default; only some of them leave that to generation.
    """
    position = _position_of_use_cache(type(module).forward)
    if position is None:
        return args, kwargs
    asked = args[position] if position < len(args) else kwargs.get("use_cache")
    if asked is True:
        warnings.warn(
            f"a model under L2L makes no key-value cache in a forward that trains (got use_cache=True for a "
            f"{type(module).__name__}): past_key_values has no new tokens. Leave it out, or call the model under "
            "torch.no_grad()",
            stacklevel=2,
        )
    if position < len(args):
        return (*args[:position], False, *args[position + 1 :]), kwargs
    return args, {**kwargs, "use_cache": False}


@lru_cache(maxsize=1024)
def _position_of_use_cache(forward: Callable[..., Any]) -> int | None:
    """The number of the parameter `use_cache` of the forward of a class, without `self`; None if it has none."""
    names = list(inspect.signature(forward).parameters)[1:]
    return names.index("use_cache") if "use_cache" in names else None
