"""The recompute runs under the forward's autocast settings, in any thread, and generators are restored."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hf_l2l.runtime.compute_state import (
    AutocastState,
    RngState,
    get_rng_state,
)
from hf_l2l.runtime.stream import HOST


def settings() -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


def test_autocast_settings_are_entered_and_left():
    outside = settings()
    with torch.autocast("cpu", torch.bfloat16):
        inside = AutocastState.current(HOST)
    assert inside.enabled_dtypes == (torch.bfloat16,)
    assert AutocastState.current(HOST).enabled_dtypes == ()
    off = AutocastState.current(HOST)
    with inside.entered():
        assert settings() == (True, torch.bfloat16, False)
        with off.entered():
            assert not torch.is_autocast_enabled("cpu")
        assert torch.nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype == torch.bfloat16
    assert settings() == outside
    with pytest.raises(KeyError), inside.entered():
        raise KeyError
    assert settings() == outside


def test_a_refilled_weight_is_cast_anew():
    """Two weights pass through one leaf inside one autocast region: the second must not meet the cast of the first."""
    x, first, second = torch.randn(4, 3), torch.randn(2, 3), torch.randn(2, 3)
    leaf = nn.Parameter(torch.empty(2, 3))
    results = []
    with torch.autocast("cpu", torch.bfloat16):
        state = AutocastState.current(HOST)
        for weight in (first, second):
            with torch.no_grad():
                leaf.copy_(weight)
            with state.entered():
                results.append(nn.functional.linear(x, leaf))
    for weight, result in zip((first, second), results, strict=True):
        assert torch.equal(result, nn.functional.linear(x.bfloat16(), weight.bfloat16()))


def test_settings_entered_in_another_thread_leave_the_cache_of_this_one():
    """Else the weight would be cast twice here, and its two gradients summed in fp32 instead of bf16."""

    def gradient(work: Callable[[], None]) -> torch.Tensor:
        weight, x = nn.Parameter(torch.linspace(-1, 1, 64 * 64).view(64, 64)), torch.linspace(-2, 3, 512).view(8, 64)
        with torch.autocast("cpu", torch.bfloat16):
            first = nn.functional.linear(x, weight)
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            second = nn.functional.linear(2 * x, weight)
        (first.float().square().sum() + second.float().square().sum()).backward()
        assert weight.grad is not None
        return weight.grad

    with torch.autocast("cpu", torch.bfloat16):
        state = AutocastState.current(HOST)

    def enter() -> None:
        with state.entered():
            pass

    def enter_a_region() -> None:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            pass

    expected = gradient(lambda: None)
    assert torch.equal(gradient(enter), expected)
    assert not torch.equal(gradient(enter_a_region), expected)  # why `entered` is no region of torch.autocast


# ---- generators


def test_states_of_generators_are_equal_if_those_of_all_devices_are():
    first = get_rng_state(HOST)
    assert first.device is None and first == get_rng_state(HOST)
    torch.rand(1)
    assert get_rng_state(HOST) != first
    host, device = torch.zeros(4), torch.ones(4)
    assert RngState(host, device) == RngState(host.clone(), device.clone())
    others = (RngState(host, device + 1), RngState(host + 1, device), RngState(host, None), "a state")
    assert all(RngState(host, device) != other for other in others)
    assert RngState(host, None) != RngState(host, device)
