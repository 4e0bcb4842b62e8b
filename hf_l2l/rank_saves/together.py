"""A checkpoint that the ranks of a training write together: whole, or absent."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from torch import distributed

from hf_l2l.checkpoint.staging import CheckpointSaveError, Staging, save_errors, staged
from hf_l2l.ranks.peers import RankFailedError
from hf_l2l.ranks.team import Team


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


class Part:
    """What each rank does of a checkpoint until all have done it: then all go on, or all raise."""

    def __init__(self, team: Team, checkpoint: Path, why: str) -> None:
        """`why` says what ranks wait for that have done theirs."""
        self.team, self.checkpoint, self.why = team, checkpoint, why
        self.text = ""
        """What this rank tells the others when it has done its part."""
        self.of_first = ""
        """What rank 0 has told, at the end."""

    def __enter__(self) -> Part:
        return self

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        if isinstance(error, RankFailedError) or not (error is None or isinstance(error, Exception)):
            return  # the others know, or will know, that this rank ends
        reason = error.reason if isinstance(error, CheckpointSaveError) else error
        told = self.team.tell(f"+{self.text}" if error is None else f"-{reason}", self.why)
        self.of_first = told[0][1:]
        failed = next((rank for rank, text in enumerate(told) if text.startswith("-")), None)
        if error is None and failed is not None:
            raise CheckpointSaveError(self.checkpoint, f"{told[failed][1:]}, in rank {failed}")


def wait_for_removal(team: Team, kind: object, error: BaseException | None, frames: object) -> None:
    """After an error, which all ranks have then, nothing of the checkpoint is left when they go on."""
    if isinstance(error, Exception) and not isinstance(error, RankFailedError):
        team.tell("", "rank 0 removes what was written of a checkpoint")


def begun(team: Team, target: Path, get_ready: Callable[[], None], held: ExitStack) -> Staging | JoinedStaging:
    """Begin the checkpoint `target`; all ranks call this.

    Args:
        team: the ranks.
        target: its place.
        get_ready: what rank 0 does before anything is written.
        held: on rank 0, it removes what was written and is not in its place when it is closed.

    Raises:
        CheckpointSaveError: in all ranks, if one of them cannot do its part.
    """
    with Part(team, target, "rank 0 begins a checkpoint") as first:
        staging = None
        if team.rank == 0:
            get_ready()
            staging = held.enter_context(staged(target))
            first.text = str(staging.parent)
    with Part(team, target, "all ranks see the folder of a checkpoint"):  # else no rank begins to write
        return staging or _joined(Path(first.of_first), target)


def saved_together(
    team: Team,
    target: Path,
    *,
    get_ready: Callable[[], None],
    write: Callable[[Staging | JoinedStaging], str | None],
    commit: Callable[[Staging], None],
) -> str | None:
    """Write a checkpoint at once. Arguments and errors are those of `begun`, and:

    Args:
        team: the ranks.
        target: its place.
        get_ready: see `begun`.
        write: writes the files of this rank, in no order with those of others. What it returns on rank 0, all ranks
            return.
        commit: what rank 0 does when all have written theirs.
    """
    with save_errors(target), ExitStack() as stack:
        stack.push(partial(wait_for_removal, team))
        place = begun(team, target, get_ready, stack)
        with Part(team, target, "all ranks write their files of a checkpoint") as written:
            written.text = write(place) or ""
        with Part(team, target, "rank 0 puts a checkpoint in its place"):
            if isinstance(place, Staging):
                commit(place)
    return written.of_first or None
