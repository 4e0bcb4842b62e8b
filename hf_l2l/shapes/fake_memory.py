"""`FakeMemory`: runs code on tensors without values, and counts the memory that it would take.

A fake tensor has a shape and no values. Its memory has the lifetime that it would have elsewhere, so what a forward
keeps for its backward, and the most that exists at once, are found without any of it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hf_l2l.compat import FakeTensor, FakeTensorMode, fake_tensors_have_values
from hf_l2l.shapes.autocast import AutocastAsOnDevice

aten = torch.ops.aten


class FakeMemory(TorchDispatchMode):
    """Counts bytes of memory of fake tensors that are made inside, as long as it lives.

    What needs values gets an answer that is assumed: a condition is `true_or_false`, a number is 1, and a choice of
    elements by a mask takes all of them, or as many as a `one_hot` of them would have.
    """

    def __init__(self, true_or_false: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        """Bytes now."""
        self.peak = 0
        """The most bytes since `begin`."""
        self.flops = 0
        """Floating-point operations of products of matrices, convolutions and attention since `begin`."""
        self._answer = true_or_false
        self._counts = True
        self._known: dict[int, int] = {}
        """Memory -> the bytes that count."""
        self.shares: dict[int, float] = {}
        """Memory of a mask -> the share of its elements that are true; 1 for others."""

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count the memory of these, which were made outside."""
        self._known.update((_memory(t)._cdata, 0) for t in tensors)

    def counted(self, memory: torch.UntypedStorage) -> int:
        """The bytes of `memory`, if they count."""
        return self._known.get(memory._cdata, 0)

    def begin(self) -> int:
        """Forget the peak and the operations so far; returns the bytes that live now."""
        self.peak, self.flops = self.live, 0
        return self.live

    @contextmanager
    def not_counting(self) -> Iterator[None]:
        """Inside, memory is made that is counted elsewhere."""
        before, self._counts = self._counts, False
        try:
            yield
        finally:
            self._counts = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = self._assumed(func, args)
        if answer is not None:
            return answer
        result = func(*args, **(kwargs or {}))
        self.flops += _flops(func, args, kwargs or {}, result)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._count(_memory(tensor))
        return result

    def _assumed(self, func: Any, args: Any) -> Any:
        """The result of an operation that needs values; None for other operations."""
        if func in (aten._local_scalar_dense.default, aten.equal.default) and isinstance(args[0], FakeTensor):
            kind = torch.bool if func is aten.equal.default else args[0].dtype
            return self._answer if kind is torch.bool else 1.0 if kind.is_floating_point else 1
        if func in (aten.index_put_.default, aten.index_put.default) and _is_mask(args[1]):
            return args[0] if func is aten.index_put_.default else self._made(args[0].shape, args[0].dtype)
        if func is aten.nonzero.default and isinstance(args[0], FakeTensor):
            return self._made((self._chosen(args[0]), args[0].dim()), torch.long)
        if func is aten.index.Tensor and _is_mask(args[1]):
            mask = args[1][0]
            return self._made((self._chosen(mask), *args[0].shape[mask.dim() :]), args[0].dtype)
        if func is aten.masked_select.default and isinstance(args[0], FakeTensor):
            return self._made((torch.broadcast_shapes(args[0].shape, args[1].shape).numel(),), args[0].dtype)
        if func is aten._ctc_loss.Tensor:
            # The sums for every place in the sequence that labels make with blanks between them.
            time, rows = args[0].shape[:2]
            sums = rows, time, 2 * (args[1].numel() // rows) + 1
            return self._made((rows,), args[0].dtype), self._made(sums, args[0].dtype)
        if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            # The shapes are the same in all dtypes, but tensors without values know one of them only.
            short = [each.to(torch.bfloat16) if _is_float(each) else each for each in args]
            return self._made(func(*short).shape, args[0].dtype)
        return None

    def _chosen(self, mask: torch.Tensor) -> int:
        """How many elements a mask is taken to choose."""
        return math.ceil(self.shares.get(_memory(mask)._cdata, 1.0) * mask.numel())

    def _made(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        found = torch.empty(tuple(shape), dtype=dtype)
        self._count(_memory(found))
        return found

    def _count(self, memory: torch.UntypedStorage) -> None:
        key, size = memory._cdata, memory.nbytes()
        if key in self._known:
            return
        self._known[key] = size = size if self._counts else 0
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(memory, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.shares.pop(key, None)
        self.live -= size


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    of_attention = _OF_ATTENTION.get(func)
    if of_attention is not None:
        query, key = args[of_attention.query : of_attention.query + 2]
        scores = query.shape[:-1].numel() * key.shape[-2]
        return int(of_attention.products * 2 * scores * query.shape[-1])
    packet = func._overloadpacket
    # An operation in place computes what the one it is named after computes.
    count = flop_registry.get(packet) or flop_registry.get(getattr(aten, packet.__name__.removesuffix("_"), packet))
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


class _Attention(NamedTuple):
    """A kernel of attention: the number of its argument `query`, and how many products of matrices it makes."""

    query: int
    products: int


_OF_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _Attention(0, 2),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _Attention(1, 5),
}


def _is_mask(indices: Any) -> bool:
    """Whether elements are chosen by one mask without values."""
    return len(indices) == 1 and isinstance(indices[0], FakeTensor) and indices[0].dtype is torch.bool


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _memory(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


class _AsOnDevice(TorchFunctionMode):
    """Functions that torch composes on the host, as an accelerator computes them."""

    def __init__(self, memory: FakeMemory, fuses: Callable[..., bool]) -> None:
        super().__init__()
        self._memory = memory
        self._fuses = fuses

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is functional.dropout:
            return self._dropout(*args, **kwargs)
        result = func(*args, **kwargs)
        if func is functional.one_hot:
            self._memory.shares[_memory(result)._cdata] = 1 / result.shape[-1]
        return result

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        """As one kernel, which keeps a mask of one byte per element."""
        return torch.native_dropout(input, p, training)[0] if training and 0 < p < 1 else input

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        fuses = self._fuses(query, key, value, attn_mask, dropout_p)
        # The fused kernel has no gradient for its mask.
        if not fuses or (attn_mask is not None and attn_mask.requires_grad):
            return self._in_parts(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -math.inf)
        fused = aten._scaled_dot_product_flash_attention_for_cpu.default
        out, _ = fused(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)
        return cast(torch.Tensor, out)

    def _in_parts(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
        is_causal: bool,
        scale: float | None,
        gqa: bool,
    ) -> torch.Tensor:
        """Attention with a matrix of scores, which are dropped by the kernel of `_dropout`: that of the host, which
        the composed function would take, keeps a mask of floating point."""
        composed, dtype = aten._scaled_dot_product_attention_math.default, query.dtype
        if dropout and dtype.itemsize < 4:  # as inside the composed function
            query, key, value = query.float(), key.float(), value.float()
        given = value[..., :0] if dropout else value
        out, weights = composed(query, key, given, mask, 0.0, is_causal, scale=scale, enable_gqa=gqa)
        if dropout:
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3) if gqa else value
            out = self._dropout(weights, dropout) @ value
        return cast(torch.Tensor, out).to(dtype)


@contextmanager
def counted(fake: FakeTensorMode, fuses: Callable[..., bool], *, true_or_false: bool = True) -> Iterator[FakeMemory]:
    """Inside, code runs on the tensors of `fake`; yields the account of its memory.

    `fuses` tells whether attention of (query, key, value, mask, dropout probability) is one kernel, which keeps its
    result and a number per query and head instead of a matrix of scores.
    """
    memory = FakeMemory(true_or_false)
    with fake_tensors_have_values(), fake, memory, _AsOnDevice(memory, fuses), AutocastAsOnDevice():
        yield memory
