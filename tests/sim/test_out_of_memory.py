"""Out of memory at any layer: what was taken is given back, and a smaller batch trains as if nothing had been."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fault_cases
from fault_cases import PLACES, Failing, check_fault, unbroken
from memory_switches import poisoned_releases
from training import assert_same_run, l2l_trainer, settled_memory, tiny_bert


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """What is read after it was given back is NaN, in every test here."""
    with poisoned_releases():
        yield


NO_MORE = "CUDA out of memory. Tried to allocate 1.00 GiB"
"""The words by which Accelerate knows such an error."""
KINDS = ("upload", "forward", "recompute", "backward", "download", "stash upload")


def cases() -> list[Any]:
    """Each layer, and each place, in the normal tier."""
    found = []
    for i, name in enumerate(KINDS):
        for index in range(fault_cases.LAYERS):
            found.append(pytest.param(name, index, marks=() if i % 3 == index else pytest.mark.slow))
    return found


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("name", "index"), cases())
def test_the_step_can_be_made_again(name, index):
    """As after any other exception; see `test_faults.py`."""
    expected = unbroken("sim", "deferred")
    check_fault("sim", name, "deferred", index, 3, expected, torch.OutOfMemoryError(NO_MORE))
    assert PLACES[name].is_update is False


@pytest.mark.parametrize("stash", [pytest.param("device", marks=pytest.mark.slow), "host"])
def test_memory_is_given_back_at_once(stash, monkeypatch):
    training = fault_cases._Training("sim", "deferred", {"stash": stash})
    for _ in range(2):
        training.step()
    before = settled_memory()
    for name in ("forward", "recompute", "backward", "upload", "download"):
        with monkeypatch.context() as patch:
            failing = Failing(torch.OutOfMemoryError(NO_MORE))
            PLACES[name].install(patch, training.model, 1, failing)
            with pytest.raises(torch.OutOfMemoryError):
                training.step()
            del failing.error  # which refers to all frames
        training.optimizer.zero_grad()
        assert settled_memory() == before, name
    training.step()
    training.optimizer.zero_grad()
    assert settled_memory() == before


FINDING = {"auto_find_batch_size": True, "max_steps": 3, "per_device_train_batch_size": 8}


def fail_above(rows: int, place: str, index: int, patch: pytest.MonkeyPatch) -> list[int]:
    """A layer has no memory for more rows, in the first or second call of a step; the sizes of batches that failed."""
    from transformers.models.bert.modeling_bert import BertLayer

    failed: list[int] = []
    forward = BertLayer.forward

    def broken(layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_recompute = torch._C._current_graph_task_id() != -1
        if len(hidden) > rows and layer.number == index and is_recompute == (place == "recompute"):
            failed.append(len(hidden))
            raise torch.OutOfMemoryError(NO_MORE)
        return forward(layer, hidden, *args, **kwargs)

    patch.setattr(BertLayer, "forward", broken)
    return failed


def numbered(model: Any) -> Any:
    for number, layer in enumerate(model.bert.encoder.layer):
        layer.number = number
    return model


@pytest.mark.parametrize(
    ("place", "index", "mode"),
    [
        ("forward", 0, "deferred"),
        ("recompute", 1, "deferred"),
        pytest.param("forward", 1, "serial", marks=pytest.mark.slow),
        pytest.param("recompute", 0, "serial", marks=pytest.mark.slow),
    ],
)
def test_a_batch_size_that_is_found_trains_as_if_it_had_been_given(place, index, mode, tmp_path, monkeypatch):
    same: dict[str, Any] = {**FINDING, "eps_update": mode, "stash": "host"}
    small = {"auto_find_batch_size": False, "per_device_train_batch_size": 2}
    expected = l2l_trainer(tmp_path / "given", model=tiny_bert(layers=2, dropout=0.0), **{**same, **small})
    expected.train()
    failed = fail_above(2, place, index, monkeypatch)
    made = l2l_trainer(tmp_path / "found", model=numbered(tiny_bert(layers=2, dropout=0.0)), **same)
    made.train()
    assert failed and set(failed) > {failed[-1]}, "more than one size failed"
    assert made._train_batch_size == 2
    assert_same_run(made, expected)


def test_without_room_for_one_row_it_says_so(tmp_path, monkeypatch):
    fail_above(0, "forward", 1, monkeypatch)
    made = l2l_trainer(tmp_path, model=numbered(tiny_bert(layers=2)), **FINDING)
    with pytest.raises(RuntimeError, match="No executable batch size found, reached zero"):
        made.train()


def test_without_it_the_error_names_the_layer_and_a_smaller_batch_trains(tmp_path, monkeypatch):
    model = numbered(tiny_bert(layers=2, dropout=0.0))
    with monkeypatch.context() as patch:
        fail_above(2, "recompute", 0, patch)
        with pytest.raises(torch.OutOfMemoryError, match="out of memory") as told:
            l2l_trainer(tmp_path, model=model, max_steps=3).train()
    assert "layer.0" in " ".join(told.value.__notes__)
    del told
    small = {"max_steps": 3, "per_device_train_batch_size": 2}
    made = l2l_trainer(tmp_path, model=model, **small)
    made.train()
    expected = l2l_trainer(tmp_path, model=tiny_bert(layers=2, dropout=0.0), **small)
    expected.train()
    assert_same_run(made, expected)
