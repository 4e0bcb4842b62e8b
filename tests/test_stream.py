"""Views where host and device are one memory, copies elsewhere; generators and autocast settings that come back."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from hf_l2l import stream
from hf_l2l.stream import HOST, AutocastState, RngState


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_an_upload_to_the_host_is_a_detached_view():
    master = nn.Parameter(torch.randn(3))
    up = stream.upload(master, HOST)
    assert same_memory(up, master)
    assert up is not master and up.is_leaf and not up.requires_grad


def test_a_forced_upload_is_a_detached_copy():
    master = nn.Parameter(torch.randn(3))
    with stream.forced_copies():
        up = stream.upload(master, HOST)
    assert not same_memory(up, master)
    assert torch.equal(up, master) and up.is_leaf and not up.requires_grad


def test_a_download_from_the_host_is_the_tensor_itself():
    tensor = torch.randn(3)
    assert stream.download(tensor) is tensor
    with stream.forced_copies():
        down = stream.download(tensor)
    assert not same_memory(down, tensor) and torch.equal(down, tensor)


def test_forced_copies_end_with_their_context():
    assert stream.shares_host_memory(HOST)
    with pytest.raises(KeyError), stream.forced_copies():
        assert not stream.shares_host_memory(HOST)
        raise KeyError
    assert stream.shares_host_memory(HOST)
    with stream.forced_copies():
        with stream.forced_copies():
            pass
        assert not stream.shares_host_memory(HOST)


@pytest.mark.parametrize("asked", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_the_host_has_one_name(asked):
    assert stream.execution_device(asked) == HOST


def test_without_an_accelerator_the_host_executes(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert stream.execution_device(None) == HOST


def test_the_current_accelerator_executes_if_it_is_available(monkeypatch):
    checked = []

    def current_accelerator(check_available: bool = False) -> torch.device:
        checked.append(check_available)
        return torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert stream.execution_device(None) == torch.device("cuda", 3)
    assert checked == [True]
    assert stream.execution_device("cuda") == torch.device("cuda", 3)
    assert stream.execution_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match=r"must be one this machine has \(got cuda:4\)"):
        stream.execution_device("cuda:4")


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError) as error:
        stream.execution_device("cuda")
    assert str(error.value) == (
        "the execution device must be one this machine has (got cuda); set device to None for the current "
        "accelerator, or to 'cpu'"
    )


def test_the_host_has_no_device_module():
    assert stream.device_module(HOST) is None
    assert stream.device_module(torch.device("cuda", 0)) is torch.cuda
    assert stream.get_rng_state(HOST).device is None


def test_equal_rng_states():
    first, second = stream.get_rng_state(HOST), stream.get_rng_state(HOST)
    assert first == second
    torch.rand(1)
    assert stream.get_rng_state(HOST) != first
    host, device = torch.zeros(4), torch.ones(4)
    assert RngState(host, device) == RngState(host.clone(), device.clone())
    assert RngState(host, device) != RngState(host, device + 1)
    assert RngState(host, device) != RngState(host + 1, device)
    assert RngState(host, device) != RngState(host, None)
    assert RngState(host, None) != RngState(host, device)
    assert RngState(host, None) != "a state"


def test_a_state_can_be_set_again():
    state = stream.get_rng_state(HOST)
    first = torch.rand(4)
    stream.set_rng_state(state, HOST)
    assert torch.equal(torch.rand(4), first)


def test_generators_come_back_whatever_is_drawn():
    before = stream.get_rng_state(HOST)
    with stream.rng_state_kept(HOST):
        torch.rand(4)
        assert stream.get_rng_state(HOST) != before
    assert stream.get_rng_state(HOST) == before
    with pytest.raises(KeyError), stream.rng_state_kept(HOST):
        torch.rand(4)
        raise KeyError
    assert stream.get_rng_state(HOST) == before


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
