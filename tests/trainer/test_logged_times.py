"""What a training logs of its times, beside what plain Trainer logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from hf_l2l.report.traced_steps import traced_steps
from models import vit
from runs import assert_same_run
from tiers import cpu_suffices
from training import l2l_trainer, measured, plain_trainer

WAITS = ("wait_upload_s", "wait_download_s", "wait_eps_s")
ADDED = {f"l2l_{name}" for name in (*WAITS, "step_s", "bound", "tokens_per_s")}


def steps_of(trace: Path) -> list[float]:
    """The seconds of each step of a trace."""
    events = json.loads(trace.read_text())["traceEvents"]
    [row] = [e["tid"] for e in events if e["name"] == "thread_name" and e["args"]["name"] == "steps"]
    spans = [(e["ts"], e["dur"] / 1e6) for e in events if e["ph"] == "X" and e["tid"] == row]
    return [seconds for _, seconds in sorted(spans)]


@cpu_suffices
def test_logs_are_those_of_plain_trainer_and_a_file_has_the_times(tmp_path, device):
    """A second training looks again, and the first one has ended; evaluations have nothing added."""
    plain = plain_trainer(tmp_path / "plain")
    plain.train()
    trace = tmp_path / "trace.json"
    l2l = l2l_trainer(tmp_path / "l2l", l2l_trace=str(trace))
    l2l.train()
    if device == "cpu":  # where gradients are added up in the same order
        assert_same_run(l2l, plain)
    for ours, theirs in zip(l2l.state.log_history, plain.state.log_history, strict=True):
        assert ours.keys() == theirs.keys()
    rows = measured(tmp_path / "l2l")
    names = {"step", *ADDED} | ({"device_peak_bytes"} if device != "cpu" else set())
    assert [set(row) for row in rows] == [names] * 4
    # Each row of the data has 8 tokens, 8 rows are a batch.
    assert [64 / row["l2l_tokens_per_s"] for row in rows] == pytest.approx(steps_of(trace), rel=1e-3)
    l2l.eps.timeline.close()
    assert traced_steps(trace).steps == 3  # but for the first one
    again = l2l_trainer(tmp_path / "again", max_steps=1)
    for _ in range(2):
        again.train()
        assert not again.eps.timeline.is_watched
        assert ["l2l_bound" in row for row in measured(tmp_path / "again")] == [True]
    assert not [key for key in again.evaluate() if key.startswith("l2l_")]


def test_inputs_that_are_no_tokens_have_no_tokens_per_second(tmp_path):
    trainer = l2l_trainer(tmp_path, model=vit(), max_steps=1)
    trainer.train_dataset = [{"pixel_values": torch.ones(3, 8, 8), "labels": 0}] * 8
    trainer.train()
    [line] = measured(tmp_path)
    assert "l2l_bound" in line and "l2l_tokens_per_s" not in line


class Lines(hf.TrainerCallback):
    """What callbacks and trackers get."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        self.first = getattr(self, "first", dict(logs))


@cpu_suffices
def test_trackers_take_every_value(tmp_path):
    """TensorBoard tells numbers from text, and drops anything else."""
    lines = Lines()
    l2l_trainer(tmp_path, max_steps=1, callbacks=[lines], l2l_log_times=True).train()
    assert {"l2l_bound", "l2l_step_s"} <= lines.first.keys() and type(lines.first["l2l_bound"]) is str
    assert {type(value) for value in lines.first.values()} <= {int, float, str}
