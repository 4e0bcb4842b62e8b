"""Which of the checkpoints in a folder to resume from, and which of them may be deleted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import distributed
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from hf_l2l.checkpoint.form import check_form
from hf_l2l.checkpoint.manifest import (
    MANIFEST,
    DamagedCheckpointError,
    Manifest,
    check_files,
    is_file,
    is_of_weights,
    read_manifest,
)
from hf_l2l.checkpoint.staging import remove, remove_interrupted
from hf_l2l.log import logger
from hf_l2l.ranks.team import process_group_size

STATE = "trainer_state.json"
"""The file that transformers' Trainer writes last."""

_RNG = "rng_state.pth"
"""Of transformers, where one process trains."""
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
    if manifest is None:
        check_form(checkpoint, is_known=False)
    else:
        check_files(checkpoint, manifest)
        # Of what was added, nothing is loaded, if it is no link that leads elsewhere.
        check_form(checkpoint, is_known=True, of=lambda name: name in manifest.files or not is_file(checkpoint / name))
    return manifest


def check_weights(checkpoint: Path) -> None:
    """`check_whole` of weights alone, which may be loaded whatever has become of the rest."""
    manifest = read_manifest(checkpoint)
    if manifest is not None:
        check_files(checkpoint, manifest, of=is_of_weights)
    check_form(checkpoint, is_known=True, of=is_of_weights)


def newest_whole(run: Path, check: Callable[[Path], object] = check_whole) -> tuple[Path | None, list[PassedOver]]:
    """The newest whole checkpoint in `run`, if there is one, and newer ones that are not whole.

    Of two trainings in one folder, the later one counts: its checkpoints come before all of others. A checkpoint
    without a manifest, as transformers' Trainer writes it, belongs to it if none of its others was saved later, and is
    whole if its last file is there. Of a whole one, `check` raises no DamagedCheckpointError.

    Raises:
        ValueError: if a newer version of this package wrote one of them.
    """
    passed_over: list[PassedOver] = []
    for folder, manifest, reason in _newest_first(run):
        if reason is None and manifest is None and not is_finished(folder):
            passed_over.append(PassedOver(folder, "saving was interrupted", is_interrupted=True))
            continue
        try:
            if reason is None:
                check(folder)
        except DamagedCheckpointError as error:
            reason = f"{error.file} {error.reason}"
        if reason is None:
            return folder, passed_over
        passed_over.append(PassedOver(folder, reason, is_interrupted=False))
    return None, passed_over


def newest_of(folders: Sequence[Path]) -> tuple[Path | None, list[PassedOver]]:
    """The newest whole checkpoint in several folders, as `newest_whole` finds that of each: of one training the one of
    the later step, of others the one that was saved later."""
    found: Path | None = None
    passed_over: list[PassedOver] = []
    for folder in folders:
        newest, passed = newest_whole(folder)
        passed_over += passed
        if newest is not None and (found is None or _is_later(newest, found)):
            found = newest
    return found, passed_over


def _is_later(checkpoint: Path, other: Path) -> bool:
    one, two = read_manifest(checkpoint), read_manifest(other)
    if one is not None and two is not None and one.run == two.run:
        return one.step > two.step
    at = [_written_at(c) if m is None else m.saved_at for c, m in ((checkpoint, one), (other, two))]
    return at[0] > at[1]


def _newest_first(run: Path) -> list[tuple[Path, Manifest | None, str | None]]:
    """The checkpoints in `run`, their manifests, and why one that has no readable manifest is not to be looked at."""
    links = [path for path in run.glob("checkpoint-*") if path.is_symlink() and _NAME.fullmatch(path.name)]
    found: list[tuple[Path, Manifest | None, str | None]] = [(link, None, "it is a link") for link in links]
    for folder in checkpoints_in(run):
        try:
            found.append((folder, read_manifest(folder), None))
        except DamagedCheckpointError as error:
            found.append((folder, None, f"{error.file} {error.reason}"))
    last = max((m for _, m, _ in found if m is not None), key=lambda m: m.saved_at, default=None)

    def order(each: tuple[Path, Manifest | None, str | None]) -> tuple[bool, float, int]:
        folder, manifest, _ = each
        saved_at = _written_at(folder) if manifest is None else manifest.saved_at
        if last is None or manifest is None:
            is_of_last = last is None or saved_at > last.saved_at
        else:
            is_of_last = manifest.run == last.run
        return is_of_last, 0.0 if is_of_last else saved_at, step_of(folder) if manifest is None else manifest.step

    return sorted(found, key=order, reverse=True)


def _written_at(checkpoint: Path) -> float:
    """When a Trainer wrote its last file, or what it wrote of the folder, in seconds since 1970."""
    state = checkpoint / STATE
    return (state if state.exists() else checkpoint).lstat().st_mtime


def rotate(run: Path, limit: int | None, keep: Path | None) -> None:
    """Delete the oldest checkpoints with a manifest in `run`, so that `limit` of them are left.

    The one that was saved last stays, and `keep`. Others, which this package has not written, are not counted.
    """
    if limit is None or limit <= 0:
        return
    ours = _ours(run)
    deletable = [folder for folder, _ in ours[:-1] if keep is None or folder.resolve() != keep.resolve()]
    for folder in deletable[: max(0, len(ours) - limit)]:
        remove(folder)


def keep_only(run: Path, keep: Path) -> None:
    """Delete all checkpoints with a manifest in `run` but `keep`, which must be there."""
    if keep.is_dir():
        for folder, _ in _ours(run):
            if folder.resolve() != keep.resolve():
                remove(folder)


def run_of(checkpoint: Path) -> str | None:
    """The name of the training that wrote `checkpoint`; "" of one of transformers' Trainer, and None without one."""
    found = next((manifest for folder, manifest in _ours(checkpoint.parent) if folder == checkpoint), None)
    if found is not None:
        return found.run
    return "" if is_finished(checkpoint) and not (checkpoint / MANIFEST).exists() else None


def is_last_of_run(manifest: Manifest, run: Path) -> bool:
    """Whether no checkpoint in `run` is of the same training, and of a later step."""
    return not any(m.run == manifest.run and m.step > manifest.step for _, m in _ours(run))


def _ours(run: Path) -> list[tuple[Path, Manifest]]:
    """The checkpoints in `run` whose manifest can be read, by the time at which they were saved."""
    found: list[tuple[Path, Manifest]] = []
    for folder in checkpoints_in(run):
        try:
            manifest = read_manifest(folder)
        except ValueError:  # damaged, or of a newer version: somebody may want to look at it
            continue
        if manifest is not None:
            found.append((folder, manifest))
    return sorted(found, key=lambda each: (each[1].saved_at, each[1].step))


def checkpoint_to_resume(asked: str | bool | None, args: Any, others: Sequence[Path] = ()) -> str | bool | None:
    """What to resume from, `asked` as in `Trainer.train` with training arguments `args`: for True, the newest whole
    checkpoint there and in `others`, folders with further ones; a folder of checkpoints stands for its newest one.
    Newer ones that are not whole are told in a warning; those of a Trainer that was interrupted are set aside, if this
    process saves checkpoints.

    Returns:
        A folder, whose files are those of its manifest, if it has one; True if there is no checkpoint, which
        transformers refuses; None or False if nothing is resumed.

    Raises:
        DamagedCheckpointError: if `asked` is a folder whose manifest does not hold, or that a trainer cannot, or must
            not, read.
        ValueError: if `asked` is True, and there are checkpoints of which none is whole; or if a newer version of this
            package wrote one of them.
    """
    if not asked:
        return asked
    folder = Path(args.output_dir)
    folders = [folder, *others]
    for run in folders if args.should_save else ():
        remove_interrupted(run)
    if asked is True:
        found, passed_over = newest_of(folders)
        if found is None and passed_over:
            raise ValueError(
                f"resume_from_checkpoint=True needs a whole checkpoint in output_dir (got {folder}, where "
                f"{_reasons(passed_over)}); name the one to resume from (resume_from_checkpoint='folder'), or train "
                "from the start in another folder"
            )
        if found is None:
            return True
        for each in passed_over:
            if not each.is_interrupted:
                logger.warning(f"{each.folder} is not resumed from, but {found} is: {each.reason}")
    else:
        found = Path(asked)
        if not (found / STATE).exists() and checkpoints_in(found):  # a folder of real-time checkpoints
            found = newest_whole(found)[0] or found
        if not found.is_dir():
            raise ValueError(
                f"Can't find a valid checkpoint at {asked}, which is no folder; check its name, or use "
                "resume_from_checkpoint=True for the newest one"
            )
        check_whole(found)
    renamed = set_aside_interrupted(folder, found) if args.should_save else ""
    if renamed:
        logger.warning(f"saving was interrupted in {renamed}: training resumes from {found}")
    _say_what_is_missing(found, getattr(args, "world_size", 1))
    return str(found)


def decided_by_rank_0(decide: Callable[[], str | bool | None]) -> str | bool | None:
    """What `decide` returns in rank 0, or the error that it raises there; all ranks call this. Others would look at
    folders that rank 0 is renaming."""
    if process_group_size() == 1:
        return decide()
    found: list[Any] = [None, None]
    with ExitStack() as stack:
        stack.callback(distributed.broadcast_object_list, found, src=0)
        if distributed.get_rank() == 0:
            stack.push(partial(_keep, found))
            found[0] = decide()
    if found[1] is not None:
        raise found[1]
    return cast("str | bool | None", found[0])


def _keep(found: list[Any], kind: object, error: BaseException | None, frames: object) -> bool:
    """Keep an error, instead of raising it here; for an `ExitStack`."""
    if isinstance(error, Exception):
        found[1] = error.with_traceback(None)
        return True
    if error is not None:
        found[1] = RuntimeError("rank 0 was interrupted while it looked for a checkpoint")
    return False


def _reasons(passed_over: Sequence[PassedOver]) -> str:
    interrupted = [each.folder.name for each in passed_over if each.is_interrupted]
    others = [f"in {each.folder.name} {each.reason}" for each in passed_over if not each.is_interrupted]
    return "; ".join([*([f"saving was interrupted in {', '.join(interrupted)}"] if interrupted else []), *others])


def _say_what_is_missing(checkpoint: Path, ranks: int) -> None:
    """Warn of what a resumed training begins anew: transformers does so without a word."""
    state = "the optimizer's state and the schedule of the learning rate begin anew"  # it loads both, or none
    for name, what in (
        (OPTIMIZER_NAME, state),
        (SCHEDULER_NAME, state),
        (_RNG if ranks == 1 else f"rng_state_{ranks - 1}.pth", "random numbers begin anew"),
        (MANIFEST, "whether its files are as they were saved is not known"),
    ):
        if not (checkpoint / name).exists():
            logger.warning(f"{checkpoint} has no {name}: {what}")


def set_aside_interrupted(folder: Path, found: Path | None = None) -> str:
    """Rename the checkpoints in `folder` that a Trainer has not finished, so that they count as none any more; if one
    was `found` to resume from, those of later steps.

    Returns what a warning says of it; "" where nothing was renamed.
    """
    renamed = []
    for path in checkpoints_in(folder):
        is_earlier = found is not None and _NAME.fullmatch(found.name) and step_of(path) < step_of(found)
        if is_earlier or (path / MANIFEST).exists() or is_finished(path):
            continue
        target, number = folder / f"_interrupted-{path.name}", 1
        while target.exists():
            number += 1
            target = folder / f"_interrupted-{path.name}-{number}"
        renamed.append((path.name, path.rename(target).name))
    return ", ".join(f"{old} (renamed to {new})" for old, new in renamed)


@contextmanager
def deleting_ours(trainer: Any, run: Path) -> Iterator[None]:
    """Inside, transformers deletes nothing before `on_train_end`, where all checkpoints of ours in `run` but the best
    one are deleted."""
    handler, args = trainer.callback_handler, trainer.args

    def at_train_end(*given: Any, **kwargs: Any) -> Any:
        del handler.on_train_end
        args.save_total_limit = 1
        if args.should_save and trainer.state.best_model_checkpoint is not None:
            keep_only(run, Path(trainer.state.best_model_checkpoint))
        return handler.on_train_end(*given, **kwargs)

    handler.on_train_end, args.save_total_limit = at_train_end, None
    try:
        yield
    finally:
        handler.__dict__.pop("on_train_end", None)
        args.save_total_limit = 1
