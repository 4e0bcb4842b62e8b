"""Folders that are whole or absent: each is written beside its place, and renamed into it when all is on the disk.

A program that ends at any point leaves the folder that was there before, or the new one. What it was writing has a
name that is no checkpoint's; the next program that saves or resumes here removes it.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from safetensors import SafetensorError

from hf_l2l.checkpoint.manifest import sync_folder

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

_PREFIX = ".l2l-saving-"
_NAME = re.compile(re.escape(_PREFIX) + r"(checkpoint-[0-9]+)-[a-z0-9_]{8}")
_OF_WRITERS = ("I/O error", "iostream error", "inline_container.cc", "PytorchStreamWriter")
"""Words in the errors of safetensors and torch when a file cannot be written, such as on a full disk."""
_BEFORE = "before"
"""In a staging folder: what was in the place of the new one."""


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
        self._lock = os.open(self.parent, os.O_RDONLY)
        _lock(self._lock)

    @property
    def folder(self) -> Path:
        """Where to write."""
        return self.parent / self.target.name

    def commit(self) -> None:
        """Put the folder, all of which must be on the disk, in its place; what was there is removed then."""
        sync_folder(self.parent)
        if self.target.exists():
            os.rename(self.target, self.parent / _BEFORE)
        os.rename(self.folder, self.target)
        sync_folder(self.target.parent)
        self.discard()

    def discard(self) -> None:
        """Remove what was written, unless it is in its place."""
        _undo(self.parent, self.target)
        os.close(self._lock)


@contextmanager
def staged(target: Path) -> Iterator[Staging]:
    """Inside, a folder is written, and committed; without a commit, nothing of it is left.

    Raises:
        OSError: if it cannot be written; also where torch or safetensors raise another error then.
    """
    staging = Staging(target)
    try:
        yield staging
    except OSError as error:
        error.add_note(f"{target} could not be written; what was there before is as it was")
        raise
    except (RuntimeError, SafetensorError) as error:
        if not any(words in str(error) for words in _OF_WRITERS):
            raise
        raise OSError(
            errno.EIO, f"{target} could not be written, and what was there before is as it was ({error})"
        ) from error
    finally:
        if staging.parent.exists():
            staging.discard()


def remove_interrupted(run: Path) -> None:
    """Remove what programs that are gone were writing in `run`, and put back what they were about to replace."""
    for path in run.iterdir() if run.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match is None or path.is_symlink() or not path.is_dir():
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if _lock(descriptor):
                _undo(path, run / match[1])
        finally:
            os.close(descriptor)


def _undo(staging: Path, target: Path) -> None:
    before = staging / _BEFORE
    if before.is_dir() and not before.is_symlink() and not target.exists():
        os.rename(before, target)
        sync_folder(target.parent)
    shutil.rmtree(staging, ignore_errors=True)


def _lock(descriptor: int) -> bool:
    """Hold the folder until the descriptor is closed, or the process ends; False if another process does. Where
    folders cannot be locked, nobody is known to be gone."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
