"""`L2LCallback`: layer-to-layer execution for libraries that build their Trainer themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from hf_l2l.budget.within import budget_bytes
from hf_l2l.config import L2LConfig
from hf_l2l.devices import execution_device
from hf_l2l.hf.attach import attach_l2l, attachment_of, check_attachable
from hf_l2l.hf.preparation import config_of, is_placed, refuse_several_devices
from hf_l2l.hf.training_args import refuse_for_layers
from hf_l2l.log import logger, tell
from hf_l2l.memory.memory_estimate import estimate
from hf_l2l.model.precision import computing_dtype
from hf_l2l.optim.layer_optimizers import unwrapped
from hf_l2l.option_names import option
from hf_l2l.report.summary import first_line
from hf_l2l.runtime import stream


class L2LCallback(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
    """Attaches L2L to the model of any `Trainer` when training begins: `SomeTrainer(..., callbacks=[L2LCallback()])`.
    One line in the log says what runs where.

    For libraries that build their Trainer inside, such as SetFit; where the Trainer can be chosen, `L2LTrainer` and
    `make_l2l_trainer` do more: they keep the model from being moved to the device first, so that it need not fit, and
    log what L2L does. The model stays attached after training; `hf_l2l.detach_l2l(model)` makes it ordinary.

    Raises:
        ValueError: when the Trainer is built, or at the start of training, if the model cannot run layer to layer, or
            not with these arguments; for a `config` that is none.
    """

    def __init__(self, config: L2LConfig | None = None) -> None:
        """Attach with `config`, by default that of `attach_l2l`; without a device in it, on that of the arguments."""
        self.config = config_of(config)
        _refuse_skipped_steps(self.config, None)

    def on_init_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Check the arguments and the model."""
        args, model = _given(args, kwargs)
        _check(args, model)
        self._refuse_budget(args, model)

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach the model, and wrap the optimizer."""
        args, model = _given(args, kwargs)
        _check(args, model)
        self._refuse_budget(args, model)
        if attachment_of(model) is None and is_placed(model, args.device):
            tell("the Trainer has put the model on %s; it moves to the host", args.device)
            model.to(stream.HOST)
            _move_state_to_host(kwargs["optimizer"])
        _refuse_skipped_steps(self.config, computing_dtype(self.config.cmp, self._device(args)))
        config = replace(self.config, device=args.device) if self.config.device is None else self.config
        eps = attach_l2l(model, config)
        eps.wrap(kwargs["optimizer"])
        if args.process_index == 0:
            attached = attachment_of(model)  # its config may be one that the program has attached it with
            assert attached is not None, "it has just been attached"
            need = estimate(model, attached.config, unwrapped(kwargs["optimizer"]))
            logger.info(first_line(model, attached.config, need, planned=None))

    def _device(self, args: TrainingArguments) -> torch.device:
        """Where the layers will run, or the first of them."""
        own: torch.device = args.device
        return own if self.config.device is None else execution_device(self.config.device)

    def _refuse_budget(self, args: TrainingArguments, model: Any) -> None:
        if attachment_of(model) is None and budget_bytes(self.config, self._device(args)) is not None:
            raise ValueError(
                f"a callback knows no batches, for which {option('device_memory_budget')} is planned (got "
                f"{self.config.device_memory_budget!r}); leave it out, use L2LTrainer or make_l2l_trainer, or attach "
                "the model before with attach_l2l(model, config, inputs=batch)"
            )

    def on_train_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Finish the last update, so that its errors are raised here."""
        attached = attachment_of(_given(args, kwargs)[1])
        if attached is not None:
            attached.eps.synchronize()


def _move_state_to_host(optimizer: Any) -> None:
    """The state of an optimizer that a Trainer has loaded from a checkpoint lies where the weights lay then."""
    for state in unwrapped(optimizer).state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = value.to(stream.HOST)


def _refuse_skipped_steps(config: L2LConfig, dtype: torch.dtype | None) -> None:
    """Raise ValueError if steps can be skipped; `dtype` is what the layers compute in, None before that is known."""
    if config.nonfinite != "skip" and config.cmp != "fp16" and dtype is not torch.float16:
        return
    found = ", which is fp16 on this device" if dtype is torch.float16 and config.cmp == "auto" else ""
    raise ValueError(
        f"a callback cannot tell the Trainer's scheduler that a step is skipped (got cmp={config.cmp!r}{found}, "
        f"nonfinite={config.nonfinite!r}); use cmp='bf16' or None and nonfinite='raise', or L2LTrainer"
    )


def _given(args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The training arguments and the model of the Trainer. SetFit passes these under names of their own, and others,
    which are no module and no arguments of transformers, under the usual ones."""
    return kwargs.get("st_args", args), kwargs.get("st_model", kwargs.get("model"))


def _check(args: TrainingArguments, model: Any) -> None:
    refuse_for_layers(args)
    refuse_several_devices(args)
    if isinstance(model, nn.Module):  # None before `model_init` is called
        check_attachable(model)
