"""`TrainerPlan`: the plan of one of transformers' trainers, for its longest batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hf_l2l.accumulation.conditions import own_method, why_not_folded
from hf_l2l.accumulation.folding import Folding
from hf_l2l.budget.agreed import is_so_for_all, reason_of_any
from hf_l2l.budget.example import NoExample, longest_batch
from hf_l2l.budget.saved import save_plan, saved_choice
from hf_l2l.budget.within import budget_bytes, plan_within
from hf_l2l.config import L2LConfig
from hf_l2l.devices import execution_device
from hf_l2l.log import logger, tell
from hf_l2l.option_names import option
from hf_l2l.plan.planner import Plan
from hf_l2l.shapes.losses import Untraceable, told_failures


@dataclass(frozen=True)
class Purpose:
    """What a plan is made for; the plan for an equal one is the same."""

    asked: L2LConfig
    model: weakref.ref[Any]
    trained: int
    """Parameters that are trained: some may be frozen later, or not any more."""
    accumulated: int
    """Batches of a step, at most."""
    shapes: tuple[tuple[str, torch.Size, torch.dtype], ...]
    """Of the longest batch."""
    autocast: torch.dtype | None
    """In which the Trainer calls the model under autocast; None if it does not."""
    why_not: str | None
    """Why no plan can be made; None if nothing is known to speak against it."""
    inputs: dict[str, torch.Tensor] = field(compare=False, repr=False)
    """The longest batch, without values."""

    @classmethod
    def of(cls, trainer: Any, asked: L2LConfig, dataloader: Any) -> Purpose | None:
        """The purpose of a training that begins with batches of `dataloader`; None if there is no budget."""
        if budget_bytes(asked, execution_device(asked.device)) is None:
            return None
        inputs: dict[str, torch.Tensor] = {}
        why_not = _why_not(trainer)
        if why_not is None:
            try:
                inputs = longest_batch(dataloader, getattr(trainer.model, "main_input_name", "input_ids"))
            except NoExample as error:
                why_not = str(error)
        return cls(
            asked,
            weakref.ref(trainer.model),
            sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
            getattr(trainer, "_l2l_most_accumulated", trainer.args.gradient_accumulation_steps),
            tuple((name, t.shape, t.dtype) for name, t in inputs.items()),
            autocast_of(trainer.args),
            why_not,
            {name: t.to("meta") if t.dim() else t for name, t in inputs.items()},
        )


class TrainerPlan:
    """What is planned for a trainer when its training begins. Evaluations, and later trainings, have the same plan."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self._purpose: Purpose | None = None

    def config(self, asked: L2LConfig) -> L2LConfig:
        """The options to attach the model with: those that are `asked` for, and those that were chosen."""
        return replace(asked if self.plan is None else self.plan.config, device_memory_budget=None)

    def is_for(self, purpose: Purpose | None, checkpoint: str | None) -> bool:
        """Whether the training that begins, or is resumed from `checkpoint`, has what was planned before, or, without
        a budget, no plan. All ranks call this, and plan again if one of them has to."""
        if purpose is None:
            return self._purpose is None
        return is_so_for_all(self._has_plan_for(purpose, checkpoint))

    def _has_plan_for(self, purpose: Purpose, checkpoint: str | None) -> bool:
        if self._purpose != purpose or self.plan is None or checkpoint is None:
            return self._purpose == purpose
        return saved_choice(checkpoint, purpose.asked) in (None, {**self.plan.chosen, "batches": self.plan.batches})

    def why_one_by_one(self) -> str | None:
        """Why accumulated batches are not run as one, if the plan says so."""
        if self.plan is None or self.plan.batches > 1:
            return None
        return (
            "the batches of a step run one by one: device_memory_budget has no room for all at once, or they would "
            "not be faster"
        )

    def start(self, folding: Folding, reason: str | None, warn: Callable[[str], None]) -> None:
        """Begin to run accumulated batches as one; `reason` is why not, apart from a plan, and is told with `warn`."""
        planned = self.why_one_by_one()
        folding.start(reason or planned, tell if reason is None and planned else warn)

    def make(self, trainer: Any, purpose: Purpose | None, checkpoint: str | None) -> None:
        """Plan for a training that begins, or is resumed from `checkpoint`. The model must not be attached.

        With "auto", which is the default, a trainer for which no plan can be made is told so in the log, and trains
        with the options as they are.

        Raises:
            ValueError: if the budget cannot be met, or is not free; or, unless it is "auto", if no plan can be made.
        """
        # Unless it succeeds, nothing is planned: a training that is tried again must not begin without a plan.
        self.plan, self._purpose = None, None
        if purpose is not None:
            self.plan = _planned(trainer, purpose, saved_choice(checkpoint, purpose.asked))
        self._purpose = purpose
        args = trainer.args
        if self.plan is not None and args.eval_strategy != "no" and args.eval_batch_size > args.train_batch_size:
            logger.warning(
                f"{option('device_memory_budget')} is planned for the batches of the training, and evaluations have "
                f"larger ones (per_device_eval_batch_size={args.per_device_eval_batch_size}, and "
                f"per_device_train_batch_size={args.per_device_train_batch_size}): they may need more memory"
            )

    def make_again(self, trainer: Any) -> None:
        """Plan for the same batches and other layers, in the middle of a training.

        Raises:
            ValueError: as `make`; but not if less of the device is free: it was free when the training began.
        """
        if self._purpose is not None:
            self.plan = _planned(trainer, self._purpose, None, is_running=True)

    def save(self, checkpoint: str) -> None:
        """Write the plan, if there is one, into the folder of a checkpoint."""
        if self.plan is not None and self._purpose is not None:
            save_plan(Path(checkpoint), self.plan, self._purpose.asked)


def _planned(
    trainer: Any, purpose: Purpose, saved: Mapping[str, Any] | None, *, is_running: bool = False
) -> Plan | None:
    reason = reason_of_any(purpose.why_not)
    if reason is None:
        try:
            # With "auto", which nobody has asked for, no model may be lost for a fault in planning.
            with told_failures(trainer.model):
                return plan_within(
                    trainer.model,
                    purpose.asked,
                    purpose.inputs,
                    optimizer=trainer.optimizer or _optimizer_to_be(trainer),
                    chosen=saved,
                    batches=1 if why_not_folded(trainer, purpose.asked) else purpose.accumulated,
                    is_running=is_running,
                    autocast=purpose.autocast,
                )
        except Untraceable as error:
            reason = str(error)
    name, asked = option("device_memory_budget"), purpose.asked.device_memory_budget
    if asked != "auto":
        raise ValueError(
            f"{name} plans for a training whose batches are known (got {asked!r}, and no plan can be made: {reason}); "
            "set 'off', and the options themselves"
        )
    tell(f"no options are chosen for the memory of the device: {reason}")
    return None


def autocast_of(args: Any) -> torch.dtype | None:
    """The dtype of the autocast under which a Trainer with these arguments calls the model; None without. That in fp16
    has a loss scaler, which L2L refuses."""
    return torch.bfloat16 if args.mixed_precision == "bf16" else None


def _why_not(trainer: Any) -> str | None:
    """What speaks against the estimate of one call of the model with a batch."""
    method = own_method(trainer)
    if method is not None:
        return f"{method}, which may call the model otherwise"
    if trainer.compute_loss_func is not None:
        return "compute_loss_func computes something of the logits"
    if trainer.args.label_smoothing_factor:
        return "label_smoothing_factor makes the Trainer compute the loss, and not the model"
    return None


def _optimizer_to_be(trainer: Any) -> torch.optim.Optimizer | None:
    """An optimizer of the kind that the trainer will make, without state."""
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    try:
        kind, options = (
            trainer._lamb()
            or trainer.optimizer_cls_and_kwargs
            or trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
        )
        made: torch.optim.Optimizer = kind(
            trained, **{k: v for k, v in options.items() if k not in ("params", "model", "optimizer_dict")}
        )
        return made
    except (ImportError, RuntimeError, TypeError, ValueError):  # what `create_optimizer` says of it is better
        return None
