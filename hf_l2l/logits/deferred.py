"""`DeferredLogits`: a tensor whose values are made when something needs them.

What is done to it is recorded, if it is done to each row alone, and losses are computed in chunks of rows; any other
use makes the values first, with the graph that they would have had, and goes on as in plain torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hf_l2l.compat import without_interception, wrapper_tensor
from hf_l2l.log import logger
from hf_l2l.logits.chunks import Head, Step
from hf_l2l.runtime.compute_state import AutocastState
from hf_l2l.runtime.tensors import size_text

Handler = Callable[..., Any]
"""Computes a function of torch without the values; returns NotImplemented if it cannot."""


_READERS = "_hf_l2l_readers"


def has_readers(tensor: torch.Tensor) -> bool:
    """Whether logits that are not made yet, and that somebody still has, are to be computed with `tensor`."""
    return any(not each.is_there for each in vars(tensor).get(_READERS, ()))


class Deferred:
    """What a `DeferredLogits` knows: how its values are made, and whether they are there."""

    def __init__(
        self,
        head: Head,
        hidden: torch.Tensor,
        sample: torch.Tensor,
        make: Callable[[], torch.Tensor],
        parent: Deferred | None = None,
        like: torch.Tensor | None = None,
    ) -> None:
        """Record logits of `hidden` (..., H).

        Args:
            head: makes the logits (..., V) of hidden states.
            hidden: on the device.
            sample: the logits of no rows (0, V), which have dtype and device of all.
            make: makes the values as plain torch would.
            parent: the logits whose values have the memory of these, if `make` makes a view of them.
            like: shape and strides of the values, on the meta device; None for those of a new tensor.
        """
        for tensor in head.tensors:  # which nobody may free before these are made, or gone
            vars(tensor).setdefault(_READERS, weakref.WeakSet()).add(self)
        self.head = head
        self.hidden = hidden
        self.sample = sample
        self.parent = parent
        self.origin = parent
        """The logits that these were made of."""
        self.in_chunks = False
        """Whether something was computed in chunks, whose graph the values are no part of."""
        self.like = torch.empty(self.shape, dtype=sample.dtype, device="meta") if like is None else like
        self._make = make
        self._autocast = AutocastState.current(hidden.device)
        self._has_graph = torch.is_grad_enabled()
        self._values: torch.Tensor | None = None
        self._version = 0
        """Of the values when they were made; of a view, that of what it is a view of."""
        self._read = [(t, t._version) for t in (hidden, *head.tensors) if not t.is_inference()]
        """What the values are made of, and its versions now."""

    @property
    def shape(self) -> torch.Size:
        """(..., V)"""
        return torch.Size((*self.hidden.shape[:-1], self.sample.shape[-1]))

    @property
    def rows(self) -> int:
        """The number of rows, of V logits each."""
        return self.hidden.numel() // max(1, self.hidden.shape[-1])

    @property
    def is_small(self) -> bool:
        """Whether all rows make up one chunk, so that nothing is won by waiting."""
        return self.rows <= self.head.rows

    @property
    def is_there(self) -> bool:
        """Whether the values have been made, here or in the memory of which they are a view; what follows is computed
        of them, since they may have been written to."""
        return self._values is not None or (self.parent is not None and self.parent.is_there)

    @property
    def is_written(self) -> bool:
        """Whether the values have been written to since they were made."""
        if self._values is None:
            return self.parent is not None and self.parent.is_written
        return self._values._version != self._version

    def values(self) -> torch.Tensor:
        """The values, as plain torch would have made them when this was recorded; made once.

        Raises:
            RuntimeError: if what they are made of has changed.
        """
        if self._values is None:
            self.refuse_changed()
            with (
                torch.inference_mode(False),
                torch.set_grad_enabled(self._has_graph),
                self._autocast.entered(),
                # Activation checkpointing, if the program is inside of it now, must not count what this graph saves.
                torch.autograd.graph.saved_tensors_hooks(_values_of, _values_of),
            ):
                self._values = self._make()
            self._version = self._values._version if self.parent is None else self.parent._version
        return self._values

    def refuse_changed(self) -> None:
        """Raise RuntimeError if hidden states, weight or bias have changed since the forward."""
        if not self.is_there and any(tensor._version != version for tensor, version in self._read):
            raise RuntimeError(
                "logits under L2L are computed when they are read, of hidden states and weights that must not have "
                "changed since the forward (they were changed in place, as by optimizer.step()); read logits before "
                "that, or use chunked_loss='off' (l2l_chunked_loss)"
            )

    def refuse_written(self) -> None:
        """Raise RuntimeError if the values have been written to."""
        if self.is_written:
            raise RuntimeError(
                "logits under L2L that are changed in place must not be given to a function with a backward of its "
                "own (a custom torch.autograd.Function), which would lose the gradient of the change; change a copy, "
                "or use chunked_loss='off' (l2l_chunked_loss)"
            )

    def chunked(self) -> None:
        """Record that something is computed in chunks, of these logits and of those that they come from."""
        each: Deferred | None = self
        while each is not None:
            each.in_chunks, each = True, each.origin

    def derived(
        self,
        make: Callable[[torch.Tensor], torch.Tensor],
        *,
        hidden: torch.Tensor | None = None,
        step: Callable[..., torch.Tensor] | None = None,
        shared: tuple[torch.Tensor, ...] = (),
        view: torch.Tensor | None = None,
    ) -> DeferredLogits:
        """The logits that `make` makes of the values: those of other hidden states, or after another step,
        which is given the logits of a chunk and what is `shared` by all rows.

        `view` has their strides, on the meta device, if they are a view: they see what is written to the values.
        """
        head, sample = self.head, self.sample
        hidden = self.hidden if hidden is None else hidden
        if step is not None:
            recorded = Step(step, AutocastState.current(hidden.device), shared)
            head = head.then(recorded)
            with torch.no_grad():
                sample = recorded(sample)
        if not torch.is_grad_enabled():
            head, hidden = head.detached(), hidden.detach()
        if view is not None:
            return DeferredLogits.of(Deferred(head, hidden, sample, lambda: make(self.values()), self, view))

        def made() -> torch.Tensor:
            # What has been written to the values since must not show.
            return head.after(head.linear(hidden)) if self.is_written else make(self.values())

        copied = Deferred(head, hidden, sample, made)
        copied.origin = self
        return DeferredLogits.of(copied)


class DeferredLogits(torch.Tensor):
    """Logits (..., V) whose values are made when something needs them. For everybody else, a tensor like others."""

    deferred: Deferred

    @staticmethod
    def __new__(cls, deferred: Deferred) -> DeferredLogits:
        """A tensor without a graph; see `of`."""
        made: DeferredLogits = wrapper_tensor(cls, deferred.like, deferred.sample.device)
        made.deferred = deferred
        return made

    @classmethod
    def of(cls, deferred: Deferred) -> DeferredLogits:
        """A tensor that is part of the graph of its hidden states and its head."""
        made: DeferredLogits = _Whole.apply(deferred, deferred.hidden, *deferred.head.tensors)  # type: ignore[no-untyped-call]
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            with without_interception():
                return func(*args, **kwargs)
        handler = HANDLERS.get(func)
        if handler is not None:
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = pytree.tree_map(lambda leaf: _with_values(leaf, func), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """What autograd, or code in C++, does without asking `__torch_function__`."""
        if op in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return DeferredLogits(args[0].deferred)
        args, kwargs = pytree.tree_map(lambda leaf: _with_values(leaf, op, graph=False), (args, kwargs or {}))
        return op(*args, **kwargs)


HANDLERS: dict[Any, Handler] = {}
"""Function of torch -> what computes it without the values."""


def _with_values(leaf: Any, func: Any, *, graph: bool = True) -> Any:
    if not isinstance(leaf, DeferredLogits):
        return leaf
    deferred = leaf.deferred
    if func in _OF_THE_TENSOR and deferred.in_chunks:
        raise RuntimeError(
            f"logits under L2L have no gradient of their own once a loss was computed of them in chunks (got "
            f"{_name(func)}); ask before the loss is computed, or use chunked_loss='off' (l2l_chunked_loss)"
        )
    if not (deferred.is_there or deferred.is_small):
        _tell(_name(func), size_text(deferred.rows * deferred.shape[-1] * deferred.sample.itemsize))
    values = deferred.values()
    return values if graph else values.detach()


def _values_of(saved: torch.Tensor) -> torch.Tensor:
    """What the graph keeps of a tensor: without its own graph, in which a result that its function saves, as tanh
    does, would keep itself. Autograd connects it again."""
    return saved.detach()


@lru_cache(maxsize=256)
def _tell_once(name: str) -> list[str]:
    return []


def _tell(name: str, size: str) -> None:
    """Say once per function that it makes the logits."""
    told = _tell_once(name)
    if not told:
        told.append(size)
        logger.warning("%s needs the logits of all tokens at once, which take %s on the device", name, size)


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = getattr(func.__self__, "__name__", name)
    return str(name)


class _Whole(torch.autograd.Function):
    """Connects a `DeferredLogits` to its graph, for gradients of what code in C++ computes of it."""

    @staticmethod
    def forward(ctx: Any, deferred: Deferred, hidden: torch.Tensor, *tensors: torch.Tensor) -> DeferredLogits:
        ctx.deferred, ctx.head = deferred, deferred.head.of([torch.empty(0)] * len(tensors))
        ctx.save_for_backward(hidden, *tensors)
        return DeferredLogits(deferred)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.deferred.refuse_written()
        with torch.enable_grad():
            needed = ctx.needs_input_grad[1:]
            inputs = [t.detach().requires_grad_(n) for t, n in zip(ctx.saved_tensors, needed, strict=True)]
            head = ctx.head.of(inputs[1:])
            logits = head.after(head.linear(inputs[0]))
        found = iter(torch.autograd.grad(logits, [t for t in inputs if t.requires_grad], gradient))
        return None, *(next(found) if t.requires_grad else None for t in inputs)


def _getters(*names: str) -> list[Any]:
    return [getattr(torch.Tensor, name).__get__ for name in names]


_FACTS: set[Any] = {
    *_getters("shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad_fn", "is_leaf", "output_nr"),
    *_getters(
        "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_mps", "is_xpu"
    ),
    *_getters("itemsize", "nbytes", "_version"),
    *(getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "nelement", "ndimension", "stride", "__len__")),
    *(getattr(torch.Tensor, name) for name in ("get_device", "element_size", "is_contiguous", "storage_offset")),
    *(getattr(torch.Tensor, name) for name in ("is_floating_point", "is_complex", "is_signed", "is_inference")),
    *(getattr(torch.Tensor, name) for name in ("is_conj", "is_neg", "__hash__")),
    *(getattr(torch, name) for name in ("numel", "is_floating_point", "is_complex", "is_signed", "is_inference")),
}
"""What a `DeferredLogits` knows of itself."""

_OF_THE_TENSOR: set[Any] = {
    torch.autograd.grad,
    torch.Tensor.retain_grad,
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    *_getters("grad"),
}
"""What asks for the gradient of a tensor itself."""
