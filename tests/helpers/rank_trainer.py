"""A training of a Trainer in each rank of a launcher, or in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.utils.data import Dataset

from families import TOKENS, VOCAB, bert, llama
from hf_l2l import L2LTrainer, L2LTrainingArguments, detach_l2l
from rank_pool import digest


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of random tokens."""

    def __init__(self, count: int, labels: str) -> None:
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(5, VOCAB, (count, TOKENS), generator=generator)
        self.labels = torch.randint(0, 2, (count,), generator=generator) if labels == "classes" else self.ids.clone()
        if labels == "tokens":
            self.labels[::3, 3:] = -100  # rows with fewer tokens, so that batches of ranks have unequal numbers

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[place], "labels": self.labels[place]}


MODELS: dict[str, tuple[Any, str]] = {
    "bert": (bert, "classes"),
    "dropout": (lambda: bert(0.2), "classes"),
    "llama": (llama, "tokens"),
}


def arguments(folder: str, options: dict[str, Any], *, layered: bool) -> Any:
    """Training arguments for a few steps on the CPU."""
    usual = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    kind = L2LTrainingArguments if layered else hf.TrainingArguments
    return kind(output_dir=folder, **{**usual, **options})


def trained(
    name: str, kind: str, folder: str, options: dict[str, Any], rows: int = 70, checkpoint: str | bool | None = None
) -> dict[str, Any]:
    """Train, evaluate, predict; losses, norms and metrics as numbers, weights and state as digests.

    Args:
        name: the model.
        kind: "l2l", or "hf" for transformers' Trainer.
        folder: of the training.
        options: training arguments.
        rows: of the data.
        checkpoint: what to resume from.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(0)
    make, labels = MODELS[name]
    model: nn.Module = make()
    args = arguments(folder, options, layered=kind == "l2l")
    trainer_type = L2LTrainer if kind == "l2l" else hf.Trainer
    trainer = trainer_type(model=model, args=args, train_dataset=Rows(rows, labels), eval_dataset=Rows(13, labels))
    trainer.train(resume_from_checkpoint=checkpoint)
    metrics = trainer.evaluate()
    predictions = trainer.predict(Rows(13, labels)).predictions
    history = trainer.state.log_history
    state = trainer.optimizer.state_dict()["state"]
    found = {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "norms": [float(entry["grad_norm"]) for entry in history if "grad_norm" in entry],
        "logs": sorted({key for entry in history for key in entry if key.startswith("l2l_")}),
        "eval_loss": metrics["eval_loss"],
        "predictions": digest(torch.from_numpy(predictions[0] if isinstance(predictions, tuple) else predictions)),
        "weights": digest(*model.parameters()),
        "values": [p.detach().double().sum().item() for p in model.parameters()],
        "state": digest(*(each[key] for _, each in sorted(state.items()) for key in sorted(each))),
        "step": trainer.state.global_step,
        "best": trainer.state.best_model_checkpoint,
        "wrapped": type(trainer.model_wrapped).__name__,
        "checkpoints": sorted(path.name for path in Path(folder).glob("checkpoint-*")),
    }
    if kind == "l2l":
        detach_l2l(model)
    PartialState._reset_state()
    return found
