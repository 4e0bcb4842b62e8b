"""What the Trainer's arguments say about a run: its options, optimizer, and rows of a device batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_l2l.accumulation.conditions import why_not_folded
from hf_l2l.budget.trainer_plan import autocast_of
from hf_l2l.config import L2LConfig
from hf_l2l.counts import parsed_devices
from hf_l2l.hf.preparation import devices_of
from hf_l2l.hf.training_args import l2l_config, optim_of, own_option, refuse_for_layers
from hf_l2l.optim.lamb import Lamb
from hf_l2l.runtime import stream


@dataclass(frozen=True)
class Asked:
    """What the arguments of a Trainer ask for."""

    config: L2LConfig
    rows: int
    """Rows of a batch."""
    batches: int
    """The batches of a step that run as one."""
    accumulates: bool
    """Whether a step has several that do not."""
    autocast: torch.dtype | None
    """In which the Trainer calls the model under autocast; None if it does not."""
    optimizer: torch.optim.Optimizer
    devices: int
    """How many devices of this machine run the layers; where it has none, those that are asked for by number."""
    notes: tuple[str, ...]
    """What of them an estimate does not follow."""


def asked_by(args: Any, model: nn.Module) -> Asked:
    """What training arguments, `L2LTrainingArguments` or plain ones, ask for, to train `model`, which may be on the
    meta device.

    Raises:
        ValueError: if these are no training arguments, or have options that L2L cannot honour.
    """
    if not isinstance(args, TrainingArguments):
        raise ValueError(
            f"the second argument of an estimate must be an L2LConfig or training arguments (got {args!r}); give one "
            "of them, or leave it out for the defaults"
        )
    refuse_for_layers(args)
    config, steps = l2l_config(args), args.gradient_accumulation_steps
    as_one = steps > 1 and _batches_run_as_one(args, model, config)
    return Asked(
        replace(config, device_memory_budget=None),
        args.per_device_train_batch_size,
        steps if as_one else 1,
        steps > 1 and not as_one,
        autocast_of(args),
        optimizer_of(args, model),
        _devices_of(args),
        tuple(_notes(config)),
    )


def _devices_of(args: TrainingArguments) -> int:
    asked = own_option(args, "l2l_devices")
    if not stream.shares_host_memory(args.device):
        return len(devices_of(args, asked))
    found = parsed_devices(asked, "l2l_devices")
    return 1 if found is None else found if isinstance(found, int) else len(found)


def _batches_run_as_one(args: TrainingArguments, model: nn.Module, config: L2LConfig) -> bool:
    """Whether the batches of an optimizer step run as one, as far as can be told before the first step."""
    forward: Any = inspect.signature(model.forward).parameters.values()
    takes_more = any(each.kind == inspect.Parameter.VAR_KEYWORD for each in forward)
    trainer = SimpleNamespace(
        args=args,
        model=model,
        compute_loss_func=None,
        model_accepts_loss_kwargs=getattr(model, "accepts_loss_kwargs", takes_more),
    )
    return why_not_folded(trainer, config) is None


def optimizer_of(args: TrainingArguments, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that the arguments name, over the parameters of `model`; what it would do is not of interest.

    Raises:
        ValueError: if it is none that is made of parameters alone.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if own_option(args, "l2l_optimizer") == "lamb":
        return Lamb(trained)
    kind, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ValueError(
            f"an estimate makes the optimizer that optim names (got optim={optim_of(args)!r}, which is made in steps "
            "of its own); pass the optimizer to estimate"
        )
    of_trainer = ("params", "model", "optimizer_dict")
    found: torch.optim.Optimizer = kind(
        options.get("params", trained), **{name: value for name, value in options.items() if name not in of_trainer}
    )
    return found


def _notes(config: L2LConfig) -> Iterator[str]:
    if config.device_memory_budget is not None:
        yield (
            "these are the bytes of the options as they are: device_memory_budget="
            f"{config.device_memory_budget!r} may choose others, which keep more on the device"
        )
