"""The update in one pass without a compiler: torch's functional steps, on chunks that a cache holds.

Chunks begin at multiples of 16 elements, where vectors of torch's kernels begin, so that each element is computed as
in a step of the whole parameter. Gradients and moments that are kept in fewer bits are widened to scratch memory of
the thread, which every chunk uses again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import torch

from hf_l2l.optim.eight_bits import BLOCK, read, write
from hf_l2l.optim.forms import LAMB, Form, Numbers, ParameterUpdate
from hf_l2l.optim.rounded_state import CHUNK, random_bits, round_to_bf16
from hf_l2l.runtime.worker import together

SLICE = 2**17
"""Elements that a thread of the compiled pass claims at once, a tenth of a millisecond, and whose squares are summed
before they are added to those of other slices."""
LANES = 4096
"""Sums of squares that are added element by element, and in their order at the end of a slice."""


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.gradient, self.first, self.second = (torch.empty(CHUNK) for _ in range(3))


_SCRATCH = _Scratch()


class _Moments:
    """The moments of one chunk, in fp32: where they are, or widened."""

    def __init__(
        self,
        kept: Sequence[torch.Tensor],
        exponents: Sequence[torch.Tensor],
        start: int,
        stop: int,
        update: ParameterUpdate,
    ) -> None:
        self._kept = [each[start:stop] for each in kept]
        self._exponents = [each[start // BLOCK : -(-stop // BLOCK)] for each in exponents]
        self._start, self._update = start, update
        self.wide = [self._widened(number, stop - start) for number in range(len(kept))]

    def _widened(self, number: int, count: int) -> torch.Tensor:
        kept, room = self._kept[number], (_SCRATCH.first, _SCRATCH.second)[number][:count]
        if kept.dtype == torch.float32:
            return kept
        if kept.dtype == torch.bfloat16:
            return room.copy_(kept)
        read(kept.numpy(), self._exponents[number].numpy(), signed=number == 0, out=room.numpy())
        return room

    def keep(self) -> None:
        """Round them to where they are kept."""
        if all(each.dtype == torch.float32 for each in self._kept):
            return
        drawn = random_bits(self._start, self._kept[0].numel(), self._update.keys)
        for number, (wide, kept) in enumerate(zip(self.wide, self._kept, strict=True)):
            if kept.dtype == torch.bfloat16:
                round_to_bf16(wide, drawn, kept, upper=number == 1)
            else:
                write(wide.numpy(), drawn, kept.numpy(), self._exponents[number].numpy(), signed=number == 0)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1)


@torch.no_grad()
def update_in_chunks(
    form: Form,
    update: ParameterUpdate,
    moments: Sequence[torch.Tensor],
    step: float,
    numbers: Numbers,
    exponents: Sequence[torch.Tensor] = (),
) -> None:
    """Update one parameter.

    Args:
        form: the optimizer.
        update: the parameter, its gradient, and what belongs to it.
        moments: those of `form.moments` in its state.
        step: the number of the step, from 1 on.
        numbers: those of the step.
        exponents: those of moments in 8 bits.
    """
    chunks = _Chunks(form, update, moments, exponents, step, numbers)
    if form.has_norms:
        chunks.find_size()
    starts = iter(range(0, update.master.numel(), CHUNK))

    @torch.no_grad()
    def work() -> None:
        for start in starts:  # each is taken by one thread
            chunks.update(start, min(start + CHUNK, update.master.numel()))

    together(work, -(-update.master.numel() // CHUNK))


class _Chunks:
    """The chunks of one parameter."""

    def __init__(
        self,
        form: Form,
        update: ParameterUpdate,
        moments: Sequence[torch.Tensor],
        exponents: Sequence[torch.Tensor],
        step: float,
        numbers: Numbers,
    ) -> None:
        self._form, self._update, self._step, self._numbers = form, update, step, numbers
        self._master, self._gradient = _flat(update.master), _flat(update.gradient)
        self._copy = None if update.copy is None else _flat(update.copy)
        self._kept, self._exponents = [_flat(each) for each in moments], exponents

    def _opened(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor, _Moments]:
        """Masters, gradient times its factor, and moments."""
        # In two operations: one on two dtypes is not vectorized.
        wide = _SCRATCH.gradient[: stop - start].copy_(self._gradient[start:stop]).mul_(self._update.factor)
        return self._master[start:stop], wide, _Moments(self._kept, self._exponents, start, stop, self._update)

    def update(self, start: int, stop: int) -> None:
        """Update one chunk."""
        master, gradient, moments = self._opened(start, stop)
        args = (master, gradient, moments.wide, self._update, self._step, self._numbers)
        self._form.step(*args, is_first=self._step == 1)
        moments.keep()
        if self._copy is not None:
            self._copy[start:stop].copy_(master)

    def find_size(self) -> None:
        """The first pass of LAMB: the step size, from the norms of the weights and of what they are moved by."""
        sums: list[tuple[float, ...]] = []
        lanes = torch.zeros(2, LANES, dtype=torch.float64)
        for start in range(0, self._master.numel(), CHUNK):
            stop = min(start + CHUNK, self._master.numel())
            master, gradient, moments = self._opened(start, stop)
            wide = [each.clone() for each in moments.wide]
            direction = LAMB.direction(master, gradient, wide, self._numbers)
            for lane, values in zip(lanes, (master, direction), strict=True):
                _add_squares(lane, values)
            if stop % SLICE == 0 or stop == self._master.numel():
                sums.append(tuple(lane.cumsum(0)[-1].item() for lane in lanes))
                lanes.zero_()
        size = LAMB.size(self._update, *norms_of(sums))
        self._numbers = (*self._numbers[:7], size, self._numbers[8])


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
