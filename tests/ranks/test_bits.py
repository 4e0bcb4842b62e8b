"""n ranks with b rows each have the bits of one process that accumulates n batches of b rows."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed

from hf_l2l.across_devices import choice
from hf_l2l.across_devices.sums import DeviceSums
from hf_l2l.ranks.team import Team
from hf_l2l.runtime import stream, wait_reasons
from host_cases import on_hosts
from models import FAMILIES
from rank_cases import MODES, Ranked, assert_same, trained
from rank_pool import RankDiedError
from rank_trainer import Lines
from tiers import more


class Place(NamedTuple):
    """Where ranks are."""

    size: int
    hosts: int = 1
    sim: bool = False
    options: dict[str, Any] = {}


PLACES = {
    "2 on the host": Place(2),
    "4 on the host": Place(4),
    "2 on devices": Place(2, sim=True),
    "2 that add on devices": Place(2, sim=True, options={"reduce": "device"}),
    "3 that add on devices": Place(3, sim=True, options={"reduce": "device"}),
    "2 of two devices": Place(2, sim=True, options={"head_device": "first", "devices": 2}),
    "2 hosts": Place(2, 2),
    "3 hosts": Place(3, 3),
    "2 hosts with devices": Place(2, 2, sim=True),
}
ALL_MODES: dict[str, dict[str, Any]] = {
    **MODES,
    "eager": {"eps_update": "eager"},
    "16-bit state": {"moment_dtype": "bf16"},
    "8-bit state": {"moment_dtype": "8bit"},
    "8-bit state, eager": {"moment_dtype": "8bit", "grad_dtype": "16bit", "cmp": "bf16", "eps_update": "eager"},
    "resident": {"eps_update": "deferred", "resident": "shell", "resident_layers": 1, "resident_update": "host"},
    "kept": {"eps_update": "deferred", "kept_weights": 1, "kept_graphs": 1},
}
CHOSEN = [
    ("2 on the host", "skipping", "eager", 2),
    ("2 on devices", "tied", "resident", 1),
    ("2 that add on devices", "skipping", "ubatches", 2),
    ("2 hosts", "tied", "16-bit state", 1),
    ("3 hosts", "skipping", "bf16", 1),
    ("2 on the host", "large", "8-bit state", 2),
    ("3 hosts", "skipping", "8-bit state, eager", 1),
]
MORE = [  # each place, model and mode, and the pairs that have most of their own
    *(("2 of two devices", "llama", "ubatches", 1), ("2 of two devices", "bert", "deferred", 2)),
    *(("2 on devices", "bert", "kept", 1), ("2 on devices", "large", "fp16", 2), ("2 on devices", "vit", "bf16", 1)),
    *(("4 on the host", name, mode, 2) for name, mode in zip(FAMILIES, MODES, strict=False) if name != "t5"),
    *(("3 that add on devices", name, "deferred", 2) for name in ("large", "adapted", "skipping", "gpt2")),
    *(("2 that add on devices", "llama", mode, 1) for mode in ("fp16", "16-bit gradients and state", "host stash")),
    *(("2 on devices", "bert", "8-bit state, eager", 1), ("2 hosts with devices", "adapted", "8-bit state", 2)),
    *(("2 hosts", name, "8-bit state", 1) for name in ("large", "tied")),
    *(("2 hosts", name, "deferred", 2) for name in ("large", "adapted", "deberta_v2", "skipping")),
    *(("3 hosts", "large", mode, 1) for mode in ("eager", "fp16", "16-bit state")),
    *(("2 hosts with devices", "tied", mode, 2) for mode in ("serial", "bf16 per sweep", "host stash")),
    *(("2 on the host", "large", mode, 1) for mode in ("16-bit gradients and state", "bf16 per sweep")),
]


@pytest.mark.parametrize(("place", "name", "mode", "accumulated"), [*CHOSEN, *more(*MORE)])
def test_ranks_have_the_bits_of_one_process(pool, place, name, mode, accumulated):
    """Of accumulated batches, the order is that of the ranks in each micro-step. All find as many skipped steps."""
    where, options = PLACES[place], ALL_MODES[mode]
    alone_options = {k: v for k, v in where.options.items() if k != "reduce"}
    rest = where.size, 3, accumulated, None if "eager" in mode else 0.5
    alone = pool(1, sim=where.sim).run(trained, name, {**options, **alone_options}, *rest)[0]
    given = name, {**options, **where.options}, *rest
    found = pool(where.size, sim=where.sim).run(on_hosts, where.hosts, trained, *given)
    assert_same(found, alone, on_one_host=where.hosts == 1)


@pytest.mark.parametrize(("name", "sim"), [("t5", False), *more(("albert", True))])
def test_what_is_called_several_times(pool, name, sim):
    """One process adds call after call, a rank all its calls and then those of the ranks: the same to rounding."""
    found = pool(2, sim=sim).run(trained, name, {"eps_update": "deferred"}, 2)
    alone = pool(1, sim=sim).run(trained, name, {"eps_update": "deferred"}, 2)[0]
    assert found[0]["norms"] == found[1]["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["losses"][0] == alone["losses"][0][0]


# ---- sums on devices: when ranks add there, the waits for them, and what is left of them


def chosen(folder: str, seconds: tuple[float, float]) -> tuple[list[str], str]:
    """What devices send each other, if a trial takes so many seconds there and on the host; and what is logged."""

    def measured(team: Team, sums: DeviceSums, num_bytes: int) -> tuple[float, float]:
        found = tried(team, sums, num_bytes)
        told = team.tell(repr(found), "of the test")
        assert len(set(told)) == 1 and min(found) > 0, "all ranks find the same"
        return seconds

    tried: Callable[..., tuple[float, float]] = choice.tried
    lines, logger = Lines(), logging.getLogger("hf_l2l")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "tried", measured)
        logger.addHandler(lines)
        logger.setLevel(logging.DEBUG)
        try:
            trained("bert", {"reduce": "auto", "trace": f"{folder}/trace.json"}, 2)
        finally:
            logger.removeHandler(lines)
            logger.setLevel(logging.NOTSET)
    name = "trace.json" if distributed.get_rank() == 0 else "trace.rank1.json"
    events = json.loads(Path(folder, name).read_text())["traceEvents"]
    rows = {e["tid"] for e in events if e.get("name") == "thread_name" and e["args"]["name"] == stream.PEER}
    names = {e["name"] for e in events if e.get("ph") == "X" and e["tid"] in rows} - {"a trial"}
    return sorted(names), " ".join(text for text in lines.lines if "Ranks add" in text)


@pytest.mark.parametrize(
    ("seconds", "where"), [((0.001, 0.002), "on the devices"), *more(((0.002, 0.001), "on the host"))]
)
def test_what_is_faster_adds_and_is_logged_by_the_first_rank(pool, tmp_path, seconds, where):
    """The trace shows what devices send each other."""
    (names, text), second = pool(2, sim=True).run(chosen, str(tmp_path), seconds)
    assert second == (names, "") and where in text
    assert any("bert.encoder.layer.0" in name for name in names) == (where == "on the devices")


def without_wait(reason: str, options: dict[str, str]) -> None:
    """A training in which one wait is left out."""
    wait = stream.wait

    def waiting(point: object, why: str, **rest: object) -> None:
        if why != reason:
            wait(point, why, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "wait", waiting)
        trained("bert", {"eps_update": "deferred", **options}, 2)


@pytest.mark.parametrize(
    ("reason", "reduce"),
    [(wait_reasons.GRADIENTS_ADDED, "device"), *more((wait_reasons.LAYER_GRADIENTS_DOWNLOADED, "host"))],
)
def test_waits_for_gradients_are_needed(pool, reason, reduce):
    """A sum is downloaded after it has been added; the host adds what has been downloaded."""
    with pytest.raises(RankDiedError, match="race|wait|before|not finite"):
        pool(2, sim=True).run(without_wait, reason, {"reduce": reduce})


def groups_left() -> tuple[int, str]:
    """How many process groups a detached model leaves; the error of ranks that have the same device."""
    before = len(distributed.distributed_c10d._world.pg_map)
    run = Ranked(reduce="device")
    run.backward(0)
    run.ended()
    assert torch.isfinite(next(run.model.parameters())).all()
    left = len(distributed.distributed_c10d._world.pg_map) - before
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError) as error:
        same = SimpleNamespace(uuid="one")
        patch.setattr(torch.sim, "get_device_properties", lambda device: same, raising=False)
        Ranked(reduce="device")
    return left, str(error.value)


def test_a_detached_model_leaves_no_process_group_and_ranks_that_have_the_same_device_are_refused(pool):
    for left, text in pool(2, sim=True).run(groups_left):
        assert left == 0 and "(got ranks that have the same device)" in text
