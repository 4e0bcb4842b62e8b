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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from safetensors import SafetensorError
from torch import distributed

from hf_l2l.checkpoint.manifest import MANIFEST, files_in, sync_folder, would_be_loaded
from hf_l2l.ranks.peers import RankFailedError
from hf_l2l.ranks.team import Team

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


class JoinedStaging:
    """A folder that rank 0 has begun, and commits; other ranks write their files to it."""

    def __init__(self, parent: Path, target: Path) -> None:
        """`parent` is that of the `Staging` of rank 0."""
        self.parent, self.target = parent, target

    @property
    def folder(self) -> Path:
        """Where to write."""
        return self.parent / self.target.name


def _joined(parent: Path, target: Path) -> JoinedStaging:
    """The folder that rank 0 has begun.

    Raises:
        CheckpointSaveError: if this rank does not see it.
    """
    if not parent.is_dir():
        rank = distributed.get_rank()
        reason = f"a folder that rank {rank} does not see, where all hosts need one file system"
        raise CheckpointSaveError(target, reason)
    return JoinedStaging(parent, target)


class _Part:
    """What each rank does of a checkpoint until all have done it: then all go on, or all raise."""

    def __init__(self, team: Team, checkpoint: Path, why: str) -> None:
        """`why` says what ranks wait for that have done theirs."""
        self.team, self.checkpoint, self.why = team, checkpoint, why
        self.text = ""
        """What this rank tells the others when it has done its part."""
        self.of_first = ""
        """What rank 0 has told, at the end."""

    def __enter__(self) -> _Part:
        return self

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        if isinstance(error, RankFailedError) or not (error is None or isinstance(error, Exception)):
            return  # the others know, or will know, that this rank ends
        told = self.team.tell(f"+{self.text}" if error is None else f"-{error}", self.why)
        self.of_first = told[0][1:]
        failed = next((rank for rank, text in enumerate(told) if text.startswith("-")), None)
        if error is None and failed is not None:
            raise CheckpointSaveError(self.checkpoint, f"an error of rank {failed}: {told[failed][1:]}")


def _wait_for_removal(team: Team, kind: object, error: BaseException | None, frames: object) -> None:
    """After an error, which all ranks have then, nothing of the checkpoint is left when they go on."""
    if isinstance(error, Exception) and not isinstance(error, RankFailedError):
        team.tell("", "rank 0 removes what was written of a checkpoint")


def saved_together(
    team: Team,
    target: Path,
    *,
    get_ready: Callable[[], None],
    write: Callable[[Staging | JoinedStaging], str | None],
    commit: Callable[[Staging], None],
) -> str | None:
    """Write the checkpoint `target` of several ranks, which all call this: it is whole, or absent.

    Args:
        team: the ranks.
        target: its place.
        get_ready: what rank 0 does before anything is written.
        write: writes the files of this rank, in no order with those of others. What it returns on rank 0, all ranks
            return.
        commit: what rank 0 does when all have written theirs.

    Raises:
        CheckpointSaveError: in all ranks, if one of them could not do its part.
    """
    with save_errors(target), ExitStack() as stack:
        stack.push(partial(_wait_for_removal, team))
        with _Part(team, target, "rank 0 begins a checkpoint") as begun:
            staging = None
            if team.rank == 0:
                get_ready()
                staging = stack.enter_context(staged(target))
                begun.text = str(staging.parent)
        with _Part(team, target, "all ranks see the folder of a checkpoint"):  # else no rank begins to write
            place = staging or _joined(Path(begun.of_first), target)
        with _Part(team, target, "all ranks write their files of a checkpoint") as written:
            written.text = write(place) or ""
        with _Part(team, target, "rank 0 puts a checkpoint in its place"):
            if staging is not None:
                commit(staging)
    return written.of_first or None


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
