"""What training holds in host and device memory: by callback, by kind, and as a notebook shows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from hf_l2l import EagerParamServer, L2LConfig, attach_l2l
from hf_l2l.measure import DeviceMemoryTrace, MemoryCallback
from hf_l2l.report.host_tensors import host_tensors
from hf_l2l.runtime.tensors import size_text, tensor_bytes
from models import attached, batch_for, bert, llama, train_once
from tiers import combinations
from training import l2l_trainer, plain_trainer, settled_memory, tiny_bert


@pytest.fixture(autouse=True)
def _settled(device: str) -> None:
    """Models of other tests are gone, with their slots."""
    if device != "cpu":
        settled_memory()


def frozen_below(model: nn.Module) -> nn.Module:
    """With embeddings that do not train."""
    model.base_model.embeddings.requires_grad_(False)
    return model


def expected_bytes(model: nn.Module, kinds: int = 4) -> int:
    """Masters of all parameters; of those that train also gradients, two moments, and AdamW's step of 4 bytes."""
    trained = [p for p in model.parameters() if p.requires_grad]
    own = (kinds - 1) * sum(p.numel() for p in trained) + (len(trained) if kinds == 4 else 0)
    return 4 * (sum(p.numel() for p in model.parameters()) + own)


def measured(make, folder, **options) -> dict[str, int]:
    """What the callback found in a run."""
    callback = MemoryCallback()
    make(folder, callbacks=[callback], **{"model": tiny_bert(layers=2), "max_steps": 2, **options}).train()
    return callback.metrics()


# ---- MemoryCallback


@pytest.mark.parametrize(
    ("make", "options"),
    combinations([plain_trainer, l2l_trainer], [{"gradient_accumulation_steps": 2}, {"max_steps": 1, "optim": "sgd"}]),
)
@pytest.mark.filterwarnings("ignore:batch 8 x accumulation 2:UserWarning")
def test_where_what_is_held(make, options, tmp_path, device):
    """On the host layer to layer, and on the CPU anyway; frozen parameters have no gradients and no moments."""
    before = settled_memory() if device != "cpu" else 0
    model = frozen_below(tiny_bert(layers=2))
    serial = {"eps_update": "serial"} if make is l2l_trainer else {}  # none is under way when it is looked at
    metrics = measured(make, tmp_path, model=model, **options, **serial)
    kinds = 2 if "optim" in options else 4
    on_host = device == "cpu" or make is l2l_trainer
    assert metrics["train_host_bytes"] == (expected_bytes(model, kinds) if on_host else 0)
    assert metrics.keys() - {"train_device_bytes"} == {"train_host_bytes", "train_process_bytes"}
    assert ("train_device_bytes" in metrics) == (device != "cpu")
    if not on_host:
        assert metrics["train_device_bytes"] - before >= expected_bytes(model, kinds)
    if device == "sim":  # whose memory is that of the process
        assert metrics["train_process_bytes"] > metrics["train_device_bytes"]


PEAK = """
from hf_l2l.memory.host_limits import peak_process_bytes
peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))
print(peak_process_bytes(), int(peak.split()[1]) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_that_started_this_one_is_not_counted():
    mine = torch.ones(2**28 // 4)  # with this, more than the other process takes
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run([sys.executable, "-c", PEAK], env=environment, capture_output=True, text=True, check=True)
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


def table(eps: EagerParamServer) -> list[list[str]]:
    """The rows of the table, which must be well-formed; a shell says what a notebook says."""
    rows = ElementTree.fromstring(eps._repr_html_()).findall("tbody/tr")
    found = [[str(cell.text) for cell in row.findall("td")] for row in rows]
    assert [line.split(maxsplit=2) for line in repr(eps).splitlines()[2:]] == found
    return found


def test_kinds_and_sizes_change_with_the_step(device):
    model = frozen_below(bert())
    eps = attach_l2l(model, L2LConfig(device=device, eps_update="serial"))
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    masters = ["masters", str(len(parameters)), size_text(tensor_bytes(parameters))]
    none = ["0", "0 bytes"]
    assert ("page-locked" in repr(eps)) == (device != "cpu")
    assert table(eps) == [masters, ["gradients", *none], ["moments", *none]]
    optimizer = eps.wrap(torch.optim.AdamW(trained, lr=0.1))
    optimizer = Accelerator(cpu=device == "cpu").prepare(optimizer)
    eps.wrap(optimizer)
    train_once(model, batch_for(model))
    eps.synchronize()
    assert held(model, optimizer) == (tensor_bytes(parameters), tensor_bytes(trained), 0)
    gradients = ["gradients", str(len(trained)), size_text(tensor_bytes(trained))]
    assert table(eps) == [masters, gradients, ["moments", *none]]
    optimizer.step()
    size = 2 * tensor_bytes(trained) + 4 * len(trained)
    assert held(model, optimizer) == (tensor_bytes(parameters), 0, size)
    moments = ["moments", str(3 * len(trained)), size_text(size)]
    assert table(eps) == [masters, ["gradients", *none], moments]
    eps.release()
    assert table(eps) == [masters, ["gradients", *none], ["moments", *none]]
