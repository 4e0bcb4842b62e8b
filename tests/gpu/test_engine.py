"""The engine on a CUDA device: results, and that no order of copies changes them. `make test-gpu`.

The other tests run on the CPU and on the simulated accelerator, which finds every wait that is missing. These find
what the simulation has wrong about CUDA.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import nn

from gpu_machine import DEVICE, IS_CUDA, full, module, sleep, small_bert
from hf_l2l import EngineFailedError, L2LConfig, attach_l2l, detach_l2l
from hf_l2l.runtime import stream
from hf_l2l.runtime.flat_memory import Pages
from models import (
    FAMILIES,
    assert_same_bits,
    attached,
    batch_for,
    gradients,
    reference,
    relative_error,
    train_once,
)

pytestmark = pytest.mark.gpu
OPTIONS: list[dict[str, Any]] = [
    {},
    {"ubatch_size": 3},
    {"ubatch_size": 3, "stash": "host"},
    {"ubatch_size": 3, "stash": "host", "gradient_slots": 1, "prefetch": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_plain_model(family, options):
    model = FAMILIES[family]().double()
    batch = batch_for(model)
    loss, expected = reference(model, batch)
    attached(model, device=DEVICE, **options)
    for _ in range(2):  # the first learns the order of the layers
        model.zero_grad()
        assert abs(train_once(model, batch) - loss) <= 1e-10 * abs(loss)
        assert relative_error(gradients(model), expected) <= 1e-10


def trained(
    model: nn.Module, steps: int = full(5, 2), max_norm: float = 1.0, **options: Any
) -> dict[str, torch.Tensor]:
    """The weights after some steps of AdamW with clipping and accumulation, dropout on."""
    torch.manual_seed(5)
    eps = attach_l2l(model, L2LConfig(device=DEVICE, **options))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for _ in range(steps):
        with eps.accumulate():
            train_once(model, batch_for(model, seed=1))
        train_once(model, batch_for(model, seed=2))
        if max_norm:
            eps.clip_grad_norm_(max_norm)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stash", ["device", "host"])
def test_overlap_changes_no_bit(stash):
    expected = trained(small_bert(), ubatch_size=3, stash=stash, prefetch=False, gradient_slots=1)
    assert_same_bits(trained(small_bert(), ubatch_size=3, stash=stash), expected)


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize(("mode", "max_norm"), [("deferred", 0.1), ("eager", 0.0)])
def test_when_weights_are_updated_changes_no_bit(mode, max_norm, stash):
    same: dict[str, Any] = {"steps": full(20, 2), "max_norm": max_norm, "ubatch_size": 3, "stash": stash}
    expected = trained(small_bert(), eps_update="serial", **same)
    assert_same_bits(trained(small_bert(), eps_update=mode, **same), expected)


@pytest.mark.parametrize(
    ("cmp", "mode", "max_norm"), [("bf16", "deferred", 0.1), ("fp16", "deferred", 0.1), ("bf16", "eager", 0.0)]
)
def test_when_weights_are_updated_changes_no_bit_in_16_bits(cmp, mode, max_norm):
    same: dict[str, Any] = {"steps": full(10, 2), "max_norm": max_norm, "ubatch_size": 3, "cmp": cmp}
    short: dict[str, Any] = {"grad_dtype": "16bit", "moment_dtype": "bf16", "host_copies": "per_sweep"}
    for options in ({}, short):
        expected = trained(small_bert(), eps_update="serial", **same, **options)
        assert_same_bits(trained(small_bert(), eps_update=mode, **same, **options), expected)


@pytest.mark.parametrize("cmp", ["bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_16_bits_come_near_to_fp32(family, cmp):
    model = FAMILIES[family]()
    batch = batch_for(model)
    loss, expected = reference(model, batch)
    eps = attach_l2l(model, L2LConfig(device=DEVICE, cmp=cmp, ubatch_size=3))
    _optimizer = eps.wrap(torch.optim.SGD(model.parameters()))  # fp16 needs one that can skip steps
    assert abs(train_once(model, batch) - loss) <= 0.02 * abs(loss)
    assert relative_error(gradients(model), expected) <= 0.2


def test_norms_of_the_device_are_those_of_the_host():
    model = small_bert()
    eps = attach_l2l(model, L2LConfig(device=DEVICE))
    train_once(model, batch_for(model))
    found = eps.grad_norm()
    on_host = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(found, on_host, rtol=1e-5, atol=0.0)


def test_a_failed_update_reaches_the_program():
    model = small_bert()
    eps = attach_l2l(model, L2LConfig(device=DEVICE, eps_update="deferred"))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
    train_once(model, batch_for(model))
    optimizer.step()
    eps.synchronize()
    masters = list(model.bert.encoder.layer[1].parameters())
    for p in masters:
        optimizer.state[p]["exp_avg"] = torch.zeros(1)  # of no use
    with pytest.raises(RuntimeError) as told:
        for _ in range(2):
            train_once(model, batch_for(model))
            optimizer.step()
    assert "layer.1" in " ".join(told.value.__notes__)
    with pytest.raises(EngineFailedError):
        train_once(model, batch_for(model))


def test_a_trace_has_what_each_lane_does_in_order(tmp_path):
    file = tmp_path / "trace.json"
    model = small_bert()
    trained(model, steps=3, ubatch_size=3, trace=str(file))
    detach_l2l(model)
    events = json.loads(file.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in rows.values()}
    for e in events:
        if e["ph"] == "X":
            spans[rows[e["tid"]]].append((e["ts"], e["ts"] + e["dur"]))
    assert all(spans[name] for name in ("steps", "compute", "upload", "download", "norm", "host update"))
    assert len(spans["steps"]) == 3
    for name, found in spans.items():
        found.sort()
        # Events of CUDA are exact to half a microsecond, and count from a base that the host knows. What two streams
        # do in one row is kept apart by the time that the host takes to launch it.
        assert all(end <= start + 50.0 for (_, end), (start, _) in zip(found, found[1:], strict=False)), name


WIDTH = 4096 if IS_CUDA else 64


class Wide(nn.Module):
    """Layers of much weight and little work: 64 MiB of weights for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def test_long_copies_with_short_computation():
    """Every copy outlasts the computation that it travels under. The reference has run before."""
    torch.manual_seed(0)
    model = Wide()
    plain = copy.deepcopy(model).to(DEVICE)
    x = torch.randn(2, WIDTH)
    for each, on in ((plain, DEVICE), (model, torch.device("cpu"))):
        eps = attach_l2l(each, L2LConfig(device=DEVICE, layer_classes=("Linear",))) if each is model else None
        optimizer = torch.optim.SGD(each.parameters(), lr=1.0, momentum=0.9)
        optimizer = eps.wrap(optimizer) if eps is not None else optimizer
        for _ in range(5):
            each(x.to(on)).backward()
            optimizer.step()
            optimizer.zero_grad()
        module().synchronize()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.cpu(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_long_computation_with_short_copies(options):
    """The device is far behind the host, so whatever the host does too early is seen."""

    def slowly(*args: Any) -> None:
        sleep(1e-3)

    expected = trained(small_bert(), steps=2, **options)
    model = small_bert()
    for layer in model.bert.encoder.layer:
        layer.output.register_forward_hook(slowly)
    assert_same_bits(trained(model, steps=2, **options), expected)


def test_masters_and_gradients_are_page_locked():
    model = attached(small_bert(), device=DEVICE)
    assert all(p.is_pinned() for p in model.parameters())
    train_once(model, batch_for(model))
    assert all(p.grad.is_pinned() for p in model.parameters() if p.grad is not None)
    detach_l2l(model)
    assert not any(p.is_pinned() for p in model.parameters())


def test_a_refused_registration_is_forgotten():
    """The next kernel must not report it."""
    pages = Pages(8192)
    assert pages.lock(DEVICE)
    address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
    assert not stream.page_lock(address, 8192, DEVICE)  # it is registered already
    torch.ones(3, device=DEVICE).sum().item()
    pages.unlock()


def test_steps_take_no_more_memory_than_the_first():
    model = attached(small_bert(), device=DEVICE, stash="host", ubatch_size=3)
    peaks = []
    for _ in range(6):
        module().reset_peak_memory_stats()
        train_once(model, batch_for(model))
        model.zero_grad()
        peaks.append(module().max_memory_allocated())
    assert len(set(peaks[2:])) == 1
