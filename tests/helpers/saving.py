"""Trainers of a small model that save each step, what comes in between, and disks that fail."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers as hf
from safetensors.torch import load_file

from hf_l2l.checkpoint.reserved import Region
from runs import assert_same_tensors
from training import SAVING, l2l_trainer, tiny_bert

EACH_STEP: dict[str, Any] = {**SAVING, "save_steps": 1, "save_total_limit": None}
BEST: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}


def saving(folder: Path, make: Callable[..., Any] = l2l_trainer, **options: Any) -> Any:
    """A trainer of a small model that saves after each of four steps, unless `options` say something else."""
    return make(folder, **{"model": tiny_bert(layers=2), **EACH_STEP, **options})


def trained(folder: Path, make: Callable[..., Any] = l2l_trainer, *, resumes: Any = None, **options: Any) -> Any:
    """Such a trainer when it has trained, perhaps from a checkpoint."""
    made = saving(folder, make, **options)
    made.train(resume_from_checkpoint=str(resumes) if isinstance(resumes, Path) else resumes)
    return made


def steps_in(run: Path) -> list[int]:
    """Those of the checkpoints in a folder."""
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in run.glob("checkpoint-*"))


def assert_saved(trainer: hf.Trainer, checkpoint: Path) -> None:
    """The weights of the trainer are those of a checkpoint."""
    assert_same_tensors(trainer.model.state_dict(), load_file(checkpoint / "model.safetensors"))


class At(hf.TrainerCallback):
    """Calls something at an event of a step, or of each step that is not the first one."""

    def __init__(self, event: str, step: int | None, call: Callable[[], object]) -> None:
        def at_event(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step and state.global_step == (step or state.global_step):
                call()

        setattr(self, event, at_event)


class Stopped(Exception):
    """What a test stops a training with."""


def stop() -> None:
    raise Stopped


def with_methods(made: Any, **methods: Callable[..., Any]) -> Any:
    """A trainer that becomes one of a subclass."""
    made.__class__ = type("Mine", (type(made),), methods)
    return made


# ---- disks


def write_fails(patch: pytest.MonkeyPatch, error: BaseException, fails: Callable[[Region], bool]) -> None:
    """Values of a file with room for them cannot be written, where `fails` says so."""
    write = Region.write

    def broken(region: Region, descriptor: int) -> None:
        if fails(region):
            raise error
        write(region, descriptor)

    patch.setattr(Region, "write", broken)


def disk_is_full(patch: pytest.MonkeyPatch, free: int = 1024) -> None:
    """The system says that there is so much room."""
    patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=2**30, used=2**30 - free, free=free))


def no_space(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Synced:
    """What has been on the disk when a folder got its name."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.missing: list[set[str]] = []
        """For each folder that was renamed with files in it: what of it had not been synced, to its last byte."""
        self.names: list[str] = []
        """Folders whose entries were synced after that."""
        fsync, rename = os.fsync, os.rename
        sizes: dict[int, int] = {}

        def synced(descriptor: int) -> None:
            found = os.fstat(descriptor)
            sizes[found.st_ino] = found.st_size
            self.names.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
            fsync(descriptor)

        def renamed(source: Any, target: Any) -> None:
            inside = [Path(source), *Path(source).rglob("*")]
            if len(inside) > 1 and not os.path.basename(target).startswith("_"):
                found = {path.name: path.stat() for path in inside}
                self.missing.append({name for name, each in found.items() if sizes.get(each.st_ino) != each.st_size})
                self.names.clear()
            rename(source, target)

        patch.setattr(os, "fsync", synced)
        patch.setattr(os, "rename", renamed)
