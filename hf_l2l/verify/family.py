"""The record of one model family, how its tiny random model is built, and the batches that it trains on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

VOCAB, TOKENS, CLASSES = 60, 6, 2
"""Tokens that a tiny model knows, tokens of the longest row, and classes of a classifier."""

Batch = dict[str, Any]
MakeBatch = Callable[[nn.Module, int], Batch]
"""Makes a batch of so many rows for a model: tensors on the CPU, floating ones in the dtype of the model."""

Loss = Callable[[Any], torch.Tensor]
"""The loss of a model's output: a scalar."""

IMAGE = 16
"""Rows and columns of an image."""


class NotInThisTransformers(Exception):
    """The installed transformers does not have a family's classes."""


def own_loss(output: Any) -> torch.Tensor:
    """The loss that the model computed from its labels."""
    loss: torch.Tensor = output.loss
    return loss.mean()  # some heads return one per row


def size_of_first(output: Any) -> torch.Tensor:
    """The mean square of the first output, for models without a loss, as those of sentence embeddings."""
    first: torch.Tensor = output[0]
    return (first - 0.5).square().mean()


@dataclass(frozen=True)
class Family:
    """One model family of transformers, as a tiny random model and a batch for it."""

    name: str
    model_class: str
    """The class of the model, by its name in transformers."""
    config_class: str
    """The class of its config, by its name in transformers."""
    sizes: Mapping[str, Any] = field(repr=False)
    """The arguments of the config."""
    batch: MakeBatch = field(repr=False)
    loss: Loss = field(default=own_loss, repr=False)
    generates: bool = False
    """Whether `generate` continues the inputs of the batch."""
    fp32: str = ""
    """Why results are exact to fp32 only: what the model computes in fp32 whatever its dtype, or why it fails in
    float64. Empty if it computes all in its own dtype."""
    random: str = ""
    """What draws random numbers in training and cannot be turned off; such a family is compared in evaluation mode."""
    dtype: torch.dtype = torch.float64
    """The dtype of the model where results are compared: float32 for one that fails in float64."""

    refused: str = ""
    """What the engine says when it refuses the model, as a pattern; empty if it runs it. Any other refusal is red."""
    own_backward: bool = False
    """Whether layers compute their backward themselves: such a model trains on the CPU only, where nothing travels,
    and its backward is not split."""

    exact: bool = False
    """Whether any difference is an error: results are to have the same bits."""

    @property
    def tolerance(self) -> float:
        """The largest difference that is rounding, relative to the largest value."""
        if self.exact:
            return 0.0
        if self.dtype == torch.float32:
            return 1e-5
        return 1e-6 if self.fp32 else 1e-10

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """A new model with random weights, the same for every call, without dropout, on the CPU: in
        training mode, or in evaluation mode where training is random.

        Raises:
            NotInThisTransformers: if the installed transformers lacks the family.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = class_named(self.config_class)(**copy.deepcopy(dict(self.sizes)))
            _turn_off_randomness(config)
            model: nn.Module = class_named(self.model_class)(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    # Biases, gates and norms begin as zeros or ones, which would hide their gradients.
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
            set_experts: Any = model.set_experts_implementation
            set_experts("eager")  # grouped products of matrices are not there in float64
        return model.to(dtype).train(not self.random)


def class_named(name: str) -> Any:
    """The class of transformers that is called `name`.

    Raises:
        NotInThisTransformers: if there is none.
    """
    try:
        return getattr(transformers, name)
    except AttributeError:
        raise NotInThisTransformers(f"transformers {transformers.__version__} has no {name}") from None


def _turn_off_randomness(config: Any) -> None:
    """Set every dropout and jitter of a config and of the configs in it to zero."""
    for key, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            _turn_off_randomness(value)
        elif ("drop" in key or "jitter" in key) and isinstance(value, float):
            setattr(config, key, 0.0)


# ---- what the makers of batches share


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of the first parameter."""
    return next(model.parameters()).dtype


def generator(seed: int = 1) -> torch.Generator:
    """Random numbers that are the same in every call."""
    return torch.Generator().manual_seed(seed)


def lengths_of(rows: int, longest: int) -> torch.Tensor:
    """Row lengths from half of the longest on, [rows] int64, the first row being the longest."""
    return longest - torch.arange(rows) % (longest // 2)


def mask_of(rows: int, longest: int) -> torch.Tensor:
    """An attention mask [rows, longest] int64 of rows of different lengths, padded on the right."""
    return (torch.arange(longest) < lengths_of(rows, longest)[:, None]).long()


def ids_of(rows: int, length: int, *, vocab: int = VOCAB, seed: int = 1) -> torch.Tensor:
    """Random token ids [rows, length] int64, none of them a special token."""
    return torch.randint(5, vocab, (rows, length), generator=generator(seed))


def classes_of(rows: int) -> torch.Tensor:
    """Random labels [rows] int64 of a classifier."""
    return torch.randint(0, CLASSES, (rows,), generator=generator(2))


def floats_of(model: nn.Module, *shape: int, seed: int = 3) -> torch.Tensor:
    """Random numbers of this shape in the dtype of the model."""
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(dtype_of(model))


More = Callable[[nn.Module, int], Batch]


def _nothing(model: nn.Module, rows: int) -> Batch:
    return {}


def text(labels: str, *, length: int = TOKENS, masked: bool = True, more: More = _nothing) -> MakeBatch:
    """Batches of token ids.

    Args:
        labels: "class" for one label per row, "token" for one per token (the ids, ignored where padded), "none".
        length: tokens of the longest row.
        masked: whether rows have different lengths and an attention mask.
        more: makes further inputs.
    """

    def make(model: nn.Module, rows: int) -> Batch:
        batch: Batch = {"input_ids": ids_of(rows, length)}
        if masked:
            batch["attention_mask"] = mask_of(rows, length)
        if labels == "class":
            batch["labels"] = classes_of(rows)
        elif labels == "token":
            batch["labels"] = batch["input_ids"].clone()
            if masked:
                batch["labels"][batch["attention_mask"] == 0] = -100
        return batch | more(model, rows)

    return make


def pair(*, length: int = TOKENS, answer: int = TOKENS - 2) -> MakeBatch:
    """Batches of `length` token ids with `answer` other ones as labels, for encoder-decoders."""

    def make(model: nn.Module, rows: int) -> Batch:
        labels = ids_of(rows, answer, seed=5)
        labels[mask_of(rows, answer) == 0] = -100
        return {"input_ids": ids_of(rows, length), "attention_mask": mask_of(rows, length), "labels": labels}

    return make


def images(labels: str = "class", *, size: int = IMAGE, more: More = _nothing) -> MakeBatch:
    """Batches of images [rows, 3, size, size], with one label per row ("class") or none ("none")."""

    def make(model: nn.Module, rows: int) -> Batch:
        batch: Batch = {"pixel_values": floats_of(model, rows, 3, size, size)}
        if labels == "class":
            batch["labels"] = classes_of(rows)
        return batch | more(model, rows)

    return make


def sounds(*, length: int, labels: str = "class") -> MakeBatch:
    """Batches of sound [rows, length], rows of different lengths, with one label per row or none."""

    def make(model: nn.Module, rows: int) -> Batch:
        mask = (torch.arange(length) < (length - 40 * (torch.arange(rows) % 3))[:, None]).long()
        batch: Batch = {"input_values": floats_of(model, rows, length), "attention_mask": mask}
        return batch | {"labels": classes_of(rows)} if labels == "class" else batch

    return make
