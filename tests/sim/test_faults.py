"""A fault in each place of a step, for each layer: it is told with the layer's name, and then the step is repeated or
refused."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from fault_cases import LAYERS, PLACES, FaultError, check_fault, unbroken
from hf_l2l.stash import spill
from memory_switches import poisoned_releases

MODES = ("serial", "deferred", "eager")


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is read after it was given back is NaN, in every test here; folders of tests count as on a disk."""
    monkeypatch.setattr(spill, "is_in_memory", lambda folder: False)
    with poisoned_releases():
        yield


@cache
def expected(mode: str, cmp: str | None, host_copies: str) -> Any:
    return unbroken("sim", mode, cmp=cmp, host_copies=host_copies)


def cases() -> list[Any]:
    """Each place with one layer, mode and step in the normal tier; all of them together are slow."""
    found = []
    for i, (name, place) in enumerate(PLACES.items()):
        of_place, usual = [], []
        for j, mode in enumerate(MODES):
            if place.is_update and mode == "serial":
                continue  # the optimizer's own step raises
            for index in range(LAYERS):
                for k, at in enumerate((3,) if name == "prefetch" else (1, 3)):  # the first step knows no order
                    of_place.append((name, mode, index, at))
                    if index != (i // 3) % 3 and (index + i) % 3 == j and (k + i + index) % 2 == 0:
                        usual.append(of_place[-1])
        quick = usual[i // 3 % len(usual)]
        found += [pytest.param(*each, marks=() if each == quick else pytest.mark.slow) for each in of_place]
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "mode", "index", "at"), cases())
def test_a_fault_is_told_with_its_layer_and_the_step_repeated_or_refused(name, mode, index, at, tmp_path):
    options = PLACES[name].options
    same = expected(mode, options.get("cmp"), options.get("host_copies", "kept"))
    spill_dir = tmp_path if options.get("stash") == "disk" else None
    check_fault("sim", name, mode, index, at, same, FaultError("broken"), spill_dir)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["forward", "recompute", "backward", "download", "upload", "stash download"])
def test_ctrl_c_is_an_exception_like_others(name, tmp_path):
    check_fault("sim", name, "deferred", 1, 3, expected("deferred", None, "kept"), KeyboardInterrupt())
