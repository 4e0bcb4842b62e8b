"""Small training runs under `Trainer` and `L2LTrainer`, and what of them is compared."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn

from hf_l2l import L2LConfig, L2LTrainer, L2LTrainingArguments, attach_l2l
from models import VOCAB, batch_for, bert

# transformers 5.23 renamed the option.
CHECKPOINTING = (
    "activation_checkpointing"
    if "activation_checkpointing" in hf.TrainingArguments.__dataclass_fields__
    else "gradient_checkpointing"
)
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss")


def settled_memory() -> int:
    """What the device holds once models that are gone are collected and the device's thread has let go of them."""
    readings: list[int] = []
    for _ in range(10):
        gc.collect()
        readings.append(int(torch.accelerator.memory_allocated()))
        if readings[-3:].count(readings[-1]) == 3:
            break
        time.sleep(0.02)
    return readings[-1]


def tiny_bert(dropout: float = 0.1, layers: int = 4, width: int = 16) -> nn.Module:
    """A BERT whose weights are the same at every call."""
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": width * 3 // 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return bert(dropout, **sizes, max_position_embeddings=16)


def rows(count: int = 48) -> list[dict[str, Any]]:
    """Labelled token rows of one length, some of them masked."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(5, VOCAB, (count, 8), generator=generator).tolist()
    return [
        {"input_ids": row, "attention_mask": [1] * (8 - i % 3) + [0] * (i % 3), "labels": int(row[0] > VOCAB // 2)}
        for i, row in enumerate(ids)
    ]


def arguments(kind: type[hf.TrainingArguments], folder: Path, **options: Any) -> hf.TrainingArguments:
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "max_grad_norm": 1.0,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return kind(**{**defaults, **options})


def trainer(kind: type[hf.Trainer], folder: Path, *, model: nn.Module | None = None, **options: Any) -> hf.Trainer:
    """A trainer over `rows`; keyword arguments go to the training arguments, or to the trainer where it has them."""
    known = ("callbacks", "optimizers", "optimizer_cls_and_kwargs", "model_init", "compute_metrics")
    of_trainer = {k: options.pop(k) for k in known if k in options}
    if issubclass(kind, L2LTrainer):
        args = arguments(
            L2LTrainingArguments, folder, **{"device_memory_budget": "off", "l2l_check_recompute": "off", **options}
        )
    else:
        args = arguments(hf.TrainingArguments, folder, **options)
    if "model_init" not in of_trainer:
        of_trainer["model"] = tiny_bert() if model is None else model
    made = kind(args=args, train_dataset=rows(), eval_dataset=rows(16), **of_trainer)
    # Trainer takes this model's loss for one that is scaled already, and makes it too large by the number of batches.
    made.loss_is_scaled_for_ga = False
    return made


def plain_trainer(folder: Path, **options: Any) -> hf.Trainer:
    """The baseline: transformers' own Trainer with activation checkpointing."""
    return trainer(hf.Trainer, folder, **{CHECKPOINTING: True}, **options)


def l2l_trainer(folder: Path, **options: Any) -> L2LTrainer:
    made = trainer(L2LTrainer, folder, **options)
    assert isinstance(made, L2LTrainer)
    return made


def logs(of: hf.Trainer) -> list[dict[str, float]]:
    return [{k: v for k, v in entry.items() if k in LOGGED} for entry in of.state.log_history]


def left_in(folder: Path) -> list[str]:
    """The names in the `output_dir` of a training, but for the file of its run."""
    return sorted(path.name for path in folder.iterdir() if path.name != "l2l_run.jsonl")


def measured(folder: Path) -> list[dict[str, Any]]:
    """What the log lines of a training said of the machine, as its file tells."""
    found = [json.loads(line) for line in (folder / "l2l_run.jsonl").read_text().splitlines()]
    return [row for row in found if "memory" not in row]


def trained_batches(of: hf.Trainer) -> list[Any]:
    """Collects the batches that are trained on from now on."""
    seen: list[Any] = []
    get_batch_samples = of.get_batch_samples

    def noting(*args: Any, **kwargs: Any) -> Any:
        found = get_batch_samples(*args, **kwargs)
        seen.extend(found[0])
        return found

    of.get_batch_samples = noting
    return seen


def inner_optimizer(of: hf.Trainer) -> torch.optim.Optimizer:
    return getattr(of.optimizer, "optimizer", of.optimizer)


SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine"}


def on(event: str, call: Callable[..., object]) -> hf.TrainerCallback:
    """A callback that does something at one event, with what transformers passes."""

    def at_event(*passed: Any, **more: Any) -> None:
        call(*passed, **more)

    made = hf.TrainerCallback()
    setattr(made, event, at_event)
    return made


class StopAt(hf.TrainerCallback):
    """Ends the training after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def stopped_at_two(make: Callable[..., hf.Trainer], folder: Path, **options: Any) -> str:
    """A run that stops after two steps of `SAVING`; returns the folder of its checkpoint."""
    made = make(folder, **{**SAVING, **options})
    made.add_callback(StopAt(2))
    made.train()
    assert made.state.global_step == 2
    return str(folder / "checkpoint-2")


def weights_after(
    model: nn.Module, count: int = 3, accumulation: int = 1, clips: bool = True, **options: Any
) -> dict[str, torch.Tensor]:
    """The weights after some steps of AdamW on the simulated accelerator, with dropout."""
    eps = attach_l2l(model, L2LConfig(**{"device": "sim", **options}))
    torch.manual_seed(11)
    torch.sim.manual_seed(11)
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    batch = batch_for(model)
    model.train()
    for _ in range(count):
        for turn in range(accumulation):
            with eps.accumulate() if turn < accumulation - 1 else nullcontext():
                (model(**batch).loss / accumulation).backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters()}
