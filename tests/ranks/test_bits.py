"""n ranks with b rows each have the bits of one process that accumulates n batches of b rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from host_cases import on_hosts
from models import FAMILIES
from rank_cases import MODES, assert_same, trained
from tiers import few, more


class Place(NamedTuple):
    """Where ranks are."""

    size: int
    hosts: int = 1
    sim: bool = False
    options: dict[str, Any] = {}
    devices: int = 0
    """Of each rank; 0 for one, which is not named."""


PLACES = {
    "2 on the host": Place(2),
    "4 on the host": Place(4),
    "2 on devices": Place(2, sim=True),
    "2 that add on devices": Place(2, sim=True, options={"reduce": "device"}),
    "3 that add on devices": Place(3, sim=True, options={"reduce": "device"}),
    "2 of two devices": Place(2, sim=True, options={"head_device": "first"}, devices=2),
    "2 hosts": Place(2, 2),
    "3 hosts": Place(3, 3),
    "2 hosts with devices": Place(2, 2, sim=True),
}
ALL_MODES: dict[str, dict[str, Any]] = {
    **MODES,
    "eager": {"eps_update": "eager"},
    "16-bit state": {"moment_dtype": "bf16"},
    "resident": {"eps_update": "deferred", "resident": "shell", "resident_layers": 1, "resident_update": "host"},
    "kept": {"eps_update": "deferred", "kept_weights": 1, "kept_graphs": 1},
}
NAMES = [*(name for name in FAMILIES if name != "t5"), "adapted", "tied", "skipping", "large"]


def is_possible(place: str, name: str, mode: str, accumulated: int) -> bool:
    where = PLACES[place]
    if where.hosts > 1 and ALL_MODES[mode].get("grad_dtype") == "16bit":
        return False  # they are rounded by host
    if mode in ("resident", "kept") and (not where.sim or where.hosts > 1 or where.devices or where.options):
        return False
    return not where.devices or (name in ("bert", "llama") and mode in ("ubatches", "deferred"))


EVERY = [
    (place, name, mode, accumulated)
    for place in PLACES
    for name in NAMES
    for mode in ALL_MODES
    for accumulated in (1, 2)
    if is_possible(place, name, mode, accumulated)
]
CHOSEN = [
    ("2 on the host", "skipping", "eager", 2),
    ("2 on devices", "tied", "resident", 1),
    ("2 that add on devices", "skipping", "ubatches", 2),
    ("2 hosts", "tied", "16-bit state", 1),
    ("3 hosts", "skipping", "bf16", 1),
    *more(("2 of two devices", "llama", "ubatches", 1), ("2 on devices", "bert", "kept", 1)),
]


@pytest.mark.parametrize(("place", "name", "mode", "accumulated"), [*CHOSEN, *more(*few(EVERY, 2)[::2])])
def test_ranks_have_the_bits_of_one_process(pool, place, name, mode, accumulated):
    """Of accumulated batches, the order is that of the ranks in each micro-step. All find as many skipped steps."""
    assert is_possible(place, name, mode, accumulated)
    where, options = PLACES[place], ALL_MODES[mode]
    alone_options = {k: v for k, v in where.options.items() if k != "reduce"}
    of_devices = {"devices": where.devices} if where.devices else {}
    rest = where.size, 3, accumulated, None if mode == "eager" else 0.5
    alone = pool(1, sim=where.sim).run(trained, name, {**options, **alone_options, **of_devices}, *rest)[0]
    given = name, {**options, **where.options, **of_devices}, *rest
    found = pool(where.size, sim=where.sim).run(on_hosts, where.hosts, trained, *given)
    assert_same(found, alone, on_one_host=where.hosts == 1)


@pytest.mark.parametrize(("name", "sim"), [("t5", False), *more(("albert", True))])
def test_what_is_called_several_times(pool, name, sim):
    """One process adds call after call, a rank all its calls and then those of the ranks: the same to rounding. T5 has
    an embedding and a position bias that several calls use."""
    found = pool(2, sim=sim).run(trained, name, {"eps_update": "deferred"}, 2)
    alone = pool(1, sim=sim).run(trained, name, {"eps_update": "deferred"}, 2)[0]
    assert found[0]["norms"] == found[1]["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["losses"][0] == alone["losses"][0][0]
