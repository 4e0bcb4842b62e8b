"""`Step`: what an optimizer step consists of, taken from a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_l2l.eps.server import EagerParamServer
from hf_l2l.model.batch_dims import RowCuts

NO_ROOM = "the device has no room for the rows of all batches at once"


@dataclass(frozen=True)
class Step:
    """What an optimizer step consists of. `items` below are what the Trainer divides its losses by."""

    model: nn.Module
    device: torch.device
    eps: EagerParamServer
    cuts: RowCuts
    autocast: bool
    """Whether the Trainer computes under autocast."""
    is_last: bool
    """Whether the optimizer's step follows this batch."""
    pad_token: int | None
    """The id of the padding token, if it is known."""
    train: Callable[[Any, Any], torch.Tensor]
    """Runs the forward and the backward of a batch, given `items`, and returns the loss, detached."""
    loss: Callable[[Any, Any], tuple[torch.Tensor, bool]]
    """The loss of a batch, given `items`, and whether the model has added an auxiliary loss."""
    backward: Callable[[torch.Tensor], None]
    """The backward of a loss."""


def step_of(trainer: Any, eps: EagerParamServer, cuts: RowCuts, train: Callable[[Any, Any], torch.Tensor]) -> Step:
    """The step of `trainer`, one of transformers, whose own training of a batch is `train`."""

    def loss(batch: Any, items: Any) -> tuple[torch.Tensor, bool]:
        inputs, model = trainer._prepare_inputs(batch), trainer.model_wrapped
        with trainer.compute_loss_context_manager():
            found, outputs = trainer.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=items)
        return found, getattr(outputs, "aux_loss", None) is not None

    return Step(
        model=trainer.model,
        device=trainer.args.device,
        eps=eps,
        cuts=cuts,
        autocast=bool(trainer.args.bf16),
        is_last=trainer.accelerator.sync_gradients,
        pad_token=_pad_token_of(trainer),
        train=train,
        loss=loss,
        backward=trainer.accelerator.backward,
    )


def _pad_token_of(trainer: Any) -> int | None:
    """The id of the padding token, of the processing class or else of the model's config; None if none is known."""
    tokens: Any = getattr(trainer, "processing_class", None)
    config: Any = getattr(trainer.model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    for holder in (tokens, getattr(tokens, "tokenizer", None), config, text):
        found = getattr(holder, "pad_token_id", None)
        if isinstance(found, int) and found >= 0:
            return found
    return None
