"""One thread at a time: another one is refused, and the first goes on as if nothing had been."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memory_switches import forced_copies
from models import attached, batch_for, bert, gradients, train_once
from other_thread import REFUSAL, in_another_thread


def call_inside(model: nn.Module, module: nn.Module, work: Callable[[], object]) -> list[BaseException]:
    """Train `model` once; while it is inside `module`, `work` runs in another thread."""
    raised: list[BaseException] = []
    done = []

    def hook(*args: Any) -> None:
        if not done:
            done.append(True)
            raised.extend(in_another_thread(work))

    with module.register_forward_pre_hook(hook):
        train_once(model, batch_for(model))
    assert done
    return raised


@pytest.mark.parametrize("where", ["embeddings", "a layer"])
def test_a_call_from_another_thread_is_refused(where):
    model = attached(bert())
    train_once(model, batch_for(model))
    expected = gradients(model)
    model.zero_grad()
    inside = model.bert.embeddings if where == "embeddings" else model.bert.encoder.layer[0].output
    for work in (lambda: model(**batch_for(model)), lambda: model.bert.encoder.layer[1](torch.randn(2, 4, 16))):
        [error] = call_inside(model, inside, work)
        assert REFUSAL in str(error)
        for name, gradient in gradients(model).items():
            assert torch.equal(gradient, expected[name]), name
        model.zero_grad()


def test_a_backward_in_another_thread_is_refused_while_a_layer_runs():
    model = attached(bert())
    loss = model.train()(**batch_for(model)).loss
    with forced_copies():
        [error] = call_inside(model, model.bert.encoder.layer[0].output, loss.backward)
    assert REFUSAL in str(error)


def test_threads_may_take_turns():
    model = attached(bert())
    batch = batch_for(model)
    train_once(model, batch)
    expected = gradients(model)
    model.zero_grad()
    assert in_another_thread(lambda: train_once(model, batch)) == []
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, expected[name]), name


def test_two_models_in_two_threads():
    plain = bert()
    models = [attached(copy.deepcopy(plain)) for _ in range(2)]
    assert call_inside(models[0], models[0].bert.embeddings, lambda: train_once(models[1], batch_for(models[1]))) == []
    for name, gradient in gradients(models[0]).items():
        assert torch.equal(gradient, gradients(models[1])[name]), name


def test_a_model_goes_on_after_an_error_in_another_thread():
    model = attached(bert())
    raised = in_another_thread(lambda: model(input_ids=torch.zeros(2, 3)))  # indices must be whole numbers
    assert len(raised) == 1 and REFUSAL not in str(raised[0])
    train_once(model, batch_for(model))
