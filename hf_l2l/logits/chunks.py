"""Functions of logits, row by row, computed for chunks of rows and once more in the backward.

A row is one token: `rows` tokens have hidden states (rows, H), and logits (rows, V). For all tokens, logits would take
4 V bytes per token for the loss and 8 in its backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hf_l2l.logits.places import FIRST, Place, Sent, arrived
from hf_l2l.rows.host_rows import fetch_rows_ahead, put_rows, room_like, rows_on_device
from hf_l2l.runtime.compute_state import AutocastState

RowFunction = Callable[..., torch.Tensor]
"""Takes logits (rows, V), tensors with as many rows, and tensors that all rows share; returns (rows, ...), each row
from its own row alone."""

_T = TypeVar("_T")

FEWEST_ROWS = 128
"""Of a chunk: with fewer, products of matrices are slow on any device."""


def rows_per_chunk(hidden_size: int) -> int:
    """Rows of a chunk: so many that its logits, what a loss makes of them and their gradient take no more than the
    gradient of the weight, which is there anyway (16 V bytes a row in fp32, 4 V H for the gradient), but at least
    `FEWEST_ROWS`."""
    return max(FEWEST_ROWS, hidden_size // 4)


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
        steps: what comes after it.
        places: where chunks are computed, in turn.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    autocast: AutocastState
    steps: tuple[Step, ...] = ()
    places: tuple[Place, ...] = (FIRST,)

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


def _ranges(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


class _Turn(NamedTuple):
    """A chunk, and where it is computed."""

    number: int
    """Of the place."""
    rows: slice
    given: Sent
    """Hidden states of the chunk, and its rows of what is computed with."""


def _turns(places: Sequence[Place], hidden: torch.Tensor, rows: Sequence[torch.Tensor]) -> Iterator[_Turn]:
    """Chunks in order. If hidden states wait in host memory, the next ones are uploaded meanwhile."""
    size = rows_per_chunk(hidden.shape[1])
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


def _turns_ahead(places: Sequence[Place], hidden: torch.Tensor, rows: Sequence[torch.Tensor]) -> Iterator[_Turn]:
    """As `_turns`; each of several places has been sent its next chunk, too."""
    return _begun_ahead(_turns(places, hidden, rows), len(places) if len(places) > 1 else 0)


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
        chunks = -(-len(hidden) // rows_per_chunk(hidden.shape[1]))
        places = head.places[:chunks]
        needed = [*tensors, *head.constants, *shared]
        placed = [_placed(place, place.send(needed), head.of(tensors)) for place in places]
        # The graph refers to the tensors through what it saves alone, so that it can free them.
        nothing = torch.empty(0)
        ctx.head = head.of([nothing] * len(tensors)).with_constants([nothing] * len(head.constants))
        ctx.function, ctx.places, ctx.rows = function, places, len(rows)
        ctx.save_for_backward(hidden, *rows, *(tensor for each in placed for tensor in each.sent.tensors))
        parts = []
        for turn in _turns_ahead(places, hidden, rows):
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
        needs_hidden, *needs = (*ctx.needs_input_grad[4:], False)[:3]
        sums = [_Sums(there, *needs) for there in placed]
        of_hidden: torch.Tensor | None = None
        found = _gradients(ctx.function, placed, sums, hidden, [*rows, gradient], needs_hidden=needs_hidden)
        for r, part in _begun_ahead(found, len(placed) - 1):
            there_now = arrived(part)
            of_hidden = room_like(hidden, there_now) if of_hidden is None else of_hidden
            put_rows(there_now, of_hidden, r)
        totals = _total(ctx.places, [each.weight for each in sums]), _total(ctx.places, [each.bias for each in sums])
        of_tensors = [
            None if g is None else g.to(t.dtype) for g, t in zip(totals, placed[0].head.tensors, strict=False)
        ]
        return None, None, None, None, of_hidden, *of_tensors


class _Sums:
    """The gradients of weight and bias, of the chunks of one place."""

    def __init__(self, placed: _Placed, needs_weight: bool, needs_bias: bool) -> None:
        self._needs_weight, self._needs_bias = needs_weight, needs_bias
        with placed.place.computing():
            self.converted = placed.head.weight.to(placed.head.dtype)
            """The weight as the product has it."""
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None

    def add(self, of_logits: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add those of a chunk, from the gradient of its logits and from its hidden states."""
        if self._needs_weight:
            self.weight = _plus_product(self.weight, of_logits, hidden.to(of_logits.dtype))
        if self._needs_bias:
            total = of_logits.sum(0, dtype=_sum_dtype(of_logits))
            self.bias = total if self.bias is None else self.bias.add_(total)


def _gradients(
    function: RowFunction,
    placed: Sequence[_Placed],
    sums: Sequence[_Sums],
    hidden: torch.Tensor,
    rows: Sequence[torch.Tensor],
    *,
    needs_hidden: bool,
) -> Iterator[tuple[slice, Sent]]:
    """Add the gradients of weight and bias to `sums`, and yield rows and gradients of hidden states, if needed. The
    last of `rows` is the gradient of what `function` returns."""
    for turn in _turns_ahead([each.place for each in placed], hidden, rows):
        part, *others, gradient = turn.given.tensors
        there, total = placed[turn.number], sums[turn.number]
        with there.place.computing(turn.given):
            of_logits = _gradient_of_logits(there.head, part, function, [*others, *there.shared], gradient)
            found = (of_logits @ total.converted).to(hidden.dtype) if needs_hidden else None
            total.add(of_logits, part)
        del of_logits  # before those of the next chunk are made
        if found is not None:
            yield turn.rows, there.place.send_back(found)


def _total(places: Sequence[Place], sums: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The sum of those of all places, added in their order, on the first device."""
    total = sums[0]
    if total is None:
        return None
    for place, other in zip(places[1:], sums[1:], strict=True):
        assert other is not None, "each place has had a chunk"
        size = rows_per_chunk(total.shape[-1])
        pieces = ((r, place.send_back(other[r])) for r in _ranges(len(total), size))
        for r, piece in _begun_ahead(pieces, 1):
            total[r] += arrived(piece)
    return total


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
