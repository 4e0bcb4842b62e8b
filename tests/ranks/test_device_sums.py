"""Gradients that ranks add on their devices: when they do, the waits for them, and what is left of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from hf_l2l.across_devices import choice
from hf_l2l.across_devices.sums import DeviceSums
from hf_l2l.ranks.team import Team
from hf_l2l.runtime import stream, wait_reasons
from rank_cases import Ranked, trained
from rank_pool import RankDiedError
from rank_trainer import Lines
from tiers import more


def sent_to_peers(folder: str, name: str, reduce: str) -> list[str]:
    """Names of what the devices send each other, in the trace of this rank."""
    file = Path(folder, f"{name}.json")
    trained("bert", {"reduce": reduce, "trace": str(file)}, 2)
    rank = distributed.get_rank()
    events = json.loads((file if rank == 0 else file.with_suffix(f".rank{rank}.json")).read_text())["traceEvents"]
    rows = {e["tid"] for e in events if e.get("name") == "thread_name" and e["args"]["name"] == stream.PEER}
    names = {e["name"] for e in events if e.get("ph") == "X" and e["tid"] in rows}
    return sorted(names - {"a trial"})


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
            names = sent_to_peers(folder, f"trace{seconds[0]}", "auto")
        finally:
            logger.removeHandler(lines)
            logger.setLevel(logging.NOTSET)
    return names, " ".join(text for text in lines.lines if "Ranks add" in text)


@pytest.mark.parametrize(
    ("seconds", "where"), [((0.001, 0.002), "on the devices"), *more(((0.002, 0.001), "on the host"))]
)
def test_what_is_faster_adds_and_is_logged_by_the_first_rank(pool, tmp_path, seconds, where):
    """The trace shows what devices send each other."""
    (names, text), second = pool(2, sim=True).run(chosen, str(tmp_path), seconds)
    assert second == (names, "") and where in text
    assert any("bert.encoder.layer.0" in name for name in names) == (where == "on the devices")


def of_one_device() -> str:
    with pytest.MonkeyPatch.context() as patch:
        same = SimpleNamespace(uuid="one")
        patch.setattr(torch.sim, "get_device_properties", lambda device: same, raising=False)
        with pytest.raises(ValueError) as error:
            Ranked(reduce="device")
    return str(error.value)


def test_ranks_that_have_the_same_device_are_refused(pool):
    for text in pool(2, sim=True).run(of_one_device):
        assert "(got ranks that have the same device)" in text


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


def groups_left() -> tuple[int, int]:
    before = len(distributed.distributed_c10d._world.pg_map)
    run = Ranked(reduce="device")
    run.backward(0)
    run.ended()
    assert torch.isfinite(next(run.model.parameters())).all()
    return before, len(distributed.distributed_c10d._world.pg_map)


def test_a_detached_model_leaves_no_process_group(pool):
    for before, after in pool(2, sim=True).run(groups_left):
        assert before == after
