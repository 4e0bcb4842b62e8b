"""Rows of large matrices in no layer, which all ranks update together."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l.optim.layerwise_check import can_step_rows
from hf_l2l.optim.layerwise_step import places_of
from hf_l2l.optim.rows_step import RowsStep
from hf_l2l.ranks.owners import dealt, shares_of_rows
from hf_l2l.runtime.worker import Task, Worker
from rank_cases import OPTIMIZERS, Ranked
from rank_pool import RankPool, digest
from tiers import combinations, more

ELEMENTWISE = ("adamw", "foreach", "fused", "sgd", "nadam")


@pytest.mark.parametrize(
    ("name", "first"),
    combinations(OPTIMIZERS, [(), ((4, 4, 3), (4,)), ((4,), (1, 1, 8)), ((1, 1, 8), (8, 3, 4, 4))]),
)
def test_a_trial_of_matrices_tells_whether_rows_can_be_updated_apart(name, first):
    """Whatever comes before them in their group."""
    parameters = [nn.Parameter(torch.randn(shape)) for shape in (*first, (64, 64))]
    assert can_step_rows(OPTIMIZERS[name](parameters), parameters[-1:]) == (name in ELEMENTWISE)


class Orthogonal(torch.optim.AdamW):
    """As one whose groups with `orthogonal` update a matrix as a whole."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if group.get("orthogonal") and p.grad is not None:
                    p.grad /= p.grad.norm()
        return super().step(closure)


def test_only_groups_with_such_matrices_are_tried():
    embedding, other = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(8, 8))
    optimizer = Orthogonal([{"params": [embedding]}, {"params": [other], "orthogonal": True}])
    trial = [can_step_rows(optimizer, each) for each in ([embedding], [embedding, other], [other], [])]
    assert trial == [True, False, False, False]
    assert can_step_rows(optimizer, [embedding.requires_grad_(False)])  # it may be trained later


class Growing(torch.optim.SGD):
    """Keeps one more tensor from its fourth step on."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for state in self.state.values():
            state["steps"] = state.get("steps", 0) + 1
            if state["steps"] > 3:
                state["slow"] = torch.zeros_like(state["momentum_buffer"])
        return found


def test_a_state_that_gets_another_key_is_refused():
    p = nn.Parameter(torch.randn(8, 16))
    optimizer = Growing([p], lr=0.1, momentum=0.9)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
    step = RowsStep(optimizer, p, torch.ones_like(p), places_of(optimizer), slice(0, 4))
    with pytest.raises(RuntimeError, match="made or dropped 'slow'"):
        step.run()


@pytest.mark.parametrize(
    ("rows", "width", "count", "starts"),
    [(1000, 64, 4, [0, 250, 500, 750]), (1000, 33, 2, [0, 448]), (1001, 48, 2, [0, 500]), (64, 1, 2, None)],
)
def test_shares_begin_at_a_multiple_of_what_kernels_compute_at_once(rows, width, count, starts):
    shares = shares_of_rows(rows, width, count)
    assert (None if shares is None else [share.start for share in shares]) == starts
    if shares is not None:
        assert shares[-1].stop == rows
        assert all(share.start * width % 64 == 0 for share in shares)


def test_divided_tensors_are_work_of_all_ranks():
    assert dealt([100, 10, 10, 10], [0, 0]) == [0, 1, 1, 1]
    assert dealt([100, 10, 10, 10], [0, 0], [0]) == [0, 0, 1, 0]


def one_leaves(late: int) -> str:
    """Rank 1 ends as soon as it has updated its rows, before rank `late` has updated its own."""
    run = Ranked("large", eps_update="deferred")
    step_rows, peers = RowsStep.run, run.eps.team.peers

    def after_it(step: RowsStep, *args: Any) -> None:
        while run.rank == late and 1 not in peers.state.left:
            time.sleep(0.01)
        time.sleep(1.0)  # a wait for the others looks around
        step_rows(step, *args)

    own: list[Task] = []
    submit = Worker.submit

    def submitted(worker: Worker, task: Task, *args: Any) -> None:
        own.append(task)
        submit(worker, task, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "submit", submitted)
        for step in range(3):
            if step == 2 and run.rank == late:
                run.eps.synchronize()
                patch.setattr(RowsStep, "run", after_it)
            run.steps([step])
        if run.rank == 1:
            for task in own:
                task.wait("test")
            peers.close()
            return ""
        run.eps.synchronize()
    return digest(*run.model.parameters())


@pytest.mark.parametrize(("size", "late"), [(2, 0), *more((3, 0), (3, 2))])
def test_a_rank_that_has_updated_its_rows_may_end(size, late):
    """Others wait for those that have not."""
    pool = RankPool(size, within_s=60)
    found = pool.run(one_leaves, late)
    assert len({each for each in found if each}) == 1
    pool.close()
