"""The recompute runs under the forward's autocast settings, in any thread, and generators are restored."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import nn

from hf_l2l.runtime.compute_state import (
    AutocastState,
    ProgramRng,
    RngState,
    autocast_dtype,
    get_rng_state,
    rng_state_kept,
    set_rng_state,
)
from hf_l2l.runtime.stream import HOST


def drawn() -> list[float]:
    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]


def test_the_generators_of_a_program_are_set_back(tmp_path):
    before = ProgramRng.now()
    assert before.moved_since(before) == set()
    expected = drawn()
    after = ProgramRng.now()
    assert after.moved_since(before) == {"python", "numpy", "torch"}
    torch.save(tuple(before.plain()), tmp_path / "state.pth")
    read = ProgramRng(*torch.load(tmp_path / "state.pth", weights_only=True))
    assert read.moved_since(before) == set()
    for state in (before, read):
        drawn()
        state.restore()
        assert drawn() == expected
    numpy.random.rand()
    assert ProgramRng.now().moved_since(after) == {"numpy"}


def settings() -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


def test_autocast_settings_are_entered_and_left():
    outside = settings()
    with torch.autocast("cpu", torch.bfloat16):
        inside = AutocastState.current(HOST)
    assert inside.enabled_dtypes == (torch.bfloat16,)
    assert AutocastState.current(HOST).enabled_dtypes == ()
    with inside.entered():
        assert settings() == (True, torch.bfloat16, False)
        assert torch.nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype == torch.bfloat16
    assert settings() == outside
    with pytest.raises(KeyError), inside.entered():
        raise KeyError
    assert settings() == outside


def test_autocast_off_is_entered_inside_autocast():
    off = AutocastState.current(HOST)
    with torch.autocast("cpu", torch.bfloat16):
        within = settings()
        with off.entered():
            assert not torch.is_autocast_enabled("cpu")
        assert settings() == within == (True, torch.bfloat16, True)


def test_autocast_settings_reach_another_thread():
    with torch.autocast("cpu", torch.bfloat16):
        state = AutocastState.current(HOST)
    found = []

    def work() -> None:
        found.append(torch.is_autocast_enabled("cpu"))
        with state.entered():
            found.append(torch.nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype)
        found.append(torch.is_autocast_enabled("cpu"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False, torch.bfloat16, False]


def test_autocast_settings_of_the_device_and_of_the_host():
    with torch.autocast("cpu", torch.bfloat16):
        state = AutocastState.current(torch.device("cuda", 0))
    assert [name for name, _, _ in state.settings] == ["cpu", "cuda"]
    assert AutocastState.current(HOST).settings == tuple(s[:1] + (False,) + s[2:] for s in state.settings[:1])


def test_the_dtype_of_autocast_is_that_of_the_device():
    assert autocast_dtype(HOST) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert (autocast_dtype(HOST), autocast_dtype(torch.device("cuda", 0))) == (torch.bfloat16, None)


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


def test_equal_rng_states():
    assert get_rng_state(HOST).device is None
    first, second = get_rng_state(HOST), get_rng_state(HOST)
    assert first == second
    torch.rand(1)
    assert get_rng_state(HOST) != first
    host, device = torch.zeros(4), torch.ones(4)
    assert RngState(host, device) == RngState(host.clone(), device.clone())
    assert RngState(host, device) != RngState(host, device + 1)
    assert RngState(host, device) != RngState(host + 1, device)
    assert RngState(host, device) != RngState(host, None)
    assert RngState(host, None) != RngState(host, device)
    assert RngState(host, None) != "a state"


def test_a_state_can_be_set_again():
    state = get_rng_state(HOST)
    first = torch.rand(4)
    set_rng_state(state, HOST)
    assert torch.equal(torch.rand(4), first)


def test_generators_come_back_whatever_is_drawn():
    before = get_rng_state(HOST)
    with rng_state_kept(HOST):
        torch.rand(4)
        assert get_rng_state(HOST) != before
    assert get_rng_state(HOST) == before
    with pytest.raises(KeyError), rng_state_kept(HOST):
        torch.rand(4)
        raise KeyError
    assert get_rng_state(HOST) == before
