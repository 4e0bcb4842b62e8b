"""Where training holds its bytes on a device that is not the host, and the device's memory over time."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import transformers as hf

from hf_l2l.measure import DeviceMemoryTrace, MemoryCallback
from hf_l2l.report.host_tensors import host_tensors
from hf_l2l.runtime.tensors import tensor_bytes
from models import attached, batch_for, train_once
from training import l2l_trainer, plain_trainer, settled_memory, tiny_bert


@pytest.fixture(autouse=True)
def _settled() -> None:
    """Models of other tests are gone, with their slots."""
    settled_memory()


def measured(make, folder, **options) -> tuple[dict[str, int], hf.Trainer]:
    """What the callback found, and the trainer."""
    callback = MemoryCallback()
    made = make(folder, callbacks=[callback], **options)
    made.train()
    assert made.args.device == torch.device("sim", 0)
    return callback.metrics(), made


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def deep_bert() -> torch.nn.Module:
    """So deep that its layers outweigh the activations of one batch."""
    return tiny_bert(layers=8)


# ---- MemoryCallback


@pytest.mark.parametrize("max_steps", [1, 3])
def test_plain_training_holds_everything_on_the_device(max_steps, tmp_path):
    before = torch.sim.memory_allocated()
    metrics, made = measured(plain_trainer, tmp_path, max_steps=max_steps)
    assert metrics["train_host_bytes"] == 0
    # Weights, gradients, two moments: of each as many bytes as there are of parameters.
    assert metrics["train_device_bytes"] - before >= 4 * tensor_bytes(made.model.parameters())
    assert metrics["train_process_bytes"] > metrics["train_device_bytes"]


@pytest.mark.parametrize(("max_steps", "mode"), [(1, "serial"), pytest.param(3, "deferred", marks=pytest.mark.slow)])
def test_layer_to_layer_training_holds_it_on_the_host(max_steps, mode, tmp_path):
    options = {"model": deep_bert(), "max_steps": max_steps, "ubatch_size": 2, "stash": "host", "eps_update": mode}
    metrics, made = measured(l2l_trainer, tmp_path / "l2l", **options)
    parameters = trained(made.model)
    assert metrics["train_host_bytes"] == 4 * tensor_bytes(parameters) + 4 * len(parameters)  # and AdamW's step
    theirs, _ = measured(plain_trainer, tmp_path / "hf", model=deep_bert(), max_steps=max_steps)
    assert 0 < metrics["train_device_bytes"] < theirs["train_device_bytes"]


def test_frozen_parameters_are_counted_as_masters_alone(tmp_path):
    model = tiny_bert()
    model.bert.embeddings.requires_grad_(False)
    metrics, _ = measured(l2l_trainer, tmp_path, model=model)
    parameters = trained(model)
    everything = tensor_bytes(model.parameters()) + 3 * tensor_bytes(parameters) + 4 * len(parameters)
    assert metrics["train_host_bytes"] == everything


def test_the_peak_of_a_run_is_its_own(tmp_path):
    large = torch.zeros(2**22, device="sim")
    del large
    metrics, _ = measured(l2l_trainer, tmp_path)
    assert metrics["train_device_bytes"] - torch.sim.memory_allocated() < 2**22


def test_host_tensors_are_those_on_the_host():
    model = tiny_bert().to("sim")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_once(model, {name: value.to("sim") for name, value in batch_for(model).items()})
    optimizer.step()
    assert host_tensors(model, [optimizer]) == {"masters": [], "gradients": [], "moments": []}
    model.classifier.to("cpu")
    found = host_tensors(model, [optimizer])
    assert {kind: len(tensors) for kind, tensors in found.items()} == {"masters": 2, "gradients": 2, "moments": 0}


# ---- DeviceMemoryTrace


def ended(trace: DeviceMemoryTrace) -> bool:
    names = [thread.name for thread in threading.enumerate()]
    return "l2l-memory-trace" not in names and not trace._thread.is_alive()


def wait_for_samples(trace: DeviceMemoryTrace, count: int) -> None:
    """Until there are `count` in all."""
    while len(trace.device_bytes) < count:
        time.sleep(0.001)


def test_a_trace_shows_memory_come_and_go():
    before = torch.sim.memory_allocated()
    started = time.perf_counter()
    with DeviceMemoryTrace(interval_s=0.001) as trace:
        wait_for_samples(trace, 1)
        large = torch.zeros(2**20, device="sim")
        wait_for_samples(trace, len(trace.device_bytes) + 2)
        del large
        wait_for_samples(trace, len(trace.device_bytes) + 2)
    took = time.perf_counter() - started
    assert ended(trace)
    assert len(trace.seconds) == len(trace.device_bytes) >= 5
    assert trace.seconds == sorted(trace.seconds)
    assert 0 <= trace.seconds[0] < trace.seconds[-1] <= took
    assert trace.device_bytes[0] == trace.device_bytes[-1] == before
    assert max(trace.device_bytes) == trace.peak_bytes == before + 4 * 2**20


def test_the_peak_is_found_between_samples_and_is_the_block_s_own():
    before = torch.sim.memory_allocated()
    earlier = torch.zeros(2**22, device="sim")
    del earlier
    with DeviceMemoryTrace(interval_s=60) as trace:
        wait_for_samples(trace, 1)
        short = torch.zeros(2**20, device="sim")
        del short
    assert ended(trace)
    assert trace.device_bytes == [before]
    assert trace.peak_bytes == before + 4 * 2**20


def test_a_trace_of_training():
    model = attached(tiny_bert(), device="sim", ubatch_size=2)
    batch = batch_for(model)
    with DeviceMemoryTrace(interval_s=0.0005) as trace:
        train_once(model, batch)
    assert ended(trace)
    assert trace.peak_bytes >= max(trace.device_bytes)
    assert trace.peak_bytes > torch.sim.memory_allocated()
    assert trace.seconds == sorted(trace.seconds)


def test_a_trace_ends_when_its_block_raises():
    with pytest.raises(RuntimeError, match="^on purpose$"), DeviceMemoryTrace() as trace:
        large = torch.zeros(2**20, device="sim")
        raise RuntimeError("on purpose")
    assert ended(trace)
    assert trace.seconds
    assert trace.peak_bytes >= tensor_bytes([large])


def test_a_trace_can_be_taken_again():
    trace = DeviceMemoryTrace()
    for elements in (1000, 10):
        with trace:
            torch.empty(elements, device="sim")
        assert 4 * elements <= trace.peak_bytes < 4 * elements + 4000
        assert trace.seconds[0] < 1
