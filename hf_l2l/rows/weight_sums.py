"""The gradients of weights that micro-batches read in turn, summed; those of tables of embeddings by rows, into one
tensor, never as a tensor of the size of the table for each micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class WeightSums(TorchFunctionMode):
    """The gradients of weights, summed over the ubatches; inside, tables are read so that rows of their gradients are
    added to one tensor."""

    def __init__(self, weights: Iterable[torch.Tensor], needed: Iterable[bool]) -> None:
        super().__init__()
        self._weights = list(weights)
        self._needed = [w for w, needs in zip(self._weights, needed, strict=True) if needs]
        self._totals: dict[torch.Tensor, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.embedding:
            read = _read(*args, **kwargs)
            if read is not None and any(each is read.table for each in self._needed):
                return _ReadRows.apply(read.ids, read.table, self._total(read.table), read.padding)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)

    def _total(self, weight: torch.Tensor) -> torch.Tensor:
        if weight not in self._totals:
            # Sums of 16-bit gradients are fp32.
            dtype = torch.float32 if weight.itemsize < 4 else weight.dtype
            self._totals[weight] = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        return self._totals[weight]

    def add(self, outputs: torch.Tensor, gradient: torch.Tensor, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run backward from the outputs of one ubatch; returns the gradients of its own `leaves`."""
        wanted = [*leaves, *self._needed]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if wanted and outputs.requires_grad:
            found = torch.autograd.grad(outputs, wanted, gradient, allow_unused=True)
        for weight, each in zip(self._needed, found[len(leaves) :], strict=True):
            if each is not None:
                self._total(weight).add_(each)
        return [torch.zeros_like(leaf) if each is None else each for leaf, each in zip(leaves, found, strict=False)]

    def results(self) -> list[torch.Tensor | None]:
        """The sums, in the order and the dtypes of the weights."""
        return [self._totals[w].to(w.dtype) if w in self._totals else None for w in self._weights]


class _Read(NamedTuple):
    """What is read of a table of embeddings: the rows `ids`, of which those with the number `padding` do not train."""

    ids: torch.Tensor
    table: torch.Tensor
    padding: int | None


def _read(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> _Read | None:
    """What `torch.nn.functional.embedding` reads; None if rows of the gradient cannot be added one by one."""
    return None if max_norm or scale_grad_by_freq or sparse else _Read(input, weight, padding_idx)


class Reading(TorchFunctionMode):
    """Notes whether a table is read in a way in which rows of its gradient cannot be added one by one."""

    is_special = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.embedding and _read(*args, **kwargs) is None:
            self.is_special = True
        return func(*args, **kwargs)


class _ReadRows(torch.autograd.Function):
    """Reads a table of embeddings, and adds to the sum of its gradients by rows."""

    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, table: torch.Tensor, total: torch.Tensor, padding: int | None
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.total, ctx.padding = total, padding
        return torch.embedding(table, ids)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None, None]:
        [ids] = ctx.saved_tensors
        total, ids = ctx.total, ids.reshape(-1)
        rows = gradient.reshape(len(ids), -1).to(total.dtype)
        if ctx.padding is not None:
            rows = rows.masked_fill((ids == ctx.padding % len(total))[:, None], 0)
        total.index_add_(0, ids, rows)
        return None, None, None, None
