"""A training that is finished, resumed once more: it says so, and no weight changes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from training import inner_optimizer, l2l_trainer, rows, tiny_bert

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*moves the weights:UserWarning"),
]

# Six batches an epoch.
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}


class _Events(hf.TrainerCallback):
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.counts["train_begin"] += 1

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.counts["epoch_begin"] += 1

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.counts["step_begin"] += 1

    def on_save(self, *_: Any, **__: Any) -> None:
        self.counts["save"] += 1

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.counts["train_end"] += 1


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    ("first", "then", "steps"),
    [
        ({"max_steps": 4}, {"max_steps": 4}, 4),
        ({"max_steps": 4}, {"max_steps": 2}, 2),
        ({"max_steps": 8}, {"max_steps": 3}, 3),
        ({"max_steps": 6}, {"max_steps": 6}, 6),
        ({"max_steps": -1, "num_train_epochs": 2}, {"max_steps": -1, "num_train_epochs": 2}, 12),
        ({"max_steps": -1, "num_train_epochs": 2}, {"max_steps": -1, "num_train_epochs": 1}, 6),
        ({"max_steps": 3, "gradient_accumulation_steps": 4}, {"max_steps": 3, "gradient_accumulation_steps": 4}, 3),
    ],
    ids=str,
)
def test_no_further_step_is_made(tmp_path, caplog, first, then, steps):
    l2l_trainer(tmp_path, **SAVING, **first).train()
    checkpoint = max(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name.removeprefix("checkpoint-")))
    made = int(checkpoint.name.removeprefix("checkpoint-"))
    events = _Events()
    again = l2l_trainer(tmp_path, model=tiny_bert(), callbacks=[events], **SAVING, **then)
    with caplog.at_level("WARNING", "hf_l2l"):
        result = again.train(resume_from_checkpoint=True)
    warnings = [each for each in caplog.records if each.levelname == "WARNING"]
    assert [each.message for each in warnings if each.name == "hf_l2l" and each.levelname == "WARNING"] == [
        f"the training is finished, and no further step is made: {checkpoint} has made {made} steps of {steps}. Raise "
        "max_steps or num_train_epochs to train on"
    ]
    assert events.counts == {"train_begin": 1, "train_end": 1}
    assert result.global_step == again.state.global_step == made and result.training_loss == 0
    assert "train_runtime" in result.metrics
    saved = load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in again.model.state_dict().items())
    moments = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    found = inner_optimizer(again).state_dict()["state"]
    assert all(torch.equal(found[i]["exp_avg"], state["exp_avg"]) for i, state in moments.items())


class _FirstIsBest(hf.TrainerCallback):
    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        metrics["eval_loss"] = float(state.global_step)


def test_the_best_model_is_loaded_all_the_same(tmp_path):
    options = {**SAVING, "max_steps": 4, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    options |= {"callbacks": [_FirstIsBest()]}
    l2l_trainer(tmp_path, **options).train()
    again = l2l_trainer(tmp_path, model=tiny_bert(), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert again.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    saved = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in again.model.state_dict().items())


def test_with_more_steps_it_trains_on(tmp_path, caplog):
    l2l_trainer(tmp_path, **SAVING, max_steps=4).train()
    with caplog.at_level("WARNING", "hf_l2l"):
        again = l2l_trainer(tmp_path, **SAVING, max_steps=5)
        again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 5 and "finished" not in caplog.text


class _Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(rows())


def test_a_streamed_data_set(tmp_path, caplog):
    """Of which nobody knows how many epochs there are."""
    for _ in range(2):
        made = l2l_trainer(tmp_path, **SAVING, max_steps=4)
        made.train_dataset = _Stream()
        with caplog.at_level("WARNING", "hf_l2l"):
            made.train(resume_from_checkpoint=(tmp_path / "checkpoint-4").exists())
    assert made.state.global_step == 4 and "no further step is made" in caplog.text
