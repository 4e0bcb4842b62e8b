"""Copies a checkpoint out of a folder in which a training may be replacing it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from hf_l2l.checkpoint.finding import STATE, check_whole, checkpoints_in, newest_whole
from hf_l2l.checkpoint.manifest import Manifest, files_in, read_manifest, sync, sync_folder

_ATTEMPTS = 5
"""While a training replaces what is being copied."""


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
    for attempt in range(_ATTEMPTS):
        source, passed_over = (folder, []) if is_checkpoint else newest_whole(folder)
        if source is None:
            reasons = "; ".join(f"{each.folder.name}: {each.reason}" for each in passed_over)
            raise ValueError(
                f"FOLDER must have a whole checkpoint (got {folder}{', where ' + reasons if reasons else ''}); name "
                "output_dir, or the folder of l2l_realtime_checkpoint"
            )
        try:
            return source, _copied(source, target)
        except (FileNotFoundError, shutil.Error, ValueError):
            is_replaced = not source.exists() and bool(checkpoints_in(folder))
            if not is_replaced or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def _copied(source: Path, target: Path) -> Manifest | None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="_l2l-copying-", dir=target.parent) as beside:
        copy = Path(beside) / "checkpoint"
        # Links stay links, which the check refuses.
        shutil.copytree(source, copy, symlinks=True)
        manifest = check_whole(copy)
        for name in files_in(copy):
            sync(copy / name)
        for path in (*(p for p in copy.rglob("*") if p.is_dir()), copy):
            sync_folder(path)
        os.rename(copy, target)
    sync_folder(target.parent)
    return manifest
