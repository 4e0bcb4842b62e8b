"""Functions of logits, row by row, computed for chunks of rows.

A row is one token: `rows` tokens have hidden states (rows, H), and logits (rows, V). For all tokens, logits would take
4 V bytes per token for the loss and 8 in its backward. Logits of a chunk are made again in the backward, unless the
gradients are computed in the forward, as those of a sum can be.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hf_l2l.compat import graph_is_retained
from hf_l2l.logits.places import FIRST, Place, Sent, arrived
from hf_l2l.rows.host_rows import fetch_rows_ahead, put_rows, room_like, room_over, rows_on_device
from hf_l2l.runtime.compute_state import AutocastState

RowFunction = Callable[..., torch.Tensor]
"""Takes logits (rows, V), tensors with as many rows, and tensors that all rows share; returns (rows, ...), each row
from its own row alone."""

_T = TypeVar("_T")

FEWEST_ROWS = 128
"""Of a chunk: with fewer, products of matrices are slow on any device."""
MOST_ROWS = 8192
"""Of a chunk: more make no product faster."""
_BYTES = 16
"""Of a row and entry of the vocabulary: logits, what a loss makes of them, and their gradient."""
_STEP = 256
_SHARE = 16
"""A chunk takes the memory divided by this."""


def rows_per_chunk(hidden_size: int, vocabulary: int, memory: int | None) -> int:
    """Rows of a chunk: as many as fit a sixteenth of `memory`, in bytes, as a multiple of 256, which products of
    matrices like.

    But at least so many that it takes as much as the sum of the weight's gradients, which is there anyway (4 V H
    bytes); and so many if the memory is None, or that of a device without a limit.
    """
    fewest = max(FEWEST_ROWS, hidden_size // 4)
    if memory is None or memory >= sys.maxsize:  # a simulated device says that all addresses are its memory
        return fewest
    fitting = min(memory // (_SHARE * _BYTES * vocabulary), MOST_ROWS)
    return max(fewest, fitting - fitting % _STEP)


class Step(NamedTuple):
    """Something done to logits, row by row, and the settings of autocast then."""

    function: Callable[..., torch.Tensor]
    autocast: AutocastState
    shared: tuple[torch.Tensor, ...] = ()
    """Its arguments after the logits, the same for all rows."""

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        with self.autocast.entered():
            return self.function(logits, *self.shared)


@dataclass(frozen=True)
class Head:
    """What makes logits of hidden states: a linear function, and what is done to its result.

    Args:
        weight: (V, H), on the device.
        bias: (V,), or None.
        autocast: the settings of autocast in the forward of the linear function.
        rows: of a chunk.
        steps: what comes after it.
        places: where chunks are computed, in turn.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    autocast: AutocastState
    rows: int
    steps: tuple[Step, ...] = ()
    places: tuple[Place, ...] = (FIRST,)

    def linear(self, hidden: torch.Tensor) -> torch.Tensor:
        """The linear function alone: hidden states (..., H) -> (..., V)."""
        with self.autocast.entered():
            return functional.linear(hidden, self.weight, self.bias)

    def of_none(self, hidden: torch.Tensor) -> torch.Tensor:
        """The result of the linear function for no rows of `hidden`: (0, V). Autocast does not cast the weight."""
        with torch.no_grad():
            part = self.of([tensor[:0] for tensor in self.tensors])
            found = part.linear(hidden.new_empty(0, self.weight.shape[1]))
        return found.new_empty(0, len(self.weight))

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

    def converted(self) -> Head:
        """This, without a graph, and with weight and bias in the dtype in which autocast computes."""
        dtype = self.dtype
        return self.of([tensor.detach().to(dtype) for tensor in self.tensors])

    @property
    def dtype(self) -> torch.dtype:
        """That of the result of the linear function, which autocast may choose."""
        return self.of_none(self.weight).dtype

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Weight and bias."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def of(self, tensors: Sequence[torch.Tensor]) -> Head:
        """This, with other `tensors`."""
        return replace(self, weight=tensors[0], bias=None if self.bias is None else tensors[1])

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """What its steps compute with, which needs no gradient."""
        return tuple(tensor for step in self.steps for tensor in step.shared)

    def with_constants(self, constants: Sequence[torch.Tensor]) -> Head:
        """This, with other `constants`."""
        left = iter(constants)
        return replace(self, steps=tuple(s._replace(shared=tuple(next(left) for _ in s.shared)) for s in self.steps))


def in_chunks(
    head: Head,
    hidden: torch.Tensor,
    function: RowFunction,
    rows: Sequence[torch.Tensor] = (),
    shared: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """`function` of the logits of `hidden` and of `rows`, as one node of the graph.

    Args:
        head: makes the logits.
        hidden: (rows, H), on the device of the head, or in host memory (`HostRows`).
        function: what is computed.
        rows: its arguments after the logits, of which each chunk takes its rows; they need no gradient.
        shared: its last arguments, the same for all rows; they need no gradient.

    Returns:
        (rows, ...), on the same device. The logits of one chunk exist at a time on a device; the gradients of weight
        and bias are summed over the chunks in fp32 even if these have 16 bits, and rounded once. If several devices
        compute chunks, each has a sum, and these are added in the order of the devices.
    """
    result: torch.Tensor = _InChunks.apply(head, function, tuple(rows), tuple(shared), hidden, *head.tensors)  # type: ignore[no-untyped-call]
    return result


def sum_in_chunks(
    head: Head,
    hidden: torch.Tensor,
    function: RowFunction,
    rows: Sequence[torch.Tensor] = (),
    shared: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """The sum of all that `in_chunks` returns, in fp32 at least.

    All rows have one gradient, a factor. So the gradients for a factor of 1 are computed in the forward, while the
    logits of a chunk are there, and the backward multiplies them. In fp16 they would be too small, or too large,
    without the loss scale, which comes with the factor: there the backward makes the logits again. Those of hidden
    states in 16 bits are rounded before and after they are multiplied.
    """
    needs_gradients = torch.is_grad_enabled() and any(t.requires_grad for t in (hidden, *head.tensors))
    if not needs_gradients or head.dtype is torch.float16:
        return _sum_of(in_chunks(head, hidden, function, rows, shared))
    result: torch.Tensor = _SumInChunks.apply(head, function, tuple(rows), tuple(shared), hidden, *head.tensors)  # type: ignore[no-untyped-call]
    return result


def _ranges(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


class _Turn(NamedTuple):
    """A chunk, and where it is computed."""

    number: int
    """Of the place."""
    rows: slice
    given: Sent
    """Hidden states of the chunk, and its rows of what is computed with."""


def _turns(places: Sequence[Place], hidden: torch.Tensor, rows: Sequence[torch.Tensor], size: int) -> Iterator[_Turn]:
    """Chunks of `size` rows in order. If hidden states wait in host memory, the next ones are uploaded meanwhile."""
    for number, r in enumerate(_ranges(len(hidden), size)):
        part = rows_on_device(hidden, r).detach()
        fetch_rows_ahead(hidden, slice(r.stop, min(r.stop + size, len(hidden))))
        at = number % len(places)
        yield _Turn(at, r, places[at].send([part, *(each[r] for each in rows)]))


def _begun_ahead(items: Iterator[_T], count: int) -> Iterator[_T]:
    """Each of `items` once `count` later ones have been made, so that copies run meanwhile."""
    ahead: deque[_T] = deque()
    for item in items:
        ahead.append(item)
        del item
        if len(ahead) > count:
            yield ahead.popleft()
    while ahead:
        yield ahead.popleft()


class _Placed(NamedTuple):
    """A head, and what all rows share, at one place."""

    place: Place
    head: Head
    shared: list[torch.Tensor]
    sent: Sent
    """Weight and bias of the head, its constants, and what is shared."""


def _placed(place: Place, sent: Sent, head: Head) -> _Placed:
    """`head` with the tensors that were sent to `place`."""
    own, fixed = len(head.tensors), len(head.tensors) + len(head.constants)
    there = sent.tensors
    return _Placed(place, head.of(there[:own]).with_constants(there[own:fixed]), there[fixed:], sent)


def _turns_ahead(placed: Sequence[_Placed], hidden: torch.Tensor, rows: Sequence[torch.Tensor]) -> Iterator[_Turn]:
    """As `_turns`; each of several places has been sent its next chunk, too."""
    turns = _turns([each.place for each in placed], hidden, rows, placed[0].head.rows)
    return _begun_ahead(turns, len(placed) if len(placed) > 1 else 0)


def _everywhere(
    head: Head, hidden: torch.Tensor, tensors: Sequence[torch.Tensor], shared: Sequence[torch.Tensor]
) -> list[_Placed]:
    """`head` with these `tensors`, converted once, at each place that has a chunk."""
    head = head.of(tensors).converted()
    needed = [*head.tensors, *head.constants, *shared]
    chunks = -(-len(hidden) // head.rows)
    return [_placed(place, place.send(needed), head) for place in head.places[:chunks]]


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: Head,
        function: RowFunction,
        rows: tuple[torch.Tensor, ...],
        shared: tuple[torch.Tensor, ...],
        hidden: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        placed = _everywhere(head, hidden, tensors, shared)
        # The graph refers to the tensors through what it saves alone, so that it can free them.
        nothing = torch.empty(0)
        ctx.head = head.of([nothing] * len(tensors)).with_constants([nothing] * len(head.constants))
        ctx.function, ctx.places, ctx.rows = function, [each.place for each in placed], len(rows)
        ctx.dtypes = [t.dtype for t in tensors]
        ctx.save_for_backward(hidden, *rows, *(tensor for each in placed for tensor in each.sent.tensors))
        parts = []
        for turn in _turns_ahead(placed, hidden, rows):
            there, [chunk, *others] = placed[turn.number], turn.given.tensors
            with there.place.computing(there.sent, turn.given):
                found = function(there.head.after(there.head.linear(chunk)), *others, *there.shared)
            parts.append(there.place.send_back(found))
        result = torch.cat([arrived(part) for part in parts])
        if not result.is_floating_point():
            ctx.mark_non_differentiable(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        hidden, *saved = ctx.saved_tensors
        rows, copies = saved[: ctx.rows], saved[ctx.rows :]
        each = len(copies) // len(ctx.places)
        sent = [Sent(copies[start : start + each]) for start in range(0, len(copies), each)]
        placed = [_placed(place, there, ctx.head) for place, there in zip(ctx.places, sent, strict=True)]
        found = _gradients(ctx.function, placed, hidden, rows, ctx.needs_input_grad[4:], gradient)
        of_tensors = [None if g is None else g.to(d) for g, d in zip(found.of_tensors, ctx.dtypes, strict=True)]
        return None, None, None, None, found.of_hidden, *of_tensors


class _SumInChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: Head,
        function: RowFunction,
        rows: tuple[torch.Tensor, ...],
        shared: tuple[torch.Tensor, ...],
        hidden: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        placed = _everywhere(head, hidden, tensors, shared)
        found = _gradients(function, placed, hidden, rows, ctx.needs_input_grad[4:])
        ctx.dtypes, ctx.rows = [t.dtype for t in (hidden, *tensors)], head.rows
        ctx.save_for_backward(found.of_hidden, *found.of_tensors)
        return _sum_of(torch.cat([arrived(part) for part in found.results]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[Any, ...]:
        needed = zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad[4:], strict=True)
        # Those of a graph that is freed are used this once.
        once = not graph_is_retained()
        found = (_times(t, factor, dtype, ctx.rows, in_place=once) if needs else None for t, dtype, needs in needed)
        return None, None, None, None, *found


class _Gradients(NamedTuple):
    """What is computed of all chunks."""

    of_hidden: torch.Tensor | None
    of_tensors: list[torch.Tensor | None]
    """Sums in fp32 at least, of weight and bias."""
    results: list[Sent]
    """What the function returns, unless its gradient was given."""


def _gradients(
    function: RowFunction,
    placed: Sequence[_Placed],
    hidden: torch.Tensor,
    rows: Sequence[torch.Tensor],
    needs: Sequence[bool],
    gradient: torch.Tensor | None = None,
) -> _Gradients:
    """The gradients that are needed, of hidden states, weight and bias; `gradient` is that of what `function` returns,
    and 1 if it is None."""
    needs_hidden, *needs_tensors = needs
    sums = [_Sums(needs_tensors) for _ in placed]
    given = [*rows] if gradient is None else [*rows, gradient]
    parts = _parts(function, placed, sums, hidden, given, needs_hidden=needs_hidden, has_gradient=gradient is not None)
    of_hidden: torch.Tensor | None = None
    results = []
    for r, part, result in _begun_ahead(parts, len(placed) - 1):
        if result is not None:
            results.append(result)
        if part is not None:
            there_now = arrived(part)
            of_hidden = room_like(hidden, there_now) if of_hidden is None else of_hidden
            put_rows(there_now, of_hidden, r)
    of_tensors = [_total(placed, found) for found in zip(*(each.found for each in sums), strict=True)]
    return _Gradients(of_hidden, of_tensors, results)


class _Sums:
    """The gradients of weight and bias, of the chunks of one place."""

    def __init__(self, needs: Sequence[bool]) -> None:
        self._needs_weight, self._needs_bias = (*needs, False)[:2]
        self.found: list[torch.Tensor | None] = [None] * len(needs)

    def add(self, of_logits: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add those of a chunk, from the gradient of its logits and from its hidden states."""
        if self._needs_weight:
            self.found[0] = _plus_product(self.found[0], of_logits, hidden.to(of_logits.dtype))
        if self._needs_bias:
            total, before = of_logits.sum(0, dtype=_sum_dtype(of_logits)), self.found[1]
            self.found[1] = total if before is None else before.add_(total)


def _parts(
    function: RowFunction,
    placed: Sequence[_Placed],
    sums: Sequence[_Sums],
    hidden: torch.Tensor,
    rows: Sequence[torch.Tensor],
    *,
    needs_hidden: bool,
    has_gradient: bool,
) -> Iterator[tuple[slice, Sent | None, Sent | None]]:
    """Add the gradients of weight and bias to `sums`, and yield rows, the gradients of hidden states, if needed, and
    what `function` returns, unless the last of `rows` is its gradient."""
    for turn in _turns_ahead(placed, hidden, rows):
        part, *others = turn.given.tensors
        gradient = others.pop() if has_gradient else None
        there = placed[turn.number]
        with there.place.computing(there.sent, turn.given):
            of_logits, result = _gradient_of_logits(there.head, part, function, [*others, *there.shared], gradient)
            found = (of_logits @ there.head.weight).to(hidden.dtype) if needs_hidden else None
            sums[turn.number].add(of_logits, part)
        del of_logits  # before those of the next chunk are made
        of_hidden = None if found is None else there.place.send_back(found)
        yield turn.rows, of_hidden, None if has_gradient else there.place.send_back(result)


def _total(placed: Sequence[_Placed], sums: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The sum of those of all places, added in their order, on the first device."""
    total = sums[0]
    if total is None:
        return None
    for there, other in zip(placed[1:], sums[1:], strict=True):
        assert other is not None, "each place has had a chunk"
        pieces = ((r, there.place.send_back(other[r])) for r in _ranges(len(total), there.head.rows))
        for r, piece in _begun_ahead(pieces, 1):
            total[r] += arrived(piece)
    return total


def _gradient_of_logits(
    head: Head, hidden: torch.Tensor, function: RowFunction, rows: list[torch.Tensor], gradient: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the result of the linear function, and what `function` returns."""
    logits = head.linear(hidden)
    # In a forward, hooks of the program, as those of activation checkpointing, must not get what this graph saves.
    own = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach)
    with torch.enable_grad(), own:
        logits = logits.detach().requires_grad_()
        result = function(head.after(logits), *rows)
    [found] = torch.autograd.grad(result, logits, torch.ones_like(result) if gradient is None else gradient)
    return found, result.detach()


def _sum_of(results: torch.Tensor) -> torch.Tensor:
    return results.sum(dtype=_sum_dtype(results))


def _times(
    gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, size: int, *, in_place: bool
) -> torch.Tensor:
    """`gradient` times a number, in `dtype`, where `gradient` is; rounded once, `size` rows at a time. It may be done
    `in_place`, which it is where the dtype is the same."""
    result: Any = room_over(gradient) if in_place and gradient.dtype == dtype else None
    for r in _ranges(len(gradient), size):
        fetch_rows_ahead(gradient, slice(r.stop, 2 * r.stop - r.start))
        part = rows_on_device(gradient, r)
        part = (part.to(_sum_dtype(part)) * factor).to(dtype)
        result = room_like(gradient, part) if result is None else result
        put_rows(part, result, r)
    found: torch.Tensor = result
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
