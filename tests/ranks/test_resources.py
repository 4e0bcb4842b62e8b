"""What of a host each rank has: cores, memory that is there already, the values of a model, and a plan."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import distributed, nn

from hf_l2l import L2LConfig, attach_l2l, detach_l2l, estimate, load_once
from hf_l2l.budget.within import plan_within
from hf_l2l.hf.preparation import make_masters_fp32
from hf_l2l.memory import host_limits
from hf_l2l.optim.layer_optimizers import places_of
from hf_l2l.optim.layerwise_check import can_step_rows
from hf_l2l.optim.rows_step import RowsStep
from hf_l2l.probe import known
from hf_l2l.probe.figures import HardwareFigures
from hf_l2l.ranks.owners import dealt, mask_of, share_of_cores, shares_of_rows
from models import batch_for, bert, llama
from rank_cases import OPTIMIZERS, rank_here
from rank_pool import digest
from rank_trainer import trained
from tiers import nightly


def test_cores_that_several_ranks_may_use_are_shared():
    for cores, shares in (
        ([range(16)] * 4, [4] * 4),  # not bound
        ([range(0, 8), range(0, 8), range(0, 8), range(8, 16)], [2, 2, 2, 8]),  # of two NUMA nodes
        ([range(2)] * 4, [1] * 4),  # fewer cores than ranks
        ([range(6), [0, 1]], [5, 1]),
    ):
        masks = [mask_of(each) for each in cores]
        assert [share_of_cores(masks, place) for place in range(len(masks))] == shares


def threads_of_rank() -> int:
    """The threads of updates of a rank that is bound to eight cores of its own."""
    rank = distributed.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda pid: set(range(8 * rank, 8 * rank + 8)))
        model = bert()
        found: int = attach_l2l(model, L2LConfig()).updates.worker.num_threads
        detach_l2l(model)
    return found


def test_updates_of_a_rank_have_its_cores_but_one(pool):
    assert pool(2).run(threads_of_rank) == [7, 7]


def in_a_host_of(num_bytes: int, folder: str) -> int | str:
    """Train where so many bytes are available; the first rank holds all masters, and the other none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_limits, "available_host_bytes", lambda: num_bytes)
        patch.setattr(host_limits, "own_bytes", lambda: 2**40 if distributed.get_rank() == 0 else 0)
        try:
            return trained("bert", "l2l", folder, {"optim": "adamw_torch", "max_steps": 1})["step"]
        except MemoryError as error:
            return str(error)


def test_masters_that_the_first_rank_has_read_are_there_for_all(pool, tmp_path):
    """Gradients and moments are to come. Too little memory for them is refused by all."""
    need = estimate(bert(), L2LConfig())
    state = need.gradients + need.moments + 2**12  # AdamW's step counters, too
    assert pool(2).run(in_a_host_of, state, str(tmp_path)) == [1, 1]
    for said in pool(2).run(in_a_host_of, need.moments, str(tmp_path)):
        assert "training needs" in said and "is available" in said


def own_bytes() -> int:
    """Memory of this process alone that has been written."""
    return 1024 * int(re.search(r"RssAnon:\s*(\d+)", Path("/proc/self/status").read_text())[1])


def made_wide() -> tuple[int, bool]:
    """What it takes a rank to make masters in fp32 of a model in 16 bits; and whether they have its values."""
    model = torch.nn.Linear(4096, 4096, dtype=torch.bfloat16)
    values, before = model.weight.detach().clone(), own_bytes()
    make_masters_fp32(model)
    taken = own_bytes() - before  # before its values are looked at, which takes memory
    return taken, model.weight.dtype == torch.float32 and torch.equal(model.weight, values.float())


def test_masters_in_fp32_are_made_by_the_first_alone(pool):
    """The others would drop theirs when the model is attached."""
    (first, has_values), (second, _) = pool(2).run(made_wide)
    num_bytes = 4 * 4096 * 4096
    assert first > 0.4 * num_bytes and has_values  # the 16-bit weights are gone
    assert second < 0.1 * num_bytes


def loaded(folder: str) -> tuple[bool, str, str]:
    """In a rank: whether the model had values before it was attached; digests of its values then, and of a step."""
    rank = rank_here()
    with load_once():
        model = hf.AutoModelForCausalLM.from_pretrained(folder)
    had_values = not any(p.is_meta for p in model.parameters())
    eps = attach_l2l(model, L2LConfig())
    values = digest(*model.parameters(), *model.buffers())
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    model.eval()(**batch_for(model, seed=rank)).loss.backward()
    optimizer.step()
    eps.synchronize()
    after = digest(*model.parameters())
    detach_l2l(model)
    assert model(**batch_for(model)).loss.isfinite()
    assert not any(b.is_meta for b in model.buffers())
    if rank:
        with load_once(), pytest.raises(ValueError, match="device_map"):
            hf.AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")
    return had_values, values, after


def test_one_rank_loads_a_model_and_others_get_its_values(pool, tmp_path):
    torch.manual_seed(1)
    model = llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    found = pool(2).run(loaded, str(tmp_path))
    assert [each[0] for each in found] == [True, False]
    assert found[0][1] == found[1][1] == digest(*model.parameters(), *model.buffers())
    assert found[0][2] == found[1][2] != found[0][1]
    assert loaded(str(tmp_path))[0], "one process loads as ever"


def planned(folder: str, fails: bool = False) -> dict[str, Any]:
    """Plan in a rank of simulated devices: by figures that each rank would measure otherwise."""
    rank, measured = distributed.get_rank(), []

    def probe(device: torch.device) -> HardwareFigures:
        measured.append(str(device))
        if fails:
            raise RuntimeError("no figures")
        card = ("a card", 2**34, 1e9, 1e9, 1e9, 1e9, 1e10, {1: 1e9}, {"fp32": 1e11 * (1 + rank)})
        return HardwareFigures(*card, page_locked=True, device_adamw=1e9)

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(known.VARIABLE, raising=False)
        patch.setenv("XDG_CACHE_HOME", os.path.join(folder, f"rank{rank}"))
        patch.setattr(known, "probe", probe)
        model = bert()
        try:
            plan = plan_within(model, L2LConfig(device="sim", device_memory_budget="1GiB"), batch_for(model))
        except ValueError as error:
            return {"error": str(error)}
    assert plan is not None
    return {"measured": measured, "seconds": plan.time.seconds, "chosen": plan.chosen}


@nightly
def test_rank_0_measures_and_all_have_its_plan(pool, tmp_path):
    """Or are told that it cannot."""
    first, second = pool(2, sim=True).run(planned, str(tmp_path))
    assert len(first["measured"]) == 1
    assert second == {**first, "measured": []}
    assert sorted(file.relative_to(tmp_path).parts[0] for file in Path(tmp_path).rglob("*.json")) == ["rank0"]
    for each in pool(2, sim=True).run(planned, str(tmp_path / "other"), True):
        assert each["error"].startswith("rank 0 measures the machine") and each["error"].endswith("no figures")


# ---- rows of large matrices in no layer, which all ranks update together

ELEMENTWISE = ("adamw", "foreach", "fused", "sgd", "nadam")


def test_a_trial_of_matrices_tells_whether_rows_can_be_updated_apart():
    """Whatever comes before them in their group."""
    for name, first in itertools.product(OPTIMIZERS, [(), ((4,), (1, 1, 8))]):
        parameters = [nn.Parameter(torch.randn(shape)) for shape in (*first, (64, 64))]
        assert can_step_rows(OPTIMIZERS[name](parameters), parameters[-1:]) == (name in ELEMENTWISE), name


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


def test_shares_begin_at_a_multiple_of_what_kernels_compute_at_once():
    """Divided tensors are work of all ranks."""
    cases = ((1000, 64, 4, [0, 250, 500, 750]), (1000, 33, 2, [0, 448]), (1001, 48, 2, [0, 500]))
    for rows, width, count, starts in cases:
        shares = shares_of_rows(rows, width, count)
        assert [share.start for share in shares] == starts and shares[-1].stop == rows
        assert all(share.start * width % 64 == 0 for share in shares)
    assert shares_of_rows(64, 1, 2) is None
    assert dealt([100, 10, 10, 10], [0, 0]) == [0, 1, 1, 1]
    assert dealt([100, 10, 10, 10], [0, 0], [0]) == [0, 0, 1, 0]
