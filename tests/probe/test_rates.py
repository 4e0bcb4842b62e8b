"""The probe on the host: every figure is there, and nothing of the process changes."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_l2l.probe import rates
from hf_l2l.probe.figures import HardwareFigures
from hf_l2l.probe.rates import Sizes, device_name, probe

TINY = Sizes(copied_bytes=2**16, parameters=2**10, most_rows=64, seconds=0.0)


def test_the_figures_of_the_host(monkeypatch):
    monkeypatch.setattr(rates, "usable_cores", lambda: 4)
    threads = torch.get_num_threads()
    figures = probe("cpu", TINY)
    assert torch.get_num_threads() == threads
    assert (figures.link_up, figures.link_down, figures.link_up_both, figures.link_down_both) == (None,) * 4
    assert (figures.device_memory_bytes, figures.page_locked, figures.pageable) == (None, None, {})
    assert figures.dram > 0
    assert list(figures.adamw_by_threads) == [1, 2, 4]
    assert {"fp32", "bf16"} <= figures.flops.keys()
    assert HardwareFigures.from_json(figures.to_json()) == figures


def test_a_rate_is_the_work_of_a_turn_by_the_median_time(monkeypatch):
    """The first turn is not counted, and one that was disturbed does not matter."""
    times = iter([100.0, 1.0, 50.0, 3.0, 2.0, 2.0])
    clock = itertools.count(0.0, 0.25)
    monkeypatch.setattr(rates.time, "perf_counter", lambda: next(clock))
    assert rates.median(lambda: next(times), 0.3) == 2.5  # of 1, 50, 3 and 2
    assert list(times) == [2.0]


def test_turns_are_few():
    times = itertools.count()
    rates.median(lambda: float(next(times)), 1e9)
    assert next(times) == 10


def test_a_dtype_without_products_is_left_out(monkeypatch):
    made = torch.mm

    def only_fp32(a, b, *, out):
        if a.dtype != torch.float32:
            raise RuntimeError("not implemented")
        return made(a, b, out=out)

    monkeypatch.setattr(torch, "mm", only_fp32)
    assert list(probe("cpu", TINY).flops) == ["fp32"]


def test_matrices_grow_until_they_take_long_enough(monkeypatch):
    seen = []

    def product(device, dtype, rows):
        seen.append(rows)
        return lambda: 0.001 * (rows / 256) ** 3

    monkeypatch.setattr(rates, "_product", product)
    assert rates._flops(torch.device("cpu"), torch.float32, Sizes()) == pytest.approx(2 * 256**3 / 0.001)
    assert seen == [256, 512, 1024]


def test_matrices_grow_as_far_as_there_is_memory(monkeypatch):
    def product(device, dtype, rows):
        if rows > 512:
            raise torch.OutOfMemoryError("no memory")
        return lambda: 0.001 * (rows / 256) ** 3

    monkeypatch.setattr(rates, "_product", product)
    assert rates._flops(torch.device("cpu"), torch.float32, Sizes()) == pytest.approx(2 * 256**3 / 0.001)


def test_a_device_that_is_not_there():
    with pytest.raises(ValueError, match="must be one this machine has"):
        probe("cuda:7")


def test_the_name_of_the_processor(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: A Fast One @ 3 GHz\n")
    assert rates._processor(info) == "A Fast One @ 3 GHz"
    assert rates._processor(tmp_path / "none") != ""
    assert device_name(torch.device("cpu")) != ""
