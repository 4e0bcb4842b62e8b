"""What of a host each rank has: cores, memory that is there already, the values of a model, and a plan."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import distributed

from hf_l2l import L2LConfig, attach_l2l, detach_l2l, load_once
from hf_l2l.budget.agreed import is_so_for_all, reason_of_any
from hf_l2l.budget.within import plan_within
from hf_l2l.hf.preparation import make_masters_fp32
from hf_l2l.memory import host_limits
from hf_l2l.memory.memory_estimate import estimate
from hf_l2l.probe import known
from hf_l2l.probe.figures import HardwareFigures
from hf_l2l.ranks.owners import mask_of, share_of_cores
from host_cases import on_hosts
from models import batch_for, bert, llama
from rank_cases import rank_here
from rank_pool import digest
from rank_trainer import trained
from tiers import more

# ---- cores

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
        patch.setattr(os, "sched_getaffinity", lambda pid: set(range(8 * rank, 8 * rank + 8)))
        model = bert()
        found: int = attach_l2l(model, L2LConfig()).updates.worker.num_threads
        detach_l2l(model)
    return found


def test_updates_of_a_rank_have_its_cores_but_one(pool):
    assert pool(2).run(threads_of_rank) == [7, 7]


# ---- memory


def in_a_host_of(num_bytes: int, folder: str) -> int | str:
    """Train where so many bytes are available; the first rank holds all masters, and the others none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_limits, "available_host_bytes", lambda: num_bytes)
        patch.setattr(host_limits, "own_bytes", lambda: 2**40 if distributed.get_rank() == 0 else 0)
        try:
            found: dict[str, Any] = trained("bert", "l2l", folder, {"optim": "adamw_torch", "max_steps": 1})
        except MemoryError as error:
            return str(error)
        return int(found["step"])


def test_masters_that_the_first_rank_has_read_are_there_for_all(pool, tmp_path):
    """Gradients and moments are to come: of two hosts, each needs half of them. Too little is refused by all."""
    need = estimate(bert(), L2LConfig())
    state = need.gradients + need.moments + 2**12  # AdamW's step counters, too
    assert pool(2).run(in_a_host_of, state, str(tmp_path)) == [1, 1]
    assert pool(2).run(on_hosts, 2, in_a_host_of, state // 2, str(tmp_path)) == [1, 1]
    for said in pool(2).run(in_a_host_of, need.moments, str(tmp_path)):
        assert "training needs" in str(said) and "is available" in str(said)


def own_bytes() -> int:
    """Memory of this process alone that has been written."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return 1024 * int(line.split()[1])


def made_wide() -> tuple[int, bool]:
    """What it takes a rank to make masters in fp32 of a model in 16 bits; and whether they have its values."""
    model = torch.nn.Linear(4096, 4096, dtype=torch.bfloat16)
    values = model.weight.detach().clone()
    before = own_bytes()
    make_masters_fp32(model)
    assert model.weight.dtype == torch.float32
    taken = own_bytes() - before  # before its values are looked at, which takes memory
    return taken, torch.equal(model.weight, values.float())


def test_masters_in_fp32_are_made_by_the_first_alone(pool):
    """The others would drop theirs when the model is attached."""
    (first, has_values), (second, _) = pool(2).run(made_wide)
    num_bytes = 4 * 4096 * 4096
    assert first > 0.4 * num_bytes and has_values  # the 16-bit weights are gone
    assert second < 0.1 * num_bytes


# ---- values

KINDS = {"bert": hf.AutoModelForSequenceClassification, "llama": hf.AutoModelForCausalLM}


def loaded(name: str, folder: str) -> tuple[bool, str, str]:
    """In a rank: whether the model had values before it was attached; digests of its values then, and of a step."""
    rank = rank_here()
    with load_once():
        model = KINDS[name].from_pretrained(folder)
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
            KINDS[name].from_pretrained(folder, device_map="cpu")
    return had_values, values, after


@pytest.mark.parametrize("name", ["llama", *more("bert")])
def test_one_rank_loads_a_model_and_others_get_its_values(pool, tmp_path, name):
    torch.manual_seed(1)
    model = bert() if name == "bert" else llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    found = pool(2).run(loaded, name, str(tmp_path))
    assert [each[0] for each in found] == [True, False]
    assert found[0][1] == found[1][1] == digest(*model.parameters(), *model.buffers())
    assert found[0][2] == found[1][2] != found[0][1]
    assert loaded(name, str(tmp_path))[0], "one process loads as ever"


# ---- a plan

FIGURES = HardwareFigures(
    "a card", 2**34, 1e9, 1e9, 1e9, 1e9, 1e10, {1: 1e9}, {"fp32": 1e11}, page_locked=True, device_adamw=1e9
)


def planned(folder: str, fails: bool = False) -> dict[str, Any]:
    """Plan in a rank of simulated devices: by figures that each rank would measure otherwise."""
    rank, measured = distributed.get_rank(), []

    def probe(device: torch.device) -> HardwareFigures:
        measured.append(str(device))
        if fails:
            raise RuntimeError("no figures")
        return replace(FIGURES, flops={"fp32": 1e11 * (1 + rank)})

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


def test_rank_0_measures_and_all_have_its_plan(pool, tmp_path):
    """Or are told that it cannot."""
    first, second = pool(2, sim=True).run(planned, str(tmp_path))
    assert len(first["measured"]) == 1
    assert second == {**first, "measured": []}
    assert sorted(file.relative_to(tmp_path).parts[0] for file in Path(tmp_path).rglob("*.json")) == ["rank0"]
    for each in pool(2, sim=True).run(planned, str(tmp_path / "other"), True):
        assert each["error"].startswith("rank 0 measures the machine") and each["error"].endswith("no figures")


def agreed() -> tuple[Any, ...]:
    """What ranks of which the second is of another opinion agree on."""
    is_second = distributed.get_rank() == 1
    return reason_of_any("a reason" if is_second else None), reason_of_any(None), is_so_for_all(not is_second)


def test_ranks_agree_on_whether_they_plan(pool):
    assert pool(2).run(agreed) == [("a reason", None, False)] * 2
