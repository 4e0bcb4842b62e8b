"""Trainings of twelve steps that are resumed at any of them, and what of their ends is compared."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from torch.utils.data import Dataset, IterableDataset

from hf_l2l import L2LTrainer
from models import VOCAB
from training import inner_optimizer, rows, tiny_bert, trainer

STEPS = 12
# Of the last batch of an epoch, rows are missing. What is timed is no part of a run.
COUNT = 44
RUN: dict[str, Any] = {
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": 1,
    "logging_steps": 1,
    "per_device_train_batch_size": 8,
    "lr_scheduler_type": "cosine",
    "l2l_log_times": False,
}
TIMED = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")


def drawn() -> int:
    """A number of all three generators that programs share."""
    return int(torch.randint(1000, ()).item()) + int(np.random.randint(1000)) + random.randrange(1000)


def changed(row: dict[str, Any]) -> dict[str, Any]:
    """The row with another token in a random place."""
    ids = list(row["input_ids"])
    ids[drawn() % len(ids)] = 5 + drawn() % (VOCAB - 5)
    return {**row, "input_ids": ids}


class Augmented(Dataset):  # type: ignore[type-arg]
    """Rows that are changed at random whenever they are read; of a language model, every token is a label."""

    def __init__(self, causal: bool = False) -> None:
        self.rows = [{**row, "labels": row["input_ids"]} if causal else row for row in rows(COUNT)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return changed(self.rows[index])


class Streamed(IterableDataset):  # type: ignore[type-arg]
    """Rows without a length, changed at random."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (changed(row) for row in rows(COUNT))


class MaskingCollator(hf.DefaultDataCollator):
    """Changes a token of each batch at random."""

    def __call__(self, features: list[dict[str, Any]], return_tensors: str | None = None) -> dict[str, Any]:
        return super().__call__([changed(features[0]), *features[1:]], return_tensors)


class Recorded:
    """A trainer whose batches are noted."""

    def __init__(self, made: hf.Trainer) -> None:
        self.made = made
        self.batches: list[list[list[int]]] = []
        get_batch_samples = made.get_batch_samples

        def noting(*args: Any, **kwargs: Any) -> Any:
            found = get_batch_samples(*args, **kwargs)
            self.batches += [batch["input_ids"].tolist() for batch in found[0]]
            return found

        made.get_batch_samples = noting


def recorded(
    folder: Path,
    kind: type[hf.Trainer] = L2LTrainer,
    *,
    data: Any = None,
    model: Any = None,
    collator: Any = None,
    **options: Any,
) -> Recorded:
    """A trainer over random changes of rows, by default with dropout."""
    options = {**RUN, **options}
    if not issubclass(kind, L2LTrainer):
        options = {name: value for name, value in options.items() if not name.startswith("l2l_")}
    built = tiny_bert(layers=2) if model is None else model()
    made = trainer(kind, folder, model=built, **options)
    made.train_dataset = Augmented() if data is None else data()
    made.data_collator = MaskingCollator() if collator is None else collator()
    if not isinstance(built, hf.BertForSequenceClassification):
        made.loss_is_scaled_for_ga = None  # of a language model it is; that of the classifier is a mean
    return Recorded(made)


def state_of(checkpoint: Path) -> dict[str, Any]:
    """`trainer_state.json` without the seconds that evaluations took, and without what the resuming was asked for."""
    written = json.loads((checkpoint / "trainer_state.json").read_text())
    history = [{k: str(v) for k, v in e.items() if k not in TIMED} for e in written["log_history"]]
    without = ("best_model_checkpoint", "save_steps")
    return {k: v for k, v in written.items() if k not in without} | {"log_history": history}


def moments_of(of: hf.Trainer) -> dict[str, torch.Tensor]:
    """State of the optimizer by the names of parameters."""
    state = inner_optimizer(of).state
    names = {p: name for name, p in of.model.named_parameters()}
    return {f"{names[p]}.{key}": torch.as_tensor(v) for p, of_p in state.items() for key, v in of_p.items()}


def assert_equal_content(found: Any, expected: Any, where: str = "") -> None:
    """The same keys, numbers, dtypes and bits."""
    assert type(found) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected), where
    elif isinstance(expected, np.ndarray):
        assert np.array_equal(found, expected), where
    elif isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            assert_equal_content(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for number, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_equal_content(a, b, f"{where}.{number}")
    else:
        assert found == expected, where


def loaded(file: Path) -> Any:
    """The content of one of torch's files."""
    from transformers.trainer_pt_utils import safe_globals

    with safe_globals():
        return torch.load(file, weights_only=True)


def assert_same_checkpoint(found: Path, expected: Path) -> None:
    """All that is saved is the same: weights, moments, scheduler, loss scale, generators, state of the training."""
    names = sorted(path.name for path in expected.iterdir())
    assert sorted(path.name for path in found.iterdir()) == names
    assert (found / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    for name in names:
        if name.endswith((".pt", ".pth")):
            assert_equal_content(loaded(found / name), loaded(expected / name), name)
    assert state_of(found) == state_of(expected)


def assert_resumes_at(whole: Recorded, at: int, folder: Path, **options: Any) -> Recorded:
    """A training that is resumed at a step of `whole`, which is over, ends as that did. The resumed one, over."""
    source = Path(whole.made.args.output_dir)
    again = recorded(folder, **{"save_steps": STEPS, **options})
    drawn()  # what a program draws before it trains is something else each time
    again.made.train(resume_from_checkpoint=str(source / f"checkpoint-{at}"))
    assert again.made.state.global_step == STEPS
    assert again.batches == whole.batches[len(whole.batches) - len(again.batches) :]
    assert_equal_content(moments_of(again.made), moments_of(whole.made))
    assert_same_checkpoint(folder / f"checkpoint-{STEPS}", source / f"checkpoint-{STEPS}")
    return again
