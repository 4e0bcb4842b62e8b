"""The recompute runs under the forward's autocast settings, in whichever thread."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from hf_l2l.runtime.compute_state import AutocastState
from hf_l2l.runtime.stream import HOST


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
