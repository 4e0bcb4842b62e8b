"""Layers that are added, dropped or swapped between steps: training goes on with the state of those that stay."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from hf_l2l import L2LConfig, L2LTrainer, L2LTrainingArguments, attach_l2l, detach_l2l
from models import bert
from plain import assert_as_plain, is_attached, small_bert
from tiers import cpu_suffices
from training import CHECKPOINTING, arguments, inner_optimizer, l2l_trainer, rows, trainer


def grow(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Stack the layers on themselves; the new ones train in the first group of the optimizer."""
    layers = model.bert.encoder.layer
    layers.extend([copy.deepcopy(layer) for layer in layers])
    new = [p for layer in layers[len(layers) // 2 :] for p in layer.parameters()]
    optimizer.param_groups[0]["params"].extend(new)


def drop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    layers = model.bert.encoder.layer
    gone = {*layers[0].parameters()}
    del layers[0]
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p not in gone]
    for p in gone:
        p.detach()  # waits for its update, which writes its state
        optimizer.state.pop(p, None)


def swap(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    layers = model.bert.encoder.layer
    layers[0], layers[1] = layers[1], layers[0]


CHANGES = {"grow": (grow, 6), "drop": (drop, 2), "swap": (swap, 3)}
"""What is done to three layers, and how many there are then."""


class Changing(hf.TrainerCallback):
    """Changes the layers after the second step."""

    def __init__(self, change):
        self.change = change

    def on_step_end(self, args, state, control, model, optimizer, **kwargs):
        if state.global_step == 2:
            self.change(model, getattr(optimizer, "optimizer", optimizer))


CASES = [("grow", {}), ("drop", {"eps_update": "deferred", "stash": "host"}), ("swap", {})]


@cpu_suffices
@pytest.mark.parametrize(("change", "options"), CASES, ids=str)
def test_a_callback_changes_the_layers(tmp_path, device, change, options):
    """Models that are attached beside the trained one stay so."""
    changed, count = CHANGES[change]

    def trained(kind, **more):
        made = trainer(
            kind, tmp_path / kind.__name__, model=small_bert(dropout=0, layers=3), max_steps=4,
            callbacks=[Changing(changed)], **more,
        )  # fmt: skip
        reference = made.accelerator.prepare_model(small_bert(layers=1), evaluation_mode=True)
        made.train()
        return made, reference

    found, reference = trained(L2LTrainer, **options)
    layers = found.model.bert.encoder.layer
    assert len(layers) == count and all(map(is_attached, layers))
    steps = [inner_optimizer(found).state[p]["step"] for p in layers[0].parameters()]
    assert set(map(float, steps)) == {4.0}
    assert_as_plain(found, trained(hf.Trainer, **{CHECKPOINTING: True})[0])
    assert is_attached(reference)
    detach_l2l(found.model)
    assert not is_attached(reference)


def test_layers_that_are_added_while_attached_are_told_of():
    model = bert()
    attach_l2l(model, L2LConfig(ubatch_size=2))
    grow(model, torch.optim.SGD(model.parameters()))
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="at 'bert.encoder.layer'"):
            model(input_ids=torch.ones(2, 4, dtype=torch.long))
    detach_l2l(model)
    model(input_ids=torch.ones(2, 4, dtype=torch.long))


@pytest.fixture
def documented() -> type[hf.TrainerCallback]:
    """The callback in the documentation."""
    page = (Path(__file__).parents[2] / "docs" / "changing_layers.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["Grow"]


@cpu_suffices
def test_the_example_of_the_documentation_is_saved_and_resumed(tmp_path, documented):
    """From a checkpoint of the grown model, with the order of its optimizer."""
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 3}
    made = l2l_trainer(tmp_path, model=small_bert(dropout=0), callbacks=[documented()], **saving)
    made.train()
    layers = made.model.bert.encoder.layer
    assert len(layers) == 4
    state = inner_optimizer(made).state
    assert {float(state[p]["step"]) for p in layers[0].parameters()} == {4.0}
    assert {float(state[p]["step"]) for p in layers[-1].parameters()} == {2.0}
    made.save_model(str(tmp_path / "saved"))
    loaded = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").state_dict()
    expected = made.model.state_dict()
    assert loaded.keys() == expected.keys()
    assert [name for name, value in loaded.items() if not torch.equal(value, expected[name])] == []

    folder = str(tmp_path / "checkpoint-3")
    args = arguments(L2LTrainingArguments, tmp_path, **saving)
    grown = hf.AutoModelForSequenceClassification.from_pretrained(folder, dtype="float32")
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        L2LTrainer(copy.deepcopy(grown), args, train_dataset=rows()).train(resume_from_checkpoint=folder)
    names, own = {p: name for name, p in made.model.named_parameters()}, dict(grown.named_parameters())
    groups = inner_optimizer(made).param_groups
    optimizer = torch.optim.AdamW([{**group, "params": [own[names[p]] for p in group["params"]]} for group in groups])
    L2LTrainer(grown, args, train_dataset=rows(), optimizers=(optimizer, None)).train(resume_from_checkpoint=folder)
    assert [name for p, name in names.items() if not torch.equal(own[name], p)] == []
