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
from hf_l2l.hf.attach import attachment_of
from models import bert, gradients, llama
from training import CHECKPOINTING, arguments, assert_same_run, inner_optimizer, rows, tiny_bert


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


CHANGES = {"grow": grow, "drop": drop, "swap": swap}


class Changing(hf.TrainerCallback):
    """Changes the layers after the second step."""

    def __init__(self, change):
        self.change = change

    def on_step_end(self, args, state, control, model, optimizer, **kwargs):
        if state.global_step == 2:
            self.change(model, getattr(optimizer, "optimizer", optimizer))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("options", [{}, {"eps_update": "deferred", "stash": "host"}, {"cmp": "bf16"}])
def test_a_callback_changes_the_layers(tmp_path, change, options):
    def trained(kind, args_kind, folder, **more):
        args = arguments(args_kind, tmp_path / folder, max_steps=5, **more)
        callbacks = [Changing(CHANGES[change])]
        made = kind(tiny_bert(dropout=0), args, train_dataset=rows(), callbacks=callbacks)
        made.train()
        return made

    found = trained(L2LTrainer, L2LTrainingArguments, "l2l", **options)
    layers = found.model.bert.encoder.layer
    assert len(layers) == {"grow": 8, "drop": 3, "swap": 4}[change]
    attached = attachment_of(found.model)
    assert {layer for stack in attached.stacks for layer in stack.layers} >= set(layers)
    steps = [inner_optimizer(found).state[p]["step"] for p in layers[0].parameters()]
    assert set(map(float, steps)) == {5.0}
    if "cmp" not in options:
        expected = trained(hf.Trainer, hf.TrainingArguments, "plain", **{CHECKPOINTING: True})
        assert_same_run(found, expected)


def test_companions_stay_attached(tmp_path):
    made = L2LTrainer(
        tiny_bert(), arguments(L2LTrainingArguments, tmp_path), train_dataset=rows(), callbacks=[Changing(grow)]
    )
    reference = made.accelerator.prepare_model(tiny_bert(), evaluation_mode=True)
    made.train()
    assert attachment_of(reference) is not None
    detach_l2l(made.model)
    assert attachment_of(reference) is None


@pytest.mark.parametrize("change", CHANGES)
def test_in_any_other_loop_the_model_is_attached_again(change):
    torch.manual_seed(0)
    model = bert()
    plain = copy.deepcopy(model)
    ids = torch.randint(5, 60, (4, 6))
    batch = {"input_ids": ids, "labels": ids[:, 0] % 2}

    def step(each, optimizer):
        each(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    attach_l2l(model).wrap(optimizer)
    step(plain, plain_optimizer)
    step(model, optimizer)
    CHANGES[change](plain, plain_optimizer)
    detach_l2l(model)
    CHANGES[change](model, optimizer)
    attach_l2l(model).wrap(optimizer)
    for _ in range(2):
        step(plain, plain_optimizer)
        step(model, optimizer)
    model(**batch).loss.backward()
    plain(**batch).loss.backward()
    for (name, gradient), other in zip(gradients(model).items(), gradients(plain).values(), strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("grad", [True, False])
def test_layers_that_are_added_while_attached_are_told_of(grad):
    model = bert()
    optimizer = torch.optim.SGD(model.parameters())
    attach_l2l(model, L2LConfig(ubatch_size=2))
    grow(model, optimizer)
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="added or replaced at 'bert.encoder.layer'"):
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


def test_the_example_of_the_documentation(tmp_path, documented):
    args = arguments(L2LTrainingArguments, tmp_path, max_steps=4)
    made = L2LTrainer(tiny_bert(), args, train_dataset=rows(), callbacks=[documented()])
    made.train()
    layers = made.model.bert.encoder.layer
    assert len(layers) == 8
    state = inner_optimizer(made).state
    assert {float(state[p]["step"]) for p in layers[0].parameters()} == {4.0}
    assert {float(state[p]["step"]) for p in layers[-1].parameters()} == {2.0}
    made.save_model(str(tmp_path / "saved"))
    loaded = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert len(loaded.bert.encoder.layer) == 8
    expected = made.model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert [name for name, value in loaded.state_dict().items() if not torch.equal(value, expected[name])] == []


def test_layers_of_a_decoder_that_know_their_place_generate():
    """As the documentation has it: each new layer gets its own place in the cache."""
    model = llama()
    layers = model.model.layers
    layers.extend([copy.deepcopy(layer) for layer in layers])
    model.config.num_hidden_layers = len(layers)
    for i, layer in enumerate(layers):
        layer.self_attn.layer_idx = i
    words = {"input_ids": torch.randint(5, 60, (2, 4)), "do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4}
    without = model.generate(**words, use_cache=False)
    assert torch.equal(model.generate(**words), without)
    attach_l2l(model, L2LConfig(ubatch_size=1))
    assert torch.equal(model.generate(**words), without)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ordered", [True, False])
def test_a_checkpoint_of_a_grown_model_resumes_with_the_order_of_its_optimizer(tmp_path, documented, ordered):
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 3}
    whole = L2LTrainer(
        tiny_bert(dropout=0),
        arguments(L2LTrainingArguments, tmp_path, **saving),
        train_dataset=rows(),
        callbacks=[documented()],
    )
    whole.train()
    folder = str(tmp_path / "checkpoint-3")
    grown = hf.AutoModelForSequenceClassification.from_pretrained(folder, dtype="float32")
    args = arguments(L2LTrainingArguments, tmp_path, **saving)
    if not ordered:
        with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
            L2LTrainer(grown, args, train_dataset=rows()).train(resume_from_checkpoint=folder)
        return
    names, own = {p: name for name, p in whole.model.named_parameters()}, dict(grown.named_parameters())
    groups = inner_optimizer(whole).param_groups
    optimizer = torch.optim.AdamW([{**group, "params": [own[names[p]] for p in group["params"]]} for group in groups])
    L2LTrainer(grown, args, train_dataset=rows(), optimizers=(optimizer, None)).train(resume_from_checkpoint=folder)
    assert [name for p, name in names.items() if not torch.equal(own[name], p)] == []
