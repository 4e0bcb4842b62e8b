"""Helpers for tensors and nested containers of tensors: bytes, shapes, rows, pytree leaves."""

from __future__ import annotations

import copy
import types
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_l2l.compat import without_interception
from hf_l2l.runtime import stream
from hf_l2l.runtime.flat_memory import is_dense


def size_text(num_bytes: int) -> str:
    """A number of bytes as text, such as "1.5 GiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


def two_digits(value: float) -> str:
    """A time, a speed or a size that is computed, as text: it is known no better."""
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of all elements of `tensors`; those of a quantized tensor are the bytes of its parts."""
    return sum(part.numel() * part.element_size() for t in tensors for part in parts_of(t))


ADAPTERS: dict[str, tuple[str, ...]] = {
    "Params4bit": (  # bitsandbytes
        "quant_state.absmax",
        "quant_state.code",
        "quant_state.offset",
        "quant_state.state2.absmax",
        "quant_state.state2.code",
    ),
}
"""Class of quantized parameters without torch's protocol of wrapper subclasses -> the attributes that hold, beside
the packed values, the tensors that its kernels read; an attribute that is None, or is not there, is left out."""


def is_quantized(tensor: torch.Tensor) -> bool:
    """Whether `tensor` can be taken apart into several: a wrapper subclass, or of a class that has an adapter here."""
    return _is_quantized_class(type(tensor))


@lru_cache(maxsize=1024)
def _is_quantized_class(kind: Any) -> bool:
    return hasattr(kind, "__tensor_flatten__") or kind.__name__ in ADAPTERS


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with memory of their own that `tensor` consists of: itself, unless it is quantized.

    They are those that it holds, not copies. A wrapper subclass is asked by `__tensor_flatten__`, and so are wrappers
    in it. Of a class with an adapter, the first part is the tensor itself, with the packed values.
    """
    if not is_quantized(tensor):
        return [tensor]
    paths = ADAPTERS.get(type(tensor).__name__)
    if paths is not None:
        return [tensor, *(found for path in paths if (found := _attribute(tensor, path)) is not None)]
    names, _ = _flattened(tensor)
    return [part for name in names for part in parts_of(getattr(tensor, name))]


def rebuilt(tensor: torch.Tensor, parts: Iterator[torch.Tensor]) -> torch.Tensor:
    """A tensor like `tensor` that consists of the next `parts`, which are like its own, on any device."""
    if not is_quantized(tensor):
        return next(parts)
    paths = ADAPTERS.get(type(tensor).__name__)
    if paths is None:
        names, context = _flattened(tensor)
        inner = {name: rebuilt(getattr(tensor, name), parts) for name in names}
        kind: Any = type(tensor)
        made: torch.Tensor = kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
        return made
    made = next(parts).as_subclass(type(tensor))
    # Not the module that holds it: an engine that refers to modules from tensors would never be freed.
    vars(made).update({k: None if isinstance(v, nn.Module) else copy.copy(v) for k, v in vars(tensor).items()})
    for path in paths:
        if _attribute(tensor, path) is not None:
            *owners, name = path.split(".")
            holder: Any = made
            before: Any = tensor
            for owner in owners:  # objects on the way are copied, since the original keeps its own tensors
                before = getattr(before, owner)
                if getattr(holder, owner) is before:
                    setattr(holder, owner, copy.copy(before))
                holder = getattr(holder, owner)
            setattr(holder, name, next(parts))
    return made


def _flattened(tensor: torch.Tensor) -> tuple[list[str], Any]:
    wrapper: Any = tensor
    names, context = wrapper.__tensor_flatten__()
    return names, context


def _attribute(tensor: torch.Tensor, path: str) -> torch.Tensor | None:
    value: Any = tensor
    for name in path.split("."):
        value = getattr(value, name, None)
    return value if isinstance(value, torch.Tensor) else None


def is_cache(value: object) -> bool:
    """Whether `value` is a key-value cache of transformers."""
    kind: Any = type(value)
    return _is_cache_class(kind)


def have_cache(values: Iterable[object]) -> bool:
    """Whether one of `values` is a key-value cache of transformers."""
    return any(map(_is_cache_class, map(type, values)))


@lru_cache(maxsize=1024)
def _is_cache_class(kind: Any) -> bool:
    return any(base.__name__ == "Cache" for base in kind.__mro__)


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of nested containers, and their structure. A key-value cache is one leaf: it changes in place."""
    return pytree.tree_flatten(value, is_leaf=is_cache)


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply `fn` to every tensor in `value`, the arguments or the output of a model.

    Key-value caches are not changed. A mapping that pytree does not know, such as transformers' `BatchEncoding`, is
    copied if something in it changes, and keeps its type if the type can be built from a dict.
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


SMALL = 2**20
"""Bytes up to which an input is copied on the host first, so that the host need not wait for its upload."""


def to_device(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in it on `device`."""
    return map_tensors(lambda tensor: sent(tensor, device, tensor.dtype, SMALL), value)


def sent(
    tensor: torch.Tensor, device: torch.device, dtype: torch.dtype, most: int, *, copy: bool = False
) -> torch.Tensor:
    """`tensor` on `device` and in `dtype`; itself if it is that already, unless a `copy` is asked for.

    The host does not wait for uploads of up to `most` bytes: they are made from a page-locked copy, so the program may
    write to `tensor` right after this. Other uploads block the host until the device has done all earlier work.
    """
    if _can_be_staged(tensor, device) and tensor.numel() * dtype.itemsize <= most:
        staged = _staged(tensor.to(dtype))  # on the host: a conversion in the upload would make it block
        if staged is not None:
            return staged.to(device, non_blocking=True)  # torch reuses the memory when the device has read it
    return tensor.to(device, dtype, copy=copy)


def _staged(tensor: torch.Tensor) -> torch.Tensor | None:
    """A page-locked copy of a host tensor; None if no memory can be page-locked."""
    with suppress(RuntimeError):
        # A tensor that is page-locked itself, as those of data loaders are, `pin_memory` would return without a copy.
        return tensor.clone().pin_memory() if tensor.is_pinned() else tensor.pin_memory()
    return None


def _can_be_staged(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a page-locked copy of a host tensor can be uploaded instead of it."""
    return (
        tensor.device == stream.HOST != device
        and stream.can_page_lock(device)
        and stream.last_refusal(device) is None
        and type(tensor) is torch.Tensor
        and not tensor.requires_grad  # autograd would give its gradient to the copy
        and tensor.layout is torch.strided
        and is_dense(tensor)
    )


def leaves_of(value: Any) -> Iterator[Any]:
    """The leaves of nested containers, including mappings of any kind; a key-value cache is one leaf."""
    for leaf in pytree.tree_leaves(value, is_leaf=is_cache):
        if isinstance(leaf, Mapping):
            yield from leaves_of(dict(leaf.items()))
        else:
            yield leaf


def _remade(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping with `items`, of the type of `mapping` if possible."""
    try:
        if not isinstance(mapping, dict | UserDict):  # shallow copies of other types may share their storage
            return type(mapping)(items)  # type: ignore[call-arg]
        made = copy.copy(mapping)
        made.update(items)
        return made
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError):  # and their subclasses
        return items


_SPLITTABLE = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


def is_opaque(leaf: Any) -> bool:
    """Whether an argument of a layer is an object that may hide tensors from `flatten`."""
    return not isinstance(leaf, (torch.Tensor, *_SPLITTABLE)) and not callable(leaf)


OBJECTS_INSPECTED = 4096
"""The most objects that `tensors_within` inspects: it runs at each call of a layer."""

_WITHOUT_TENSORS = (
    *_SPLITTABLE,
    nn.Module,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
)
"""Types whose objects hold no input tensors of a layer: text, numbers, code, and modules (which hold weights)."""


def tensors_within(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that an object holds in containers and attributes: breadth first, in up to `OBJECTS_INSPECTED`
    objects. The order of tensors does not depend on the other contents of the object."""
    waiting, seen, taken = deque([value]), dict[int, Any](), 1
    while waiting:
        each = waiting.popleft()
        if isinstance(each, torch.Tensor):
            yield each
        elif not isinstance(each, _WITHOUT_TENSORS) and id(each) not in seen:
            seen[id(each)] = each  # keeps it alive, so that its id is not reused
            inner = list(islice(_inside(each), OBJECTS_INSPECTED - taken))
            taken += len(inner)
            waiting.extend(inner)


def _inside(value: Any) -> Iterator[Any]:
    """The values of an object's attributes, including those in `__slots__`, and its items."""
    yield from getattr(value, "__dict__", {}).values()
    for slot in _slots_of(type(value)):  # type: ignore[arg-type]  # a class has a hash
        try:
            held = slot.__get__(value)
        except AttributeError:  # the slot is empty
            continue
        yield held
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from value


@lru_cache(maxsize=1024)  # of a few kinds of objects, each looked into again and again
def _slots_of(kind: type) -> tuple[types.MemberDescriptorType, ...]:
    """Those of `__slots__`, of the class and of its bases."""
    held = (each for base in kind.__mro__ for each in vars(base).values())
    return tuple(s for s in held if isinstance(s, types.MemberDescriptorType) and s.__name__ != "__dict__")


def narrow(tensor: torch.Tensor, dim: int | None, rows: int, start: int, stop: int) -> torch.Tensor:
    """A view of rows `start` to `stop` of a tensor with `rows` rows along `dim`."""
    if dim is None:
        return tensor
    per_row = tensor.shape[dim] // rows
    return tensor.narrow(dim, start * per_row, (stop - start) * per_row)


def on_meta(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Shape and strides of `tensor` with another dtype; only the shape of a quantized one."""
    with without_interception():
        if is_quantized(tensor):  # few of them know `empty_like`
            return torch.empty(tensor.size(), dtype=dtype, device="meta")
        return torch.empty_like(tensor, dtype=dtype, device="meta", requires_grad=False)


def with_own_version(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the memory of `tensor`, without a graph, whose version is its own: views share theirs."""
    with torch.no_grad():
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def is_plain(parameter: torch.Tensor) -> bool:
    """Whether the parameter can be moved to other memory without other effects."""
    return type(parameter) is nn.Parameter and can_move(parameter)


def can_move(tensor: torch.Tensor) -> bool:
    """Whether neither inference mode nor another process keeps the tensor, an ordinary one, in its memory."""
    # On an accelerator, torch calls all memory shared.
    is_shared = tensor.device == stream.HOST and tensor.is_shared()
    return not tensor.is_inference() and not is_shared


def sharing_memory(tensors: Iterable[torch.Tensor]) -> set[torch.Tensor]:
    """Those of the host tensors among `tensors`, or of the parts of quantized ones, whose bytes belong to another one
    as well: tied by memory."""
    found: set[torch.Tensor] = set()
    ranges = []
    for tensor in {part for each in tensors for part in parts_of(each)}:
        if tensor.device == stream.HOST and tensor.layout is torch.strided and tensor.numel():
            last = sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
            start = tensor.data_ptr()
            ranges.append((start, start + (last + 1) * tensor.element_size(), tensor))
    ranges.sort(key=lambda each: each[:2])
    reaches, holder = 0, None
    for start, stop, tensor in ranges:
        if start < reaches and holder is not None:
            found |= {tensor, holder}
        if stop > reaches:
            reaches, holder = stop, tensor
    return found
