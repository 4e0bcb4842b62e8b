"""A fault in each place of a step on the CPU, where host and device share memory; see `sim/test_faults.py`."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from fault_cases import PLACES, FaultError, check_fault, unbroken
from hf_l2l.stash import spill


@cache
def expected(mode: str, cmp: str | None, host_copies: str) -> Any:
    return unbroken("cpu", mode, cmp=cmp, host_copies=host_copies)


ELSEWHERE = (
    "prefetch",
    "upload, submitted",
    "download, submitted",
    "norm",
    "stash download",
    "stash upload",
    "spill read",
)
"""What the CPU does not do."""


def cases() -> list[Any]:
    """Each place once in the normal tier."""
    found = []
    for i, (name, place) in enumerate((n, p) for n, p in PLACES.items() if n not in ELSEWHERE):
        for j, mode in enumerate(("serial", "deferred", "eager")):
            for index in range(3):
                if not (place.is_update and mode == "serial"):  # there the optimizer's own step raises
                    usual = j == 1 + i % 2 and index == i // 2 % 3
                    found.append(pytest.param(name, mode, index, marks=() if usual else pytest.mark.slow))
    return found


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("name", "mode", "index"), cases())
def test_a_fault_is_told_with_its_layer_and_the_step_repeated_or_refused(name, mode, index, tmp_path, monkeypatch):
    monkeypatch.setattr(spill, "is_in_memory", lambda folder: False)
    options = PLACES[name].options
    same = expected(mode, options.get("cmp"), options.get("host_copies", "kept"))
    spill_dir = tmp_path if options.get("stash") == "disk" else None
    check_fault("cpu", name, mode, index, 1 + 2 * (index % 2), same, FaultError("broken"), spill_dir)
