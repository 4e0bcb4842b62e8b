"""After many steps there is no more of anything than after a few: threads, files, tensors, device memory."""

from __future__ import annotations

from typing import Any

import pytest

import left_over
from hf_l2l import detach_l2l
from training import settled_memory
from update_cases import toy_under

OPTIONS: tuple[dict[str, Any], ...] = (
    {"stash": "host"},
    {"stash": "disk"},
    {"cmp": "bf16", "stash": "host", "boundary": "host"},
)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mode", ["deferred", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_steps_leave_nothing(mode, options, tmp_path, monkeypatch):
    """3,000 of them are a part of `make soak`."""
    monkeypatch.setattr("hf_l2l.stash.spill.is_in_memory", lambda folder: False)
    more = {"spill_dir": tmp_path} if options.get("stash") == "disk" else {}
    before_threads = left_over.threads()
    model, eps, optimizer, batch = toy_under("sim", mode, **options, **more)
    found = []
    for step in range(40):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            eps.synchronize()
            found.append({**left_over.counts(), "device": settled_memory()})
    left_over.assert_flat(found)
    detach_l2l(model)
    assert left_over.threads() <= before_threads + 1, "torch's thread for the device stays"
    assert not list(tmp_path.iterdir())
