"""What of a host each rank has: the tensors that it updates, and the cores that it uses.

A whole tensor has one owner, so that every optimizer that updates parameters one by one keeps its results. Of large
matrices in no layer, each rank updates rows, where the optimizer leaves the same bits so.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from fractions import Fraction
from itertools import pairwise

_TOGETHER = 64
"""Elements that kernels compute at once, at most: those left over at the end of a tensor may be rounded otherwise."""


def dealt(sizes: Iterable[int], loads: Sequence[int], divided: Collection[int] = ()) -> list[int]:
    """The owner of each tensor: the rank with the least to do so far; of equal ones the first.

    Of the tensors in the order in which the next forward needs them, every beginning is then spread over the ranks
    to within its largest tensor.

    Args:
        sizes: elements of each tensor, in the order of first use.
        loads: elements that each rank owns already; its length is the number of ranks.
        divided: places of tensors whose rows all ranks update.
    """
    loads, found = list(loads), []
    for place, size in enumerate(sizes):
        owner = loads.index(min(loads))
        if place in divided:
            loads = [load + size // len(loads) for load in loads]
        else:
            loads[owner] += size
        found.append(owner)
    return found


def shares_of_rows(rows: int, width: int, count: int) -> list[slice] | None:
    """The rows of a matrix that each of so many ranks updates, if all do: as many each, from a multiple of 64 elements
    on. None if there are too few."""
    step = _TOGETHER // math.gcd(_TOGETHER, width)
    cuts = [rows * number // count // step * step for number in range(count)]
    shares = [slice(start, stop) for start, stop in pairwise([*cuts, rows])]
    return shares if all(share.start < share.stop for share in shares) else None


def mask_of(cores: Iterable[int]) -> int:
    """Cores as a number with the bit of each."""
    return sum(1 << core for core in set(cores))


def share_of_cores(masks: Sequence[int], place: int) -> int:
    """How many cores the rank at `place` has for itself, at least one: those that several ranks may use count as that
    part of a core. So it is right whether ranks are bound to NUMA nodes (`torchrun --numa-binding=node`), to cores of
    their own, or not at all.

    Args:
        masks: the cores that each rank of the host may use, by `mask_of`.
        place: of one of them.
    """
    mine = masks[place]
    cores = [core for core in range(mine.bit_length()) if mine >> core & 1]
    return max(1, int(sum(Fraction(1, sum(mask >> core & 1 for mask in masks)) for core in cores)))
