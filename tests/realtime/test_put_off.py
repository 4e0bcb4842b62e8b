"""Checkpoints in the background do not wait for the updates of their own step, and have what those make."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from hf_l2l.checkpoint.finding import checkpoints_in
from hf_l2l.optim import layerwise_step
from hf_l2l.realtime.put_off import PutOffSave
from slow_disk import assert_same_checkpoints
from training import SAVING, assert_same_run, l2l_trainer, left_in, tiny_bert

EACH_STEP = {**SAVING, "save_steps": 1, "save_total_limit": None, "eps_update": "deferred"}


class AtBegin(hf.TrainerCallback):
    """Calls something at the beginning of each step but the first one."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step:
            self.call(**kwargs)


def test_a_step_ends_while_its_updates_go_on(tmp_path, monkeypatch):
    """They are made when the saving has been begun: a save that waited for them would wait for ever."""
    run, may_run, late = layerwise_step.Part.run, threading.Event(), []
    made = l2l_trainer(tmp_path / "later", **EACH_STEP, l2l_async_save=True)
    may_run.set()
    save = made._save_checkpoint

    def slow(part: Any, *args: Any) -> None:
        late.append(not may_run.wait(timeout=30))
        run(part, *args)

    def saved(*args: Any) -> None:
        save(*args)
        assert isinstance(made._l2l_saving[0], PutOffSave) and not made._l2l_saving[0].is_done
        may_run.set()

    step = made.training_step

    def trained(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = step(*args, **kwargs)
        may_run.clear()  # those of this step wait
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(layerwise_step.Part, "run", slow)
        patch.setattr(made, "_save_checkpoint", saved)
        patch.setattr(made, "training_step", trained)
        made.train()
    assert late and not any(late)
    l2l_trainer(tmp_path / "at once", **EACH_STEP).train()
    assert_same_checkpoints(tmp_path / "later", tmp_path / "at once")


class Counting(torch.nn.Module):
    """A module whose buffer each forward changes."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            self.calls += 1
        return self.inner(*args, **kwargs)


def counting_bert() -> Any:
    model = tiny_bert()
    model.bert.embeddings = Counting(model.bert.embeddings)
    return model


def test_buffers_are_those_of_the_step(tmp_path):
    """A forward has changed them before the files are made; it goes on with its own values."""
    made = l2l_trainer(tmp_path / "later", model=counting_bert(), **EACH_STEP, l2l_async_save=True)
    made.train()
    whole = l2l_trainer(tmp_path / "at once", model=counting_bert(), **EACH_STEP)
    whole.train()
    assert_same_checkpoints(tmp_path / "later", tmp_path / "at once")
    calls = [
        load_file(each / "model.safetensors")["bert.embeddings.calls"][0]
        for each in checkpoints_in(tmp_path / "later")
    ]
    assert sorted(set(calls)) == calls
    assert_same_run(made, whole)


def test_state_that_is_loaded_after_the_step_is_not_saved(tmp_path):
    def run(folder: Path, **options: Any) -> None:
        def load(optimizer: Any, **_: Any) -> None:
            inner = getattr(optimizer, "optimizer", optimizer)
            state = inner.state_dict()
            state["state"] = {n: {k: v * 0.5 for k, v in each.items()} for n, each in state["state"].items()}
            inner.load_state_dict(state)

        l2l_trainer(folder, **EACH_STEP, callbacks=[AtBegin(load)], **options).train()

    run(tmp_path / "at once")
    run(tmp_path / "later", l2l_async_save=True)
    assert_same_checkpoints(tmp_path / "later", tmp_path / "at once")


def test_an_update_that_fails_leaves_no_checkpoint_of_its_step(tmp_path, monkeypatch):
    run = layerwise_step.Part.run
    made = l2l_trainer(tmp_path, **EACH_STEP, l2l_async_save=True)

    def failing(part: Any, *args: Any) -> None:
        if made.state.global_step >= 2:
            raise ZeroDivisionError("of the optimizer")
        run(part, *args)

    monkeypatch.setattr(layerwise_step.Part, "run", failing)
    with pytest.raises(ZeroDivisionError, match="of the optimizer"):
        made.train()
    left = set(left_in(tmp_path))
    assert left <= {"checkpoint-1", "checkpoint-2"}, "that of the step before, at most, and nothing else"


def test_a_folder_that_is_removed_meanwhile_is_an_error_of_the_checkpoint(tmp_path, monkeypatch):
    """The training of a real-time checkpoint goes on, if that is asked for."""
    given = {**SAVING, "save_strategy": "no", "eps_update": "deferred"}
    now = {"l2l_realtime_checkpoint": str(tmp_path / "now"), "l2l_realtime_every": 1, "l2l_realtime_errors": "warn"}

    def remove(**_: Any) -> None:
        for path in (tmp_path / "now").glob("_l2l-saving-*"):
            path.rename(tmp_path / path.name)

    made = l2l_trainer(tmp_path / "run", **given, **now, callbacks=[AtBegin(remove)])
    made.train()
    whole = l2l_trainer(tmp_path / "whole", **given)
    whole.train()
    assert_same_run(made, whole)


def test_the_bytes_of_a_generation_are_said_first(tmp_path, caplog):
    """Its files are made at once for that, those of later ones when the updates are done."""
    given = {**SAVING, "save_strategy": "no", "eps_update": "deferred", "l2l_realtime_every": 1}
    made = l2l_trainer(tmp_path / "run", **given, l2l_realtime_checkpoint=str(tmp_path / "now"))
    kinds: list[bool] = []
    begin = made._begin_generation

    def begun(*args: Any) -> None:
        begin(*args)
        kinds.append(isinstance(made._l2l_saving[0], PutOffSave))

    made._begin_generation = begun  # type: ignore[method-assign]
    hf.logging.set_verbosity_info()
    hf.logging.enable_propagation()
    try:
        with caplog.at_level("DEBUG", "hf_l2l"):
            made.train()
    finally:
        hf.logging.set_verbosity_warning()
        hf.logging.disable_propagation()
    sizes = [re.search(r"a real-time checkpoint has ([\d.]+) KiB", text) for text in dict.fromkeys(caplog.messages)]
    first, then = (float(found[1]) for found in sizes if found is not None)
    assert first == pytest.approx(then, rel=0.05), "before the first one is there, and when it is, with its manifest"
    assert kinds == [False, True, True, True]
