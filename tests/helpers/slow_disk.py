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
from training import left_in


class SlowDisk:
    """Writes the values of a checkpoint only when somebody waits for that, group by group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copied_bytes = 0
        """The most bytes of copies."""
        begin, take = Snapshot.__init__, Snapshot.next_group
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

        result = background.BackgroundSave.result

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
    for name in names:
        ours, theirs = state_of(found / name), state_of(expected / name)
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.equal(ours[key], value), (name, key)
        assert sorted(p.name for p in (found / name).iterdir()) == sorted(p.name for p in (expected / name).iterdir())
        manifest = read_manifest(found / name)
        assert manifest is not None
        check_files(found / name, manifest)
        same = ("config.json", "scheduler.pt")
        assert all((found / name / f).read_bytes() == (expected / name / f).read_bytes() for f in same)
