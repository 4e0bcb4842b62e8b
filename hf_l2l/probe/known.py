"""The figures of this machine, measured once and then kept: equal runs on one machine get equal plans."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import torch

from hf_l2l.log import logger, tell
from hf_l2l.probe.figures import REMEDY, HardwareFigures
from hf_l2l.probe.rates import device_name, probe
from hf_l2l.runtime import compute_state
from hf_l2l.runtime.worker import usable_cores

VARIABLE = "HF_L2L_FIGURES"
"""Environment variable: a file with the figures of the machine, which is read and not measured."""


def known_figures(device: torch.device) -> HardwareFigures:
    """What the machine reaches with `device`: of the file that HF_L2L_FIGURES names; or else as measured before, or
    now, which takes a few seconds.

    Raises:
        ValueError: if that file cannot be read, or is none.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return _read(Path(named))
    file = figures_file(device)
    if file.exists():
        try:
            return _read(file)
        except ValueError as error:
            logger.warning("the figures of this machine are measured again: %s", error)
    tell("the figures of this machine are measured, and kept in %s", file)
    with compute_state.rng_state_kept(device):  # a run that measures draws the random numbers of one that does not
        figures = probe(device)
    keep(figures, device)
    return figures


def figures_file(device: torch.device) -> Path:
    """Where the figures of this machine with `device` are kept, with so many cores: other numbers have other ones."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "hf_l2l"
    name = re.sub(r"[^A-Za-z0-9]+", "-", f"{device.type} {device_name(device)}").strip("-")
    return folder / f"figures-{name}-{usable_cores()}-cores.json"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # a user without one, as in some containers
        return Path(tempfile.gettempdir())


def keep(figures: HardwareFigures, device: torch.device) -> None:
    """Write the figures where `known_figures` finds them; where nothing can be written, a warning says so."""
    file = figures_file(device)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}")  # another process may read it meanwhile
        part.write_text(figures.to_json(), encoding="utf-8")
        part.replace(file)
    except OSError as error:
        logger.warning("the figures of this machine cannot be kept, so the next run measures them again: %s", error)


def _read(file: Path) -> HardwareFigures:
    try:
        return HardwareFigures.from_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"figures of the hardware must be in a file (got {file}: {error}){REMEDY}") from error
