"""Checkpoints of transformers' Trainer: whole or absent, found again if they hold, and with what it does not save:
generators of other devices, and the plan for the device memory.

A Trainer that is interrupted while it saves leaves a folder without its last file, `trainer_state.json`. Ours writes
beside, and adds a manifest (see `hf_l2l.checkpoint`).
"""

from __future__ import annotations

import errno
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from torch import nn
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from hf_l2l.budget.trainer_plan import TrainerPlan
from hf_l2l.checkpoint.finding import PassedOver, checkpoints_in, is_finished, newest_whole, rotate
from hf_l2l.checkpoint.manifest import MANIFEST, check_files, read_manifest, write_manifest
from hf_l2l.checkpoint.resuming import ResumingMixin
from hf_l2l.checkpoint.staging import Staging, remove_interrupted, staged
from hf_l2l.config import L2LConfig
from hf_l2l.hf.attach import attachment_of
from hf_l2l.hf.preparation import make_masters_fp32
from hf_l2l.hf.training_args import own_option
from hf_l2l.model.precision import computing_dtype, copy_as
from hf_l2l.runtime import compute_state, stream
from hf_l2l.runtime.tensors import size_text

# Below transformers' own logger, so that its verbosity and handlers apply.
logger = logging.get_logger("transformers.hf_l2l")

_SAVED = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""`l2l_save_dtype` -> the dtype of the copy that is saved."""

_RNG = "rng_state.pth"
"""Of transformers, where one process trains."""

_SAVED_BY_TRAINER = ("cuda", "hpu", "mlu", "musa", "npu", "xla")
"""Device types whose generators transformers itself saves."""


def checkpoint_to_resume(asked: str | bool | None, args: Any) -> str | bool | None:
    """What to resume from, `asked` as in `Trainer.train` with training arguments `args`: for True, the newest whole
    checkpoint. Newer ones that are not whole are told in a warning; those of a Trainer that was interrupted are set
    aside, if this process saves checkpoints.

    Returns:
        A folder, whose files are those of its manifest, if it has one; True if there is no checkpoint, which
        transformers refuses; None or False if nothing is resumed.

    Raises:
        DamagedCheckpointError: if `asked` is a folder whose manifest does not hold.
        ValueError: if `asked` is True, and there are checkpoints of which none is whole; or if a newer version of this
            package wrote one of them.
    """
    if not asked:
        return asked
    folder = Path(args.output_dir)
    remove_interrupted(folder)
    if asked is True:
        found, passed_over = newest_whole(folder)
        if found is None and passed_over:
            raise ValueError(
                f"resume_from_checkpoint=True needs a whole checkpoint in output_dir (got {folder}, where "
                f"{_reasons(passed_over)}); remove what is there, and train from the start"
            )
        if found is None:
            return True
        for each in passed_over:
            if not each.is_interrupted:
                logger.warning(f"{each.folder} is not resumed from, but {found} is: {each.reason}")
    else:
        found = Path(asked)
        manifest = read_manifest(found)
        if manifest is not None:
            check_files(found, manifest)
    renamed = set_aside_interrupted(folder) if args.should_save else ""
    if renamed:
        logger.warning(f"saving was interrupted in {renamed}: training resumes from {found}")
    _say_what_is_missing(found)
    return str(found)


def _reasons(passed_over: Sequence[PassedOver]) -> str:
    interrupted = [each.folder.name for each in passed_over if each.is_interrupted]
    others = [f"in {each.folder.name} {each.reason}" for each in passed_over if not each.is_interrupted]
    return "; ".join([*([f"saving was interrupted in {', '.join(interrupted)}"] if interrupted else []), *others])


def _say_what_is_missing(checkpoint: Path) -> None:
    """Warn of what a resumed training begins anew: transformers does so without a word."""
    if not checkpoint.is_dir():
        return
    state = "the optimizer's state and the schedule of the learning rate begin anew"  # it loads both, or none
    for name, what in ((OPTIMIZER_NAME, state), (SCHEDULER_NAME, state), (_RNG, "random numbers begin anew")):
        if not (checkpoint / name).exists():
            logger.warning(f"{checkpoint} has no {name}: {what}")


def set_aside_interrupted(folder: Path) -> str:
    """Rename the checkpoints in `folder` that a Trainer has not finished, so that they count as none any more.

    Returns what a warning says of it; "" where nothing was renamed.
    """
    renamed = []
    for path in checkpoints_in(folder):
        if (path / MANIFEST).exists() or is_finished(path):
            continue
        target, number = folder / f"interrupted-{path.name}", 1
        while target.exists():
            number += 1
            target = folder / f"interrupted-{path.name}-{number}"
        renamed.append((path.name, path.rename(target).name))
    return ", ".join(f"{old} (renamed to {new})" for old, new in renamed)


def save_generator(checkpoint: Path, device: torch.device) -> None:
    """Save the state of the generator of `device`, where transformers does not."""
    if device.type not in _SAVED_BY_TRAINER and hasattr(stream.device_module(device), "get_rng_state"):
        torch.save(compute_state.get_rng_state(device).device, _file(checkpoint, device))


def load_generator(checkpoint: Path, device: torch.device) -> None:
    """Put the generator of `device` into the state that was saved, if one was."""
    if _file(checkpoint, device).is_file():
        state = torch.load(_file(checkpoint, device), weights_only=True)
        compute_state.set_rng_state(compute_state.RngState(torch.get_rng_state(), state), device)


def _file(checkpoint: Path, device: torch.device) -> Path:
    return checkpoint / f"rng_state_{device.type}.pth"


class CheckpointsMixin(ResumingMixin):
    """The part of `L2LTrainerMixin` that saves and loads."""

    model: Any
    _asked_config: Callable[[], L2LConfig]
    _streams: Callable[[], bool]
    _l2l_plan: TrainerPlan
    _l2l_staging: Staging | None = None
    """Where a checkpoint is written now."""
    _l2l_run: str | None = None
    """Names the training in the manifests of its checkpoints."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Overridden for `l2l_save_dtype`; checkpoints (internal calls with a folder) keep the fp32 masters."""
        asked = _SAVED[own_option(self.args, "l2l_save_dtype")]
        if asked is None or (_internal_call and output_dir is not None):
            super().save_model(output_dir, _internal_call)
            return
        masters: nn.Module = self.model
        self.model = copy_as(masters, asked)
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self.model = masters

    def _begin_run(self, checkpoint: str | bool | None) -> None:
        """A training begins, or goes on from a checkpoint, in whose manifest it is named."""
        manifest = read_manifest(Path(checkpoint)) if isinstance(checkpoint, str) else None
        self._l2l_run = uuid.uuid4().hex if manifest is None else manifest.run

    def _get_output_dir(self, trial: Any) -> str:
        """Overridden so that a checkpoint is written beside its place."""
        found: str = super()._get_output_dir(trial) if self._l2l_staging is None else str(self._l2l_staging.parent)
        return found

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Overridden so that a checkpoint is whole or absent.

        Raises:
            OSError: if it cannot be written; the folder of the training is as it was then.
        """
        attached = attachment_of(self.model)
        if attached is not None:
            attached.eps.synchronize()  # a failed update raises before anything is written
        if not self.args.should_save:
            super()._save_checkpoint(model, trial)
            return
        run = Path(self._get_output_dir(trial))
        target = run / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        remove_interrupted(run)
        run.mkdir(parents=True, exist_ok=True)
        self._check_room(run)
        with staged(target) as self._l2l_staging:
            try:
                super()._save_checkpoint(model, trial)  # there, it finds no other checkpoints
                self._name_best(run, self._l2l_staging)
                write_manifest(
                    self._l2l_staging.folder, self.state.global_step, self._l2l_run or "", self._saved_with()
                )
                self._l2l_staging.commit()
            finally:
                self._l2l_staging = None
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(target))
        best = self.state.best_model_checkpoint
        rotate(run, self.args.save_total_limit, None if best is None else Path(best))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Overridden: what is pushed must stay where it is."""
        if self._l2l_staging is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _name_best(self, run: Path, staging: Staging) -> None:
        """Save where the best checkpoint is, or will be: transformers looks for it beside the one that it writes."""
        best = run / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        if self.state.best_global_step and (best == staging.target or best.exists()):
            self.state.best_model_checkpoint = str(best)
            self.state.save_to_json(str(staging.folder / TRAINER_STATE_NAME))

    def _check_room(self, run: Path) -> None:
        """Raise OSError unless the disk has room for weights and optimizer state."""
        tensors = {*self.model.parameters(), *self.model.buffers()}
        if not self.args.save_only_model and self.optimizer is not None:
            states = (value for state in self.optimizer.state.values() for value in state.values())
            tensors |= {value for value in states if isinstance(value, torch.Tensor)}
        need, free = sum(t.nbytes for t in tensors), shutil.disk_usage(run).free
        if free < need:
            raise OSError(
                errno.ENOSPC,
                f"a checkpoint needs room for weights and optimizer state ({size_text(need)}, and {size_text(free)} "
                f"are free on the disk of {run}); free some, keep fewer with save_total_limit, or save less with "
                "save_only_model=True",
            )

    def _saved_with(self) -> dict[str, Any]:
        """What the manifest tells people of the training."""
        versions = {"transformers": transformers.__version__, "accelerate": accelerate.__version__}
        return {"trainer": type(self).__name__, "torch": torch.__version__, **versions}

    def _save_rng_state(self, output_dir: str) -> None:
        """Overridden for devices whose random generators transformers does not save."""
        super()._save_rng_state(output_dir)
        save_generator(Path(output_dir), self.args.device)
        self._l2l_plan.save(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Overridden for the same reason as `_save_rng_state`."""
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            load_generator(Path(checkpoint), self.args.device)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Overridden because the masters of a model that was loaded in 16 bits are saved in fp32."""
        config = self._asked_config()
        trains_in_16_bits = computing_dtype(config.cmp, stream.execution_device(config.device)) is not None
        if trains_in_16_bits and attachment_of(self.model) is None and self._streams():
            make_masters_fp32(self.model)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Overridden because an fp16 run may be resumed in another dtype, which has no loss scale."""
        if self.accelerator.scaler is not None:
            super()._load_scaler(checkpoint)
