"""Copies a checkpoint out of a folder in which a training may be replacing it."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from hf_l2l.checkpoint.finding import STATE, check_whole, checkpoints_in, newest_whole
from hf_l2l.checkpoint.manifest import (
    LINK,
    MANIFEST,
    DamagedCheckpointError,
    Manifest,
    files_in,
    read_manifest,
    sync,
    sync_folder,
)

_ATTEMPTS = 5
"""While a training replaces what is about to be copied."""
_AT_ONCE = 2**20


def copy_newest(folder: Path, target: Path) -> tuple[Path, Manifest | None]:
    """Copy the newest whole checkpoint of `folder`, or the checkpoint `folder` itself, to `target`, whole or not at
    all; its bytes are compared with its manifest after that. Returns what was copied, and its manifest.

    Raises:
        ValueError: if there is no checkpoint that is whole, or `target` exists.
        OSError: if it cannot be read or written.
    """
    if not folder.is_dir():
        raise ValueError(f"FOLDER must be a folder with checkpoints (got {folder}, which is none); check its name")
    if target.exists() or target.is_symlink():
        raise ValueError(f"TARGET must not exist yet (got {target}); name another one, or remove it")
    is_checkpoint = (folder / STATE).exists() or read_manifest(folder) is not None
    if is_checkpoint and target.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"TARGET must not be in the checkpoint itself (got {target} in {folder}); name another one")
    damaged: dict[Path, DamagedCheckpointError] = {}
    left = _ATTEMPTS
    while True:
        source = None
        try:
            source, passed_over = (folder, []) if is_checkpoint else newest_whole(folder, partial(_looked_at, damaged))
            if source is not None:
                return source, _copied(source, target)
        except DamagedCheckpointError as error:
            if is_checkpoint or source is None:
                raise
            damaged[source] = DamagedCheckpointError(source, error.file, error.reason)
            continue
        except FileNotFoundError:
            left -= 1
            if left == 0 or is_checkpoint or not checkpoints_in(folder):
                raise
            continue  # a training has replaced it
        reasons = "; ".join(f"{each.folder.name}: {each.reason}" for each in passed_over)
        raise ValueError(
            f"FOLDER must have a whole checkpoint (got {folder}{', where ' + reasons if reasons else ''}); name "
            "output_dir, or the folder of l2l_realtime_checkpoint"
        )


def _looked_at(damaged: Mapping[Path, DamagedCheckpointError], checkpoint: Path) -> None:
    """Raise DamagedCheckpointError for a checkpoint that has been found to be damaged, or whose manifest is: others
    are compared when they are copied, since a training may delete them meanwhile."""
    if checkpoint in damaged:
        raise damaged[checkpoint]
    if read_manifest(checkpoint) is None:
        check_whole(checkpoint)


def _copied(source: Path, target: Path) -> Manifest | None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        files = _opened(source, stack)
        beside = stack.enter_context(tempfile.TemporaryDirectory(prefix="_l2l-copying-", dir=target.parent))
        copy = Path(beside) / "checkpoint"
        copy.mkdir()
        for name, descriptor in files.items():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.dup(descriptor), "rb") as file, (copy / name).open("wb") as to:
                shutil.copyfileobj(file, to, _AT_ONCE)
        manifest = check_whole(copy)
        for name in files_in(copy):
            sync(copy / name)
        for path in (*(p for p in copy.rglob("*") if p.is_dir()), copy):
            sync_folder(path)
        os.rename(copy, target)
    sync_folder(target.parent)
    return manifest


def _opened(source: Path, stack: ExitStack) -> dict[str, int]:
    """All files of a checkpoint, by name: they can be read when it has been deleted.

    Raises:
        DamagedCheckpointError: if one of them is a link.
        FileNotFoundError: if it is deleted meanwhile.
    """
    found: dict[str, int] = {}
    names = [*files_in(source), *([MANIFEST] if (source / MANIFEST).exists() else [])]
    for name in names:
        try:
            descriptor = os.open(source / name, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise DamagedCheckpointError(source, name, LINK) from error
            raise
        stack.callback(os.close, descriptor)
        found[name] = descriptor
    if not found:
        raise FileNotFoundError(errno.ENOENT, "the checkpoint is gone", str(source))
    return found
