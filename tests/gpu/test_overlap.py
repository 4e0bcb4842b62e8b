"""What runs at the same time on a CUDA device: ratios of times that the device itself has measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gpu_machine
from gpu_machine import DEVICE, IS_CUDA, MIB, marked, no_synchronization, seconds_between, sleep, small_bert
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.engine.relay import Relay
from hf_l2l.runtime import stream
from models import assert_same_bits, batch_for, train_once

pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
LAYERS = 6
WIDTH = 4096 if IS_CUDA else 16
"""Of a layer, whose weights are then 64 MiB."""


@pytest.fixture(autouse=True)
def _clock_of_now() -> None:
    """The clock of a device is another one when it is warm."""
    gpu_machine.cycles_per_s.cache_clear()
    sleep(1e-3)


class Call:
    """A call of a layer: its beginning and end on the device, and the calls before it that ran when it was issued."""

    def __init__(self, calls: list[Call]) -> None:
        self.start, self.end = marked(), None
        self.running = [number for number, call in enumerate(calls) if call.end is not None and not call.end.query()]
        calls.append(self)


class Sleeper(nn.Module):
    """A layer of 64 MiB whose kernels sleep."""

    def __init__(self, calls: list[Call], sleep_s: float) -> None:
        super().__init__()
        self.linear, self.calls, self.sleep_s = nn.Linear(WIDTH, WIDTH, bias=False), calls, sleep_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        call = Call(self.calls)
        sleep(self.sleep_s)
        x = self.linear(x)
        call.end = marked()
        return x


class Stack(nn.Module):
    def __init__(self, sleep_s: float) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.blocks = nn.Sequential(*(Sleeper(self.calls, sleep_s) for _ in range(LAYERS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


def copy_s(weight: torch.Tensor) -> float:
    """Of one upload of a page-locked weight, with nothing beside it."""
    there = torch.empty(weight.shape, device=DEVICE)
    found = []
    for _ in range(6):
        start = marked()
        there.copy_(weight.detach(), non_blocking=True)
        found.append(seconds_between(start, marked()))
    return statistics.median(found[1:])


def sweep_s(model: Stack, x: torch.Tensor) -> float:
    """Seconds on the device from the first layer's first kernel to the last layer's end, in a forward.

    The device sleeps first, so that how fast the host is does not matter.
    """
    found = []
    for _ in range(6):  # the first learns the order of the layers
        model.calls.clear()
        sleep(0.05)
        with torch.no_grad():
            model(x)
        found.append(seconds_between(model.calls[0].start, model.calls[-1].end))
    return statistics.median(found[1:])


@pytest.mark.parametrize("prefetch", [True, False])
def test_uploads_run_beside_the_computation(prefetch):
    model = Stack(0.0)
    attach_l2l(model, L2LConfig(device=DEVICE, layer_classes=("Sleeper",), prefetch=prefetch))
    x = torch.randn(2, WIDTH, device=DEVICE)
    one = copy_s(model.blocks[0].linear.weight)
    sleep_s = 1.1 * one  # a little longer than the copy that is to hide under it
    start = marked()
    for _ in range(LAYERS):
        sleep(sleep_s)
    compute_s = seconds_between(start, marked())
    for block in model.blocks:
        block.sleep_s = sleep_s
    found = sweep_s(model, x)
    longer = max(compute_s, (LAYERS - 1) * one)  # the first layer's upload lies before its first kernel
    if IS_CUDA:
        assert found <= 1.15 * longer if prefetch else found >= 1.4 * longer, (found, compute_s, one)


def test_the_host_runs_ahead_of_the_device():
    """In each sweep, the last layer is launched while the second one still computes."""
    model = Stack(0.03)
    eps = attach_l2l(model, L2LConfig(device=DEVICE, layer_classes=("Sleeper",), eps_update="serial"))
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=1e-3))
    x = torch.randn(2, WIDTH, device=DEVICE)
    for _ in range(4):  # the first allocates and learns
        model.calls.clear()
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(model.calls) == 2 * LAYERS
    if IS_CUDA:
        assert 1 in model.calls[LAYERS - 1].running
        assert LAYERS + 1 in model.calls[-1].running


def train_steadily(steps: int, at: int, begins: Callable[[], object], **options: Any) -> nn.Module:
    """A small BERT after so many steps; before step `at`, something begins."""
    model = small_bert()
    eps = attach_l2l(model, L2LConfig(device=DEVICE, eps_update="deferred", **options))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
    for step in range(steps):
        if step == at:
            begins()
        train_once(model, batch_for(model))
        eps.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    eps.synchronize()
    return model


@pytest.mark.parametrize(
    "options", [{}, {"ubatch_size": 3, "stash": "host"}, {"cmp": "bf16"}, {"resident": "shell"}], ids=str
)
def test_no_layer_call_of_a_steady_step_waits_for_the_device(options, monkeypatch):
    watched: list[str] = []

    def watch() -> None:
        for name in ("forward", "backward"):
            original = getattr(Relay, name)

            def watched_call(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
                with no_synchronization():
                    watched.append(name)
                    return original(*args, **kwargs)

            monkeypatch.setattr(Relay, name, watched_call)

    model = train_steadily(5, 3, watch, **options)
    assert watched.count("forward") == watched.count("backward") == 2 * len(model.bert.encoder.layer)


@pytest.mark.skipif(not IS_CUDA, reason="needs CUDA itself")
def test_a_synchronization_would_be_noticed():
    with no_synchronization(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(3, device=DEVICE).sum().item()


HEAD = 8192 if IS_CUDA else 32
"""Rows and columns of a matrix of 256 MiB."""


class Overwriting(nn.Module):
    """A layer that overwrites, in its backward, what memory it can get, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.overwrites = nn.Linear(8, 8), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and self.overwrites:
            _held = [torch.full((HEAD, HEAD), float("nan"), device=x.device) for _ in range(3)]
        return self.linear(x)


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Overwriting() for _ in range(3)))
        self.middle = nn.Linear(8, HEAD, bias=False)
        self.head = nn.Linear(HEAD, HEAD, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.blocks(x))).square().mean()


def test_the_gradient_of_a_non_layer_module_is_read_before_its_memory_is_used_again():
    """It is freed in the backward while the lane that downloads it is busy; new tensors of its size are NaN."""
    found = []
    model, x = Headed(), torch.randn(4, 8, device=DEVICE)
    eps = attach_l2l(model, L2LConfig(device=DEVICE, layer_classes=("Overwriting",)))
    for overwrites in (False, True):
        for block in model.blocks:
            block.overwrites = overwrites
        model.zero_grad()
        gpu_machine.module().empty_cache()
        loss = model(x)
        with eps.lane.entered():
            sleep(0.3)
        loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert model.head.weight.numel() * 4 == (256 * MIB if IS_CUDA else 4096)
    assert_same_bits(found[1], found[0])


@pytest.mark.parametrize("options", [{"stash": "host", "ubatch_size": 3}, {"cmp": "bf16"}], ids=str)
def test_nothing_is_page_locked_in_a_steady_step(options, monkeypatch):
    """Page-locking waits for the device and takes long."""
    page_lock, locked, of_the_first = stream.page_lock, [], []

    def counted(address: int, num_bytes: int, device: torch.device) -> bool:
        locked.append(num_bytes)
        return page_lock(address, num_bytes, device)

    monkeypatch.setattr(stream, "page_lock", counted)
    train_steadily(10, 2, lambda: (of_the_first.extend(locked), locked.clear()), **options)
    assert of_the_first and locked == [], "the gradients of the first step are page-locked"


def steps_of(model: nn.Module, resident: str, count: int = 4) -> dict[str, Any]:
    """The weights after some steps with dropout."""
    eps = attach_l2l(model, L2LConfig(device=DEVICE, eps_update="deferred", ubatch_size=3, resident=resident))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    torch.manual_seed(5)
    for seed in range(count):
        train_once(model, batch_for(model, seed=seed))
        eps.clip_grad_norm_(1.0)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("resident", ["none", "shell"])
def test_a_loop_on_another_stream_has_the_same_bits(resident):
    """Also if the default stream is busy: nothing is left to it."""
    expected = steps_of(small_bert(), resident)
    model, module = small_bert(), gpu_machine.module()
    # Backward runs on the streams of the forward, but not on the simulated accelerator.
    other = module.Stream(device=DEVICE) if IS_CUDA else module.current_stream()
    sleep(0.5)
    with module.stream(other):
        found = steps_of(model, resident)
    module.synchronize()
    assert_same_bits(found, expected)
