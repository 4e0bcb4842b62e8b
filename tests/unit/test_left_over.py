"""There is no more after trainings and checkpoints than before: threads, files, sockets, children, names, tensors."""

from __future__ import annotations

from typing import Any

import pytest

import left_over
from hf_l2l import detach_l2l
from tiers import more
from training import l2l_trainer, left_in, tiny_bert


@pytest.mark.parametrize("workers", [1, *more(0, 2)])
def test_trainings_leave_nothing(workers, tmp_path):
    """Of steps alone: `tests/trainer/test_measure.py`."""
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    named, found = left_over.shared_memory(), []
    for turn in range(4):
        options = {"dataloader_num_workers": workers, "l2l_async_save": turn % 2 == 0, **saving}
        made = l2l_trainer(tmp_path, model=tiny_bert(layers=2), eps_update="deferred", max_steps=3, **options)
        made.train()
        detach_l2l(made.model)
        del made
        found.append({**left_over.counts(), "names in /dev/shm": len(left_over.shared_memory() - named)})
    left_over.assert_flat(found)
    assert left_in(tmp_path) == ["checkpoint-2", "checkpoint-3"]
