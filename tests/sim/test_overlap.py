"""Weights travel while the device computes: the same bits, every wait needed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l.runtime import stream, wait_reasons
from memory_switches import land_the_rest, poisoned_releases
from models import Toy, attached, batch_for, gradients, train_once
from runs import train
from tiers import ALL
from training import tiny_bert

WAITS = (
    wait_reasons.WEIGHTS_UPLOADED,
    wait_reasons.WEIGHTS_MEMORY_FREE,
    wait_reasons.WEIGHT_SLOT_FREE,
    wait_reasons.MASTERS_READ,
    wait_reasons.GRADIENTS_COMPUTED,
    wait_reasons.GRADIENT_SLOT_FREE,
    wait_reasons.ALL_GRADIENTS_DOWNLOADED,
    wait_reasons.LAYER_GRADIENTS_DOWNLOADED,
    wait_reasons.FAILED_DOWNLOADS_FINISHED,
    wait_reasons.INPUT_COMPUTED,
    wait_reasons.INPUT_STASHED,
    wait_reasons.STASH_COPIES_FINISHED,
)
OF_ROWS = (
    wait_reasons.OUTPUT_COMPUTED,
    wait_reasons.OUTPUT_DOWNLOADED,
    wait_reasons.ROWS_DOWNLOADED,
    wait_reasons.ROWS_MEMORY_FREE,
    wait_reasons.ROWS_UPLOADED,
)
"""That these are needed is in `test_row_lanes.py`."""


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """What is read after it was given back is NaN, in every test here."""
    with poisoned_releases():
        yield


class Waits:
    """Every reason that something waited for, and those waits that are left out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, without: str = "") -> None:
        self.found: set[str] = set()
        original = stream.wait

        def wait(event: Any, why: str, **options: Any) -> None:
            self.found.add(why)
            if why != without:
                original(event, why, **options)

        monkeypatch.setattr(stream, "wait", wait)


def weights(**options: Any) -> dict[str, torch.Tensor]:
    return train(Toy(dropout=0.0), steps=2, accumulation=2, **options).weights


@cache
def on_the_host(max_norm: float) -> dict[str, torch.Tensor]:
    return weights(device="cpu", eps_update="serial", max_norm=max_norm)


def everything() -> None:
    """Raise or assert if anything is wrong in training, evaluation and after an error."""
    evaluate_and_write(tiny_bert(layers=3))
    eager = {"eps_update": "eager", "max_norm": 0.0}
    on_host = {"stash": "host", "ubatch_size": 3}
    plan = {"resident": "shell", "resident_layers": 1, "kept_weights": 2, "kept_graphs": 1}
    for options in ({}, on_host, {**on_host, "boundary": "host"}, {"gradient_slots": 1}, plan, eager):
        found = weights(**options)
        for name, value in on_the_host(options.get("max_norm", 0.5)).items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
    train(eps_update="serial", optimizer="SGD", steps=1, max_norm=0.0)
    fail_and_go_on(tiny_bert(layers=3, dropout=0.0))
    stop_half_way(tiny_bert(layers=3))


@pytest.mark.parametrize("why", WAITS if ALL else WAITS[1::2])
def test_every_wait_is_needed(why, monkeypatch):
    waits = Waits(monkeypatch, without=why)
    with pytest.raises((RuntimeError, AssertionError), match="sim stream|not close|not finite"):
        everything()
    assert why in waits.found
    land_the_rest()


def evaluate_and_write(model: nn.Module) -> None:
    """Write into all masters while nothing has waited for what a forward computed."""
    attached(model.eval(), device="sim")
    with torch.no_grad():
        model(**batch_for(model))
        for p in model.parameters():
            p.mul_(2.0)
        model(**batch_for(model))


def fail_and_go_on(model: nn.Module) -> None:
    """Write into the gradients when a backward that was adding to them has failed."""
    batch = batch_for(model)
    plain = copy.deepcopy(model)
    attached(model, device="sim")
    train_once(model, batch)
    first = model.bert.encoder.layer[0].output.dense

    def fail(*args: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # when the layer is recomputed
            raise KeyError("from the user's hook")

    with first.register_forward_pre_hook(fail), pytest.raises(KeyError):
        train_once(model, batch)
    for p in model.parameters():
        p.grad.zero_()
    train_once(model, batch)
    train_once(plain, batch)
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(model)[name], gradient)


def stop_half_way(model: nn.Module) -> None:
    """Fetch what the next layer backwards would recompute from, and let there be no next layer."""
    attached(model, device="sim", stash="host")
    for _ in range(2):
        outputs = model(**batch_for(model), output_hidden_states=True)
        torch.autograd.grad(outputs.loss, outputs.hidden_states[1])


def test_all_waits_are_listed(monkeypatch):
    waits = Waits(monkeypatch)
    everything()
    # The copies that follow this one make the host wait by themselves: the wait is there for the logs, and of several
    # devices for layers that compute on other streams.
    assert waits.found == {*WAITS, *OF_ROWS, wait_reasons.RECOMPUTE_COMPARED}


def test_weights_written_unseen_between_two_forwards_are_used():
    model = attached(tiny_bert(layers=2, dropout=0.0), device="sim").eval()
    batch = batch_for(model)
    with torch.no_grad():
        before = model(**batch).logits
        model.bert.encoder.layer[1].output.dense.weight.data.mul_(2.0)  # moves no version counter
        after = model(**batch).logits
        plain = copy.deepcopy(model)
        assert not torch.equal(before, after)
        assert torch.equal(after.cpu(), plain(**batch).logits)
