"""The update in one pass without a compiler: torch's functional steps, on chunks.

Chunks begin at multiples of 16 elements, where vectors of torch's kernels begin, so that each element is computed as
in a step of the whole parameter. Gradients and moments that are kept in fewer bits are widened to scratch memory of
the thread, which every chunk uses again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_l2l.optim.eight_bits import BLOCK, read
from hf_l2l.optim.forms import LAMB, Chunk, Form, ParameterUpdate
from hf_l2l.optim.rounded_state import round_to_bf16, round_to_blocks
from hf_l2l.runtime.worker import together

AT_ONCE = 2**18
"""Elements that are updated at once: threads wait for each other between operations of torch, and with fewer elements
they would do so for longer than a second thread saves."""
SLICE = 2**17
"""Elements that a thread of the compiled pass claims at once, a tenth of a millisecond, and whose squares are summed
before they are added to those of other slices."""
LANES = 4096
"""Sums of squares that are added element by element, and in their order at the end of a slice."""


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.gradient, self.moments = torch.empty(AT_ONCE), torch.empty(2, AT_ONCE)


_SCRATCH = _Scratch()


def _parts(tensor: torch.Tensor, size: int) -> Sequence[torch.Tensor]:
    parts: Sequence[torch.Tensor] = tensor.detach().view(-1).split(size)
    return parts


def _rows_of(rows: torch.Tensor, number: int, count: int) -> torch.Tensor:
    """The beginning of the first rows."""
    return rows.narrow(0, 0, number).narrow(1, 0, count)


@torch.no_grad()
def update_in_chunks(form: Form, update: ParameterUpdate) -> None:
    """Update one parameter of an optimizer of this form, on the threads of this thread's worker."""
    if form.counts:
        update.state["step"].fill_(update.step)
    chunks = _Chunks(form, update)
    if form.has_norms:
        chunks.find_size()
    _for_each(chunks.count, chunks.update)


def _for_each(count: int, call: Callable[[int], None]) -> None:
    """Call it with all numbers below `count`, each on one of the threads."""
    numbers = iter(range(count))

    @torch.no_grad()
    def work() -> None:
        for number in numbers:
            call(number)

    together(work, count)


class _Chunks:
    """The chunks of one parameter."""

    def __init__(self, form: Form, update: ParameterUpdate) -> None:
        self._form, self._update = form, update
        self._size = size = SLICE if form.has_norms else AT_ONCE
        self.count = -(-update.master.numel() // size)
        self._masters, self._gradients = _parts(update.master, size), _parts(update.gradient, size)
        self._copies = None if update.copy is None else _parts(update.copy, size)
        self._kept = [_parts(each, size) for each in update.moments]
        self._exponents = [each.split(size // BLOCK) for each in update.exponents]

    def _opened(self, number: int) -> Chunk:
        """A chunk with moments in fp32: where they are, or widened to memory of this thread."""
        master, gradient = self._masters[number], self._gradients[number]
        count, scratch = master.numel(), _SCRATCH
        moments = [parts[number] for parts in self._kept]
        if moments and moments[0].dtype != torch.float32:
            rooms = _rows_of(scratch.moments, len(moments), count).unbind()
            for of, (kept, room) in enumerate(zip(moments, rooms, strict=True)):
                if kept.dtype == torch.bfloat16:
                    room.copy_(kept)
                else:
                    read(kept.numpy(), self._exponents[of][number].numpy(), signed=of == 0, out=room.numpy())
            moments = [*rooms]
        # In two operations: one on two dtypes is not vectorized.
        wide = scratch.gradient.narrow(0, 0, count).copy_(gradient).mul_(self._update.factor)
        return Chunk(master, wide, moments, self._update)

    def _keep(self, number: int, master: torch.Tensor) -> None:
        """Round the moments of a chunk, in the memory of this thread, to where they are kept; `master` has been
        updated by them."""
        moments = [parts[number] for parts in self._kept]
        if not moments or moments[0].dtype == torch.float32:
            return
        start, count, keys = number * self._size, moments[0].numel(), self._update.keys
        wide = _rows_of(_SCRATCH.moments, len(moments), count)
        if moments[0].dtype == torch.bfloat16:
            if math.isnan(master.sum().item()):  # as every master with a moment that is NaN
                wide.masked_fill_(wide.isnan(), math.nan)
            round_to_bf16(wide, start, keys, moments)
            return
        for of, (row, codes) in enumerate(zip(wide.unbind(), moments, strict=True)):
            round_to_blocks(row, start, keys, codes, self._exponents[of][number], signed=of == 0)

    def update(self, number: int) -> None:
        """Update one chunk."""
        chunk = self._opened(number)
        self._form.step(chunk)
        self._keep(number, chunk.master)
        if self._copies is not None:
            self._copies[number].copy_(chunk.master)

    def find_size(self) -> None:
        """The first pass of LAMB: the step size, from the norms of the weights and of what they are moved by."""
        sums = [(0.0, 0.0)] * self.count

        def add(number: int) -> None:
            sums[number] = self._sums_of(number)

        _for_each(self.count, add)
        update, size = self._update, LAMB.size(self._update.group, *norms_of(sums))
        update.numbers = (*update.numbers[:7], size, update.numbers[8])

    def _sums_of(self, number: int) -> tuple[float, float]:
        """Sums of the squares of weights, and of what they are moved by, in a slice."""
        lanes = torch.zeros(2, LANES, dtype=torch.float64)
        chunk = self._opened(number)
        direction = LAMB.direction(chunk._replace(moments=[each.clone() for each in chunk.moments]))
        for lane, values in zip(lanes, (chunk.master, direction), strict=True):
            _add_squares(lane, values)
        of_weights, of_directions = lanes.cumsum(1)[:, -1].tolist()
        return of_weights, of_directions


def _add_squares(lanes: torch.Tensor, values: torch.Tensor) -> None:
    """Add the squares of float32 values, which are exact in float64, each to its lane, in order."""
    squares = values.double().square_()
    for row in squares.split(LANES):
        lanes[: row.numel()].add_(row)


def norms_of(sums: Sequence[Any]) -> tuple[float, float]:
    """Two norms of one parameter, from the sums of squares of its slices, which are added in their order."""
    of_weights = of_directions = 0.0
    for first, second in sums:
        of_weights += float(first)
        of_directions += float(second)
    return math.sqrt(of_weights), math.sqrt(of_directions)
