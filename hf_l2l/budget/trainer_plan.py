"""`TrainerPlan`: the plan of one of transformers' trainers, for its longest batch."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hf_l2l.accumulation.conditions import replaced_by, why_not_folded
from hf_l2l.budget.example import NoExample, longest_batch
from hf_l2l.budget.saved import save_plan, saved_choice
from hf_l2l.budget.within import budget_bytes, plan_within
from hf_l2l.config import L2LConfig, option
from hf_l2l.plan.planner import Plan
from hf_l2l.runtime import stream
from hf_l2l.shapes.losses import Untraceable

# Below transformers' own logger, so that its verbosity and handlers apply.
logger = logging.getLogger("transformers.hf_l2l")


class TrainerPlan:
    """What is planned for a trainer when its training begins. Evaluations, and later trainings, have the same plan."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self._asked: L2LConfig | None = None
        self._made_for: Any = None

    def config(self, asked: L2LConfig) -> L2LConfig:
        """The options to attach the model with: those that are `asked` for, and those that were chosen."""
        return replace(asked if self.plan is None else self.plan.config, device_memory_budget=None)

    def is_to_make(self, trainer: Any, asked: L2LConfig) -> bool:
        """Whether there is something to plan for the training that begins."""
        has_budget = budget_bytes(asked, stream.execution_device(asked.device)) is not None
        return has_budget and self._made_for != _purpose(trainer, asked)

    def forget(self) -> None:
        """The layers of the model are others than those that were planned for."""
        self.plan = None

    def why_one_by_one(self) -> str | None:
        """Why accumulated batches are not run as one, if the plan says so."""
        if self.plan is None or self.plan.batches > 1:
            return None
        return (
            "the batches of a step run one by one: device_memory_budget has no room for all at once, or they would "
            "not be faster"
        )

    def make(self, trainer: Any, asked: L2LConfig, dataloader: Any, checkpoint: str | None) -> None:
        """Plan for a training that begins, or is resumed from `checkpoint`. The model must not be attached.

        With "auto", which is the default, a trainer for which no plan can be made is told so in the log, and trains
        with the options as they are.

        Raises:
            ValueError: if the budget cannot be met, or is not free; or, unless it is "auto", if no plan can be made.
        """
        self.plan, self._asked, self._made_for = None, asked, _purpose(trainer, asked)
        try:
            self.plan = _planned(trainer, asked, dataloader, saved_choice(checkpoint, asked))
        except _NoPlan as error:
            text = f"{option('device_memory_budget')} plans for a training whose batches are known (got one for which"
            if asked.device_memory_budget != "auto":
                raise ValueError(f"{text} it is not: {error}); set 'off', and the options themselves") from error
            logger.info(f"no options are chosen for the memory of the device: {error}")

    def save(self, checkpoint: str) -> None:
        """Write the plan, if there is one, into the folder of a checkpoint."""
        if self.plan is not None:
            assert self._asked is not None
            save_plan(Path(checkpoint), self.plan, self._asked)


def _purpose(trainer: Any, asked: L2LConfig) -> tuple[Any, ...]:
    return asked, trainer._train_batch_size, trainer.args.gradient_accumulation_steps, weakref.ref(trainer.model)


class _NoPlan(Exception):
    """No plan can be made, for the reason that is the text."""


def _planned(trainer: Any, asked: L2LConfig, dataloader: Any, saved: Mapping[str, Any] | None) -> Plan | None:
    reason = _why_not(trainer)
    if reason is not None:
        raise _NoPlan(reason)
    name = getattr(trainer.model, "main_input_name", "input_ids")
    try:
        inputs = longest_batch(dataloader, trainer._train_batch_size, name)
    except NoExample as error:
        raise _NoPlan(str(error)) from error
    optimizer = trainer.optimizer or _optimizer_to_be(trainer)
    try:
        return plan_within(
            trainer.model,
            asked,
            inputs,
            optimizer=optimizer,
            chosen=saved,
            batches=1 if why_not_folded(trainer, asked) else trainer.args.gradient_accumulation_steps,
        )
    except Untraceable as error:
        raise _NoPlan(str(error)) from error


def _why_not(trainer: Any) -> str | None:
    """What speaks against the estimate of one call of the model with a batch."""
    for name in ("compute_loss", "training_step"):
        owner = replaced_by(trainer, name)
        if owner is not None:
            return f"{owner} has a {name} of its own, which may call the model otherwise"
    if trainer.compute_loss_func is not None:
        return "compute_loss_func computes something of the logits"
    if trainer.args.label_smoothing_factor:
        return "label_smoothing_factor makes the Trainer compute the loss, and not the model"
    if trainer.args.bf16:
        return "bf16=True is autocast, whose memory is not estimated (cmp='bf16' has less)"
    return None


def _optimizer_to_be(trainer: Any) -> torch.optim.Optimizer | None:
    """An optimizer of the kind that the trainer will make, without state."""
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    try:
        kind, options = trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(
            trainer.args, trainer.model
        )
        made: torch.optim.Optimizer = kind(
            trained, **{k: v for k, v in options.items() if k not in ("params", "model", "optimizer_dict")}
        )
        return made
    except (ImportError, RuntimeError, TypeError, ValueError):  # what `create_optimizer` says of it is better
        return None
