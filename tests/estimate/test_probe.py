"""What the hardware reaches: measured on the host, kept for the machine, and written as JSON and read back."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from dataclasses import replace

import pytest
import torch

from hf_l2l.probe import known, rates
from hf_l2l.probe.figures import LINK, HardwareFigures
from hf_l2l.probe.rates import Sizes, probe

TINY = Sizes(copied_bytes=2**16, parameters=2**10, most_rows=64, seconds=0.0)


def test_the_figures_of_the_host(monkeypatch):
    monkeypatch.setattr(rates, "usable_cores", lambda: 4)
    threads = torch.get_num_threads()
    figures = probe("cpu", TINY)
    assert torch.get_num_threads() == threads
    assert {getattr(figures, name) for name in (*LINK, "device_memory_bytes", "page_locked")} == {None}
    assert figures.pageable == {} and figures.dram > 0
    assert list(figures.adamw_by_threads) == [1, 2, 4]
    assert {"fp32", "bf16"} <= figures.flops.keys()
    assert HardwareFigures.from_json(figures.to_json()) == figures


def test_a_rate_is_the_work_of_a_turn_by_the_median_time(monkeypatch):
    """The first turn is not counted, and one that was disturbed does not matter. Turns are few."""
    many = itertools.count()
    rates.median(lambda: float(next(many)), 1e9)
    assert next(many) == 10
    times = iter([100.0, 1.0, 50.0, 3.0, 2.0, 2.0])
    clock = itertools.count(0.0, 0.25)
    monkeypatch.setattr(rates.time, "perf_counter", lambda: next(clock))
    assert rates.median(lambda: next(times), 0.3) == 2.5  # of 1, 50, 3 and 2
    assert list(times) == [2.0]


def test_a_dtype_without_products_is_left_out(monkeypatch):
    made = torch.mm

    def only_fp32(a, b, *, out):
        if a.dtype != torch.float32:
            raise RuntimeError("not implemented")
        return made(a, b, out=out)

    monkeypatch.setattr(torch, "mm", only_fp32)
    assert list(probe("cpu", TINY).flops) == ["fp32"]


def test_matrices_grow_until_there_is_no_memory(monkeypatch):
    seen = []

    def product(device, dtype, rows):
        if rows > 512:
            raise torch.OutOfMemoryError("no memory")
        seen.append(rows)
        return lambda: 0.001 * (rows / 256) ** 3

    monkeypatch.setattr(rates, "product", product)
    assert rates.flops_of(torch.device("cpu"), torch.float32, Sizes()) == pytest.approx(2 * 256**3 / 0.001)
    assert seen == [256, 512]


# ---- figures that are kept

CPU = torch.device("cpu")
FIGURES = HardwareFigures("a card", 2**30, 1e9, 1e9, 1e9, 1e9, 1e10, {1: 1e9}, {"fp32": 1e11})


@pytest.fixture
def probed(monkeypatch, tmp_path):
    """The devices that are measured, and a folder of its own for what is kept."""
    seen: list[torch.device] = []

    def probe(device):
        torch.rand(1)
        seen.append(device)
        return replace(FIGURES, dram=float(len(seen)))

    monkeypatch.delenv(known.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(known, "probe", probe)
    return seen


def test_they_are_measured_once(probed, monkeypatch):
    before = torch.get_rng_state()
    assert known.known_figures(CPU) == known.known_figures(CPU) == replace(FIGURES, dram=1.0)
    assert probed == [CPU] and torch.equal(torch.get_rng_state(), before), "no generator moves"
    monkeypatch.setattr(known, "usable_cores", lambda: 1234)  # of another machine
    known.known_figures(CPU)
    assert len(probed) == 2


def test_a_user_without_a_home(probed, tmp_path, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(known.Path, "home", no_home)
    monkeypatch.setattr(known.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    assert known.known_figures(CPU) == known.known_figures(CPU) and len(probed) == 1
    assert known.figures_file(CPU).is_relative_to(tmp_path / "tmp")


def test_a_damaged_file_is_measured_again(probed, caplog, tmp_path, monkeypatch):
    """With a warning, as where nothing can be written."""
    file = known.figures_file(CPU)
    file.parent.mkdir(parents=True)
    file.write_text("{")
    with caplog.at_level(logging.WARNING, "hf_l2l"):
        assert known.known_figures(CPU) == known.known_figures(CPU) and len(probed) == 1
        assert "measured again" in caplog.text
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        assert known.known_figures(CPU).dram == 2.0
    assert "cannot be kept" in caplog.text


def test_a_file_of_the_user_is_read_and_nothing_measured(probed, tmp_path, monkeypatch):
    file = tmp_path / "mine.json"
    monkeypatch.setenv(known.VARIABLE, str(file))
    for content in (None, "", "{}"):
        if content is not None:
            file.write_text(content)
        with pytest.raises(ValueError, match="figures of the hardware must"):
            known.known_figures(CPU)
    file.write_text(FIGURES.to_json())
    assert known.known_figures(CPU) == FIGURES and probed == []


# ---- as JSON

OF_A_HOST = HardwareFigures("a processor", None, None, None, None, None, 1e10, {1: 1e8}, {"fp32": 1e11})
OF_A_GPU = replace(
    FIGURES,
    adamw_by_threads={1: 5e8, 8: 2e9},
    device_adamw=6e10,
    flops={"fp32": 5e13, "bf16": 7e14},
    page_locked=True,
    pageable={"up": 5e9, "down": 4e9, "up_both": 3e9, "down_both": 3e9},
)


def test_json_gives_the_same_figures():
    """As they are, and in the output of `hf-l2l env`."""
    for figures in (OF_A_GPU, OF_A_HOST):
        assert HardwareFigures.from_json(figures.to_json()) == figures
        assert list(json.loads(figures.to_json())) == [each.name for each in dataclasses.fields(HardwareFigures)]
    text = json.dumps({"versions": {}, "probe": json.loads(OF_A_GPU.to_json())})
    assert HardwareFigures.from_json(text) == OF_A_GPU
    with pytest.raises(ValueError, match="must have the fields"):  # of a run without --probe
        HardwareFigures.from_json(json.dumps({"versions": {}, "probe": None}))


def test_other_values_are_refused():
    known = json.loads(OF_A_GPU.to_json())
    for given, said in (
        ({**known, "dram": 0}, "(got 0)"),
        ({**known, "link_up": -1.0}, "link_up must be a rate"),
        ({**known, "flops": {"fp32": None}}, "flops must be a rate"),
        ({**known, "adamw_by_threads": {"few": 1e9}}, "(got 'few')"),
        ({**known, "page_locked": 1}, "page_locked must be"),
        ({**known, "speed": 1}, "(got an unknown speed)"),
        ([], "must be a JSON object"),
    ):
        with pytest.raises(ValueError) as error:
            HardwareFigures.from_json(json.dumps(given))
        assert said in str(error.value) and str(error.value).endswith("write them with: hf-l2l env --probe --json")
    with pytest.raises(ValueError, match="must be JSON"):
        HardwareFigures.from_json("{")
