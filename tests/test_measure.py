"""What training holds in host memory, on the CPU: by callback, by kind, and as a notebook shows it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from hf_l2l import EagerParamServer, L2LConfig, attach_l2l
from hf_l2l.measure import DeviceMemoryTrace, MemoryCallback
from hf_l2l.report.host_tensors import host_tensors
from hf_l2l.runtime.tensors import size_text, tensor_bytes
from models import attached, batch_for, bert, llama, train_once
from training import l2l_trainer, plain_trainer, tiny_bert

ROOT = Path(__file__).parent.parent
TRAINERS = [plain_trainer, l2l_trainer]


def frozen_below(model: nn.Module) -> nn.Module:
    """With embeddings that do not train."""
    model.base_model.embeddings.requires_grad_(False)
    return model


def expected_bytes(model: nn.Module) -> int:
    """Masters of all parameters; of those that train also gradients, two moments, and AdamW's step of 4 bytes."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return 4 * (sum(p.numel() for p in model.parameters()) + 3 * sum(p.numel() for p in trained) + len(trained))


def measured(make, folder, **options) -> dict[str, int]:
    """What the callback found in a run on the CPU."""
    callback = MemoryCallback()
    make(folder, callbacks=[callback], use_cpu=True, **options).train()
    return callback.metrics()


# ---- MemoryCallback


@pytest.mark.one_in(4)
@pytest.mark.parametrize("options", [{"max_steps": 1}, {"max_steps": 3}, {"gradient_accumulation_steps": 2}], ids=str)
@pytest.mark.parametrize("make", TRAINERS)
@pytest.mark.filterwarnings("ignore:batch 8 x accumulation 2:UserWarning")
def test_the_host_holds_everything_on_the_cpu(make, options, tmp_path):
    metrics = measured(make, tmp_path, **options)
    assert metrics.keys() == {"train_host_bytes", "train_process_bytes"}
    assert metrics["train_host_bytes"] == expected_bytes(tiny_bert())


@pytest.mark.parametrize("make", TRAINERS)
def test_frozen_parameters_have_no_gradients_and_no_moments(make, tmp_path):
    model = frozen_below(tiny_bert())
    assert measured(make, tmp_path, model=model)["train_host_bytes"] == expected_bytes(model)
    assert expected_bytes(model) < expected_bytes(tiny_bert())


@pytest.mark.parametrize("make", TRAINERS)
def test_an_optimizer_without_state_has_no_moments(make, tmp_path):
    model = tiny_bert()
    found = measured(make, tmp_path, model=model, optim="sgd")
    assert found["train_host_bytes"] == 2 * 4 * sum(p.numel() for p in model.parameters())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", TRAINERS)
def test_a_resumed_run_is_measured_too(make, tmp_path):
    measured(make, tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    callback = MemoryCallback()
    resumed = make(tmp_path, callbacks=[callback], use_cpu=True, max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert callback.metrics()["train_host_bytes"] == expected_bytes(tiny_bert())


def test_the_process_holds_at_least_what_it_holds_now():
    now = psutil.Process().memory_info().rss
    assert MemoryCallback().metrics()["train_process_bytes"] >= 0.95 * now


def test_the_process_is_left_out_where_the_system_does_not_tell(monkeypatch):
    monkeypatch.setattr("hf_l2l.measure.peak_process_bytes", lambda: None)
    assert MemoryCallback().metrics() == {"train_host_bytes": 0}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("module", "asked"),
    [
        ("memory.host_limits import peak_process_bytes", "peak_process_bytes()"),  # which the callback asks
        pytest.param(
            "measure import MemoryCallback",
            "MemoryCallback().metrics()['train_process_bytes']",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_process_that_started_this_one_is_not_counted(module, asked):
    code = (
        f"from hf_l2l.{module}\n"
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        f"print({asked}, int(peak.split()[1]) * 1024)"
    )
    mine = torch.ones(2**28 // 4)  # with this, more than the other process takes
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    found, peak = map(int, result.stdout.split())
    assert found == pytest.approx(peak, rel=0.05), f"with {tensor_bytes([mine])} more bytes held here"


# ---- DeviceMemoryTrace


def test_there_is_nothing_to_trace_without_an_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    message = (
        "device memory can be traced on an accelerator only (there is none); call "
        "hf_l2l.testing.enable_simulated_accelerator() at the top of the script"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        DeviceMemoryTrace()


# ---- host_tensors


def held(model: nn.Module, *optimizers: torch.optim.Optimizer) -> tuple[int, int, int]:
    """Bytes of masters, gradients, moments."""
    found = host_tensors(model, optimizers)
    assert list(found) == ["masters", "gradients", "moments"]
    return tuple(tensor_bytes(tensors) for tensors in found.values())


@pytest.mark.parametrize("wrapped", [False, True])
def test_what_the_host_holds_changes_with_the_step(wrapped):
    model = frozen_below(bert())
    eps = attach_l2l(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = eps.wrap(torch.optim.AdamW(trained, lr=0.1))
    if wrapped:
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        assert optimizer.optimizer is not optimizer
    masters, of_trained = tensor_bytes(model.parameters()), tensor_bytes(trained)
    assert held(model, optimizer) == (masters, 0, 0)
    train_once(model, batch_for(model))
    assert held(model, optimizer) == (masters, of_trained, 0)
    optimizer.step()
    assert held(model, optimizer) == (masters, 0, 2 * of_trained + 4 * len(trained))


def test_several_optimizers_and_tied_weights():
    model = attached(llama(tie_word_embeddings=True))
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


def test_what_an_eager_update_has_used_is_no_gradient_any_more():
    model = bert()
    eps = attach_l2l(model, L2LConfig(eps_update="eager"))
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    train_once(model, batch_for(model))
    assert held(model, optimizer) == (tensor_bytes(model.parameters()), 0, 0)


def test_what_is_not_in_host_memory_is_left_out():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    assert held(model) == (24, 0, 0)


# ---- as a notebook shows it


def in_a_shell(eps: EagerParamServer) -> tuple[str, list[list[str]]]:
    """The caption and the rows of what `repr` says."""
    caption, header, *rows = repr(eps).splitlines()
    assert header.split() == ["in", "host", "memory", "tensors", "size"]
    return caption, [row.split(maxsplit=2) for row in rows]


def table(eps: EagerParamServer) -> tuple[str, list[list[str]]]:
    """The caption and the rows of the table, which must be well-formed."""
    tree = ElementTree.fromstring(eps._repr_html_())
    assert tree.tag == "table"
    header = [cell.text for cell in tree.findall("thead/tr/th")]
    assert header == ["in host memory", "tensors", "size"]
    found = tree.findtext("caption"), [[cell.text for cell in row.findall("td")] for row in tree.findall("tbody/tr")]
    assert in_a_shell(eps) == found  # a shell says what a notebook says
    return found


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_notebook_shows_kinds_and_sizes(wrapped):
    model = frozen_below(bert())
    eps = attach_l2l(model)
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    masters = ["masters", str(len(parameters)), size_text(tensor_bytes(parameters))]
    none = ["0", "0 bytes"]
    caption = f"EagerParamServer of a BertForSequenceClassification, layers run on {eps.device}"
    assert table(eps) == (caption, [masters, ["gradients", *none], ["moments", *none]])
    optimizer = eps.wrap(torch.optim.AdamW(trained, lr=0.1))
    if wrapped:
        optimizer = Accelerator(cpu=True).prepare(optimizer)
        eps.wrap(optimizer)
    train_once(model, batch_for(model))
    gradients = ["gradients", str(len(trained)), size_text(tensor_bytes(trained))]
    assert table(eps)[1] == [masters, gradients, ["moments", *none]]
    optimizer.step()
    moments = ["moments", str(3 * len(trained)), size_text(2 * tensor_bytes(trained) + 4 * len(trained))]
    assert table(eps)[1] == [masters, ["gradients", *none], moments]
    eps.release()
    assert table(eps)[1] == [masters, ["gradients", *none], ["moments", *none]]
