"""Checkpoints of transformers' Trainer: finds those that are complete, and saves what it does not save: generators of
other devices, and the plan for the device memory.

A Trainer that is interrupted while it saves leaves a folder without its last file, `trainer_state.json`.
`save_total_limit` counts such a folder as a checkpoint, and would delete complete ones in its place.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from hf_l2l.budget.trainer_plan import TrainerPlan
from hf_l2l.hf.attach import attachment_of
from hf_l2l.hf.training_args import own_option
from hf_l2l.model.precision import copy_as
from hf_l2l.runtime import compute_state, stream

# Below transformers' own logger, so that its verbosity and handlers apply.
logger = logging.get_logger("transformers.hf_l2l")

_SAVED = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""`l2l_save_dtype` -> the dtype of the copy that is saved."""

_SAVED_BY_TRAINER = ("cuda", "hpu", "mlu", "musa", "npu", "xla")
"""Device types whose generators transformers itself saves."""


def is_complete(checkpoint: Path) -> bool:
    """Whether the Trainer wrote all of this folder: the file that it writes last is there, to its end."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def last_checkpoints(folder: Path) -> tuple[Path | None, list[Path]]:
    """The last complete checkpoint in `folder`, if there is one, and those after it, which were interrupted."""
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    steps = {path.name.removeprefix(prefix): path for path in folder.glob(f"{prefix}*") if path.is_dir()}
    interrupted: list[Path] = []
    for step in sorted(filter(str.isdecimal, steps), key=int, reverse=True):
        if is_complete(steps[step]):
            return steps[step], interrupted
        interrupted.append(steps[step])
    return None, interrupted


def last_complete(folder: Path) -> str | bool:
    """The last complete checkpoint in `folder`; True if there is no checkpoint, which transformers refuses.

    Raises:
        ValueError: if there are checkpoints, and none of them is complete.
    """
    complete, interrupted = last_checkpoints(folder)
    if complete is None and interrupted:
        names = ", ".join(path.name for path in interrupted)
        raise ValueError(
            f"resume_from_checkpoint=True needs a complete checkpoint in output_dir (got {folder}, where saving was "
            f"interrupted in {names}); remove what is there, and train from the start"
        )
    return True if complete is None else str(complete)


def checkpoint_to_resume(asked: str | bool | None, args: Any) -> str | bool | None:
    """What to resume from, `asked` as in `Trainer.train` with training arguments `args`: for True, the last complete
    checkpoint. Interrupted ones after it are set aside, with a warning, if this process saves checkpoints.

    Raises:
        ValueError: if `asked` is True, and there are checkpoints of which none is complete.
    """
    folder = Path(args.output_dir)
    found = last_complete(folder) if asked is True else asked
    passed_over = set_aside_interrupted(folder) if found and args.should_save else ""
    if passed_over:
        logger.warning(f"saving was interrupted in {passed_over}: training resumes from {found}")
    return found


def set_aside_interrupted(folder: Path) -> str:
    """Rename the interrupted checkpoints after the last complete one in `folder`, so that they count as none any more.

    Returns what a warning says of it; "" where nothing was renamed.
    """
    renamed = []
    for path in last_checkpoints(folder)[1]:
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


if TYPE_CHECKING:
    from transformers import Trainer as _NextTrainer
else:
    _NextTrainer = object  # the trainer that the mixin is combined with comes after it


class CheckpointsMixin(_NextTrainer):  # type: ignore[misc]  # transformers ships no types
    """The part of `L2LTrainerMixin` that saves and loads."""

    model: Any
    _l2l_plan: TrainerPlan

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

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Overridden so that a failed update raises before a folder exists that looks like a checkpoint."""
        attached = attachment_of(self.model)
        if attached is not None:
            attached.eps.synchronize()
        super()._save_checkpoint(*args, **kwargs)

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

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Overridden because an fp16 run may be resumed in another dtype, which has no loss scale."""
        if self.accelerator.scaler is not None:
            super()._load_scaler(checkpoint)
