"""The part of `L2LTrainerMixin` that writes real-time checkpoints (`l2l_realtime_checkpoint`).

A generation is a checkpoint of transformers' Trainer in a folder of its own. It is written in the background, as with
`l2l_async_save`, and the one before is deleted when it is in its place.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_l2l.checkpoint.finding import checkpoints_in, run_of
from hf_l2l.checkpoint.staging import CheckpointSaveError, Staging, bytes_in, remove
from hf_l2l.eps.server import EagerParamServer
from hf_l2l.log import logger, tell
from hf_l2l.probe.disk import write_rate
from hf_l2l.ranks.team import of_rank_0
from hf_l2l.realtime.lock import FolderLock
from hf_l2l.realtime.options import RealtimeOptions
from hf_l2l.realtime.put_off import PutOffMixin
from hf_l2l.realtime.schedule import Schedule
from hf_l2l.runtime.tensors import size_text

# Of a folder that cannot be made or written; other errors may be those of locks alone.
_CANNOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST)
_MANY_TERABYTES = 1.0
"""A day, from which on the wear of a disk is worth a warning."""


class RealtimeMixin(PutOffMixin):
    """Writes a generation after steps at which one is due. It comes before `CheckpointsMixin`, which does all else."""

    _l2l_run: str | None
    _l2l_resumed: tuple[str | None, int]
    _l2l_saving: Any
    _l2l_saved_at: int | None
    _l2l_staging: Any
    _streams: Callable[[], bool]
    _finish_if_saved: Callable[[], None]
    _l2l_is_generation: bool
    _l2l_schedule: Schedule | None = None
    _l2l_rate: float | None = None
    """Bytes per second that the disk takes, measured before the first generation."""
    _l2l_lock: FolderLock | None = None
    """Of the folder of the generations; rank 0 has it."""
    _l2l_failed_to_write = False
    """Whether the last generation could not be written, which is logged once in a row."""

    def _init_training_state(
        self, max_steps: int, steps_of_epoch: int, epochs: int, checkpoint: str | None, trial: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """Overridden because steps are counted from here on.

        Raises:
            ValueError: if another training has checkpoints in the folder of the generations, or writes some now.
        """
        found: tuple[int, int] = super()._init_training_state(
            max_steps, steps_of_epoch, epochs, checkpoint, trial, **kwargs
        )
        options = RealtimeOptions.of(self.args)
        self._l2l_schedule, self._l2l_rate, self._l2l_failed_to_write = None, None, False
        if options.folder is None:
            return found
        if trial is not None:
            raise ValueError(
                "l2l_realtime_checkpoint is for one training (got a trial of hyperparameter_search, which has "
                "many); leave it out"
            )
        if not self._streams():
            logger.warning(f"l2l_realtime_checkpoint={str(options.folder)!r} is for layers that are streamed: none is")
            return found
        self._lock(options.folder)
        self._refuse_others(options.folder)
        self._l2l_schedule = Schedule(options.every, self.state.global_step)
        return found

    def _refuse_others(self, folder: Path) -> None:
        """Only generations of this training are deleted; others would stay, and be taken for its own."""
        others: list[str] = []
        with suppress(OSError):  # it is told when a generation is begun
            runs = [(each.name, run_of(each)) for each in checkpoints_in(folder)]
            others = [name for name, run in runs if run not in (None, self._l2l_run, self._l2l_resumed[0])]
        if others:
            raise ValueError(
                "l2l_realtime_checkpoint must be a folder of this training (got "
                f"{folder}, where {', '.join(others)} is of another one); resume from it, or name another folder"
            )

    def _lock(self, folder: Path) -> None:
        """Have no other training write there; all ranks call this."""
        found = ""
        if self.args.should_save:
            try:
                self._l2l_lock = FolderLock(folder)
            except ValueError as error:
                found = str(error)
            except OSError as error:
                if error.errno in _CANNOT_WRITE and RealtimeOptions.of(self.args).stops:
                    found = (
                        f"l2l_realtime_checkpoint must be a folder in which files can be written (got {folder}: "
                        f"{error.strerror}); name another one"
                    )
                else:  # a generation may be written nevertheless
                    logger.warning(f"no other training is kept from the folder of l2l_realtime_checkpoint: {error}")
        found = of_rank_0(found)
        if found:
            raise ValueError(found)

    def _finish_after_error(self) -> None:
        """Overridden because no generation is written any more."""
        super()._finish_after_error()
        lock, self._l2l_lock = self._l2l_lock, None
        if lock is not None:
            with suppress(OSError):
                lock.release()

    def _is_own(self, checkpoint: Path) -> bool:
        """Whether this training has written it; damaged ones, and those of `Trainer`, are nobody's to delete."""
        run = run_of(checkpoint)
        return bool(run) and run in (self._l2l_run, self._l2l_resumed[0])

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Overridden because a step has ended here."""
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *args, **kwargs)
        self._finish_if_saved()
        schedule, step = self._l2l_schedule, self.state.global_step
        if schedule is None:
            return
        schedule.made(step)
        if not schedule.is_due(step):
            return
        if step == self._l2l_saved_at:
            schedule.put_off(step)  # another checkpoint has this step
        elif not (schedule.is_auto and self._l2l_saving is not None):  # else another one is being written
            self._begin_generation(schedule, RealtimeOptions.of(self.args).folder or Path(), model, trial)

    def _begin_generation(self, schedule: Schedule, folder: Path, model: Any, trial: Any) -> None:
        self._finish_saving()
        if self.eps is not None and (schedule.seconds is None or not self._puts_off(self.eps)):
            self.eps.synchronize()  # an error of it is none of the generation
        self._l2l_is_generation = True
        is_first = self._l2l_rate is None and self.args.should_save
        if is_first:
            with suppress(OSError):  # it is told where the generation is begun
                folder.mkdir(parents=True, exist_ok=True)
                self._l2l_rate = write_rate(folder)
        try:
            schedule.begin(self.state.global_step)
            self._save_checkpoint(model, trial)
        except OSError as error:
            self._generation_failed(schedule, folder, error)
            return
        finally:
            self._l2l_is_generation = False
        if is_first and self._l2l_saving is not None and self._l2l_rate is not None:
            num_bytes = self._l2l_saving[0].num_bytes
            rate = f", of which {folder} takes {size_text(int(self._l2l_rate))}/s"
            self._say(schedule, num_bytes, num_bytes / self._l2l_rate, rate)

    def _puts_off(self, eps: EagerParamServer | None) -> bool:
        """Overridden because the bytes of the first generation are logged when it begins."""
        schedule = self._l2l_schedule
        is_first = self._l2l_is_generation and schedule is not None and schedule.seconds is None
        return not is_first and super()._puts_off(eps)

    def _get_output_dir(self, trial: Any) -> str:
        """Overridden because generations have a folder of their own."""
        is_asked = self._l2l_is_generation and self._l2l_staging is None
        return str(RealtimeOptions.of(self.args).folder) if is_asked else super()._get_output_dir(trial)

    def _generations(self) -> list[Path]:
        """The folder of the generations, if there is one."""
        folder = RealtimeOptions.of(self.args).folder
        return [] if folder is None else [folder]

    def _folders(self, trial: Any) -> list[Path]:
        return [*super()._folders(trial), *self._generations()]

    def _commit(self, staging: Staging, **how: Any) -> None:
        """Overridden to delete the generations before this one, on the thread that has written it: a file system takes
        some time for large files."""
        super()._commit(staging, **how)
        if staging.target.parent != RealtimeOptions.of(self.args).folder:
            return
        with suppress(OSError):  # the new one is in its place
            for each in checkpoints_in(staging.target.parent):
                if each != staging.target and self._is_own(each):
                    remove(each)

    def _after_saving(self, checkpoint: Path, best: str | None, state: Any = None) -> None:
        """Overridden because a generation is for no callback, and no other one is kept."""
        schedule, folder = self._l2l_schedule, RealtimeOptions.of(self.args).folder
        if schedule is None or checkpoint.parent != folder:
            super()._after_saving(checkpoint, best, state)
            return
        is_first = schedule.seconds is None
        schedule.end(self.state.global_step)
        self._l2l_failed_to_write = False
        if is_first and schedule.seconds is not None and self.args.should_save:
            with suppress(OSError):  # the generation is whole, for all ranks
                self._say(schedule, bytes_in(checkpoint), schedule.seconds, "")

    def _finish_saving(self) -> None:
        """Overridden because a training may go on without a generation that could not be written."""
        folder, schedule = RealtimeOptions.of(self.args).folder, self._l2l_schedule
        is_generation = self._l2l_saving is not None and self._l2l_saving[0].is_generation
        try:
            super()._finish_saving()
        except OSError as error:
            if not is_generation or schedule is None or folder is None:
                raise
            self._generation_failed(schedule, folder, error)

    def _generation_failed(self, schedule: Schedule, folder: Path, error: OSError) -> None:
        """Any error of the system is one of the disk here: nothing else is done of a generation.

        Raises:
            CheckpointSaveError: with `l2l_realtime_errors="stop"`.
        """
        schedule.end(self.state.global_step, failed=True)
        if not isinstance(error, CheckpointSaveError):
            error = CheckpointSaveError(folder, str(error), error.errno)
        if RealtimeOptions.of(self.args).stops:
            raise error
        if not self._l2l_failed_to_write:
            logger.warning(f"training goes on without a real-time checkpoint: {error.reason}, in {error.checkpoint}")
        self._l2l_failed_to_write = True

    def _say(self, schedule: Schedule, num_bytes: int, write_s: float, rate: str) -> None:
        """Log what generations cost: before the first one is there, from the rate of the disk, and when it is."""
        step_s = schedule.step_seconds()
        per_day = schedule.bytes_per_day(num_bytes, step_s, write_s) / 1e12
        log = logger.warning if per_day >= _MANY_TERABYTES else tell
        log(
            f"a real-time checkpoint has {size_text(num_bytes)}{rate}, and is written in {write_s:.2g} s: a crash "
            f"loses at most {schedule.most_lost(step_s, write_s)} steps of {step_s:.2g} s, and {per_day:.2g} TB are "
            "written per day"
        )
