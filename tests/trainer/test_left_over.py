"""After many steps there is no more of anything than after a few: threads, files, tensors, device memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import left_over
from devices import DEVICE
from hf_l2l import detach_l2l
from hf_l2l.testing import page_locked_bytes
from models import batch_for
from runs import attach
from tiers import cpu_suffices, more
from training import settled_memory

CASES: list[Any] = [({"stash": "disk", "gradient_slots": 1}, "deferred"), *more(({}, "eager"))]


def held() -> dict[str, Any]:
    """What the process has; on the simulated accelerator also the memory of the device, and what is page-locked."""
    found = left_over.counts()
    if DEVICE == "sim":
        found |= {"device": settled_memory(), "page-locked": page_locked_bytes()}
    return found


@cpu_suffices
@pytest.mark.parametrize(("options", "mode"), CASES)
def test_steps_leave_nothing(options, mode, device, tmp_path, monkeypatch):
    """Of accumulated batches of different sizes, evaluations, and forwards without a backward; 3,000 of them are a
    part of `make soak`."""
    monkeypatch.setattr("hf_l2l.stash.spill.is_in_memory", lambda folder: False)
    spills = {"spill_dir": tmp_path} if options.get("stash") == "disk" else {}
    before = left_over.own_threads()
    model, eps, optimizer, batch = attach(eps_update=mode, **options, **spills)
    batches = [batch, batch_for(model, masked=False, rows=5, seed=2)]
    found = []
    for step in range(16):
        with eps.accumulate():
            model(**batches[step % 2]).loss.backward()
        model(**batch).loss.backward()
        if mode != "eager":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        model(**batch)
        with torch.no_grad():
            model.eval()(**batch)
            model.train()
        if step % 4 == 3:
            eps.synchronize()
            found.append(held())
    left_over.assert_flat(found)
    detach_l2l(model)
    assert left_over.own_threads() <= before
    assert not list(tmp_path.iterdir())
