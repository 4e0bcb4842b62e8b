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

import numpy as np
import torch

from hf_l2l.optim.eight_bits import BLOCK, read, write
from hf_l2l.optim.forms import LAMB, Chunk, Form, ParameterUpdate
from hf_l2l.optim.rounded_state import CHUNK, random_bits, random_halves, round_to_bf16
from hf_l2l.runtime.worker import together

SLICE = 2**17
"""Elements that a thread of the compiled pass claims at once, a tenth of a millisecond, and whose squares are summed
before they are added to those of other slices."""
LANES = 4096
"""Sums of squares that are added element by element, and in their order at the end of a slice."""


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.gradient, self.moments = torch.empty(CHUNK), torch.empty(2, CHUNK)


_SCRATCH = _Scratch()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1)


@torch.no_grad()
def update_in_chunks(form: Form, update: ParameterUpdate) -> None:
    """Update one parameter of an optimizer of this form."""
    if form.counts:
        update.state["step"].fill_(update.step)
    chunks = _Chunks(form, update)
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

    def __init__(self, form: Form, update: ParameterUpdate) -> None:
        self._form, self._update = form, update
        self._master, self._gradient = _flat(update.master), _flat(update.gradient)
        self._copy = None if update.copy is None else _flat(update.copy)
        self._kept = [_flat(each) for each in update.moments]

    def _opened(self, start: int, stop: int) -> Chunk:
        """A chunk with moments in fp32: where they are, or widened to memory of this thread."""
        scratch, update = _SCRATCH, self._update
        # In two operations: one on two dtypes is not vectorized.
        gradient = scratch.gradient[: stop - start].copy_(self._gradient[start:stop]).mul_(update.factor)
        moments = []
        for number, whole in enumerate(self._kept):
            kept, room = whole[start:stop], scratch.moments[number, : stop - start]
            if kept.dtype == torch.uint8:
                exponents = update.exponents[number][start // BLOCK : -(-stop // BLOCK)]
                read(kept.numpy(), exponents.numpy(), signed=number == 0, out=room.numpy())
            moments.append(
                kept if kept.dtype == torch.float32 else room if kept.dtype == torch.uint8 else room.copy_(kept)
            )
        return Chunk(self._master[start:stop], gradient, moments, update)

    def _keep(self, start: int, stop: int, moments: Sequence[torch.Tensor]) -> None:
        """Round the moments of a chunk to where they are kept."""
        if not self._kept or self._kept[0].dtype == torch.float32:
            return
        kept = [whole[start:stop] for whole in self._kept]
        if kept[0].dtype == torch.bfloat16:
            halves = random_halves(start, stop - start, self._update.keys)
            for wide, noise, short in zip(moments, halves, kept, strict=False):
                round_to_bf16(wide, noise, short)
            return
        drawn = random_bits(start, stop - start, self._update.keys).numpy().view(np.uint32)
        for number, (wide, codes) in enumerate(zip(moments, kept, strict=True)):
            exponents = self._update.exponents[number][start // BLOCK : -(-stop // BLOCK)]
            write(wide.numpy(), drawn, codes.numpy(), exponents.numpy(), signed=number == 0)

    def update(self, start: int, stop: int) -> None:
        """Update one chunk."""
        chunk = self._opened(start, stop)
        self._form.step(chunk)
        self._keep(start, stop, chunk.moments)
        if self._copy is not None:
            self._copy[start:stop].copy_(chunk.master)

    def find_size(self) -> None:
        """The first pass of LAMB: the step size, from the norms of the weights and of what they are moved by."""
        sums: list[tuple[float, ...]] = []
        lanes = torch.zeros(2, LANES, dtype=torch.float64)
        for start in range(0, self._master.numel(), CHUNK):
            stop = min(start + CHUNK, self._master.numel())
            chunk = self._opened(start, stop)
            direction = LAMB.direction(chunk._replace(moments=[each.clone() for each in chunk.moments]))
            for lane, values in zip(lanes, (chunk.master, direction), strict=True):
                _add_squares(lane, values)
            if stop % SLICE == 0 or stop == self._master.numel():
                sums.append(tuple(lane.cumsum(0)[-1].item() for lane in lanes))
                lanes.zero_()
        update, size = self._update, LAMB.size(self._update.group, *norms_of(sums))
        update.numbers = (*update.numbers[:7], size, update.numbers[8])


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
