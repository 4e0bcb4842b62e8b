"""Ctrl-C while the program waits for a checkpoint that is written in the background."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from hf_l2l.checkpoint.finding import newest_whole
from slow_disk import SlowDisk
from training import SAVING, l2l_trainer


def test_a_wait_that_is_interrupted_ends_neither_the_save_nor_what_waits_for_it(tmp_path, monkeypatch):
    """The checkpoint is finished when the training ends, with the values of its step."""
    SlowDisk(monkeypatch)
    result, interrupted = Future.result, []

    def once(future: Future[Any], timeout: float | None = None) -> Any:
        if not interrupted:
            assert not future.done()
            interrupted.append(future)
            assert all(master.saving is not None for master in made.eps.masters.on_host())
            raise KeyboardInterrupt
        return result(future, timeout)

    monkeypatch.setattr(Future, "result", once)
    made: Any = l2l_trainer(tmp_path, **{**SAVING, "save_steps": 1}, eps_update="deferred", l2l_async_save=True)
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert interrupted
    assert newest_whole(tmp_path) == (tmp_path / "checkpoint-1", [])
    assert all(master.saving is None for master in made.eps.masters.on_host())
