"""Runs of the Trainer with updates in the background: checkpoints, callbacks, data loaders, signals."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from hf_l2l.eps import updates
from training import assert_same_run, l2l_trainer, logs, plain_trainer, tiny_bert

pytestmark = pytest.mark.filterwarnings(
    # torch warns of the scheduler's order when the optimizer is loaded; plain Trainer does the same.
    "ignore:.*lr_scheduler.step.*:UserWarning",
)

STEPS = 4
SAVING: dict[str, Any] = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "cosine"}
CLIPS = {"deferred": 1.0, "eager": 0.0}


@pytest.fixture(autouse=True)
def _slow_updates(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So slow that code without a wait is early."""
    original = updates.carry_out

    def late(*args: Any) -> None:
        time.sleep(0.01)
        original(*args)

    monkeypatch.setattr(updates, "carry_out", late)
    yield


def assert_same_checkpoint(found: Path, expected: Path) -> None:
    assert sorted(p.name for p in found.iterdir()) == sorted(p.name for p in expected.iterdir())
    assert (found / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    ours, theirs = (torch.load(p / "optimizer.pt", weights_only=True) for p in (found, expected))
    assert ours["param_groups"] == theirs["param_groups"]
    assert list(ours["state"]) == list(theirs["state"])
    for index, state in theirs["state"].items():
        assert all(torch.equal(ours["state"][index][key], value) for key, value in state.items())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", CLIPS)
def test_a_checkpoint_at_any_step_is_the_one_that_serial_saves(tmp_path, mode):
    runs = {}
    for each in ("serial", mode):
        runs[each] = l2l_trainer(tmp_path / each, eps_update=each, max_grad_norm=CLIPS[mode], **SAVING)
        runs[each].train()
    for step in range(1, STEPS + 1):
        name = f"checkpoint-{step}"
        assert_same_checkpoint(tmp_path / mode / name, tmp_path / "serial" / name)
    assert_same_run(runs[mode], runs["serial"])


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("first", "second"),
    [("deferred", "serial"), ("serial", "deferred"), ("eager", "deferred"), ("deferred", "eager"), ("plain", "eager")],
)
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_run_goes_on_in_another_mode(tmp_path, step, first, second):
    def made(mode: str, folder: str, **options: Any) -> hf.Trainer:
        same = {**SAVING, "max_grad_norm": 0.0, "model": tiny_bert(), **options}
        if mode == "plain":
            return plain_trainer(tmp_path / folder, **same)
        return l2l_trainer(tmp_path / folder, eps_update=mode, **same)

    whole = made(first, "whole")
    whole.train()
    resumed = made(second, "parts")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
    assert_same_run(resumed, whole)


class _Average(hf.TrainerCallback):
    """An exponential average of the weights, read while the update runs."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            for name, p in model.named_parameters():
                self.average.setdefault(name, p.clone()).lerp_(p, 0.5)


def test_an_update_that_fails_leaves_no_folder_of_a_checkpoint(tmp_path, monkeypatch):
    made = l2l_trainer(tmp_path, eps_update="deferred", **SAVING)
    carry_out, save_checkpoint, saving = updates.carry_out, made._save_checkpoint, threading.Event()

    def save(*args: Any) -> None:
        if made.state.global_step == 2:
            saving.set()
        save_checkpoint(*args)

    def failing(*args: Any) -> None:
        if (tmp_path / "checkpoint-1" / "trainer_state.json").exists():
            assert saving.wait(60)
            raise KeyError("in an update")
        carry_out(*args)

    monkeypatch.setattr(made, "_save_checkpoint", save)

    monkeypatch.setattr(updates, "carry_out", failing)
    with pytest.raises(KeyError, match="in an update"):
        made.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


def test_what_a_callback_reads_is_finished(tmp_path):
    found = []
    for mode in ("serial", "deferred"):
        callback = _Average()
        l2l_trainer(tmp_path / mode, eps_update=mode, callbacks=[callback]).train()
        found.append(callback.average)
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())
    assert len(found[1]) == len(list(tiny_bert().parameters()))


def test_evaluation_and_the_best_model_see_finished_weights(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, **SAVING}
    runs = {}
    for mode in ("serial", "deferred"):
        runs[mode] = l2l_trainer(tmp_path / mode, eps_update=mode, **options)
        runs[mode].train()
    assert_same_run(runs["deferred"], runs["serial"])
    assert len([entry for entry in logs(runs["deferred"]) if "eval_loss" in entry]) == STEPS


def test_forked_data_loaders_live_with_the_worker(tmp_path):
    """They are forked while an update is under way; the second epoch's, too."""
    runs = {}
    for mode in ("serial", "deferred"):
        options = {"dataloader_num_workers": 2, "max_steps": 14, "logging_steps": 7, "l2l_num_threads": 2}
        runs[mode] = l2l_trainer(tmp_path / mode, eps_update=mode, **options)
        runs[mode].train()
    assert_same_run(runs["deferred"], runs["serial"])


SCRIPT = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored
sys.path.insert(0, {root!r})
import torch
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.eps import updates

original = updates.carry_out
def slow(*args):
    os.write(1, b"updating\\n")  # at once: two updates may begin together
    time.sleep({seconds})
    original(*args)
updates.carry_out = slow
class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()
model = Stack()
eps = attach_l2l(model, L2LConfig(device="cpu", eps_update={mode!r}, num_threads=2, layer_classes=("Linear",)))
optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
while True:
    model(torch.randn(4, 8)).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("mode", "seconds", "sent"),
    [
        ("deferred", 1000.0, signal.SIGINT),
        pytest.param("deferred", 1000.0, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("eager", 0.5, signal.SIGINT, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow  # test_signals.py has one of each in the normal tier
def test_a_signal_ends_the_program(mode, seconds, sent):
    """Also while an update takes for ever."""
    root = Path(__file__).parents[2]
    code = SCRIPT.format(root=str(root), mode=mode, seconds=seconds)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout is not None and program.stderr is not None
        try:
            assert program.stdout.readline() == b"updating\n"
            time.sleep(0.3)
            program.send_signal(sent)
            _, errors = program.communicate(timeout=100)  # much less than the update takes
        finally:
            program.kill()
    assert program.returncode == -sent
    if sent == signal.SIGINT:
        assert b"KeyboardInterrupt" in errors and b"Error" not in errors
