"""Figures of a machine that are measured once."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from hf_l2l.probe import known
from hf_l2l.probe.figures import HardwareFigures

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


def test_they_are_measured_once(probed):
    assert known.known_figures(CPU) == known.known_figures(CPU) == replace(FIGURES, dram=1.0)
    assert probed == [CPU]


def test_measuring_moves_no_generator(probed):
    before = torch.get_rng_state()
    known.known_figures(CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_user_without_a_home(probed, tmp_path, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(known.Path, "home", no_home)
    monkeypatch.setattr(known.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    assert known.known_figures(CPU) == known.known_figures(CPU)
    assert len(probed) == 1
    assert known.figures_file(CPU).is_relative_to(tmp_path / "tmp")


def test_those_of_another_machine_are_others(probed, monkeypatch):
    known.known_figures(CPU)
    monkeypatch.setattr(known, "usable_cores", lambda: 1234)
    known.known_figures(CPU)
    assert len(probed) == 2


def test_a_damaged_file_is_measured_again(probed, caplog):
    file = known.figures_file(CPU)
    file.parent.mkdir(parents=True)
    file.write_text("{")
    with caplog.at_level(logging.WARNING, "hf_l2l"):
        assert known.known_figures(CPU) == known.known_figures(CPU)
    assert len(probed) == 1
    assert "measured again" in caplog.text


def test_where_nothing_can_be_written_a_warning_says_so(probed, caplog, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, "hf_l2l"):
        assert known.known_figures(CPU).dram == 1.0
    assert "cannot be kept" in caplog.text


def test_a_file_of_the_user_is_read_and_nothing_measured(probed, tmp_path, monkeypatch):
    file = tmp_path / "mine.json"
    file.write_text(FIGURES.to_json())
    monkeypatch.setenv(known.VARIABLE, str(file))
    assert known.known_figures(CPU) == FIGURES
    assert probed == []


@pytest.mark.parametrize("content", [None, "", "{}"])
def test_a_file_of_the_user_that_is_none_is_refused(probed, tmp_path, monkeypatch, content):
    file = tmp_path / "mine.json"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv(known.VARIABLE, str(file))
    with pytest.raises(ValueError, match="figures of the hardware must"):
        known.known_figures(CPU)
