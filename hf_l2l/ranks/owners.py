"""Which rank updates which tensor: whole tensors, dealt so that the ranks have equal work at every point.

A whole tensor has one owner, so that every optimizer that updates parameters one by one keeps its results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def dealt(sizes: Iterable[int], loads: Sequence[int]) -> list[int]:
    """The owner of each tensor: the rank with the least to do so far; of equal ones the first.

    Of the tensors in the order in which the next forward needs them, every beginning is then spread over the ranks
    to within its largest tensor.

    Args:
        sizes: elements of each tensor, in the order of first use.
        loads: elements that each rank owns already; its length is the number of ranks.
    """
    loads, found = list(loads), []
    for size in sizes:
        owner = loads.index(min(loads))
        loads[owner] += size
        found.append(owner)
    return found
