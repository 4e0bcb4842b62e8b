"""Gradients that ranks add on their devices: the bits, the choice between devices and host, what is refused."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed

from failing_ranks import check_others, ended_by, hurt, raising
from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.across_devices import choice
from hf_l2l.across_devices.sums import DeviceSums, cuts
from hf_l2l.ranks.team import Team
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.runtime.flat_memory import ALIGNMENT
from models import batch_for, bert
from rank_cases import assert_same, trained, trained_on_two
from rank_pool import RankDiedError, RankPool

ON_DEVICE = {"reduce": "device"}
MODES: dict[str, dict[str, Any]] = {
    "serial": {"eps_update": "serial"},
    "deferred": {"eps_update": "deferred"},
    "ubatches": {"ubatch_size": 2, "eps_update": "deferred"},
    "bf16": {"cmp": "bf16", "eps_update": "deferred"},
    "16-bit gradients and state": {"cmp": "bf16", "grad_dtype": "16bit", "moment_dtype": "bf16"},
    "fp16": {"cmp": "fp16", "eps_update": "deferred"},
    "host stash": {"stash": "host", "ubatch_size": 2},
}


def counted(*args: Any) -> tuple[dict[str, Any], int]:
    """What a training returns, and how many parts of items it has added on the device."""
    count, add = 0, DeviceSums.add

    def counting(sums: DeviceSums, given: Any, at: Any, parts: Any, why: str) -> None:
        nonlocal count
        count += why != "a trial"
        add(sums, given, at, parts, why)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceSums, "add", counting)
        return trained(*args), count


def assert_same_bits(pool: Any, size: int, name: str, options: dict[str, Any], *rest: Any) -> None:
    """Ranks that add on their devices have the bits of one process."""
    alone = pool(1, sim=True).run(trained, name, options, size, *rest)[0]
    found = pool(size, sim=True).run(counted, name, {**options, **ON_DEVICE}, size, *rest)
    assert_same([each for each, _ in found], alone)
    assert len({count for _, count in found}) == 1 and found[0][1] > 0


@pytest.mark.one_in(84)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["bert", "t5", "llama", "tied", "skipping", "large"])
@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
def test_the_bits_are_those_of_one_process(pool, size, name, mode):
    assert_same_bits(pool, size, name, MODES[mode])


@pytest.mark.one_in(6)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["bert", "skipping", "large"])
def test_micro_steps_are_added_to_one_sum(pool, name, size):
    assert_same_bits(pool, size, name, {"eps_update": "deferred"}, 2, 2)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("accumulated", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["bert", "skipping", "tied"])
def test_eager_updates(pool, name, accumulated):
    assert_same_bits(pool, 2, name, {"eps_update": "eager"}, 3, accumulated, None)


# ---- what is chosen


@given(st.integers(1, 500), st.integers(1, 9))
def test_shares_are_aligned_and_the_same_but_for_the_last_ones(units, count):
    ends = cuts(units * ALIGNMENT, count)
    sizes = [stop - start for start, stop in zip(ends, ends[1:], strict=False)]
    assert ends[0] == 0 and ends[-1] == units * ALIGNMENT and len(sizes) == count
    assert all(size % ALIGNMENT == 0 for size in sizes) and sizes == sorted(sizes, reverse=True)
    assert sizes[0] <= (units // count + 1) * ALIGNMENT


def chosen(seconds: tuple[float, float], asked: str, devices: Any = None) -> tuple[bool, list[str]]:
    """Whether a training adds on the devices, if it measures so many seconds there and on the host, and what it
    logs."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hf_l2l")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)

    def measured(team: Team, sums: DeviceSums, num_bytes: int) -> tuple[float, float]:
        choice_of(team, sums, num_bytes)  # which works
        return seconds

    choice_of: Callable[..., tuple[float, float]] = choice.tried
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "tried", measured)
        try:
            _, count = counted("bert", {"reduce": asked}, distributed.get_world_size())
        finally:
            logger.removeHandler(handler)
            logger.setLevel(logging.NOTSET)
    return count > 0, [text for text in said if "Ranks add" in text]


@pytest.mark.parametrize(("seconds", "on_device"), [((0.001, 0.002), True), ((0.002, 0.001), False)])
def test_what_is_faster_is_chosen_and_logged(pool, seconds, on_device):
    first, second = pool(2, sim=True).run(chosen, seconds, "auto")
    assert first[0] == second[0] == on_device
    (text,), nothing = first[1], second[1]
    where = "on the devices" if on_device else "on the host"
    assert text.startswith(f"Ranks add gradients {where}: ") and text.endswith("(reduce).")
    assert nothing == []


def test_the_host_adds_if_that_is_asked_for(pool):
    assert pool(2, sim=True).run(chosen, (0.001, 0.002), "host") == [(False, [])] * 2


def of_a_trial() -> tuple[float, float]:
    team = Team.met(10.0)
    try:
        device = torch.device("sim", distributed.get_rank())
        sums = DeviceSums(team, device)
        return choice.tried(team, sums, 2**16)
    finally:
        team.close()


def test_all_ranks_find_the_same_seconds(pool):
    first, second = pool(2, sim=True).run(of_a_trial)
    assert first == second and min(first) > 0


def refused(options: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as error:
        attach_l2l(bert(), L2LConfig(reduce="device", **options))
    return str(error.value)


def refused_on_two_devices() -> str:
    rank = distributed.get_rank()
    return refused({"device": (f"sim:{rank}", f"sim:{rank + 2}")})


def test_devices_that_cannot_add_are_refused(pool):
    for text in pool(2).run(refused, {}):
        assert (
            "reduce='device' adds gradients on the devices" in text and "(got ranks that compute on the host)" in text
        )
    for text in pool(2, sim=True).run(refused_on_two_devices):
        assert "(got 2 devices of a rank)" in text and text.endswith("use reduce='host', or 'auto'")


def same_device() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "_identity", lambda device, rank: "one")
        return refused({})


def test_ranks_that_have_the_same_device_are_refused(pool):
    for text in pool(2, sim=True).run(same_device):
        assert "(got ranks that have the same device)" in text


def test_auto_adds_on_the_host_where_devices_cannot(pool):
    """With two devices of each rank, and on the CPU."""
    options = {"eps_update": "deferred", "ubatch_size": 2, "head_device": "first"}
    alone = pool(1, sim=True).run(trained, "bert", {**options, "device": ("sim:0", "sim:1")}, 2)[0]
    assert_same(pool(2, sim=True).run(trained_on_two, "bert", {**options, "reduce": "auto"}, 2), alone)


def on_other_options() -> str:
    asked = ("host", "device")[distributed.get_rank()]
    with pytest.raises(ValueError) as error:
        attach_l2l(bert(), L2LConfig(reduce=asked))
    return str(error.value)


def test_ranks_that_ask_for_other_ways_are_refused(pool):
    for text in pool(2, sim=True).run(on_other_options):
        assert text.startswith("all ranks must attach the same model with the same options (got reduce: ")


def traced(folder: str) -> list[str]:
    """Names of what the devices send each other, in the trace of this rank."""
    rank = distributed.get_rank()
    trained("bert", {**ON_DEVICE, "trace": f"{folder}/trace.json"}, 2)
    events = json.loads(Path(folder, "trace.json" if rank == 0 else f"trace.rank{rank}.json").read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    rows = {e["tid"] for e in events if e.get("name") == "thread_name" and e["args"]["name"] == stream.PEER}
    return sorted({e["name"] for e in events if e.get("ph") == "X" and e["tid"] in rows})


def test_the_trace_shows_what_devices_send_each_other(pool, tmp_path):
    for names in pool(2, sim=True).run(traced, str(tmp_path)):
        assert len(names) == 3 and any("bert.encoder.layer.0" in name for name in names)


# ---- waits, memory, failures


def without_wait(reason: str) -> Any:
    """A training in which one wait is left out."""
    wait = stream.wait

    def waiting(point: Any, why: str, **rest: Any) -> None:
        if why != reason:
            wait(point, why, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "wait", waiting)
        return trained("bert", {"eps_update": "deferred", "reduce": "device"}, 2)


def test_a_sum_is_downloaded_after_it_has_been_added(pool):
    with pytest.raises(RankDiedError, match="race|wait|before"):
        pool(2, sim=True).run(without_wait, wait_reasons.GRADIENTS_ADDED)


def groups_left() -> tuple[int, int]:
    before = len(distributed.distributed_c10d._world.pg_map)
    model = bert()
    attach_l2l(model, L2LConfig(reduce="device"))
    model(**batch_for(model)).loss.backward()
    detach_l2l(model)
    return before, len(distributed.distributed_c10d._world.pg_map)


def test_a_detached_model_leaves_no_process_group(pool):
    for before, after in pool(2, sim=True).run(groups_left):
        assert before == after


@pytest.mark.slow  # a process that ends with an error: `test_an_exception_of_a_rank_ends_the_others`
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs_ends_the_others(number):
    own = RankPool(3, sim=True, within_s=60.0)
    found = ended_by(own, hurt(number, 4.0), 10**6, None, ON_DEVICE)
    text = "it has not answered" if number == signal.SIGSTOP else "its process has ended"
    for rank in (0, 2):  # a simulated device lets its host wait for a collective: such a rank is ended
        assert not found[rank][0]
        assert f"rank 1 has failed: {text}" in found[rank][1] or found[rank][1] == f"rank {rank} has ended"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("place", ["backward", "step", "data"])
def test_an_exception_of_a_rank_ends_the_others(place):
    own = RankPool(2, sim=True, within_s=60.0)
    own.begin(raising, 10, place, ON_DEVICE)
    found = own.results()
    own.close()
    assert f"no memory in the {place}" in found[1][1] or "rank 1 has ended" in found[1][1]
    check_others(found, "")
