"""Checkpoints that are written in the background as late as possible, and what is compared of them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from hf_l2l.checkpoint import background
from hf_l2l.checkpoint import snapshot as snapshots
from hf_l2l.checkpoint.manifest import check_files, read_manifest
from hf_l2l.checkpoint.snapshot import Snapshot
from runs import assert_same_tensors
from training import left_in


class SlowDisk:
    """Writes the values of a checkpoint only when somebody waits for that, group by group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copied_bytes = 0
        """The most bytes of copies."""
        begin, take, result = Snapshot.__init__, Snapshot.next_group, background.BackgroundSave.result
        needed: dict[Snapshot, threading.Semaphore] = {}

        def begun(snapshot: Snapshot, groups: Any, room: int, *others: Any, **more: Any) -> None:
            permits, disk = threading.Semaphore(0 if room else 10**6), self

            class Changed(threading.Condition):
                def wait(self, timeout: float | None = None) -> bool:
                    disk.copied_bytes = max(disk.copied_bytes, snapshot.copied_bytes)
                    permits.release()
                    return super().wait(timeout)

            needed[snapshot] = permits
            with mock.patch.object(snapshots, "Condition", Changed):
                begin(snapshot, groups, room, *others, **more)

        def taken(snapshot: Snapshot) -> Any:
            assert needed[snapshot].acquire(timeout=60), "nobody waits"
            return take(snapshot)

        def finished(saving: background.BackgroundSave) -> None:
            needed[saving.snapshot].release(10**6)
            result(saving)

        monkeypatch.setattr(Snapshot, "__init__", begun)
        monkeypatch.setattr(Snapshot, "next_group", taken)
        monkeypatch.setattr(background.BackgroundSave, "result", finished)


def state_of(checkpoint: Path) -> dict[str, Any]:
    """Weights and optimizer state that a checkpoint has."""
    state = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)["state"]
    moments = {f"{i}.{key}": torch.as_tensor(v) for i, values in state.items() for key, v in values.items()}
    return {**load_file(checkpoint / "model.safetensors"), **moments}


def assert_same_checkpoints(found: Path, expected: Path) -> None:
    names = sorted(path.name for path in expected.glob("checkpoint-*"))
    assert left_in(found) == names, "nothing else is left"
    for ours, theirs in ((found / name, expected / name) for name in names):
        assert_same_tensors(state_of(ours), state_of(theirs))
        assert sorted(p.name for p in ours.iterdir()) == sorted(p.name for p in theirs.iterdir())
        manifest = read_manifest(ours)
        assert manifest is not None
        check_files(ours, manifest)
        assert all((ours / f).read_bytes() == (theirs / f).read_bytes() for f in ("config.json", "scheduler.pt"))
