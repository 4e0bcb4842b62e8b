"""A backward is known from its first node to its end, or to its failure."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch

from hf_l2l.runtime.backward_callbacks import Backwards, End, HookErrors
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


def test_the_end_is_told_once_however_many_nodes_take_part():
    of = Heard()
    run(*[(of.backwards, lambda: of.heard.append("node"))] * 3)
    assert of.heard == ["node", "node", "node", "end"]
    run((of.backwards, nothing))
    assert of.heard[4:] == ["end"]


def test_a_failure_of_an_own_node_is_told_before_the_caller_knows():
    of = Heard()
    with pytest.raises(KeyError):
        run((of.backwards, fail), (of.backwards, nothing))
    assert of.heard == ["failure"]
    run((of.backwards, nothing))
    assert of.heard == ["failure", "end"]


def test_a_failure_elsewhere_is_told():
    of, other = Heard(), Heard()
    with pytest.raises(KeyError):
        run((other.backwards, fail), (of.backwards, nothing))
    assert of.heard == other.heard == ["failure"]


def test_a_backward_inside_a_backward_ends_by_itself():
    of = Heard()

    def inner() -> None:
        with torch.enable_grad():
            run((of.backwards, nothing))
        of.heard.append("inner is over")

    run((of.backwards, inner))
    assert of.heard == ["end", "inner is over", "end"]


def test_other_threads_are_refused_while_it_runs_and_those_inside_are_not():
    of = Heard()
    refused: list[BaseException] = []

    def work() -> None:
        of.backwards.refuse_others(own=False)
        refused.extend(in_another_thread(lambda: of.backwards.refuse_others(own=False)))

    run((of.backwards, work))
    assert [REFUSAL in str(error) for error in refused] == [True]
    of.backwards.refuse_others(own=False)


def test_the_caller_waits_for_its_own_to_be_given_up(monkeypatch):
    of = Heard()
    entered, go = threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        assert go.wait(10)

    thread = threading.Thread(target=lambda: run((of.backwards, work)))
    thread.start()
    assert entered.wait(10)
    threading.Timer(0.05, go.set).start()
    of.backwards.refuse_others(own=True)
    thread.join()
    assert of.heard == ["end"]


def test_it_keeps_no_object_alive():
    backwards, heard = Backwards(), []
    gone = Heard()
    gone.heard = heard
    backwards.call(at_end=gone.end, at_failure=gone.failure)
    del gone
    run((backwards, nothing))
    assert heard == []


def test_the_first_error_of_a_hook_is_raised_once():
    errors = HookErrors()
    for text in ("first", "second"):
        with errors:
            raise ValueError(text)
    with pytest.raises(ValueError, match="first"):
        errors.raise_first()
    errors.raise_first()


class Interrupted(Heard):
    def end(self) -> None:
        super().end()
        raise KeyboardInterrupt


def test_an_interrupt_is_raised_before_errors():
    errors = HookErrors()
    for error in (ValueError(), KeyboardInterrupt(), SystemExit()):
        with errors:
            raise error
    with pytest.raises(KeyboardInterrupt):
        errors.raise_first()
    errors.raise_first()


def test_an_interrupt_in_a_callback_ends_the_backward_when_all_have_been_called():
    backwards, first, second = Backwards(), Interrupted(), Heard()
    backwards.call(at_end=first.end, at_failure=first.failure)
    backwards.call(at_end=second.end, at_failure=second.failure)
    with pytest.raises(KeyboardInterrupt):
        run((backwards, nothing))
    assert first.heard == second.heard == ["end"]
    backwards.errors.raise_first()


def test_an_error_at_the_end_is_kept_and_the_others_are_told():
    of = Heard()

    class Failing:
        def end(self) -> None:
            raise ValueError("at the end")

    failing, late = Failing(), Heard()
    of.backwards.call(at_end=failing.end, at_failure=failing.end)
    of.backwards.call(at_end=late.end, at_failure=late.failure)
    run((of.backwards, nothing))
    assert of.heard == late.heard == ["end"]
    with pytest.raises(ValueError, match="at the end"):
        of.backwards.errors.raise_first()


def test_what_is_over_is_dropped_without_any_code():
    """A Ctrl-C that came during a backward is raised in the first Python code after it; a destructor swallows it."""
    end = End(Backwards(), 1)
    assert weakref.getweakrefcount(end) == 1, "of who is told when it is dropped"
    end()
    assert weakref.getweakrefcount(end) == 0 and not hasattr(type(end), "__del__")
