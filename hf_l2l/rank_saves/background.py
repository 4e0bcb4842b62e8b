"""A checkpoint that the ranks write while training goes on: each writes the values of what it updates.

Rank 0 writes the files, with room for all values, and tells each rank which bytes are its own. When all have written
theirs, rank 0 puts the checkpoint in its place. On one host, each rank's thread tells it at once; those of other hosts
are heard of when the ranks tell each other how far they are, before each batch and after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures import Future
from contextlib import ExitStack
from enum import IntEnum
from functools import partial
from pathlib import Path
from threading import Event

from hf_l2l.checkpoint.background import BackgroundSave, ReservedFiles
from hf_l2l.checkpoint.manifest import sync
from hf_l2l.checkpoint.reserved import Region
from hf_l2l.checkpoint.staging import CheckpointSaveError, Staging, bytes_in, save_errors
from hf_l2l.eps.masters import Master
from hf_l2l.rank_saves.secured import ALL, WRITTEN, secured_of, tell_secured
from hf_l2l.rank_saves.shares import deal, read_regions, write_shares
from hf_l2l.rank_saves.together import JoinedStaging, Part, begun, wait_for_removal
from hf_l2l.shared_eps.server import SharedEagerParamServer


class _Stage(IntEnum):
    """What the ranks wait for."""

    WRITING = 0
    COMMITTING = 1
    ENDED = 2


_WHY = {
    _Stage.WRITING: "all ranks write their values of a checkpoint",
    _Stage.COMMITTING: "rank 0 puts a checkpoint in its place",
}


class BackgroundSaveOfRanks(BackgroundSave):
    """One checkpoint that is being written, as one rank sees it."""

    def __init__(
        self,
        eps: SharedEagerParamServer,
        regions: Iterable[Region],
        number: int,
        target: Path,
        commit: Callable[[], None] | None,
        held: ExitStack,
        num_bytes: int,
    ) -> None:
        """Of the present values; all ranks call this, and all updates must have finished.

        Args:
            eps: of this rank.
            regions: what this rank writes.
            number: that of the checkpoint, which its ranks count (`Secured.begin`).
            target: the place of the checkpoint.
            commit: on rank 0, what is called when all have written theirs.
            held: see `BackgroundSave`.
            num_bytes: see `BackgroundSave`.
        """
        regions = list(regions)
        self._team, self._target, self._commit = eps.team, target, commit
        self._files = {region.file for region in regions}
        self._stage = _Stage.WRITING
        self._error: BaseException | None = None
        self._wrote: Future[None] = Future()
        """Whether this rank has written its values."""
        self._may_commit = Event()
        self._is_given_up = False
        self._secured, self._number = secured_of(eps.team.peers), number
        self._others = dict(self._written_by_others(eps))
        if commit is not None and len(eps.team.hosts) == 1:  # else those of other hosts tell it at the end of a step
            self._secured.when_written(self._may_commit.set)
        super().__init__(eps, regions, self._finish, held, num_bytes, locks=len(eps.team.hosts) > 1)

    def _written_by_others(self, eps: SharedEagerParamServer) -> Iterable[tuple[Master, set[int]]]:
        """Masters of which other ranks of this host write values, and which ranks."""
        for master in eps.masters.on_host():
            writers = {master.owner} if eps.updates.rows_of(master) is None else set(self._team.near)
            found = writers.intersection(self._team.near) - {self._team.rank}
            if found:
                yield master, found

    def _has_secured(self, group: int | None) -> None:
        tell_secured(self._team.peers, self._number, ALL if group is None else group)

    def _finish(self) -> None:
        if self._is_given_up:
            return
        for file in self._files:  # the others of another host see only what is there
            sync(file)
        self._wrote.set_result(None)
        tell_secured(self._team.peers, self._number, WRITTEN)
        if self._commit is None:
            return
        self._may_commit.wait()  # until all ranks have written theirs
        if not self._is_given_up:
            self._commit()

    def _has_ended(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not self._wrote.done():
            if error is None:
                self._wrote.set_result(None)
            else:
                self._wrote.set_exception(error)
        return super()._has_ended(kind, error, traceback)

    def secure(self, masters: Iterable[Master], *, rows: bool = False) -> None:
        """See `BackgroundSave.secure`; with `rows`, only this rank's rows of the masters may change then."""
        masters = list(masters)
        super().secure(masters)
        for master in () if rows else masters:
            ranks, group = self._others.get(master, ()), self._numbers.get(master)
            if ranks and group is not None:
                self._wait_for(ranks, group, f"the values of {master.name} are written to a checkpoint, or copied")

    def _wait_for(self, ranks: Iterable[int], group: int, why: str) -> None:
        """Wait until other ranks have secured a group of values, or `ALL`."""
        ranks, number = set(ranks), self._number
        self._team.peers.wait(lambda: all(self._secured.has(rank, number, group) for rank in ranks), why, ranks)

    def wait_for_values(self) -> None:
        """See `BackgroundSave.wait_for_values`; of all ranks of this host."""
        others = [rank for rank in self._team.near if rank != self._team.rank]
        self._wait_for(others, ALL, "the other ranks have the values of a checkpoint")
        super().wait_for_values()

    def poll(self) -> bool:
        """See `BackgroundSave.poll`; all ranks call this, and get the same answer."""
        if self._stage is not _Stage.ENDED:
            self._go_on(waits=False)
        return self.is_done

    @property
    def is_done(self) -> bool:
        """See `BackgroundSave.is_done`."""
        return self._stage is _Stage.ENDED

    def result(self) -> None:
        """See `BackgroundSave.result`; all ranks call this, and raise if one of them cannot do its part."""
        while self._stage is not _Stage.ENDED:
            self._go_on(waits=True)
        self._end()
        if self._error is not None:
            raise self._error

    def _go_on(self, *, waits: bool) -> None:
        """Tell the other ranks how far this one is, and hear of them."""
        mine = self._wrote if self._stage is _Stage.WRITING else self._future
        if waits:
            futures.wait([mine])  # else the others would hear "not yet", and ask again
        error = mine.exception() if mine.done() else None
        reason = error.reason if isinstance(error, CheckpointSaveError) else error
        told = self._team.tell(f"-{reason}" if error is not None else "+" if mine.done() else "", _WHY[self._stage])
        failed = next((rank for rank, text in enumerate(told) if text.startswith("-")), None)
        if failed is not None:
            self._error = error or CheckpointSaveError(self._target, f"{told[failed][1:]}, in rank {failed}")
            self.give_up()
            wait_for_removal(self._team, type(self._error), self._error, None)
            self._stage = _Stage.ENDED
        elif all(told):
            self._stage = _Stage(self._stage + 1)
            self._may_commit.set()

    def give_up(self) -> None:
        """Write no more, unless all ranks have written theirs; nothing of the checkpoint is left then. This asks no
        other rank, and waits for its own thread."""
        if self._stage is _Stage.WRITING:
            self._is_given_up = True
            self.snapshot.stop()
            self._may_commit.set()
        futures.wait([self._future])
        self._end()

    def _end(self) -> None:
        super()._end()
        self._others = {}


def begun_in_background(
    eps: SharedEagerParamServer,
    target: Path,
    *,
    get_ready: Callable[[], None],
    write: Callable[[Staging | JoinedStaging, ReservedFiles], str | None],
    commit: Callable[[Staging], None],
) -> tuple[BackgroundSaveOfRanks, str | None]:
    """Begin a checkpoint that is written while training goes on. All ranks call this, inside
    `SharedUpdates.state_gathered` if optimizer state is saved; arguments and errors are those of `saved_together`.

    Returns the checkpoint, and what `write` has returned on rank 0.
    """
    team, number = eps.team, secured_of(eps.team.peers).begin()
    with save_errors(target), ExitStack() as at_errors:
        at_errors.push(partial(wait_for_removal, team))
        held = at_errors.enter_context(ExitStack())
        held.enter_context(save_errors(target))
        place = begun(team, target, get_ready, held)
        with Part(team, target, "all ranks write their files of a checkpoint") as written:
            reserved = ReservedFiles()
            written.text = write(place, reserved) or ""
            others: list[Region] = []
            num_bytes = 0
            if team.rank == 0:
                num_bytes = bytes_in(place.folder)
                shares, others = deal(eps, place.folder, reserved.regions)
                for rank, each in enumerate(shares):
                    write_shares(_file_of(place, rank), each)
        with Part(team, target, "all ranks begin to write their values of a checkpoint"):
            regions = [*read_regions(eps, place.folder, _file_of(place, team.rank)), *others]
            whole = partial(commit, place) if isinstance(place, Staging) else None
            saving = BackgroundSaveOfRanks(eps, regions, number, target, whole, held, num_bytes)
            at_errors.callback(saving.give_up)
        at_errors.pop_all()
    return saving, written.of_first or None


def _file_of(place: Staging | JoinedStaging, rank: int) -> Path:
    """Beside the checkpoint: what a rank writes of it."""
    return place.parent / f"rank-{rank}.json"
