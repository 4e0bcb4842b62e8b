"""What the ranks of a process group agree on before they plan: one machine is measured once, and all of them plan, or
none does."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import distributed

from hf_l2l.probe.figures import HardwareFigures
from hf_l2l.probe.known import known_figures
from hf_l2l.ranks.team import process_group_size

_WITHIN = timedelta(minutes=10)
"""Rank 0 may have to measure a slow machine."""
_FAILED = "failed: "


def told_by_all(text: str) -> list[str]:
    """The text of each rank, by rank; all of them call this. In one process, its own."""
    if process_group_size() == 1:
        return [text]
    found = [""] * process_group_size()
    # A group of the devices could need each rank to have chosen its own already.
    group = distributed.new_group(backend="gloo", timeout=_WITHIN)
    try:
        distributed.all_gather_object(found, text, group=group)
    finally:
        distributed.destroy_process_group(group)
    return found


def figures_of_rank_0(device: torch.device) -> HardwareFigures:
    """The figures of the machine as rank 0 knows or measures them, while no other rank uses it; all ranks call this.

    Raises:
        ValueError: in all ranks, if rank 0 finds none.
    """
    if process_group_size() == 1:
        return known_figures(device)
    text = ""
    if distributed.get_rank() == 0:
        try:
            text = known_figures(device).to_json()
        except (MemoryError, OSError, RuntimeError, ValueError) as error:  # the others wait, and are told
            text = f"{_FAILED}{error}"
    found = told_by_all(text)[0]
    if found.startswith(_FAILED):
        raise ValueError(f"rank 0 measures the machine for all ranks, and {found}")
    return HardwareFigures.from_json(found)


def reason_of_any(reason: str | None) -> str | None:
    """That of the first rank that has a reason why no plan can be made; None if none has. All ranks call this."""
    return next(filter(None, told_by_all(reason or "")), None)


def is_so_for_all(answer: bool) -> bool:
    """Whether all ranks, which all call this, have answered yes."""
    return all(told_by_all("yes" if answer else ""))
