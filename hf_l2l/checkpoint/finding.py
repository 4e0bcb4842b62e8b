"""Which of the checkpoints in a folder to resume from, and which of them may be deleted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from hf_l2l.checkpoint.form import check_form
from hf_l2l.checkpoint.manifest import DamagedCheckpointError, Manifest, check_files, read_manifest
from hf_l2l.checkpoint.staging import remove

STATE = "trainer_state.json"
"""The file that transformers' Trainer writes last."""

_NAME = re.compile("checkpoint-([0-9]+)")


class PassedOver(NamedTuple):
    """A checkpoint that is not resumed from."""

    folder: Path
    reason: str
    is_interrupted: bool
    """Whether a Trainer has not finished it: without a manifest, and without the file that is written last."""


def checkpoints_in(run: Path) -> list[Path]:
    """The folders in `run` that are named as checkpoints, by step; links are none."""
    found = [path for path in (run.iterdir() if run.is_dir() else ()) if _NAME.fullmatch(path.name)]
    return sorted((p for p in found if p.is_dir() and not p.is_symlink()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None, checkpoint
    return int(match[1])


def is_finished(checkpoint: Path) -> bool:
    """Whether a Trainer wrote all of this folder: the file that it writes last is there, to its end."""
    try:
        json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError):
        return False
    return True


def check_whole(checkpoint: Path) -> Manifest | None:
    """Raise unless the manifest, if there is one, holds, and a trainer can read all; returns the manifest.

    Raises:
        DamagedCheckpointError: names the file that is not as it was, or has a form in which it is not read.
        ValueError: if a newer version of this package wrote it.
    """
    manifest = read_manifest(checkpoint)
    if manifest is not None:
        check_files(checkpoint, manifest)
    check_form(checkpoint)
    return manifest


def newest_whole(run: Path, check: Callable[[Path], object] = check_whole) -> tuple[Path | None, list[PassedOver]]:
    """The newest whole checkpoint in `run`, if there is one, and newer ones that are not whole.

    Of two trainings in one folder, the later one counts: its checkpoints come before all of others. A checkpoint
    without a manifest, as transformers' Trainer writes it, belongs to it if none of its others was saved later, and is
    whole if its last file is there. Of a whole one, `check` raises no DamagedCheckpointError.

    Raises:
        ValueError: if a newer version of this package wrote one of them.
    """
    passed_over: list[PassedOver] = []
    for folder, manifest in _newest_first(run, passed_over):
        if manifest is None and not is_finished(folder):
            passed_over.append(PassedOver(folder, "saving was interrupted", is_interrupted=True))
            continue
        try:
            check(folder)
        except DamagedCheckpointError as error:
            passed_over.append(PassedOver(folder, f"{error.file} {error.reason}", is_interrupted=False))
            continue
        return folder, passed_over
    return None, passed_over


def _newest_first(run: Path, passed_over: list[PassedOver]) -> Iterator[tuple[Path, Manifest | None]]:
    found: list[tuple[Path, Manifest | None]] = []
    for folder in checkpoints_in(run):
        try:
            found.append((folder, read_manifest(folder)))
        except DamagedCheckpointError as error:
            passed_over.append(PassedOver(folder, f"{error.file} {error.reason}", is_interrupted=False))
    last = max((manifest for _, manifest in found if manifest is not None), key=lambda m: m.saved_at, default=None)

    def order(each: tuple[Path, Manifest | None]) -> tuple[bool, float, int]:
        folder, manifest = each
        saved_at = _written_at(folder) if manifest is None else manifest.saved_at
        if last is None or manifest is None:
            is_of_last = last is None or saved_at > last.saved_at
        else:
            is_of_last = manifest.run == last.run
        return is_of_last, 0.0 if is_of_last else saved_at, step_of(folder)

    return iter(sorted(found, key=order, reverse=True))


def _written_at(checkpoint: Path) -> float:
    """When a Trainer wrote its last file, or what it wrote of the folder, in seconds since 1970."""
    state = checkpoint / STATE
    return (state if state.exists() else checkpoint).stat().st_mtime


def rotate(run: Path, limit: int | None, keep: Path | None) -> None:
    """Delete the oldest checkpoints with a manifest in `run`, so that `limit` of them are left.

    The one that was saved last stays, and `keep`. Others, which this package has not written, are not counted.
    """
    if limit is None or limit <= 0:
        return
    ours: list[tuple[float, int, Path]] = []
    for folder in checkpoints_in(run):
        try:
            manifest = read_manifest(folder)
        except ValueError:  # damaged, or of a newer version: somebody may want to look at it
            continue
        if manifest is not None:
            ours.append((manifest.saved_at, manifest.step, folder))
    ours.sort()
    deletable = [folder for *_, folder in ours[:-1] if keep is None or folder.resolve() != keep.resolve()]
    for folder in deletable[: max(0, len(ours) - limit)]:
        remove(folder)
