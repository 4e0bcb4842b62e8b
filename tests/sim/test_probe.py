"""The probe on the simulated accelerator, whose race check sees a wait that is missing; its rates mean nothing."""

from __future__ import annotations

import pytest
import torch

from hf_l2l.probe.figures import LINK, HardwareFigures
from hf_l2l.probe.rates import Sizes, probe
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.testing import copies_under_way, enable_simulated_accelerator, page_lock_limit, page_locked_bytes

TINY = Sizes(copied_bytes=2**16, parameters=2**10, most_rows=64, seconds=0.0)
WAYS = {"up", "down", "up_both", "down_both"}


def test_the_figures():
    before = page_locked_bytes()
    figures = probe(sizes=TINY)
    assert figures.device_name == "simulated accelerator"
    assert figures.device_memory_bytes == stream.memory_of(torch.device("sim:0"))
    assert figures.page_locked is True
    assert all(getattr(figures, name) > 0 for name in LINK)
    assert figures.pageable.keys() == WAYS and figures.flops["fp32"] > 0
    assert page_locked_bytes() == before and copies_under_way() == 0
    assert HardwareFigures.from_json(figures.to_json()) == figures


def test_a_small_device():
    enable_simulated_accelerator("2MiB")
    try:
        figures = probe(sizes=Sizes(copied_bytes=2**16, parameters=2**20, most_rows=2048, seconds=0.0))
    finally:
        enable_simulated_accelerator()
    assert figures.flops["fp32"] > 0 and figures.link_up > 0
    assert figures.device_adamw is None, "its state has 16 MiB"


def test_page_locking_that_is_refused():
    """The rates of the link are those of pageable memory then."""
    with page_lock_limit(0):
        figures = probe(sizes=TINY)
    stream.forget_refusal(torch.device("sim:0"))
    assert figures.page_locked is False
    assert [getattr(figures, name) for name in LINK] == [figures.pageable[name.removeprefix("link_")] for name in LINK]


def test_the_link_is_measured_with_page_locked_memory(monkeypatch):
    """All copies of the second half of the measurement are from or to it."""
    pinned = []
    copy = torch.Tensor.copy_

    def copy_(target, source, non_blocking=False):
        if non_blocking:
            here = source if source.device == stream.HOST else target
            pinned.append(any(here.data_ptr() in each for each in ranges()))
        return copy(target, source, non_blocking)

    def ranges():
        return [range(start, start + 2**16) for start in locked]

    locked = []
    lock = stream.page_lock

    def page_lock(address, num_bytes, device):
        locked.append(address)
        return lock(address, num_bytes, device)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(stream, "page_lock", page_lock)
    probe(sizes=TINY)
    assert pinned == [False] * (len(pinned) // 2) + [True] * (len(pinned) // 2) and len(pinned) == 48


def test_lanes_need_the_memory_filled(monkeypatch):
    wait = stream.wait

    def without(point, why, **options):
        if why != wait_reasons.PROBE_FILLED:
            wait(point, why, **options)

    monkeypatch.setattr(stream, "wait", without)
    with pytest.raises(RuntimeError, match="write-after-write race"):
        probe(sizes=TINY)
    torch.sim.synchronize()
