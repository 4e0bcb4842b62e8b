"""Checkpoints of transformers' Trainer: whole or absent, written at once or while training goes on, and with what it
does not save: generators of other devices, and the plan for the device memory.

A Trainer that is interrupted while it saves leaves a folder without its last file, `trainer_state.json`. Ours writes
beside, and adds a manifest (see `hf_l2l.checkpoint`).
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_l2l.budget.trainer_plan import TrainerPlan
from hf_l2l.checkpoint.background import BackgroundSave, ReservedFiles, WithoutState
from hf_l2l.checkpoint.finding import check_weights, deleting_ours, is_last_of_run, rotate, run_of
from hf_l2l.checkpoint.manifest import read_manifest, saved_with, write_manifest
from hf_l2l.checkpoint.reserved import can_write_places
from hf_l2l.checkpoint.resuming import ResumingMixin, load_generator, save_generator
from hf_l2l.checkpoint.staging import (
    Staging,
    bytes_in,
    bytes_to_save,
    check_room,
    remove_interrupted,
    save_errors,
    staged,
)
from hf_l2l.config import L2LConfig
from hf_l2l.eps.server import EagerParamServer
from hf_l2l.hf.attach import attachment_of
from hf_l2l.hf.training_args import own_option
from hf_l2l.log import logger
from hf_l2l.model.precision import copy_as
from hf_l2l.optim.rounded_state import unfilled
from hf_l2l.rank_saves.background import BackgroundSaveOfRanks, begun_in_background
from hf_l2l.rank_saves.together import JoinedStaging, saved_together
from hf_l2l.ranks.team import of_rank_0
from hf_l2l.realtime.put_off import PutOffSave
from hf_l2l.shared_eps.server import SharedEagerParamServer

_About = tuple[int, str, dict[str, Any]]
"""What `write_manifest` is told of a checkpoint: its step, its training, and what it was saved with."""
_SAVED = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""`l2l_save_dtype` -> the dtype of the copy that is saved."""


def _log_error(kind: object, error: BaseException | None, traceback: object) -> bool:
    """Log an error instead of raising it; for an `ExitStack`."""
    if isinstance(error, Exception):
        logger.error(str(error) or type(error).__name__)
    return isinstance(error, Exception)


class CheckpointsMixin(ResumingMixin):
    """The part of `L2LTrainerMixin` that saves and loads."""

    model: Any
    state: Any
    _asked_config: Callable[[], L2LConfig]
    _l2l_config: Callable[[], L2LConfig]
    _streams: Callable[[], bool]
    _puts_off: Callable[[EagerParamServer], bool]
    optimizer: Any
    _l2l_plan: TrainerPlan
    _l2l_staging: Staging | JoinedStaging | None = None
    """Where a checkpoint is written now."""
    _l2l_run: str | None = None
    """Names the training in the manifests of its checkpoints."""
    _l2l_resumed: tuple[str | None, int] = None, 0
    """That of the training whose checkpoint was resumed from, as `run_of` has it, and the step of the checkpoint."""
    _l2l_has_begun = False
    """Whether this call of `train` has begun to train before, with another batch size."""
    _l2l_in_loop = False
    """Whether the training loop logs, evaluates or saves now."""
    _l2l_reserved: ReservedFiles | None = None
    """The files of the checkpoint that is begun now, if it is written in the background."""
    _l2l_saving: tuple[BackgroundSave | PutOffSave, Callable[[], None]] | None = None
    """The checkpoint that is written in the background, and what is to be done when it is in its place."""
    _l2l_is_generation = False
    """Whether the checkpoint that is begun now is a generation of `l2l_realtime_checkpoint`."""
    _l2l_saved_at: int | None = None  # the step of the last checkpoint that was begun

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Overridden for `l2l_save_dtype`; checkpoints (internal calls with a folder) keep the fp32 masters, which are
        perhaps written later (`l2l_async_save`)."""
        asked = _SAVED[own_option(self.args, "l2l_save_dtype")]
        if asked is None or (_internal_call and output_dir is not None):
            with nullcontext() if self._l2l_reserved is None else self._l2l_reserved.weights():
                super().save_model(output_dir, _internal_call)
            return
        if not self.args.should_save:  # transformers writes nothing in this rank
            return
        masters: nn.Module = self.model
        self.model = copy_as(masters, asked)
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self.model = masters

    def _init_training_state(
        self, max_steps: int, steps_of_epoch: int, epochs: int, checkpoint: str | None, trial: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """Overridden because each attempt of `auto_find_batch_size` begins here."""
        self._finish_saving()
        if self._l2l_has_begun:
            self._begin_again(checkpoint)
        self._l2l_has_begun = True
        # A training that goes on from a checkpoint is named in its manifest; one that goes back to it is another one.
        manifest = None if checkpoint is None else read_manifest(Path(checkpoint))
        goes_on = manifest is not None and all(is_last_of_run(manifest, run) for run in self._folders(trial))
        self._l2l_run = of_rank_0(manifest.run if manifest is not None and goes_on else uuid.uuid4().hex)
        found: tuple[int, int] = super()._init_training_state(
            max_steps, steps_of_epoch, epochs, checkpoint, trial, **kwargs
        )
        self._l2l_resumed = (None if checkpoint is None else run_of(Path(checkpoint))), self.state.global_step
        return found

    def _folders(self, trial: Any) -> list[Path]:
        """Where this training has its checkpoints."""
        return [Path(self._get_output_dir(trial))]

    def _begin_again(self, checkpoint: str | None) -> None:
        """The device was out of memory, and `auto_find_batch_size` tries again: with the weights of the beginning."""
        if checkpoint is not None:
            self._load_from_checkpoint(checkpoint)
        elif self.state.global_step > 0:
            logger.warning(
                f"auto_find_batch_size=True begins again after {self.state.global_step} steps, with the weights that "
                "they have made, since those of the beginning are not kept; train once more with the batch size that "
                "is found, or resume from a checkpoint"
            )

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Overridden because only checkpoints of the training loop are written in the background: others, such as
        those before the end of a job (`enable_jit_checkpoint`), are in their place when the call returns."""
        self._l2l_in_loop = True
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        finally:
            self._l2l_in_loop = False
            self.callback_handler.__dict__.pop("on_save", None)

    def _get_output_dir(self, trial: Any) -> str:
        """Overridden so that a checkpoint is written beside its place."""
        found: str = super()._get_output_dir(trial) if self._l2l_staging is None else str(self._l2l_staging.parent)
        return found

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Overridden so that a checkpoint is whole or absent, and written in the background with `l2l_async_save`.

        Raises:
            CheckpointSaveError: if it cannot be written, or the one before could not, in the background; the folder of
                the training has its other checkpoints.
        """
        self._finish_saving()
        attached = attachment_of(self.model)
        if attached is not None and attached.eps.updates.eager.is_within_step:
            raise RuntimeError(
                "eps_update='eager' updates layers between backward and optimizer.step(), where no checkpoint can be "
                "saved (got a save there); save it in on_step_end, or use eps_update='deferred'"
            )
        asked = self._l2l_is_generation or (self._l2l_in_loop and own_option(self.args, "l2l_async_save"))
        if attached is not None and asked and self._puts_off(attached.eps):
            attached.eps.updates.check()
        elif attached is not None:
            attached.eps.synchronize()  # a failed update raises before anything is written
        team = None if attached is None else attached.eps.team
        if team is None and (not self.args.should_save or self.args.world_size > 1):  # a model without layers
            super()._save_checkpoint(model, trial)
            return
        self._l2l_saved_at = self.state.global_step
        target = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        about = self.state.global_step, self._l2l_run or "", saved_with(type(self), vars(self._l2l_config()))
        save = self._save_together if team is not None else self._save_alone
        saving, best = save(partial(self._write_files, model, trial), target, about, in_background=asked)
        if saving is None:
            self._after_saving(target, best)
            return
        saving.is_generation = self._l2l_is_generation
        state = copy.copy(self.state)  # that of this step, for callbacks
        state.log_history = list(state.log_history)
        self._l2l_saving = saving, partial(self._after_saving, target, best, state)
        if not self._l2l_is_generation:
            self._let_callbacks_wait()

    def _save_alone(
        self, write: Callable[..., str | None], target: Path, about: _About, *, in_background: bool
    ) -> tuple[BackgroundSave | PutOffSave | None, str | None]:
        """Save a checkpoint of one process, or begin it; returns what is still being written, and where the best one
        is, or will be."""
        attached = attachment_of(self.model)
        with save_errors(target):
            self._get_ready(target)
        with ExitStack() as stack:
            staging = stack.enter_context(staged(target))
            if attached is None or not in_background:
                best = write(staging)
                self._commit(staging, about=about, in_parallel=True)
                return None, best
            reserved = ReservedFiles()
            best = write(staging, reserved)
            begin = partial(self._begin_values, attached.eps, staging, reserved, about)
            return self._begun(attached.eps, begin, stack), best

    def _begun(
        self, eps: EagerParamServer, begin: Callable[[ExitStack], BackgroundSave], held: ExitStack
    ) -> BackgroundSave | PutOffSave:
        """Begin to write values; what is written is removed by `held`, unless it is in its place."""
        return begin(held)

    def _begin_values(
        self, eps: EagerParamServer, staging: Staging, reserved: ReservedFiles, about: _About, held: ExitStack
    ) -> BackgroundSave:
        commit = partial(self._commit, staging, about=about)
        return BackgroundSave(eps, reserved.regions, commit, held, bytes_in(staging.folder))

    def _save_together(
        self, write: Callable[..., str | None], target: Path, about: _About, *, in_background: bool
    ) -> tuple[BackgroundSave | None, str | None]:
        """`_save_alone` of several ranks."""
        attached = attachment_of(self.model)
        assert attached is not None and isinstance(attached.eps, SharedEagerParamServer), "ranks have one EPS"
        eps, commit = attached.eps, partial(self._commit, about=about, in_parallel=not in_background)
        get_ready = partial(self._get_ready, target)
        # Rank 0 writes what cannot be held, and moments in 8 bits, which it makes fp32.
        by_rank_0 = self._has_blocks or not all(m.can_be_held for m in eps.masters.all())
        values = not in_background or by_rank_0
        with nullcontext() if self.args.save_only_model else eps.updates.state_gathered(values=values):
            if in_background:
                return begun_in_background(eps, target, get_ready=get_ready, write=write, commit=commit)
            return None, saved_together(eps.team, target, get_ready=get_ready, write=write, commit=commit)

    def _get_ready(self, target: Path) -> None:
        """What is done before a checkpoint is begun."""
        remove_interrupted(target.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        less = "keep fewer with save_total_limit, or save less with save_only_model=True"
        remedy = "name a folder on another disk" if self._l2l_is_generation else less
        check_room(target, bytes_to_save(self.model, None if self.args.save_only_model else self.optimizer), remedy)

    def _write_files(
        self, model: Any, trial: Any, staging: Staging | JoinedStaging, reserved: ReservedFiles | None = None
    ) -> str | None:
        """Write the files of a checkpoint, perhaps without values; returns where the best one is, or will be."""
        before: str | None = self.state.best_model_checkpoint
        number = self.state.best_global_step
        if self.args.world_size > 1 or self._l2l_is_generation:  # which is none of those that may be the best
            self.state.best_global_step = None  # else ranks wait there for each other, and one may have failed
        self._l2l_staging, self._l2l_reserved = staging, reserved
        # What is pushed must be in its place, and stay there.
        self.__dict__["_push_from_checkpoint"] = lambda folder: None
        try:
            super()._save_checkpoint(model, trial)  # there, it finds no other checkpoints
            self.state.best_global_step = number
            best = staging.target.parent / f"{PREFIX_CHECKPOINT_DIR}-{number}"
            of_run = number and not self._l2l_is_generation
            known = bool(of_run and (best == staging.target or self._is_ours(best, number)))
            self.state.best_model_checkpoint = str(best) if known else before
            changed = known or self._l2l_is_generation or self.args.world_size > 1
            if changed and self.args.should_save:  # transformers looks for it beside the one that it writes
                self.state.save_to_json(str(staging.folder / TRAINER_STATE_NAME))
            return str(best) if known else before
        finally:
            del self.__dict__["_push_from_checkpoint"]
            self._l2l_staging = self._l2l_reserved = None
            self.state.best_global_step = number
            self.state.best_model_checkpoint = before  # until the checkpoint is in its place

    def _is_ours(self, checkpoint: Path, step: int) -> bool:
        """Whether this training has written the checkpoint of that step, or the one that it goes on from."""
        run, (resumed, until) = run_of(checkpoint), self._l2l_resumed
        return run is not None and (run == self._l2l_run or (run == resumed and step <= until))

    def _commit(self, staging: Staging, *, about: _About, in_parallel: bool = False) -> None:
        write_manifest(staging.folder, *about, in_parallel=in_parallel)
        staging.commit()

    def _after_saving(self, checkpoint: Path, best: str | None, state: Any = None) -> None:
        """The checkpoint is in its place: push it, and delete old ones. If callbacks have waited, they get `state`."""
        self.state.best_model_checkpoint = best
        if self.args.push_to_hub:
            now, self.state = self.state, self.state if state is None else state  # whose step the commit names
            try:
                self._push_from_checkpoint(str(checkpoint))
            finally:
                self.state = now
        if self.args.should_save:
            rotate(checkpoint.parent, self.args.save_total_limit, None if best is None else Path(best))
        if state is not None:
            state.best_model_checkpoint = best
            asked = self.control.should_save  # for another one, meanwhile
            # The handler's own `on_save` may be the one that waits.
            self.control = type(self.callback_handler).on_save(self.callback_handler, self.args, state, self.control)
            self.control.should_save |= asked

    def _let_callbacks_wait(self) -> None:
        """Have the next `on_save`, which transformers calls when this returns, called by `_after_saving` instead."""
        handler = self.callback_handler

        def on_save(args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_save = False
            return control

        handler.on_save = on_save

    def _finish_saving(self) -> None:
        """Wait until the checkpoint that is written in the background is in its place.

        Raises:
            CheckpointSaveError: if it could not be written.
        """
        if self._l2l_saving is not None:
            saving, then = self._l2l_saving
            try:
                saving.result()
            finally:
                if saving.is_done:  # else Ctrl-C has ended the wait, and the checkpoint is finished after it
                    self._l2l_saving = None
            then()

    def _finish_if_saved(self) -> None:
        """`_finish_saving`, if that needs no waiting; all ranks call this."""
        if self._l2l_saving is not None and self._l2l_saving[0].poll():
            self._finish_saving()

    def _finish_after_error(self) -> None:
        """`_finish_saving` when an exception ends the training, which is not replaced by another one."""
        saving = None if self._l2l_saving is None else self._l2l_saving[0]
        if isinstance(saving, BackgroundSaveOfRanks):  # the other ranks are elsewhere
            self._l2l_saving = None
            saving.give_up()
        with ExitStack() as stack:
            stack.push(_log_error)
            self._finish_saving()

    def _finalize_training(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        """Overridden because the last checkpoint may be the best one, which is loaded here; and because, with
        `save_total_limit=1`, transformers deletes the checkpoints of others, too."""
        self._finish_saving()
        with ExitStack() as stack:
            if self.args.save_total_limit == 1 and (
                self.args.world_size == 1 or attachment_of(self.model) is not None
            ):
                stack.enter_context(deleting_ours(self, Path(self._get_output_dir(trial))))
            return super()._finalize_training(trial, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Overridden to have the values of the optimizer's state written later."""
        reserved = self._l2l_reserved
        if reserved is None and self._keeps_blocks:
            now = ReservedFiles()
            self._save_optimizer_and_scheduler_but_values(now, output_dir)
            now.write()
            return
        if reserved is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        self._save_optimizer_and_scheduler_but_values(reserved, output_dir)

    def _save_optimizer_and_scheduler_but_values(self, reserved: ReservedFiles, output_dir: str) -> None:
        optimizer = self.optimizer
        self.optimizer = WithoutState()
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            self.optimizer = optimizer
        if self.args.should_save:
            self._save_optimizer(reserved, output_dir)

    def _save_optimizer(self, reserved: ReservedFiles, output_dir: str) -> None:
        """Save the optimizer's state, but for its values; moments in 8 bits become fp32 piece by piece, as they are
        written."""
        with unfilled() if self._keeps_blocks else nullcontext() as blocks:
            reserved.save_torch(self.optimizer.state_dict(), Path(output_dir) / OPTIMIZER_NAME, blocks)

    @property
    def _has_blocks(self) -> bool:
        """Whether moments are in 8 bits."""
        return bool(own_option(self.args, "l2l_moment_dtype") == "8bit")

    @property
    def _keeps_blocks(self) -> bool:
        """Whether moments in 8 bits are written by this process alone."""
        return self._has_blocks and self.args.world_size == 1 and can_write_places()

    def _save_rng_state(self, output_dir: str) -> None:
        """Overridden for devices whose random generators transformers does not save."""
        super()._save_rng_state(output_dir)
        save_generator(Path(output_dir), self.args.device)
        if self.args.should_save:
            self._l2l_plan.save(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Overridden for the same reason as `_save_rng_state`."""
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            load_generator(Path(checkpoint), self.args.device)

    def _load_best_model(self) -> None:
        """Overridden to load no other weights than those that were saved.

        Raises:
            DamagedCheckpointError: if the weights of the best checkpoint are not as they were saved.
        """
        if Path(self.state.best_model_checkpoint).is_dir():
            check_weights(Path(self.state.best_model_checkpoint))
        attached = attachment_of(self.model)
        if attached is not None and attached.eps.team is not None:  # each rank writes to the weights of all
            attached.eps.team.barrier("no rank uses the last weights any more, before the best ones are loaded")
        super()._load_best_model()
