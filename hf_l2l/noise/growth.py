"""A callback whose batches grow with the critical batch (arXiv:2106.02679, section 8.1)."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.optimization import GreedyLR
from transformers.trainer_callback import ExportableState

from hf_l2l.checkpoint.data_position import length_of
from hf_l2l.log import tell

LOOKS_EVERY = 16
"""Steps from one look at the critical batch to the next."""
FEWEST_MEASURED = 50
"""Steps that must have been measured with the batch as it is: before that, the averages are mostly noise."""
_RULES = {"keep": 1.0, "sqrt": math.sqrt(2), "linear": 2.0}
"""What the learning rate is multiplied by when the batch is doubled."""


class L2LBatchGrowth(TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers ships no types
    """Doubles `gradient_accumulation_steps` when the critical batch has become twice the batch of a step.

    For a training of an `L2LTrainer` with `l2l_noise_scale=True`. It looks every 16 steps, once 50 steps have been
    measured with the batch as it is. The batch of the arguments is the smallest one, and `most_rows` bounds the
    largest; it never shrinks. Epochs stay what they are: the training ends after the same rows, in fewer steps. A
    schedule of the learning rate goes on as if the batch had not grown: it is at the same place after the same rows.
    `max_steps` counts steps of the first batch; `logging_steps`, `save_steps` and `eval_steps` count steps as they are
    made. A resumed training goes on with the batch that it had. Logs with a training loss have the rows of a step
    (`l2l_step_rows`).

    Raises:
        ValueError: for a bad value; and at the start of a training, if nothing tells the critical batch, nobody
            knows how many batches an epoch has, or `most_rows` has no room for twice the first batch.
    """

    def __init__(self, most_rows: int, learning_rate: str = "keep") -> None:
        """
        Args:
            most_rows: of a step of all ranks.
            learning_rate: what becomes of the learning rate when the batch is doubled: it is left as it is ("keep"),
                or multiplied by the square root of 2 ("sqrt", usual for Adam), or by 2 ("linear", usual for SGD).
        """
        if type(most_rows) is not int or most_rows < 1:
            raise ValueError(f"most_rows must be a number of rows from 1 on (got {most_rows!r}); give that of a step")
        if learning_rate not in _RULES:
            raise ValueError(
                f"learning_rate must be one of {', '.join(map(repr, _RULES))} (got {learning_rate!r}); 'keep' leaves "
                "it as it is"
            )
        self.most_rows, self.learning_rate = most_rows, learning_rate
        self.reset()

    def reset(self) -> None:
        """A training begins: forget an earlier one."""
        self.first = 0
        """`gradient_accumulation_steps` of the arguments; 0 before a training."""
        self.now = 0
        """`gradient_accumulation_steps` of the next step."""
        self.wants_more = False
        """Whether the batch is to be doubled as soon as transformers allows it."""
        self.since = 0
        """The steps that had been measured when the batch was doubled last."""
        self.epochs = 0
        """Epochs that are over."""
        self.batches = 0
        """Batches that the steps of the running epoch have used."""
        self.whole = 0
        """Batches of an epoch."""
        self.end = 0
        """The last step, if all had the first batch."""
        self.measured = 0
        """Steps that had been measured at the last look."""
        self.looked_at = 0
        """The step after which the last look was."""

    def state(self) -> dict[str, Any]:
        """See `ExportableState`."""
        names = ("first", "now", "wants_more", "since", "measured", "looked_at", "epochs", "batches", "whole")
        return {
            "args": {"most_rows": self.most_rows, "learning_rate": self.learning_rate},
            "attributes": {name: getattr(self, name) for name in names},
        }

    def resume(self, args: Any) -> None:
        """Give the training arguments of a resumed training the batch that it had.

        Raises:
            ValueError: if its first batch was another one than theirs.
        """
        if not self.first:
            return  # the checkpoint was made without this callback
        if args.gradient_accumulation_steps != self.first:
            raise ValueError(
                f"a training with L2LBatchGrowth is resumed with gradient_accumulation_steps={self.first}, with which "
                f"it began (got {args.gradient_accumulation_steps}); set it so"
            )
        args.gradient_accumulation_steps = self.now

    def most_accumulated(self, args: Any, rows: int) -> int:
        """The most `gradient_accumulation_steps` that there may be, with batches of so many rows in each rank."""
        count: int = self.first or args.gradient_accumulation_steps
        while 2 * count * rows * args.world_size <= self.most_rows:
            count *= 2
        return count

    def rows_of_step(self, args: Any, state: Any) -> int:
        """Rows of a step, of all ranks."""
        return self.now * int(state.train_batch_size) * int(args.world_size)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin, or go on with the batch of the checkpoint."""
        if not getattr(args, "l2l_noise_scale", False):
            raise ValueError(
                "L2LBatchGrowth needs the critical batch (got l2l_noise_scale=False); set l2l_noise_scale=True"
            )
        whole = length_of(kwargs["train_dataloader"])
        if whole is None:
            raise ValueError(
                "L2LBatchGrowth needs a train_dataset with a length (got one without); leave the callback out"
            )
        self.whole, self.end = whole, state.max_steps
        if not self.first:
            self.first = self.now = args.gradient_accumulation_steps
        if self.most_accumulated(args, int(state.train_batch_size)) == self.first:
            least = 2 * self.first * int(state.train_batch_size) * args.world_size
            raise ValueError(
                f"most_rows of L2LBatchGrowth must be at least twice the rows of a step, {least} (got "
                f"{self.most_rows}); raise it, or leave the callback out"
            )
        state.max_steps = state.global_step + self.steps_left(self.end)

    def steps_left(self, end: int) -> int:
        """Steps until the rows of `end` steps with the first batch have been used."""
        epochs, more = divmod(end, -(-self.whole // self.first))
        batches = min(more * self.first, self.whole)  # of the last epoch

        def steps(batches: int) -> int:
            return -(-batches // self.now)

        if self.epochs >= epochs:
            return steps(max(0, batches - self.batches)) if self.epochs == epochs else 0
        whole_epochs = epochs - self.epochs - 1
        return steps(self.whole - self.batches) + whole_epochs * steps(self.whole) + steps(batches)

    def look(self, args: Any, state: Any, critical: float | None, measured: int) -> None:
        """Compare the batch with the critical one, in rows, after so many measured steps."""
        doubled = 2 * self.rows_of_step(args, state)
        is_enough = measured - self.since >= FEWEST_MEASURED
        self.wants_more = is_enough and critical is not None and doubled <= min(critical, self.most_rows)
        self.measured, self.looked_at = measured, state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the schedule where it would be with the first batch, and double the batch if that is wanted."""
        used = min(self.now, self.whole - self.batches)
        self.batches += used
        for _ in range(-(-used // self.first) - 1):
            _go_on(kwargs["lr_scheduler"], kwargs["optimizer"])
        # transformers makes a step wherever the batches of the epoch so far are a multiple of the new number.
        if self.wants_more and self.batches % (2 * self.now) == 0:
            self._grow(args, state, **kwargs)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Where an epoch begins, the batch may always be doubled."""
        self.epochs, self.batches = self.epochs + 1, 0
        if self.wants_more:
            self._grow(args, state, **kwargs)

    def _grow(self, args: Any, state: Any, *, optimizer: Any, lr_scheduler: Any, **_: Any) -> None:
        if not self.steps_left(self.end):
            return
        self.now, self.wants_more, self.since = 2 * self.now, False, self.measured
        args.gradient_accumulation_steps = self.now
        state.max_steps = state.global_step + self.steps_left(self.end)
        factor = _RULES[self.learning_rate]
        if factor != 1.0:
            _scale_rates(factor, optimizer, lr_scheduler)
        tell(
            f"from step {state.global_step + 1} on, a step has {self.rows_of_step(args, state):,} rows, since the "
            f"critical batch has grown (gradient_accumulation_steps={self.now}); the training ends with step "
            f"{state.max_steps}"
        )


def _go_on(lr_scheduler: Any, optimizer: Any) -> None:
    """A step of the schedule more; none of one that looks at metrics, which transformers makes elsewhere."""
    is_by_step = not isinstance(lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau | GreedyLR)
    if is_by_step and not getattr(optimizer, "step_was_skipped", False):
        lr_scheduler.step()


def _scale_rates(factor: float, optimizer: Any, lr_scheduler: Any) -> None:
    """Multiply the rates of now, and those that the schedule begins with."""
    for group in optimizer.param_groups:
        for name in ("lr", "initial_lr"):
            if name in group:
                group[name] = group[name] * factor
    for each in (lr_scheduler, *getattr(lr_scheduler, "_schedulers", ())):  # of torch's SequentialLR, for example
        if hasattr(each, "base_lrs"):
            each.base_lrs = [rate * factor for rate in each.base_lrs]
