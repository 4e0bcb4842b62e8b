"""Folders that are whole or absent: each is written beside its place, and renamed into it when all is on the disk.

A program that ends at any point leaves the folder that was there before, or the new one. What it was writing has a
name that is no checkpoint's; the next program that saves or resumes here removes it.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from hf_l2l.checkpoint.manifest import MANIFEST, files_in, sync_folder, would_be_loaded
from hf_l2l.runtime.tensors import size_text

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

# transformers uploads no name that begins so to the Hub.
_PREFIX = "_l2l-saving-"
_NAME = re.compile(re.escape(_PREFIX) + r"(checkpoint-[0-9]+)-[a-z0-9_]{8}")
_REMOVED = "_l2l-removing-"
_NAME_REMOVED = re.compile(re.escape(_REMOVED) + r"checkpoint-[0-9]+-[0-9a-f]{8}")
_OF_TORCH = ("inline_container.cc", "iostream error", "PytorchStreamWriter")
"""What the errors of `torch.save` name when it cannot write: its file's end may be elsewhere than it expects."""
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG)
_BEFORE = "before"
"""In a staging folder: what was in the place of the new one."""


class CheckpointSaveError(OSError):
    """A checkpoint was not saved. Older ones are as they were."""

    def __init__(self, checkpoint: Path, reason: str, number: int | None = None) -> None:
        """`number` is that of the system's error, as far as it is known."""
        super().__init__(
            number,
            f"a checkpoint must be written as a whole (got {reason}, while saving {checkpoint}); nothing of it is "
            "left, and older ones are as they were: fix that, and train again with resume_from_checkpoint=True",
            str(checkpoint),
        )
        self.checkpoint, self.reason = checkpoint, reason

    def __str__(self) -> str:
        """Without the number and the path, which are in it."""
        return str(self.strerror)

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors that come from other processes are pickled."""
        return type(self), (self.checkpoint, self.reason, self.errno)


@contextmanager
def save_errors(checkpoint: Path) -> Iterator[None]:
    """Inside, what those who write files raise of a disk is raised as `CheckpointSaveError`: safetensors has an error
    of its own, and `torch.save` raises RuntimeError."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, CheckpointSaveError) or not _is_of_a_disk(error, checkpoint.parent):
            raise
        number = error.errno if isinstance(error, OSError) else None
        raise CheckpointSaveError(checkpoint, f"{error}{_free(checkpoint.parent)}", number) from error


def _is_of_a_disk(error: OSError | RuntimeError | SafetensorError, run: Path) -> bool:
    """Whether an error is one of writing in `run`, and not of a program that does something else, too."""
    if isinstance(error, RuntimeError):
        return any(name in str(error) for name in _OF_TORCH)
    if isinstance(error, OSError):
        file = error.filename
        return error.errno in _OF_DISKS or (isinstance(file, str) and Path(file).is_relative_to(run))
    return True


def _free(folder: Path) -> str:
    """What is told of the disk: `torch.save` says nothing of it."""
    try:
        return f", {shutil.disk_usage(folder).free:,} bytes free without the checkpoint"
    except OSError:
        return ""


def bytes_to_save(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of the weights that transformers saves of a model, and of the optimizer's state, if there is one."""
    tensors = {*model.parameters(), *model.buffers()}
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        tensors = {p for p in model.parameters() if p.requires_grad}  # adapters are saved, and no base
    if optimizer is not None:
        states = (value for state in optimizer.state.values() for value in state.values())
        tensors |= {value for value in states if isinstance(value, torch.Tensor)}
    return sum(each.nbytes for each in tensors)


def check_room(checkpoint: Path, num_bytes: int, remedy: str) -> None:
    """Raise CheckpointSaveError unless the disk has room for so many bytes of a checkpoint; `remedy` says what helps,
    beside freeing some."""
    free = shutil.disk_usage(checkpoint.parent).free
    if free < num_bytes:
        raise CheckpointSaveError(
            checkpoint,
            f"a disk with {size_text(free)} free for {size_text(num_bytes)} of weights and optimizer state: "
            f"free some, or {remedy}",
            errno.ENOSPC,
        )


def bytes_in(folder: Path) -> int:
    """Bytes of the files in a folder, and in those in it."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


class Staging:
    """One folder that is being written."""

    def __init__(self, target: Path) -> None:
        """Its place is `target`, named "checkpoint-" and a number.

        Raises:
            OSError: if nothing can be written there.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        self.target = target
        # Nobody else can read what is in it.
        self.parent = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{target.name}-", dir=target.parent))
        self._descriptor: int | None = None
        self._is_there = True
        try:
            self._descriptor = None if fcntl is None else os.open(self.parent, os.O_RDONLY)
        except OSError:
            self.parent.rmdir()
            raise
        _lock(self._descriptor)

    @property
    def folder(self) -> Path:
        """Where to write."""
        return self.parent / self.target.name

    def commit(self) -> None:
        """Put the folder, all of which must be on the disk, in its place; what was there is removed then.

        If no manifest is there, subclasses of the trainer have written more files of this checkpoint into its place:
        they are kept, unless they were in the place of ours, as those of an interrupted Trainer.
        """
        sync_folder(self.parent)
        if self.target.exists():
            os.rename(self.target, self.parent / _BEFORE)
        os.rename(self.folder, self.target)
        try:
            sync_folder(self.target.parent)
        except OSError:
            os.rename(self.target, self.folder)  # nobody knows whether it is on the disk
            raise
        before = self.parent / _BEFORE
        if before.is_dir() and not (before / MANIFEST).exists():
            self._keep_added(before)
        self.discard()

    def _keep_added(self, before: Path) -> None:
        loaded = {name.split("/")[0] for name in files_in(before) if would_be_loaded(name)}
        for path in before.iterdir():
            if path.name not in loaded and not (self.target / path.name).exists():
                os.rename(path, self.target / path.name)

    def discard(self) -> None:
        """Remove what was written, unless it is in its place. A second call does nothing."""
        if not self._is_there:
            return
        self._is_there = False
        try:
            _undo(self.parent, self.target)
        finally:
            if self._descriptor is not None:
                os.close(self._descriptor)


@contextmanager
def staged(target: Path) -> Iterator[Staging]:
    """Inside, a folder is written, and committed; without a commit, nothing of it is left.

    Raises:
        CheckpointSaveError: if the disk, or who writes on it, raised an error inside.
    """
    with save_errors(target):
        staging = Staging(target)
        try:
            yield staging
        finally:
            staging.discard()


def remove(checkpoint: Path) -> None:
    """Delete a folder. It is no checkpoint any more before the first of its files is gone; as many as can be are."""
    # Without a folder for it to be put in, which a full disk may have no room for.
    moved = checkpoint.with_name(f"{_REMOVED}{checkpoint.name}-{secrets.token_hex(4)}")
    try:
        os.rename(checkpoint, moved)
    except OSError:
        return
    shutil.rmtree(moved, ignore_errors=True)


def remove_interrupted(run: Path) -> None:
    """Remove what programs that are gone were writing or deleting in `run`, and put back what they were about to
    replace."""
    for path in run.iterdir() if run.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if path.is_symlink() or not path.is_dir():
            continue
        if _NAME_REMOVED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        if match is None or fcntl is None:
            continue
        with suppress(OSError):  # that of another user, or on a disk that cannot be written: it stays
            _remove_if_left(path, run / match[1])


def _remove_if_left(staging: Path, target: Path) -> None:
    descriptor = os.open(staging, os.O_RDONLY)
    try:
        if _lock(descriptor):
            _undo(staging, target)
    finally:
        os.close(descriptor)


def _undo(staging: Path, target: Path) -> None:
    before = staging / _BEFORE
    puts_back = before.is_dir() and not before.is_symlink() and not target.exists()
    if puts_back:
        os.rename(before, target)  # if it cannot be, the folder that it is in stays
    try:
        if puts_back:
            sync_folder(target.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _lock(descriptor: int | None) -> bool:
    """Hold the folder until the descriptor is closed, or the process ends; False if another process does. Where
    folders cannot be locked, nobody is known to be gone."""
    if fcntl is None or descriptor is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
