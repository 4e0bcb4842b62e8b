"""Inputs of a model, made of its configuration: their shapes and dtypes, without values."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_l2l.model_source import named

_OF_ROWS = (
    "SequenceClassification",
    "ImageClassification",
    "AudioClassification",
    "VideoClassification",
    "NextSentence",
    "MultipleChoice",
)
"""Parts of names of classes that have one label per row."""


_OTHER_SENSES = ("pixel_values", "pixel_values_videos", "input_features", "input_values", "input_audio_embeds")
"""Arguments of models of texts that are images or sound."""

CHOICES = 4
"""Of a question, for models of multiple choice."""
LETTERS = 16
"""Of a second of speech, for models that are trained with CTC."""


def example_inputs(model: nn.Module, rows: int, tokens: int | None = None) -> dict[str, torch.Tensor]:
    """Inputs with which `model`, one of transformers, computes its loss; on the meta device.

    Args:
        model: on any device; its configuration tells the sizes of images and sounds.
        rows: rows of the batch.
        tokens: tokens of a row, of models of texts; None takes as many as the model has positions, at most 512.

    Raises:
        ValueError: if the model takes other inputs than ids, pixels or sound features, computes no loss, or has no
            text, and `tokens` are given.
    """
    for name, count in (("rows", rows), ("tokens", tokens)):
        if count is not None and count < 1:
            raise ValueError(f"{name} of an estimate must be at least 1 (got {count}); give those of a batch")
    arguments = inspect.signature(model.forward).parameters
    name, kind = _main_input(model), type(model).__name__
    config: Any = getattr(model, "config", None)
    length = tokens or min(512, _first(config, "max_position_embeddings", "n_positions", "max_length") or 512)
    if name == "input_ids" and name in arguments:
        found = {name: _ids(rows, CHOICES, length) if "MultipleChoice" in kind else _ids(rows, length)}
    elif name == "pixel_values":
        height, width = _pair(_first(config, "image_size") or 224)
        found = {name: _values(rows, _first(config, "num_channels") or 3, height, width)}
    elif name == "input_features":
        bins, frames = _first(config, "num_mel_bins") or 80, 2 * (_first(config, "max_source_positions") or 1500)
        found = {name: _values(rows, bins, frames)}
    elif name == "input_values":
        found = {name: _values(rows, 16_000)}
    else:
        raise ValueError(
            f"inputs are made for models that take ids, pixels or sound (got a {kind}, which takes {name}); pass "
            "inputs, a dict of tensors, which may be on the meta device"
        )
    labels = _labels(kind, arguments, rows, tokens or LETTERS if "CTC" in kind else length)
    if tokens is not None and name != "input_ids" and all(t.dim() < 2 for t in labels.values()):
        raise ValueError(
            f"tokens are those of a text (got tokens={tokens} and a {kind}, which takes {name} and has no text); "
            "leave tokens out"
        )
    return found | labels


def _main_input(model: nn.Module) -> str:
    return str(getattr(model, "main_input_name", "input_ids"))


def rows_of(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> int:
    """The rows of a device batch: what its main input has, or else its labels. Packed inputs, such as the patches of
    all images, may have another number of rows, even a larger one."""
    for name in (_main_input(model), "input_ids", "inputs_embeds", "labels"):
        if name in inputs and inputs[name].dim():
            return inputs[name].shape[0]
    return max((t.shape[0] for t in inputs.values() if t.dim()), default=1)


def left_out(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> list[str]:
    """Arguments of `model` for images or sound that are not among the `inputs`."""
    arguments = inspect.signature(model.forward).parameters
    return [name for name in _OTHER_SENSES if name in arguments and name not in inputs and "input_ids" in inputs]


def _labels(kind: str, arguments: Any, rows: int, tokens: int) -> dict[str, torch.Tensor]:
    if "start_positions" in arguments:
        return {name: _ids(rows) for name in ("start_positions", "end_positions")}
    if "labels" not in arguments:
        raise ValueError(
            f"an estimate is made of a model that computes its loss (got a {kind}, which takes no labels); set "
            f"{named('model_class')} to a class with a head, such as AutoModelForSequenceClassification"
        )
    if any(part in kind for part in _OF_ROWS):
        return {"labels": _ids(rows)}
    return {"labels": _ids(rows, tokens)}


def _ids(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.long, device="meta")


def _values(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def _first(config: Any, *names: str) -> int | None:
    return next(
        (value for name in names if isinstance(value := getattr(config, name, None), int | tuple | list)), None
    )  # type: ignore[return-value]


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
