"""Overrides of transformers' Trainer with which a resumed training makes what the unbroken one would have made: the
batches (see `data_position`), and the losses that it logs. A finished one makes no further step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import skip_first_batches
from torch import distributed
from transformers.trainer_utils import has_length

from hf_l2l.checkpoint.data_position import BatchFeed, DataPosition, position_file, saved_position
from hf_l2l.log import logger
from hf_l2l.ranks.team import process_group_size
from hf_l2l.runtime import compute_state, stream

if TYPE_CHECKING:
    from transformers import Trainer as _NextTrainer
else:
    _NextTrainer = object  # the trainer that the mixin is combined with comes after it


_SAVED_BY_TRAINER = ("cuda", "hpu", "mlu", "musa", "npu", "xla")
"""Device types whose generators transformers itself saves."""


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
    rank = f"_{distributed.get_rank()}" if process_group_size() > 1 else ""
    return checkpoint / f"rng_state_{device.type}{rank}.pth"


class ResumingMixin(_NextTrainer):  # type: ignore[misc]  # transformers ships no types
    """The part of `L2LTrainerMixin` that finds out where in its data a training goes on."""

    control: Any
    _l2l_feed: BatchFeed | None = None
    """The batches of the epoch that runs."""
    _l2l_position: DataPosition | None = None
    """Where the training is resumed, until it is."""

    def _init_training_state(
        self, max_steps: int, steps_of_epoch: int, epochs: int, checkpoint: str | None, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """Overridden so that a finished training trains no further step, as transformers does where an epoch is not
        over; and to find out where in the data it is."""
        self._l2l_position = None
        found: tuple[int, int] = super()._init_training_state(
            max_steps, steps_of_epoch, epochs, checkpoint, *args, **kwargs
        )
        if checkpoint is None:
            return found
        if self.state.global_step >= max_steps:
            logger.warning(
                f"the training is finished, and no further step is made: {checkpoint} has made "
                f"{self.state.global_step} steps of {max_steps}. Raise max_steps or num_train_epochs to train on"
            )
            return epochs, 0
        if self.args.ignore_data_skip:
            return found
        position = saved_position(self._position_file(checkpoint), self._data_options(), is_within=found[1] > 0)
        self._l2l_position = position
        if position is None:
            return found
        epoch = position.epoch + int(position.is_over)
        if epoch and self.args.dataloader_persistent_workers:
            logger.warning(
                "dataloader_persistent_workers=True: workers that live longer than an epoch begin anew, and draw "
                "other random numbers than without the interruption"
            )
        return epoch, 0 if position.is_over else position.batches

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Overridden because an fp16 run may be resumed in another dtype, which has no loss scale."""
        if self.accelerator.scaler is not None:
            super()._load_scaler(checkpoint)

    def _position_file(self, checkpoint: str) -> Path:
        """Of this rank, whose batches and generators are its own."""
        return Path(checkpoint, position_file(self.args.process_index if self.args.world_size > 1 else None))

    def _data_options(self) -> dict[str, Any]:
        """The options that decide which batches there are, and what is drawn for them."""
        names = ("seed", "data_seed", "gradient_accumulation_steps", "dataloader_num_workers", "dataloader_drop_last")
        rows = len(self.train_dataset) if has_length(self.train_dataset) else None
        return {
            "per_device_train_batch_size": self._train_batch_size,
            "train_sampling_strategy": getattr(self.args, "train_sampling_strategy", None),
            "rows of train_dataset": rows,
            "number of ranks": self.args.world_size,
            **{name: getattr(self.args, name) for name in names},
        }

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Overridden to know which batches have been made, and to go on with what has not been logged yet."""
        checkpoint, skipped = kwargs["resume_from_checkpoint"], 0
        position, self._l2l_position = self._l2l_position, None
        if checkpoint is not None and kwargs["epoch"] == kwargs["epochs_trained"]:
            skipped = kwargs["steps_trained_in_current_epoch"]
            self._load_rng_state(checkpoint)  # transformers does so later; the feed looks at the generators now
        self._l2l_feed = BatchFeed(kwargs["epoch"], kwargs["train_dataloader"], skipped, self.state.global_step)
        if position is not None:
            self._tr_loss += position.loss
            self._total_loss_scalar -= position.loss  # the mean loss of a call of `train` is that of its own steps
            self._globalstep_last_logged = position.logged_at
        if position is not None and not position.is_over:
            self._l2l_feed.resume(position, skip_first_batches, partial(self._load_when_resumed, checkpoint))
        try:
            if position is not None and position.is_complete and not position.is_over:
                self._end_epoch(position, **kwargs)
            else:
                super()._run_epoch(*args, **kwargs)
        finally:
            self._l2l_feed = None

    def _end_epoch(
        self,
        position: DataPosition,
        model: Any,
        epoch: int,
        trial: Any,
        ignore_keys_for_eval: Any,
        start_time: float,
        **_: Any,
    ) -> None:
        """What transformers does after the last step of an epoch."""
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        self._maybe_log_save_evaluate(
            self._tr_loss,
            position.grad_norm,
            model,
            trial,
            epoch,
            ignore_keys_for_eval,
            start_time,
            learning_rate=position.learning_rate,
        )

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """Overridden for the same reason as `_run_epoch`."""
        batches = epoch_iterator if self._l2l_feed is None else self._l2l_feed.over(epoch_iterator)
        return super().get_batch_samples(batches, *args, **kwargs)

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        """Overridden to know whether this is after a step, or at the end of an epoch, and what is to be logged."""
        if self._l2l_feed is not None:
            self._l2l_feed.at_step(self.state.global_step, grad_norm, kwargs.get("learning_rate"))
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def _save_rng_state(self, output_dir: str) -> None:
        """Overridden to save where in the data the training is."""
        super()._save_rng_state(output_dir)
        if self._l2l_feed is None:
            return
        position = self._l2l_feed.position(
            step=self.state.global_step,
            stops=self.control.should_epoch_stop,
            options=self._data_options(),
            loss=float(self._tr_loss.item()),
            logged_at=self._globalstep_last_logged,
        )
        if position is not None:
            position.save(self._position_file(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Overridden because transformers calls it too late in a resumed epoch, whose feed has done it in time."""
        if self._l2l_feed is None or not self._l2l_feed.is_resumed:
            super()._load_rng_state(checkpoint)

    def _load_when_resumed(self, checkpoint: str) -> None:
        feed, self._l2l_feed = self._l2l_feed, None
        try:
            self._load_rng_state(checkpoint)
        finally:
            self._l2l_feed = feed
