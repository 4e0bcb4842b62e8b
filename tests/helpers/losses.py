"""A trainer whose loss is a module with parameters of its own, as in sentence-transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn

from models import SMALL
from training import arguments, rows


class Embedding(nn.Module):
    """A model with BERT inside, called once per sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = hf.BertModel(
            hf.BertConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), add_pooling_layer=False
        )

    def forward(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.bert(**features).last_hidden_state.mean(1)


class Classifying(nn.Module):
    """The loss: a classifier over two embeddings and their difference."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.classifier = nn.Linear(3 * SMALL["hidden_size"], 2)

    def forward(self, features: list[dict[str, torch.Tensor]], labels: torch.Tensor) -> torch.Tensor:
        one, two = (self.model(each) for each in features)
        return nn.functional.cross_entropy(self.classifier(torch.cat([one, two, (one - two).abs()], 1)), labels)


class _ClearAll(hf.TrainerCallback):
    """Clears the gradients that `model.zero_grad()` does not reach."""

    def on_step_end(self, *args: Any, optimizer: torch.optim.Optimizer, **kwargs: Any) -> None:
        optimizer.zero_grad()


class Embedder(hf.Trainer):
    """Computes the loss of pairs, and makes its optimizer over the parameters of the loss."""

    def __init__(self, *args: Any, loss: nn.Module | dict[str, nn.Module], **kwargs: Any) -> None:
        super().__init__(*args, callbacks=[_ClearAll()], **kwargs)
        self.loss = self.prepare_loss(loss)

    def prepare_loss(self, loss: Any) -> Any:
        for each in loss.values() if isinstance(loss, dict) else [loss]:
            each.to(next(self.model.parameters()).device)
        return loss

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        if self.optimizer is None:
            losses = self.loss.values() if isinstance(self.loss, dict) else [self.loss]
            held = dict.fromkeys(p for loss in losses for p in loss.parameters())
            self.optimizer = torch.optim.AdamW(held, lr=self.args.learning_rate)
        return super().create_optimizer(*args, **kwargs)

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        labels = inputs.pop("labels")
        other = {name: tensor.flip(0) for name, tensor in inputs.items()}
        losses = self.loss.values() if isinstance(self.loss, dict) else [self.loss]
        return sum(loss([inputs, other], labels) for loss in losses)


def embedded(
    kind: type[hf.Trainer],
    arguments_kind: type[hf.TrainingArguments],
    folder: Path,
    several: bool = False,
    **more: Any,
) -> hf.Trainer:
    """A trained trainer, of a model and a loss (or two) that are the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Embedding()
        losses = {name: Classifying(model) for name in ("one", "two")}
    made = kind(
        model,
        arguments(arguments_kind, folder, remove_unused_columns=False, **more),
        train_dataset=rows(),
        loss=losses if several else losses["one"],
    )
    made.train()
    return made


def weights_with_loss(trained: hf.Trainer) -> dict[str, torch.Tensor]:
    losses = trained.loss.values() if isinstance(trained.loss, dict) else [trained.loss]
    found = [each.state_dict() for each in losses]
    return {f"{n}.{name}": copy.deepcopy(t).cpu() for n, state in enumerate(found) for name, t in state.items()}
