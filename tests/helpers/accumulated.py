"""Trainings of causal language models on rows of unequal lengths, with accumulated batches."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn

from hf_l2l import L2LTrainer, L2LTrainingArguments
from models import SMALL, VOCAB
from training import arguments

PAD = 0


def tiny_llama(layers: int = 2, **config: Any) -> nn.Module:
    """A Llama whose weights are the same at every call."""
    known = {"num_hidden_layers": layers, "num_key_value_heads": 1, "max_position_embeddings": 32, "pad_token_id": PAD}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return hf.LlamaForCausalLM(hf.LlamaConfig(**{**SMALL, **known, **config}))


def ragged(count: int = 48, longest: int = 9, shortest: int = 3) -> list[dict[str, Any]]:
    """Token rows of unequal lengths, each with its own number of labels that count."""
    generator = torch.Generator().manual_seed(5)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    rows = []
    for _ in range(count):
        ids = torch.randint(1, VOCAB, (number(shortest, longest),), generator=generator).tolist()
        ignored = number(0, len(ids) - 2)
        rows.append({"input_ids": ids, "labels": [-100] * ignored + ids[ignored:]})
    return rows


def padded(rows: list[dict[str, Any]], side: str = "right") -> dict[str, torch.Tensor]:
    """A batch of `ragged` rows, as long as its longest row."""
    width = max(len(row["input_ids"]) for row in rows)

    def filled(values: list[int], by: int) -> list[int]:
        padding = [by] * (width - len(values))
        return values + padding if side == "right" else padding + values

    return {
        "input_ids": torch.tensor([filled(row["input_ids"], PAD) for row in rows]),
        "attention_mask": torch.tensor([filled([1] * len(row["input_ids"]), 0) for row in rows]),
        "labels": torch.tensor([filled(row["labels"], -100) for row in rows]),
    }


def made(
    folder: Path,
    *,
    kind: type[hf.Trainer] = L2LTrainer,
    model: nn.Module | None = None,
    data: list[dict[str, Any]] | None = None,
    of_trainer: dict[str, Any] | None = None,
    **options: Any,
) -> hf.Trainer:
    """A trainer that accumulates 4 batches of 2 rows; options are training arguments."""
    arguments_of = L2LTrainingArguments if issubclass(kind, L2LTrainer) else hf.TrainingArguments
    known = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 3}
    args = arguments(arguments_of, folder, **{**known, **options})
    others = {"train_dataset": ragged() if data is None else data, "data_collator": padded, **(of_trainer or {})}
    return kind(model=tiny_llama() if model is None else model, args=args, **others)


def train(trainer: hf.Trainer, *args: Any) -> list[str]:
    """Train; returns what the warnings say."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.train(*args)
    return [str(w.message) for w in said]


def forwards(trainer: hf.Trainer) -> list[int]:
    """Collects the rows of every forward of the model in grad mode and training mode."""
    seen: list[int] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            seen.append(len(kwargs["input_ids"]))

    trainer.model.register_forward_pre_hook(note, with_kwargs=True)
    return seen
