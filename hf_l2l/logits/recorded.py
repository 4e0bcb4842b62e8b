"""What can be done with `DeferredLogits` without their values.

Three kinds: functions of each number or row, which become steps; views that only choose or regroup rows, which are
made of the hidden states instead; and functions that leave few numbers per row, which are computed in chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from hf_l2l.compat import FakeTensor
from hf_l2l.logits.chunks import RowFunction, in_chunks, sum_in_chunks
from hf_l2l.logits.deferred import HANDLERS, DeferredLogits, Handler


def _handles(*functions: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return register


def _methods(*names: str) -> list[Any]:
    """These methods of tensors, and the functions of torch that have the same names."""
    return [getattr(place, name) for name in names for place in (Tensor, torch) if hasattr(place, name)]


def _is_waiting(value: Any) -> bool:
    return isinstance(value, DeferredLogits) and not value.deferred.is_there and value.deferred.rows > 0


def _is_last(dim: Any, logits: DeferredLogits) -> bool:
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        [dim] = dim
    return isinstance(dim, int) and dim in (-1, logits.dim() - 1)


# ---- functions of each number, or of each row


def _step(
    logits: DeferredLogits, of_any: Callable[[Tensor], Tensor], of_chunk: Callable[..., Tensor], *shared: Tensor
) -> Any:
    return logits.deferred.derived(of_any, step=of_chunk, shared=shared)


_ELEMENTWISE = _methods(
    *("float", "double", "half", "bfloat16", "mul", "multiply", "div", "divide", "true_divide", "add", "sub", "neg"),
    *("negative", "tanh", "exp", "sigmoid", "log", "clamp"),
    *("__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__add__", "__radd__", "__sub__", "__rsub__", "__neg__"),
)


@_handles(*_ELEMENTWISE)
def _elementwise(func: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
    others = pytree.tree_leaves((args, kwargs))
    if not _is_waiting(logits) or kwargs.get("out") is not None:
        return NotImplemented
    if not any(isinstance(other, Tensor) for other in others):
        sample = logits.deferred.sample
        with torch.no_grad():
            if func(sample, *args, **kwargs) is sample:  # a conversion to the dtype that they have
                return logits
        return _step(logits, lambda t: func(t, *args, **kwargs), lambda t: func(t, *args, **kwargs))
    other: Any = others[0]
    if len(others) > 1 or not _is_one_row(other, logits):
        return NotImplemented
    version = other._version

    def of_chunk(chunk: Tensor, there: Tensor) -> Any:
        if other._version != version:
            raise RuntimeError(
                "a tensor that logits were computed with has been changed in place before their backward"
            )
        return func(chunk, there.reshape(-1))  # whatever the number of dimensions, a chunk has two

    return _step(logits, lambda t: func(t, other), of_chunk, other)


def _is_one_row(other: Any, logits: DeferredLogits) -> bool:
    """Whether `other` is the same for each row, as BART's bias of logits, and needs no gradient."""
    return (
        isinstance(other, Tensor)
        and not isinstance(other, DeferredLogits)
        and not other.requires_grad
        and other.device == logits.device
        and 0 < other.dim() <= logits.dim()
        and other.numel() == other.shape[-1] == logits.shape[-1]
    )


@_handles(*_methods("detach"))
def _detach(func: Any, logits: Any) -> Any:
    with torch.no_grad():
        return logits.deferred.derived(func, view=logits.deferred.like) if _is_waiting(logits) else NotImplemented


@_handles(Tensor.to, Tensor.type_as)
def _to(func: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
    if not _is_waiting(logits) or any(isinstance(a, DeferredLogits) for a in (*args, *kwargs.values())):
        return NotImplemented
    sample = logits.deferred.sample
    with torch.no_grad():
        there = func(sample, *args, **kwargs)
    if there is sample:
        return logits
    dtype = there.dtype
    if there.device != sample.device:
        return NotImplemented
    return _step(logits, lambda t: func(t, *args, **kwargs), lambda t: t.to(dtype))


@_handles(*_methods("log_softmax", "softmax"), functional.log_softmax, functional.softmax)
def _softmax(func: Any, logits: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    if not _is_waiting(logits) or not _is_last(dim, logits) or "out" in kwargs:
        return NotImplemented
    return _step(logits, lambda t: func(t, dim, *args, **kwargs), lambda t: func(t, -1, *args, **kwargs))


# ---- views that choose or regroup rows


_REGROUPING = _methods(
    *(
        "view",
        "reshape",
        "view_as",
        "reshape_as",
        "flatten",
        "unflatten",
        "unsqueeze",
        "squeeze",
        "contiguous",
        "clone",
    )
)


@_handles(*_REGROUPING)
def _regroup(func: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
    if not _is_waiting(logits) or any(isinstance(a, DeferredLogits) for a in (*args, *kwargs.values())):
        return NotImplemented
    deferred, width = logits.deferred, logits.shape[-1]
    like = func(deferred.like, *args, **kwargs)
    # Rows stay in their order, so they are the same ones if there are as many, of the same size.
    same = like.dtype == logits.dtype and like.numel() == logits.numel() and like.dim() > 0
    if not same or like.shape[-1] != width or width == 1:
        return NotImplemented
    hidden = deferred.hidden.reshape(*like.shape[:-1], deferred.hidden.shape[-1])
    return deferred.derived(lambda t: func(t, *args, **kwargs), hidden=hidden, view=_if_view(like, deferred.like))


def _if_view(like: Tensor, of: Tensor) -> Tensor | None:
    """`like` if it is a view of `of`, or the same tensor; None if it is a copy."""
    return like if like is of or like._is_view() else None


@_handles(Tensor.__getitem__)
def _choose(func: Any, logits: Any, index: Any) -> Any:
    if not _is_waiting(logits):
        return NotImplemented
    of_rows = _without_last(index, logits.dim())
    if of_rows is None:
        return NotImplemented
    deferred = logits.deferred
    entries = index if isinstance(index, tuple) else (index,)
    copies = any(isinstance(entry, (Tensor, list)) for entry in entries)
    view = None if copies else deferred.like[index]
    return deferred.derived(lambda t: func(t, index), hidden=deferred.hidden[of_rows], view=view)


def _without_last(index: Any, dims: int) -> tuple[Any, ...] | None:
    """`index` with an entry for each of so many dimensions, if it takes the last one whole; None otherwise."""
    entries = list(index) if isinstance(index, tuple) else [index]
    taken = 0
    for entry in entries:
        if isinstance(entry, bool) or isinstance(entry, DeferredLogits):
            return None
        if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8):
            taken += entry.dim()
        elif entry is not None and entry is not Ellipsis:
            taken += 1
    whole = [slice(None)] * (dims - taken)
    places = [i for i, entry in enumerate(entries) if entry is Ellipsis]
    if len(places) > 1 or taken > dims:
        return None
    place = places[0] if places else len(entries)
    entries = [*entries[:place], *whole, *entries[place + 1 :]]
    last = entries[-1] if entries else None
    return tuple(entries) if isinstance(last, slice) and last == slice(None) else None


def _part(position: int, default: int | None = None) -> Handler:
    """For a view along the dimension that is argument number `position` after the tensor."""

    def handler(func: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        dim = kwargs.get("dim", args[position] if len(args) > position else default)
        if not _is_waiting(logits) or not isinstance(dim, int) or not -logits.dim() <= dim < logits.dim() - 1:
            return NotImplemented
        if dim == -1 or "out" in kwargs:
            return NotImplemented
        found, deferred = func(logits.deferred.hidden, *args, **kwargs), logits.deferred
        if isinstance(found, Tensor):
            copies = any(isinstance(each, Tensor) for each in args)
            view = None if copies else func(deferred.like, *args, **kwargs)
            return deferred.derived(lambda t: func(t, *args, **kwargs), hidden=found, view=view)
        views = func(deferred.like, *args, **kwargs)
        return tuple(
            deferred.derived(partial(_nth, number, func, args, kwargs), hidden=hidden, view=view)
            for number, (hidden, view) in enumerate(zip(found, views, strict=True))
        )

    return handler


@_handles(*_methods("transpose", "swapaxes", "swapdims"))
def _transpose(func: Any, logits: Any, one: Any = None, other: Any = None) -> Any:
    if not _is_waiting(logits) or not all(isinstance(dim, int) for dim in (one, other)):
        return NotImplemented
    if logits.dim() - 1 in (one % logits.dim(), other % logits.dim()):
        return NotImplemented
    deferred = logits.deferred
    hidden, view = (func(each, one, other) for each in (deferred.hidden, deferred.like))
    return deferred.derived(lambda t: func(t, one, other), hidden=hidden, view=view)


def _nth(number: int, func: Any, args: Any, kwargs: Any, values: Tensor) -> Any:
    return func(values, *args, **kwargs)[number]


_handles(*_methods("split", "chunk"))(_part(1, 0))
_handles(*_methods("unbind"))(_part(0, 0))
_handles(*_methods("narrow", "select", "index_select"))(_part(0))


# ---- functions that leave few numbers per row


def _of_chunks(
    compute: Callable[..., Tensor],
    logits: DeferredLogits,
    function: RowFunction,
    rows: Iterable[Tensor],
    shared: Iterable[Tensor],
) -> Tensor:
    """What `compute`, which is `in_chunks` or `sum_in_chunks`, makes of logits (..., V), `rows` (..., m) and what all
    rows share."""
    deferred = logits.deferred
    deferred.refuse_changed()
    hidden = deferred.hidden.reshape(-1, deferred.hidden.shape[-1])
    flat = [each.reshape(len(hidden), -1) for each in rows]
    found = compute(deferred.head, hidden, function, flat, [*shared])
    if found.requires_grad:
        deferred.chunked()
    return found


def _per_row(
    logits: DeferredLogits, function: RowFunction, rows: Iterable[Tensor] = (), shared: Iterable[Tensor] = ()
) -> Tensor:
    """(..., n) of logits (..., V), `rows` (..., m) and what all rows share; computed in chunks."""
    found = _of_chunks(in_chunks, logits, function, rows, shared)
    return found.reshape(*logits.shape[:-1], found.shape[-1])


def _has_rows_of(other: Any, logits: DeferredLogits) -> bool:
    """Whether `other` is a tensor of the same device (..., m), with values of its own (not one of a class that makes
    them when they are needed), with as many rows, and needs no gradient."""
    kind = type(other)
    return (
        isinstance(other, Tensor)
        and (kind is FakeTensor or kind.__torch_dispatch__ is Tensor.__torch_dispatch__)
        and not other.requires_grad
        and other.device == logits.device
        and other.shape[:-1] == logits.shape[:-1]
        and other.dim() == logits.dim()
    )


@_handles(functional.cross_entropy)
def _cross_entropy(
    func: Any,
    logits: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    by_class = isinstance(target, Tensor) and target.dim() == 1 and not target.is_floating_point()
    if not (_is_waiting(logits) and by_class and logits.dim() == 2 and _has_rows_of(target[:, None], logits)):
        return NotImplemented
    given = (size_average, reduce) == (None, None) and reduction in ("mean", "sum", "none")
    if not given or (weight is not None and (weight.requires_grad or weight.device != logits.device)):
        return NotImplemented

    def loss(chunk: Tensor, labels: Tensor, of_classes: Tensor | None = None) -> Tensor:
        found: Tensor = func(chunk, labels[:, 0], of_classes, None, ignore_index, None, "none", label_smoothing)
        return found[:, None]

    rows, shared = [target[:, None]], [] if weight is None else [weight]
    if reduction == "none":
        return _per_row(logits, loss, rows, shared)[:, 0]
    total = _of_chunks(sum_in_chunks, logits, loss, rows, shared)
    if reduction == "mean":
        is_counted = target != ignore_index
        counts = is_counted if weight is None else weight[target.masked_fill(~is_counted, 0)] * is_counted
        # Of no labels at all, the mean is no number, but all gradients are 0.
        are_there = is_counted.any()
        total = torch.where(are_there, total / torch.where(are_there, counts.sum(), 1), math.nan)
    with torch.no_grad():
        dtype = loss(logits.deferred.sample, target[:0, None], weight).dtype
    return total.to(dtype)


@_handles(*_methods("gather"))
def _gather(func: Any, logits: Any, dim: Any = None, index: Any = None, **kwargs: Any) -> Any:
    if not (_is_waiting(logits) and _is_last(dim, logits) and _has_rows_of(index, logits)) or any(kwargs.values()):
        return NotImplemented
    return _per_row(logits, lambda chunk, chosen: func(chunk, -1, chosen), [index])


def _reduction(func: Any, logits: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    if not (_is_waiting(logits) and _is_last(dim, logits)) or "out" in kwargs:
        return NotImplemented
    found = _per_row(logits, lambda chunk: func(chunk, -1, True, **kwargs))
    return found if keepdim else found.squeeze(-1)


_handles(*_methods("logsumexp", "sum", "mean", "argmax", "amax", "amin"), torch.special.logsumexp)(_reduction)
