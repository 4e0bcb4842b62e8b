"""The probe on the simulated accelerator, whose race check sees a wait that is missing; its rates mean nothing."""

from __future__ import annotations

import pytest
import torch

from hf_l2l.probe.figures import LINK, HardwareFigures
from hf_l2l.probe.rates import Sizes, probe
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.testing import copies_under_way, enable_simulated_accelerator, page_lock_limit, page_locked_bytes

TINY = Sizes(copied_bytes=2**16, parameters=2**10, most_rows=64, seconds=0.0)


def test_the_figures(monkeypatch):
    """The second half of the measurement of the link is from or to page-locked memory."""
    pinned, locked = [], []
    copy, lock = torch.Tensor.copy_, stream.page_lock

    def copy_(target, source, non_blocking=False):
        if non_blocking:
            here = source if source.device == stream.HOST else target
            pinned.append(any(here.data_ptr() in range(start, start + 2**16) for start in locked))
        return copy(target, source, non_blocking)

    def page_lock(address, num_bytes, device):
        locked.append(address)
        return lock(address, num_bytes, device)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(stream, "page_lock", page_lock)
    before = page_locked_bytes()
    figures = probe(sizes=TINY)
    assert pinned == [False] * (len(pinned) // 2) + [True] * (len(pinned) // 2) and len(pinned) == 48
    assert figures.device_name == "simulated accelerator" and figures.page_locked is True
    assert figures.device_memory_bytes == stream.memory_of(torch.device("sim:0"))
    assert all(getattr(figures, name) > 0 for name in LINK) and figures.flops["fp32"] > 0
    assert figures.pageable.keys() == {"up", "down", "up_both", "down_both"}
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


def test_lanes_need_the_memory_filled(monkeypatch):
    wait = stream.wait

    def without(point, why, **options):
        if why != wait_reasons.PROBE_FILLED:
            wait(point, why, **options)

    monkeypatch.setattr(stream, "wait", without)
    with pytest.raises(RuntimeError, match="write-after-write race"):
        probe(sizes=TINY)
    torch.sim.synchronize()
