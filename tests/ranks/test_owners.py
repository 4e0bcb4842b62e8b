"""What of a host each rank has."""

from __future__ import annotations

import pytest
from torch import distributed

from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.ranks.owners import mask_of, share_of_cores
from hf_l2l.shared_eps import updates
from models import bert

NODES = [range(0, 8), range(8, 16)]
"""Cores of two NUMA nodes."""


@pytest.mark.parametrize(
    ("cores", "shares"),
    [
        ([range(16)] * 4, [4] * 4),  # not bound
        ([NODES[0], NODES[0], NODES[1], NODES[1]], [4] * 4),  # torchrun --numa-binding=node
        ([range(0, 4), range(4, 8), range(8, 12), range(12, 16)], [4] * 4),  # --numa-binding=exclusive
        ([NODES[0], NODES[0], NODES[0], NODES[1]], [2, 2, 2, 8]),
        ([range(2)] * 4, [1] * 4),  # fewer cores than ranks
        ([range(3), range(3)], [1, 1]),
        ([range(6), [0, 1]], [5, 1]),
        ([range(1000, 1024)], [24]),
    ],
)
def test_cores_that_several_ranks_may_use_are_shared(cores, shares):
    masks = [mask_of(each) for each in cores]
    assert [share_of_cores(masks, place) for place in range(len(masks))] == shares


def threads_of_rank() -> int:
    """The threads of updates of a rank that is bound to eight cores of its own."""
    rank = distributed.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates, "cores_of_process", lambda: set(range(8 * rank, 8 * rank + 8)))
        model = bert()
        found: int = attach_l2l(model, L2LConfig()).updates.worker.num_threads
        detach_l2l(model)
    return found


def test_updates_of_a_rank_have_its_cores_but_one(pool):
    assert pool(2).run(threads_of_rank) == [7, 7]
