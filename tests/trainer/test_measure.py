"""What training holds in host and device memory (by callback, by kind, as a notebook shows it, and after many steps),
and what it logs of its times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import left_over
from devices import DEVICE
from hf_l2l import EagerParamServer, L2LConfig, attach_l2l, detach_l2l
from hf_l2l.measure import DeviceMemoryTrace, MemoryCallback
from hf_l2l.report.host_tensors import host_tensors
from hf_l2l.report.traced_steps import traced_steps
from hf_l2l.runtime.tensors import size_text, tensor_bytes
from hf_l2l.testing import page_locked_bytes
from models import attached, batch_for, bert, llama, train_once, vit
from runs import assert_same_run, attach
from tiers import combinations, cpu_suffices, more
from training import l2l_trainer, measured, on, plain_trainer, settled_memory, tiny_bert


@pytest.fixture(autouse=True)
def _settled(device: str) -> None:
    """Models of other tests are gone, with their slots."""
    if device != "cpu":
        settled_memory()


# ---- MemoryCallback


def frozen_below(model: nn.Module) -> nn.Module:
    """With embeddings that do not train."""
    model.base_model.embeddings.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("make", "options"),
    combinations([plain_trainer, l2l_trainer], [{"gradient_accumulation_steps": 2}, {"max_steps": 1, "optim": "sgd"}]),
)
@pytest.mark.filterwarnings("ignore:batch 8 x accumulation 2:UserWarning")
def test_where_what_is_held(make, options, tmp_path, device):
    """On the host layer to layer, and on the CPU anyway; frozen parameters have no gradients and no moments."""
    before = settled_memory() if device != "cpu" else 0
    model, memory = frozen_below(tiny_bert(layers=2)), MemoryCallback()
    serial = {"eps_update": "serial"} if make is l2l_trainer else {}  # none is under way when it is looked at
    make(tmp_path, callbacks=[memory], model=model, **{"max_steps": 2, **options}, **serial).train()
    metrics, trained = memory.metrics(), [p for p in model.parameters() if p.requires_grad]
    of_state = tensor_bytes(trained) if "optim" in options else 3 * tensor_bytes(trained) + 4 * len(trained)
    expected = tensor_bytes(model.parameters()) + of_state  # gradients, and of AdamW two moments and a step
    on_host = device == "cpu" or make is l2l_trainer
    assert metrics["train_host_bytes"] == (expected if on_host else 0)
    assert metrics.keys() - {"train_device_bytes"} == {"train_host_bytes", "train_process_bytes"}
    assert ("train_device_bytes" in metrics) == (device != "cpu")
    if not on_host:
        assert metrics["train_device_bytes"] - before >= expected
    if device == "sim":  # whose memory is that of the process
        assert metrics["train_process_bytes"] > metrics["train_device_bytes"]


@cpu_suffices
@pytest.mark.parametrize(("moments", "each"), [("bf16", 10), ("8bit", 8)])
def test_the_host_holds_the_bytes_per_parameter_that_the_summary_says(tmp_path, moments, each):
    """Moments of 8 bits have exponents besides, one for 256 elements of a parameter."""
    memory = MemoryCallback()
    short = {"cmp": "fp16", "l2l_grad_dtype": "16bit", "l2l_moment_dtype": moments, "l2l_host_copies": "per_sweep"}
    options = {"l2l_loss_scale_init": 1.0, "eps_update": "deferred", "max_steps": 2, "callbacks": [memory]}
    made = l2l_trainer(tmp_path, model=tiny_bert(layers=2), **options, **short)
    parameters = list(made.model.parameters())
    count, exponents = sum(p.numel() for p in parameters), 2 * sum(-(-p.numel() // 256) for p in parameters)
    beside = 4 * len(parameters) + exponents * (moments == "8bit")  # a step count of each
    assert f"({each + exponents * (moments == '8bit') / count:.1f} bytes per parameter)" in made.l2l_summary()
    made.train()
    assert memory.metrics()["train_host_bytes"] == each * count + beside


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_that_started_this_one_is_not_counted():
    mine = torch.ones(2**28 // 4)  # with this, more than the other process takes
    code = """
from hf_l2l.memory.host_limits import peak_process_bytes
peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))
print(peak_process_bytes(), int(peak.split()[1]) * 1024)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    found, peak = map(int, result.stdout.split())
    assert found == pytest.approx(peak, rel=0.05), f"with {tensor_bytes([mine])} more bytes held here"


def test_there_is_nothing_to_trace_without_an_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device memory can be traced on an accelerator only"):
        DeviceMemoryTrace()


# ---- host_tensors


def held(model: nn.Module, *optimizers: torch.optim.Optimizer) -> tuple[int, int, int]:
    """Bytes of masters, gradients, moments."""
    found = host_tensors(model, optimizers)
    assert list(found) == ["masters", "gradients", "moments"]
    return tuple(tensor_bytes(tensors) for tensors in found.values())


def test_several_optimizers_and_tied_weights(device):
    model = attached(llama(tie_word_embeddings=True), device=device)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    train_once(model, batch_for(model))
    count = sum(p.numel() for p in set(model.parameters()))
    layers, others = list(model.model.layers.parameters()), [model.model.norm.weight, model.lm_head.weight]
    optimizers = [torch.optim.SGD(some, lr=0.1, momentum=0.9) for some in (layers, others)]
    for optimizer in optimizers:
        optimizer.step()
    assert held(model, *optimizers) == (4 * count, 4 * count, 4 * count)
    assert held(model, optimizers[1]) == (4 * count, 4 * count, tensor_bytes(others))
    assert held(model) == (4 * count, 4 * count, 0)


def test_what_an_eager_update_has_used_is_no_gradient_any_more(device):
    model = bert()
    eps = attach_l2l(model, L2LConfig(eps_update="eager", device=device))
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    train_once(model, batch_for(model))
    eps.synchronize()
    assert held(model, optimizer) == (tensor_bytes(model.parameters()), 0, 0)


# ---- as a notebook shows it


def shown(eps: EagerParamServer) -> list[list[str]]:
    """How many of each kind there are, and their size: a shell says what a notebook shows, which is well-formed."""
    rows = ElementTree.fromstring(eps._repr_html_()).findall("tbody/tr")
    found = [[str(cell.text) for cell in row.findall("td")] for row in rows]
    assert [line.split(maxsplit=2) for line in repr(eps).splitlines()[2:]] == found
    return [row[1:] for row in found]


def test_kinds_and_sizes_change_with_the_step(device):
    model = frozen_below(bert())
    eps = attach_l2l(model, L2LConfig(device=device, eps_update="serial"))
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    whole, size, none = tensor_bytes(parameters), tensor_bytes(trained), ["0", "0 bytes"]
    masters = [str(len(parameters)), size_text(whole)]
    assert ("page-locked" in repr(eps)) == (device != "cpu")
    assert shown(eps) == [masters, none, none]
    optimizer = eps.wrap(torch.optim.AdamW(trained, lr=0.1))
    optimizer = Accelerator(cpu=device == "cpu").prepare(optimizer)
    eps.wrap(optimizer)
    train_once(model, batch_for(model))
    eps.synchronize()
    assert held(model, optimizer) == (whole, size, 0)
    assert shown(eps) == [masters, [str(len(trained)), size_text(size)], none]
    optimizer.step()
    moments = 2 * size + 4 * len(trained)
    assert held(model, optimizer) == (whole, 0, moments)
    assert shown(eps) == [masters, none, [str(3 * len(trained)), size_text(moments)]]
    eps.release()
    assert shown(eps) == [masters, none, none]


# ---- after many steps, as after a few


@pytest.mark.parametrize(
    ("options", "mode"), [({"stash": "disk", "gradient_slots": 1}, "deferred"), *more(({}, "eager"))]
)
def test_steps_leave_nothing(options, mode, device, tmp_path, monkeypatch):
    """No threads, files, tensors, memory: of accumulated batches, evaluations, and forwards without a backward; 3,000
    of them are a part of `make soak`."""
    monkeypatch.setattr("hf_l2l.stash.spill.is_in_memory", lambda folder: False)
    spills = {"spill_dir": tmp_path} if options.get("stash") == "disk" else {}
    before = left_over.own_threads()
    model, eps, optimizer, batch = attach(eps_update=mode, **options, **spills)
    batches = [batch, batch_for(model, masked=False, rows=5, seed=2)]
    found = []
    for step in range(12):
        with eps.accumulate():
            model(**batches[step % 2]).loss.backward()
        model(**batch).loss.backward()
        if mode != "eager":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        model(**batch)
        with torch.no_grad():
            model.eval()(**batch)
            model.train()
        if step % 3 == 2:
            eps.synchronize()
            found.append(left_over.counts())
            if DEVICE == "sim":
                found[-1] |= {"device": settled_memory(), "page-locked": page_locked_bytes()}
    left_over.assert_flat(found)
    detach_l2l(model)
    assert left_over.own_threads() <= before
    assert not list(tmp_path.iterdir())


# ---- times


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
    added = ("wait_upload_s", "wait_download_s", "wait_eps_s", "step_s", "bound", "tokens_per_s")
    names = {"step", *(f"l2l_{name}" for name in added)} | ({"device_peak_bytes"} if device != "cpu" else set())
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


@cpu_suffices
def test_trackers_take_every_value(tmp_path):
    """TensorBoard tells numbers from text, and drops anything else."""
    lines = []
    callback = on("on_log", lambda *_, logs, **__: lines.append(dict(logs)))
    l2l_trainer(tmp_path, max_steps=1, callbacks=[callback], l2l_log_times=True).train()
    assert {"l2l_bound", "l2l_step_s"} <= lines[0].keys() and type(lines[0]["l2l_bound"]) is str
    assert {type(value) for value in lines[0].values()} <= {int, float, str}
