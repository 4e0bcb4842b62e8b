"""Ranks that plan for a budget: rank 0 measures the machine for all, and all plan alike."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from hf_l2l import L2LConfig
from hf_l2l.budget.agreed import is_so_for_all, reason_of_any
from hf_l2l.budget.within import plan_within
from hf_l2l.probe import known
from hf_l2l.probe.figures import HardwareFigures
from models import batch_for, bert

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
    first, *others = pool(3, sim=True).run(planned, str(tmp_path))
    assert len(first["measured"]) == 1
    for each in others:
        assert each == {**first, "measured": []}
    assert sorted(file.relative_to(tmp_path).parts[0] for file in Path(tmp_path).rglob("*.json")) == ["rank0"]


def test_all_are_told_that_rank_0_finds_none(pool, tmp_path):
    for each in pool(2, sim=True).run(planned, str(tmp_path), True):
        assert each == {"error": "rank 0 measures the machine for all ranks, and failed: no figures"}


def agreed() -> tuple[Any, ...]:
    """What ranks of which the second is of another opinion agree on."""
    is_second = distributed.get_rank() == 1
    return reason_of_any("a reason" if is_second else None), reason_of_any(None), is_so_for_all(not is_second)


def test_ranks_agree_on_whether_they_plan(pool):
    assert pool(2).run(agreed) == [("a reason", None, False)] * 2
