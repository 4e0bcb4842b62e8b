"""A backward is known from its first node to its end, or to its failure; one thread at a time runs a model; and the
recompute runs under the forward's autocast settings, in any thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from hf_l2l.runtime.backward_callbacks import Backwards, End, HookErrors
from hf_l2l.runtime.compute_state import AutocastState
from hf_l2l.runtime.stream import HOST
from memory_switches import forced_copies
from models import assert_same_bits, attached, batch_for, bert, gradients, train_once
from other_thread import REFUSAL, in_another_thread


class Heard:
    """What an engine is told; at the end, it may be interrupted."""

    def __init__(self, backwards: Backwards | None = None, *, is_interrupted: bool = False) -> None:
        self.backwards, self.is_interrupted = backwards or Backwards(), is_interrupted
        self.heard: list[str] = []
        self.backwards.call(at_end=self.end, at_failure=self.failure)

    def end(self) -> None:
        self.heard.append("end")
        if self.is_interrupted:
            raise KeyboardInterrupt

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
    with pytest.raises(ZeroDivisionError):
        run((other.backwards, lambda: 1 / 0), (of.backwards, nothing))
    assert of.heard == other.heard == ["failure"], "before the caller knows"
    run((of.backwards, nothing))
    assert of.heard == ["failure", "end"]


def test_it_keeps_no_object_alive():
    gone = Heard()
    backwards, heard = gone.backwards, gone.heard
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


def test_an_interrupt_in_a_callback_ends_the_backward_when_all_have_been_called():
    first = Heard(is_interrupted=True)
    second = Heard(first.backwards)
    with pytest.raises(KeyboardInterrupt):
        run((first.backwards, nothing))
    assert first.heard == second.heard == ["end"]
    first.backwards.errors.raise_first()


def test_what_is_over_is_dropped_without_any_code():
    """A Ctrl-C that came during a backward is raised in the first Python code after it; a destructor swallows it."""
    end = End(Backwards(), 1)
    assert weakref.getweakrefcount(end) == 1, "of who is told when it is dropped"
    end()
    assert weakref.getweakrefcount(end) == 0 and not hasattr(type(end), "__del__")


def call_inside(model: nn.Module, module: nn.Module, work: Callable[[], object]) -> BaseException:
    """Train `model` once; while it is inside `module`, `work` runs in another thread. The one error of that."""
    raised: list[BaseException] = []

    def hook(*args: Any) -> None:
        handle.remove()
        raised.extend(in_another_thread(work))

    handle = module.register_forward_pre_hook(hook)
    train_once(model, batch_for(model))
    [error] = raised
    return error


def test_a_call_from_another_thread_is_refused_and_threads_may_take_turns():
    model = attached(bert())
    batch = batch_for(model)
    train_once(model, batch)
    expected = gradients(model)
    layers = model.bert.encoder.layer
    for inside in (model.bert.embeddings, layers[0].output):
        for work in (lambda: model(**batch), lambda: layers[1](torch.randn(2, 4, 16))):
            model.zero_grad()
            assert REFUSAL in str(call_inside(model, inside, work))
            assert_same_bits(gradients(model), expected)
    model.zero_grad()
    assert in_another_thread(lambda: train_once(model, batch)) == []
    assert_same_bits(gradients(model), expected)


def test_a_backward_in_another_thread_is_refused_while_a_layer_runs():
    model = attached(bert())
    loss = model.train()(**batch_for(model)).loss
    with forced_copies():
        assert REFUSAL in str(call_inside(model, model.bert.encoder.layer[0].output, loss.backward))


def settings() -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


def test_autocast_settings_are_entered_and_left():
    outside, off = settings(), AutocastState.current(HOST)
    with torch.autocast("cpu", torch.bfloat16):
        inside = AutocastState.current(HOST)
    assert inside.enabled_dtypes == (torch.bfloat16,) and off.enabled_dtypes == ()
    with inside.entered():
        assert settings() == (True, torch.bfloat16, False)
        with off.entered():
            assert not torch.is_autocast_enabled("cpu")
        assert linear(torch.ones(1, 1), torch.ones(1, 1)).dtype == torch.bfloat16
    assert settings() == outside
    with pytest.raises(KeyError), inside.entered():
        raise KeyError
    assert settings() == outside


def test_a_refilled_weight_is_cast_anew():
    """Two weights pass through one leaf inside one autocast region: the second must not meet the cast of the first."""
    x, leaf = torch.randn(4, 3), nn.Parameter(torch.empty(2, 3))
    with torch.autocast("cpu", torch.bfloat16):
        state = AutocastState.current(HOST)
        for weight in (torch.randn(2, 3), torch.randn(2, 3)):
            with torch.no_grad():
                leaf.copy_(weight)
            with state.entered():
                result = linear(x, leaf)
            assert torch.equal(result, linear(x.bfloat16(), weight.bfloat16()))


def test_settings_entered_in_another_thread_leave_the_cache_of_this_one():
    """Else the weight would be cast twice here, and its two gradients summed in fp32 instead of bf16."""

    def gradient(entered: Callable[[], AbstractContextManager[Any]]) -> torch.Tensor:
        def enter() -> None:
            with entered():
                pass

        weight, x = nn.Parameter(torch.linspace(-1, 1, 64 * 64).view(64, 64)), torch.linspace(-2, 3, 512).view(8, 64)
        with torch.autocast("cpu", torch.bfloat16):
            first = linear(x, weight)
            thread = threading.Thread(target=enter)
            thread.start()
            thread.join()
            second = linear(2 * x, weight)
        (first.float().square().sum() + second.float().square().sum()).backward()
        assert weight.grad is not None
        return weight.grad

    with torch.autocast("cpu", torch.bfloat16):
        state = AutocastState.current(HOST)
    expected = gradient(nullcontext)
    assert torch.equal(gradient(state.entered), expected)
    region = gradient(lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False))
    assert not torch.equal(region, expected), "why `entered` is no region of torch.autocast"
