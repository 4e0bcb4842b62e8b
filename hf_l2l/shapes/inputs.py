"""Inputs of a model, made of its configuration: their shapes and dtypes, without values."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

_OF_ROWS = (
    "SequenceClassification",
    "ImageClassification",
    "AudioClassification",
    "VideoClassification",
    "NextSentence",
)
"""Parts of names of classes that have one label per row."""


def example_inputs(model: nn.Module, rows: int, tokens: int | None = None) -> dict[str, torch.Tensor]:
    """Inputs with which `model`, one of transformers, computes its loss; on the meta device.

    Args:
        model: on any device; its configuration tells the sizes of images and sounds.
        rows: rows of the batch.
        tokens: tokens of a row, of models of texts; None takes as many as the model has positions, at most 512.

    Raises:
        ValueError: if the model takes other inputs than ids, pixels or sound features, or computes no loss.
    """
    for name, count in (("rows", rows), ("tokens", tokens)):
        if count is not None and count < 1:
            raise ValueError(f"{name} of an estimate must be at least 1 (got {count}); give those of a batch")
    arguments = inspect.signature(model.forward).parameters
    name = str(getattr(model, "main_input_name", "input_ids"))
    config: Any = getattr(model, "config", None)
    tokens = tokens or min(512, _first(config, "max_position_embeddings", "n_positions", "max_length") or 512)
    if name == "input_ids" and name in arguments:
        found = {name: _ids(rows, tokens)}
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
            f"inputs are made for models that take ids, pixels or sound (got a {type(model).__name__}, which takes "
            f"{name}); pass inputs, a dict of tensors, which may be on the meta device"
        )
    return found | _labels(model, arguments, rows, tokens)


def _labels(model: nn.Module, arguments: Any, rows: int, tokens: int) -> dict[str, torch.Tensor]:
    kind = type(model).__name__
    if "start_positions" in arguments:
        return {name: _ids(rows) for name in ("start_positions", "end_positions")}
    if "labels" not in arguments:
        raise ValueError(
            f"an estimate is made of a model that computes its loss (got a {kind}, which takes no labels); name a "
            "class with a head, such as AutoModelForSequenceClassification"
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
