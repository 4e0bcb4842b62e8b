"""What transformers collects inside of layers is taken from its collector, and delivered to it."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest

from hf_l2l.model.captured_outputs import CapturedOutputs


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> ContextVar[Any]:
    """A stand-in for transformers' variable, set as by a running model."""
    variable: ContextVar[Any] = ContextVar("collector", default=None)
    monkeypatch.setitem(
        sys.modules, "transformers.utils.output_capturing", SimpleNamespace(_active_collector=variable)
    )
    return variable


def test_pieces_are_taken_and_the_model_collects_none(collector):
    running = {"attentions": [], "hidden_states": []}
    collector.set(running)
    with CapturedOutputs() as captured:
        assert captured.keys == ("attentions",)  # hidden states come from hooks on whole layers
        collector.get()["attentions"].append(1)
    assert captured.taken == {"attentions": [1]}
    assert collector.get() is running and running == {"attentions": [], "hidden_states": []}
    CapturedOutputs.deliver(captured.taken)
    assert running["attentions"] == [1]
    with pytest.raises(KeyError), CapturedOutputs():
        raise KeyError
    assert collector.get() is running


def test_a_recompute_takes_the_keys_of_its_forward(collector):
    with CapturedOutputs(("attentions",)) as captured:
        collector.get()["attentions"].append(1)
    assert captured.taken == {"attentions": [1]}
    CapturedOutputs.deliver(captured.taken)  # no model runs: there is no collector
    running = {"attentions": []}
    collector.set(running)
    with CapturedOutputs(()):
        assert collector.get() == {}
    assert running == {"attentions": []}


def test_without_transformers_nothing_is_captured(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers.utils.output_capturing", raising=False)
    with CapturedOutputs() as captured:
        pass
    assert captured.taken == {} and captured.keys == ()
    CapturedOutputs.deliver({"attentions": [1]})
