"""`l2l_async_save` on the simulated accelerator, where updates run beside the computation."""

from __future__ import annotations

from typing import Any

import pytest

from slow_disk import SlowDisk, assert_same_checkpoints
from tiers import combined
from training import SAVING, assert_same_run, l2l_trainer, tiny_bert

EACH_STEP = {**SAVING, "save_steps": 1, "save_total_limit": None}

OPTIONS: dict[str, dict[str, Any]] = {
    "deferred": {},
    "serial": {"eps_update": "serial"},
    "eager": {"eps_update": "eager", "max_grad_norm": 0.0},
    "bf16": {"cmp": "bf16"},
    "resident layers": {"l2l_resident_layers": 2, "l2l_resident_update": "device"},
    "resident shell": {"l2l_resident": "shell", "l2l_resident_update": "host"},
    "all resident": {"l2l_resident": "all"},
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", combined(OPTIONS, one_in=2))
def test_checkpoints_have_the_values_of_their_step(tmp_path, monkeypatch, name):
    options = OPTIONS[name]
    l2l_trainer(tmp_path / "at once", **EACH_STEP, **options).train()
    SlowDisk(monkeypatch)
    l2l_trainer(tmp_path / "later", **EACH_STEP, **options, l2l_async_save=True).train()
    assert_same_checkpoints(tmp_path / "later", tmp_path / "at once")


def test_they_are_resumed_from(tmp_path):
    whole = l2l_trainer(tmp_path / "whole", **EACH_STEP)
    whole.train()
    l2l_trainer(tmp_path / "parts", **EACH_STEP, l2l_async_save=True).train()
    resumed = l2l_trainer(tmp_path / "parts", model=tiny_bert(), **EACH_STEP)
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    assert_same_run(resumed, whole)


def test_copies_of_layers_are_in_the_memory_report(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)
    made = l2l_trainer(tmp_path, **EACH_STEP, l2l_async_save=True)
    made.train()
    assert made.eps is not None
    found = made.eps.memory_report()["host"]["layers being saved"]
    # What the disk has seen when it waited; there may be more copies between its waits.
    assert found["now"] == 0 and found["peak"] >= disk.copied_bytes > 0
