"""The update in one pass without a compiler: torch's functional steps, on chunks that a cache holds.

Chunks begin at multiples of 16 elements, where vectors of torch's kernels begin, so that each element is computed as
in a step of the whole parameter. Gradients and moments that are kept in fewer bits are widened to scratch memory of
the thread, which every chunk uses again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from hf_l2l.optim.forms import LAMB, Form, Numbers, ParameterUpdate
from hf_l2l.optim.rounded_state import CHUNK, random_bits, round_to_bf16

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

    def __init__(self, kept: Sequence[torch.Tensor], start: int, stop: int, update: ParameterUpdate) -> None:
        self._kept = [each[start:stop] for each in kept]
        self._start, self._update = start, update
        rooms = (_SCRATCH.first, _SCRATCH.second)
        self.wide = [
            each if each.dtype == torch.float32 else room[: stop - start].copy_(each)
            for each, room in zip(self._kept, rooms, strict=False)
        ]

    def keep(self) -> None:
        """Round them to where they are kept."""
        if all(each.dtype == torch.float32 for each in self._kept):
            return
        drawn = random_bits(self._start, self._kept[0].numel(), self._update.keys)
        for upper, (wide, kept) in enumerate(zip(self.wide, self._kept, strict=True)):
            round_to_bf16(wide, drawn, kept, upper=bool(upper))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1)


@torch.no_grad()
def update_in_chunks(
    form: Form, update: ParameterUpdate, moments: Sequence[torch.Tensor], step: float, numbers: Numbers
) -> None:
    """Update one parameter.

    Args:
        form: the optimizer.
        update: the parameter, its gradient, and what belongs to it.
        moments: those of `form.moments` in its state.
        step: the number of the step, from 1 on.
        numbers: those of the step.
    """
    master, gradient = _flat(update.master), _flat(update.gradient)
    copy = None if update.copy is None else _flat(update.copy)
    kept = [_flat(each) for each in moments]
    factor = torch.tensor([update.factor])
    is_first = step == 1
    sums: list[tuple[float, float]] = []
    lanes = torch.zeros(2, LANES, dtype=torch.float64)
    for start in range(0, master.numel(), CHUNK):
        stop = min(start + CHUNK, master.numel())
        wide = torch.mul(gradient[start:stop], factor, out=_SCRATCH.gradient[: stop - start])
        opened = _Moments(kept, start, stop, update)
        form.step(master[start:stop], wide, opened.wide, update, step, is_first=is_first)
        opened.keep()
        if form.has_norms:
            again = _Moments(kept, start, stop, update).wide
            for lane, values in zip(
                lanes, (master[start:stop], LAMB.direction(master[start:stop], again, numbers)), strict=True
            ):
                _add_squares(lane, values)
            if stop % SLICE == 0 or stop == master.numel():
                sums.append(tuple(lane.cumsum(0)[-1].item() for lane in lanes))
                lanes.zero_()
        elif copy is not None:
            copy[start:stop].copy_(master[start:stop])
    if form.has_norms:
        _move(update, master, kept, copy, numbers, sums)


def _add_squares(lanes: torch.Tensor, values: torch.Tensor) -> None:
    """Add the squares of float32 values, which are exact in float64, each to its lane, in order."""
    squares = values.double().square_()
    for row in squares.split(LANES):
        lanes[: row.numel()].add_(row)


def _move(
    update: ParameterUpdate,
    master: torch.Tensor,
    kept: Sequence[torch.Tensor],
    copy: torch.Tensor | None,
    numbers: Numbers,
    sums: Sequence[tuple[float, float]],
) -> None:
    """The second pass of LAMB."""
    size = LAMB.size(update, *total_squares(sums))
    for start in range(0, master.numel(), CHUNK):
        stop = min(start + CHUNK, master.numel())
        part = master[start:stop]
        part.sub_(LAMB.direction(part, _Moments(kept, start, stop, update).wide, numbers).mul_(size))
        if copy is not None:
            copy[start:stop].copy_(part)


def total_squares(sums: Sequence[Any]) -> tuple[float, float]:
    """The sums over the slices of one parameter, in their order."""
    of_weights = of_directions = 0.0
    for first, second in sums:
        of_weights += float(first)
        of_directions += float(second)
    return of_weights, of_directions
