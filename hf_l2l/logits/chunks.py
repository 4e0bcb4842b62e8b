"""Functions of logits, row by row, computed for chunks of rows and once more in the backward.

A row is one token: `rows` tokens have hidden states (rows, H), and logits (rows, V). For all tokens, logits would take
4 V bytes per token for the loss and 8 in its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hf_l2l.rows.host_rows import fetch_rows_ahead, put_rows, room_like, rows_on_device
from hf_l2l.runtime.compute_state import AutocastState

RowFunction = Callable[..., torch.Tensor]
"""Takes logits (rows, V), and tensors with as many rows; returns (rows, ...), each row from its own row alone."""

FEWEST_ROWS = 128
"""Of a chunk: with fewer, products of matrices are slow on any device."""


def rows_per_chunk(hidden_size: int) -> int:
    """Rows of a chunk: so many that its logits, what a loss makes of them and their gradient take no more than the
    gradient of the weight, which is there anyway (16 V bytes a row in fp32, 4 V H for the gradient), but at least
    `FEWEST_ROWS`."""
    return max(FEWEST_ROWS, hidden_size // 4)


class Step(NamedTuple):
    """Something done to logits, row by row, and the settings of autocast then."""

    function: Callable[[torch.Tensor], torch.Tensor]
    autocast: AutocastState

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        with self.autocast.entered():
            return self.function(logits)


@dataclass(frozen=True)
class Head:
    """What makes logits of hidden states: a linear function, and what is done to its result.

    Args:
        weight: (V, H), on the device.
        bias: (V,), or None.
        autocast: the settings of autocast in the forward of the linear function.
        steps: what comes after it.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    autocast: AutocastState
    steps: tuple[Step, ...] = ()

    def linear(self, hidden: torch.Tensor) -> torch.Tensor:
        """The linear function alone: hidden states (..., H) -> (..., V)."""
        with self.autocast.entered():
            return functional.linear(hidden, self.weight, self.bias)

    def after(self, logits: torch.Tensor) -> torch.Tensor:
        """What the steps make of the result of the linear function."""
        for step in self.steps:
            logits = step(logits)
        return logits

    def then(self, step: Step) -> Head:
        """This, and another step."""
        return replace(self, steps=(*self.steps, step))

    def detached(self) -> Head:
        """This, without a graph."""
        return replace(self, weight=self.weight.detach(), bias=None if self.bias is None else self.bias.detach())

    @property
    def dtype(self) -> torch.dtype:
        """That of the result of the linear function, which autocast may choose."""
        return self.linear(self.weight.new_empty(0, self.weight.shape[1])).dtype

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Weight and bias."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def of(self, tensors: Sequence[torch.Tensor]) -> Head:
        """This, with other `tensors`."""
        return replace(self, weight=tensors[0], bias=None if self.bias is None else tensors[1])


def in_chunks(
    head: Head, hidden: torch.Tensor, function: RowFunction, rows: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """`function` of the logits of `hidden` and of `rows`, as one node of the graph.

    Args:
        head: makes the logits.
        hidden: (rows, H), on the device of the head, or in host memory (`HostRows`).
        function: what is computed.
        rows: its other arguments, which need no gradient.

    Returns:
        (rows, ...), on the same device. The logits of one chunk exist at a time; the gradients of weight and bias are
        summed over the chunks in fp32 even if these have 16 bits, and rounded once.
    """
    result: torch.Tensor = _InChunks.apply(head, function, tuple(rows), hidden, *head.tensors)  # type: ignore[no-untyped-call]
    return result


def _ranges(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _chunks(hidden: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """The rows of each chunk, and their hidden states on the device; if these wait in host memory, the next ones are
    uploaded meanwhile."""
    size = rows_per_chunk(hidden.shape[1])
    for rows in _ranges(len(hidden), size):
        part = rows_on_device(hidden, rows).detach()
        fetch_rows_ahead(hidden, slice(rows.stop, min(rows.stop + size, len(hidden))))
        yield rows, part


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: Head,
        function: RowFunction,
        rows: tuple[torch.Tensor, ...],
        hidden: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        # The graph refers to the tensors through what it saves alone, so that it can free them.
        ctx.head, ctx.function = head.of([torch.empty(0)] * len(tensors)), function
        ctx.save_for_backward(hidden, *tensors, *rows)
        parts = [function(head.after(head.linear(chunk)), *(each[r] for each in rows)) for r, chunk in _chunks(hidden)]
        result = torch.cat(parts)
        if not result.is_floating_point():
            ctx.mark_non_differentiable(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        hidden, *others = ctx.saved_tensors
        count = len(ctx.head.tensors)
        head, rows = ctx.head.of(others[:count]).detached(), others[count:]
        needs_hidden, needs_weight, needs_bias = (*ctx.needs_input_grad[3:], False)[:3]
        of_hidden = of_weight = of_bias = None
        weight = head.weight.to(head.dtype)
        for r, part in _chunks(hidden):
            of_logits = _gradient_of_logits(head, part, ctx.function, [each[r] for each in rows], gradient[r])
            if needs_hidden:
                found = (of_logits @ weight).to(hidden.dtype)
                of_hidden = room_like(hidden, found) if of_hidden is None else of_hidden
                put_rows(found, of_hidden, r)
            if needs_weight:
                of_weight = _plus_product(of_weight, of_logits, part.to(of_logits.dtype))
            if needs_bias:
                total = of_logits.sum(0, dtype=_sum_dtype(of_logits))
                of_bias = total if of_bias is None else of_bias.add_(total)
            del of_logits  # before those of the next chunk are made
        of_tensors = [
            None if g is None else g.to(t.dtype) for g, t in zip((of_weight, of_bias), head.tensors, strict=False)
        ]
        return None, None, None, of_hidden, *of_tensors


def _gradient_of_logits(
    head: Head, hidden: torch.Tensor, function: RowFunction, rows: list[torch.Tensor], gradient: torch.Tensor
) -> torch.Tensor:
    """The gradient of the result of the linear function."""
    logits = head.linear(hidden)
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        result = function(head.after(logits), *rows)
    [found] = torch.autograd.grad(result, logits, gradient)
    return found


def _sum_dtype(tensor: torch.Tensor) -> torch.dtype:
    return tensor.dtype if tensor.itemsize >= 4 else torch.float32


def _plus_product(total: torch.Tensor | None, of_logits: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """`total` plus the gradient (V, H) of a weight; None stands for 0."""
    count, size = of_logits.shape[1], hidden.shape[1]
    if total is None:
        total = torch.zeros(count, size, dtype=_sum_dtype(of_logits), device=hidden.device)
    if total.dtype == of_logits.dtype:
        return total.addmm_(of_logits.t(), hidden)
    # A product in 16 bits takes memory of its own: as much as the logits of the chunk have, at most.
    for r in _ranges(count, max(1, count * len(hidden) // size)):
        total[r] += of_logits[:, r].t() @ hidden
    return total
