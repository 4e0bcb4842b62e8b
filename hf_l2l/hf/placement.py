"""Where the models and optimizers of a trainer are: attached ones stay on the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from hf_l2l.config import L2LConfig, options_of_the_trainer
from hf_l2l.hf.attach import attach_companion, attachment_of, companion_classes
from hf_l2l.hf.preparation import is_placed
from hf_l2l.model.stacks import find_stacks


def leave_models_where_they_are(trainer: Any, config: Callable[[], L2LConfig], companions: list[nn.Module]) -> None:
    """Make the accelerator of `trainer` move no attached model, and no optimizer of one, to the device.

    A further model that it prepares for evaluation, such as a reference model, is attached with `config`, and added to
    `companions`; unless it has no layers, or the program has put it on the device itself.
    """
    # Weak references: in a cycle, processes of data loaders would end only when garbage is collected, and slowly.
    own, accelerator, kind = weakref.ref(trainer), weakref.proxy(trainer.accelerator), type(trainer.accelerator)
    made, device = weakref.WeakMethod(config), trainer.args.device

    @options_of_the_trainer()
    def attach_beside(model: nn.Module) -> None:
        options = made()
        assert options is not None
        wanted = options()
        if find_stacks(model, companion_classes(model, wanted)) and not is_placed(model, device):
            attach_companion(model, wanted)
            companions.append(model)

    def model_where_it_is(
        model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        trainer = own()
        is_other = trainer is not None and model is not trainer.model
        if evaluation_mode and is_other and attachment_of(model) is None:
            attach_beside(model)
        placed = device_placement if attachment_of(model) is None else False
        prepared: nn.Module = kind.prepare_model(
            accelerator, model, device_placement=placed, evaluation_mode=evaluation_mode
        )
        return prepared

    def optimizer_where_it_is(optimizer: Any, device_placement: bool | None = None) -> Any:
        trainer = own()
        placed = device_placement if trainer is None or attachment_of(trainer.model) is None else False
        return kind.prepare_optimizer(accelerator, optimizer, device_placement=placed)

    trainer.accelerator.prepare_model = model_where_it_is
    trainer.accelerator.prepare_optimizer = optimizer_where_it_is
