"""Batches for the heads of transformers' models, by the names of their classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_l2l.verify.family import (
    CLASSES,
    TOKENS,
    Batch,
    Loss,
    MakeBatch,
    generator,
    ids_of,
    images,
    own_loss,
    pair,
    size_of_first,
    text,
)


@dataclass(frozen=True)
class Head:
    """How a model with some head is trained."""

    batch: MakeBatch
    loss: Loss = own_loss
    generates: bool = False


def _classes_of_tokens(model: nn.Module, rows: int) -> Batch:
    return {"labels": torch.randint(0, CLASSES, (rows, TOKENS), generator=generator(2))}


def _spans(model: nn.Module, rows: int) -> Batch:
    places = torch.randint(0, TOKENS // 2, (2, rows), generator=generator(2))
    return {"start_positions": places[0], "end_positions": places[1]}


def _answers(model: nn.Module, rows: int) -> Batch:
    return {"decoder_input_ids": ids_of(rows, TOKENS - 2, seed=5)}


TEXT_HEADS = {
    "ForCausalLM": Head(text("token"), generates=True),
    "LMHeadModel": Head(text("token"), generates=True),
    "ForMaskedLM": Head(text("token")),
    "ForSequenceClassification": Head(text("class")),
    "ForTokenClassification": Head(text("none", more=_classes_of_tokens)),
    "ForQuestionAnswering": Head(text("none", more=_spans)),
    "Model": Head(text("none"), size_of_first),
}
ENCODER_DECODER_HEADS = {
    "ForConditionalGeneration": Head(pair(), generates=True),
    "MTModel": Head(pair(), generates=True),
    "Model": Head(text("none", more=_answers), size_of_first),
}


def head_of(class_name: str, config: Any) -> Head | None:
    """How a model of this class is trained; None if its head or its inputs are not known."""
    if getattr(config, "vocab_size", None) is None:
        return _of_images(class_name, config)
    heads = ENCODER_DECODER_HEADS if config.is_encoder_decoder else TEXT_HEADS
    return next((head for ending, head in heads.items() if class_name.endswith(ending)), None)


def _of_images(class_name: str, config: Any) -> Head | None:
    if not isinstance(getattr(config, "image_size", None), int) or getattr(config, "num_channels", 3) != 3:
        return None
    if class_name.endswith("ForImageClassification"):
        return Head(images("class"))
    return Head(images("none"), size_of_first) if class_name.endswith("Model") else None
