"""A backward is known from its first node to its end, or to its failure; and one thread at a time runs a model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l.runtime.backward_callbacks import Backwards, End, HookErrors
from memory_switches import forced_copies
from models import assert_same_bits, attached, batch_for, bert, gradients, train_once
from other_thread import REFUSAL, in_another_thread


class Heard:
    """What an engine is told."""

    def __init__(self) -> None:
        self.backwards = Backwards()
        self.heard: list[str] = []
        self.backwards.call(at_end=self.end, at_failure=self.failure)

    def end(self) -> None:
        self.heard.append("end")

    def failure(self) -> None:
        self.heard.append("failure")


class Node(torch.autograd.Function):
    """Takes part in its backward, and does something in it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backwards: Backwards, work: Any) -> torch.Tensor:
        ctx.backwards, ctx.work = backwards, work
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        with ctx.backwards.joined():
            ctx.work()
        return gradient, None, None


def nothing() -> None:
    pass


def fail() -> None:
    raise KeyError("in a node")


def run(*nodes: tuple[Backwards, Any]) -> None:
    """One backward through these nodes, the last one first."""
    x = torch.ones(2, requires_grad=True)
    for backwards, work in nodes:
        x = Node.apply(x, backwards, work)
    x.sum().backward()


def test_the_end_is_told_once_and_failures_are_told_to_all():
    of, other = Heard(), Heard()
    run(*[(of.backwards, lambda: of.heard.append("node"))] * 3)
    assert of.heard == ["node", "node", "node", "end"]
    del of.heard[:]
    with pytest.raises(KeyError):
        run((other.backwards, fail), (of.backwards, nothing))
    assert of.heard == other.heard == ["failure"], "before the caller knows"
    run((of.backwards, nothing))
    assert of.heard == ["failure", "end"]


def test_it_keeps_no_object_alive():
    backwards, heard = Backwards(), []
    gone = Heard()
    gone.heard = heard
    backwards.call(at_end=gone.end, at_failure=gone.failure)
    del gone
    run((backwards, nothing))
    assert heard == []


@pytest.mark.parametrize("kinds", [(ValueError, KeyError), (KeyError, KeyboardInterrupt, SystemExit)])
def test_the_first_error_of_hooks_is_raised_once_and_an_interrupt_before_errors(kinds):
    errors = HookErrors()
    for kind in kinds:
        with errors:
            raise kind
    with pytest.raises(next((kind for kind in kinds if not issubclass(kind, Exception)), kinds[0])):
        errors.raise_first()
    errors.raise_first()


class Interrupted(Heard):
    def end(self) -> None:
        super().end()
        raise KeyboardInterrupt


def test_an_interrupt_in_a_callback_ends_the_backward_when_all_have_been_called():
    backwards, first, second = Backwards(), Interrupted(), Heard()
    backwards.call(at_end=first.end, at_failure=first.failure)
    backwards.call(at_end=second.end, at_failure=second.failure)
    with pytest.raises(KeyboardInterrupt):
        run((backwards, nothing))
    assert first.heard == second.heard == ["end"]
    backwards.errors.raise_first()


def test_what_is_over_is_dropped_without_any_code():
    """A Ctrl-C that came during a backward is raised in the first Python code after it; a destructor swallows it."""
    end = End(Backwards(), 1)
    assert weakref.getweakrefcount(end) == 1, "of who is told when it is dropped"
    end()
    assert weakref.getweakrefcount(end) == 0 and not hasattr(type(end), "__del__")


# ---- one thread at a time


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


def test_a_call_from_another_thread_is_refused_and_threads_may_take_turns():
    model = attached(bert())
    batch = batch_for(model)
    train_once(model, batch)
    expected = gradients(model)
    layers = model.bert.encoder.layer
    for inside in (model.bert.embeddings, layers[0].output):
        for work in (lambda: model(**batch), lambda: layers[1](torch.randn(2, 4, 16))):
            model.zero_grad()
            [error] = call_inside(model, inside, work)
            assert REFUSAL in str(error)
            assert_same_bits(gradients(model), expected)
    model.zero_grad()
    assert in_another_thread(lambda: train_once(model, batch)) == []
    assert_same_bits(gradients(model), expected)


def test_a_backward_in_another_thread_is_refused_while_a_layer_runs():
    model = attached(bert())
    loss = model.train()(**batch_for(model)).loss
    with forced_copies():
        [error] = call_inside(model, model.bert.encoder.layer[0].output, loss.backward)
    assert REFUSAL in str(error)
