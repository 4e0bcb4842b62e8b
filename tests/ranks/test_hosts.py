"""Ranks on several hosts: each of these processes takes itself for one of such a host."""

from __future__ import annotations

import copy
import gc
import re
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from failing_ranks import check_others, hurt, nothing_is_left, raising, training
from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.ranks.peers import RankFailedError
from host_cases import on_hosts
from left_over import own_threads
from models import batch_for, bert
from rank_cases import MODES as OF_ONE_HOST
from rank_cases import assert_same, trained
from rank_pool import RankPool, digest
from rank_trainer import trained as trained_by_trainer

MODES: dict[str, dict[str, Any]] = {
    # Gradients in 16 bits are rounded by host.
    **{name: options for name, options in OF_ONE_HOST.items() if options.get("grad_dtype") != "16bit"},
    "16-bit state": {"moment_dtype": "bf16"},
}


@pytest.mark.one_in(80)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["bert", "t5", "tied", "skipping", "large"])
@pytest.mark.parametrize("size", [2, 3])
def test_one_rank_on_each_host_has_the_bits_of_one_process(pool, size, name, mode):
    alone = pool(1).run(trained, name, MODES[mode], size)[0]
    assert_same(pool(size).run(on_hosts, size, trained, name, MODES[mode], size), alone, on_one_host=False)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mode", ["deferred", "bf16"])
@pytest.mark.parametrize("name", ["bert", "skipping"])
def test_on_the_simulated_accelerator(pool, name, mode):
    alone = pool(1, sim=True).run(trained, name, MODES[mode], 2)[0]
    assert_same(pool(2, sim=True).run(on_hosts, 2, trained, name, MODES[mode], 2), alone, on_one_host=False)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("name", ["bert", "skipping", "tied", "large"])
def test_eager_updates(pool, name, accumulated):
    given = name, {"eps_update": "eager"}, 2, 3, accumulated, None
    found = pool(2).run(on_hosts, 2, trained, *given)
    assert_same(found, pool(1).run(trained, *given)[0], on_one_host=False)


@pytest.mark.slow  # with eager updates: `test_eager_updates`, of which a case with two of them is drawn
@pytest.mark.parametrize("name", ["bert", "skipping", "large"])
def test_micro_steps_are_added_to_one_sum(pool, name):
    given = name, {"eps_update": "deferred"}, 2, 2, 3
    found = pool(2).run(on_hosts, 2, trained, *given)
    assert_same(found, pool(1).run(trained, *given)[0], on_one_host=False)


@pytest.mark.slow  # with a plain sum in torch beside it: `test_hosts_are_added_in_their_order_each_as_a_whole`
@pytest.mark.parametrize("name", ["bert", "skipping"])
def test_two_hosts_with_two_ranks_each(pool, name):
    """Each host adds its ranks, and then the hosts are added: the same to rounding, and to the bit in all ranks."""
    found = pool(4).run(on_hosts, 2, trained, name, {"eps_update": "deferred"}, 4)
    alone = pool(1).run(trained, name, {"eps_update": "deferred"}, 4)[0]
    for rank, each in enumerate(found):
        assert each["norms"] == found[0]["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        assert (each["weights"], each["state"], each["detached"]) == (
            found[0]["weights"],
            found[0]["state"],
            found[0]["weights"],
        )
        assert each["losses"][0] == alone["losses"][0][rank]


def sums_of(hosts: int) -> dict[str, float]:
    """How far weights after SGD are from those of torch, where each host adds its ranks, and then hosts are added."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    model, plain = bert(), bert()
    plain.load_state_dict(model.state_dict())
    eps = attach_l2l(model, L2LConfig(eps_update="deferred"))
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=1.0))
    model(**batch_for(model, seed=rank)).loss.backward()
    optimizer.step()
    near = size // hosts
    sums: dict[str, torch.Tensor] = {}
    for host in range(hosts):
        plain.zero_grad()
        for other in range(host * near, (host + 1) * near):
            (plain(**batch_for(plain, seed=other)).loss / size).backward()
        for name, p in plain.named_parameters():
            sums[name] = p.grad.clone() if host == 0 else sums[name].add_(p.grad)
    values = model.state_dict()
    with torch.no_grad():
        return {name: (values[name] - p.sub(sums[name])).abs().max().item() for name, p in plain.named_parameters()}


def test_hosts_are_added_in_their_order_each_as_a_whole(pool):
    for found in pool(4).run(on_hosts, 2, sums_of, 2):
        assert not [name for name, value in found.items() if value != 0.0]


def memory_of(kind: str) -> dict[str, int]:
    """Elements of state that this rank's host has, before and after it has all."""
    model = bert()
    eps = attach_l2l(model, L2LConfig(eps_update="serial"))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))

    def count() -> int:
        eps.synchronize()
        return sum(each["exp_avg"].numel() for each in optimizer.state.values() if each)

    found = []
    for step in range(2):
        model(**batch_for(model, seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(count())
        state = optimizer.state_dict()
        found.append(count())
    assert len(state["state"]) == len(list(model.parameters()))
    return {"steps": found, "all": sum(p.numel() for p in model.parameters()), "trained": kind == "trained"}


def saved_and_loaded() -> dict[str, Any]:
    """The state of a model after it was saved and loaded, without a step in between; and after it was detached."""
    model = bert()
    eps = attach_l2l(model, L2LConfig(eps_update="serial"))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    model(**batch_for(model, seed=distributed.get_rank())).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    first = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(first)
    found = {"first": state_digest(first["state"]), "again": state_digest(optimizer.state_dict()["state"])}
    detach_l2l(model)
    return found | {"detached": state_digest(optimizer.state_dict()["state"])}


def state_digest(state: dict[int, dict[str, torch.Tensor]]) -> str:
    return digest(*(each[key] for _, each in sorted(state.items()) for key in sorted(each)))


def test_a_state_that_was_loaded_is_gathered_again(pool):
    for found in pool(2).run(on_hosts, 2, saved_and_loaded):
        assert found["first"] == found["again"] == found["detached"]


def gathered_on_the_first() -> dict[str, Any]:
    """How many parameters have state in this rank while it is gathered on the first host, and then; what rank 0 saves,
    and the state that all ranks ask for."""
    model = bert()
    eps = attach_l2l(model, L2LConfig(eps_update="serial"))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    found: dict[str, Any] = {"inside": [], "after": []}
    for step in range(2):
        model(**batch_for(model, seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with eps.updates.state_gathered():
            if distributed.get_rank() == 0:
                found["saved"] = state_digest(optimizer.state_dict()["state"])
            found["inside"].append(sum(bool(each) for each in optimizer.state.values()))
        found["after"].append(sum(bool(each) for each in optimizer.state.values()))
    return found | {"all": state_digest(optimizer.state_dict()["state"]), "count": len(list(model.parameters()))}


def calls_to_others() -> tuple[int, int]:
    """How often this rank has asked its counterparts, before and after a state was gathered on the first host."""
    model = bert()
    eps = attach_l2l(model, L2LConfig(eps_update="serial"))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    model(**batch_for(model)).loss.backward()
    optimizer.step()
    counterparts = eps.team.counterparts
    before = counterparts._asked
    with eps.updates.state_gathered():
        pass
    found = before, counterparts._asked
    detach_l2l(model)
    return found


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_all_hosts_count_as_many_calls(pool, size):
    """By which they find out who is in a backward while another one waits."""
    first, *others = pool(size).run(on_hosts, size, calls_to_others)
    assert first[1] > first[0] and others == [first] * (size - 1)


def test_for_a_checkpoint_the_first_host_alone_gets_the_state_of_all(pool):
    first, second = pool(2).run(on_hosts, 2, gathered_on_the_first)
    assert first["inside"] == [first["count"]] * 2
    assert all(0 < count < second["count"] for count in first["after"] + second["inside"] + second["after"])
    assert first["saved"] == first["all"] == second["all"]


def test_each_host_has_its_share_of_the_state(pool):
    a, b = pool(2).run(on_hosts, 2, memory_of, "")
    for each in (a, b):
        assert each["steps"][1] == each["steps"][3] == each["steps"][0] + [b, a][each is b]["steps"][0]
        assert 0.25 * each["steps"][1] < each["steps"][0] == each["steps"][2] < 0.75 * each["steps"][1]


def reads_gradient() -> list[str]:
    model = bert()
    attach_l2l(model, L2LConfig())
    model(**batch_for(model)).loss.backward()
    found = []
    for p in model.parameters():
        if p.grad is not None:
            try:
                p.grad.sum()
            except RuntimeError as error:
                found.append(str(error))
    return found


def test_a_gradient_that_another_host_has_cannot_be_read(pool):
    found = pool(2).run(on_hosts, 2, reads_gradient)
    for rank, texts in enumerate(found):
        assert texts and all(f"which rank {1 - rank} updates" in text for text in texts)


def long_texts() -> list[list[str]]:
    """What ranks say, of which one has much to say."""
    model, rank = bert(), distributed.get_rank()
    team = attach_l2l(model, L2LConfig()).team
    assert team is not None
    found = [team.tell(str(rank) * (50_000 if rank == number else 3), "test") for number in range(2)]
    detach_l2l(model)
    return found


def test_texts_of_any_length_are_told_to_other_hosts(pool):
    expected = [["0" * 50_000, "111"], ["000", "1" * 50_000]]
    assert pool(2).run(on_hosts, 2, long_texts) == [expected, expected]


def unequal() -> str:
    with pytest.raises(ValueError) as error:
        attach_l2l(bert(), L2LConfig())
    return str(error.value)


def test_hosts_with_other_numbers_of_ranks_are_refused(pool):
    for text in pool(3).run(on_hosts, 2, unequal):
        assert re.match(r"each host must have as many ranks as the others \(got 2, 1\)", text)


@pytest.fixture
def own_pool() -> Iterator[RankPool]:
    """Two processes for one test, which leaves them as they should not be."""
    own = RankPool(2)
    yield own
    own.close()


def steps_alone() -> str:
    """Rank 1 makes another backward where rank 0 steps."""
    model = bert()
    eps = attach_l2l(model, L2LConfig(rank_timeout=20.0))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    model(**batch_for(model)).loss.backward()
    with pytest.raises(RuntimeError) as error:
        if distributed.get_rank() == 0:
            optimizer.step()
        else:
            model(**batch_for(model)).loss.backward()
        optimizer.step()
    return str(error.value)


def test_hosts_that_make_other_calls_are_told(own_pool):
    for text in own_pool.run(on_hosts, 2, steps_alone):
        assert "all ranks must run the same forwards, backwards and steps" in text, text


def fails_with_much_to_say() -> str:
    """What rank 0 hears of rank 1."""
    team = attach_l2l(bert(), L2LConfig(rank_timeout=20.0)).team
    assert team is not None
    if distributed.get_rank() == 1:
        team.peers.tell_failure("y" * 5000)
        return ""
    with pytest.raises(RankFailedError) as error:
        team.tell("", "test")
    return str(error.value)


def test_a_reason_that_is_too_long_for_another_host_says_so(own_pool):
    first, _ = own_pool.run(on_hosts, 2, fails_with_much_to_say)
    assert re.match(r"rank 1 has failed: y{900,1024} \[\.\.\.\]", first)


@pytest.mark.slow  # a process that ends with an error: `test_an_exception_of_a_rank_ends_those_of_all_hosts`
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_dies_or_hangs_ends_those_of_all_hosts(pool, size, number):
    own = type(pool(size))(size, within_s=60.0)
    own.start()
    pids = [process.pid for process in own.processes]
    own.begin(on_hosts, 2, training, 10**6)
    hurt(number, 4.0)(pids)
    found = own.results()
    own.close()
    nothing_is_left(pids)
    check_others(found, "it has not answered" if number == signal.SIGSTOP else "its process has ended")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("place", ["backward", "step", "data"])
def test_an_exception_of_a_rank_ends_those_of_all_hosts(pool, place):
    own = type(pool(2))(2, within_s=60.0)
    own.start()
    own.begin(on_hosts, 2, raising, 4, place)
    found = own.results()
    own.close()
    assert f"no memory in the {place}" in found[1][1] or "rank 1 has ended" in found[1][1]
    check_others(found, "")


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_trainer(pool, tmp_path, size):
    """Checkpoints have all state, and are resumed to the same bits."""
    options = {"eps_update": "deferred", "save_strategy": "steps", "save_steps": 2}
    whole = pool(size).run(on_hosts, 2, trained_by_trainer, "dropout", "l2l", str(tmp_path / "whole"), options)
    near = pool(size).run(trained_by_trainer, "dropout", "l2l", str(tmp_path / "near"), options)
    state = torch.load(tmp_path / "whole" / "checkpoint-2" / "optimizer.pt", weights_only=True)["state"]
    assert len(state) > 10 and all({"exp_avg", "exp_avg_sq"} <= set(each) for each in state.values())
    if size == 2:
        assert whole[0]["weights"] == near[0]["weights"] and whole[1]["state"] == near[1]["state"]
    checkpoint = str(tmp_path / "whole" / "checkpoint-2")
    found = pool(size).run(
        on_hosts, 2, trained_by_trainer, "dropout", "l2l", str(tmp_path / "next"), options, 70, checkpoint
    )
    for rank, each in enumerate(found):
        for what in ("weights", "state", "step"):
            assert each[what] == whole[rank][what], what


def given_up() -> tuple[list[str], int]:
    """Threads of the package, and maps of shared memory, after a model was given up without `detach_l2l`."""
    model = bert()
    eps = attach_l2l(model, L2LConfig(eps_update="deferred"))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for step in range(2):
        model(**batch_for(model, seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model(**batch_for(model)).loss.backward()  # p.grad are there
    eps.synchronize()
    distributed.barrier()
    del model, eps, optimizer
    gc.collect()
    until = time.monotonic() + 10
    while own_threads() and time.monotonic() < until:
        time.sleep(0.05)
    maps = Path("/proc/self/maps").read_text().count("memfd:hf_l2l")
    return sorted(thread.name for thread in own_threads()), maps


@pytest.mark.parametrize("hosts", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_model_that_is_given_up_leaves_no_thread_and_no_memory(own_pool, hosts):
    assert own_pool.run(on_hosts, hosts, given_up) == [([], 0), ([], 0)]


def after_detaching(all_ranks: bool) -> tuple[list[int], str, list[str]]:
    """Which state the optimizer has when the model is detached, its bits, and warnings."""
    model = bert()
    eps = attach_l2l(model, L2LConfig(eps_update="deferred", rank_timeout=20.0))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    model(**batch_for(model)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    eps.synchronize()
    if not all_ranks and distributed.get_rank() == 1:
        eps.team.close()
        return [], "", []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        detach_l2l(model)
    values = [optimizer.state[p].get("exp_avg") for p in model.parameters() if optimizer.state[p]]
    return [v.numel() for v in values], digest(*values), [str(each.message) for each in caught]


def test_a_detached_model_has_all_state(pool):
    found = pool(2).run(on_hosts, 2, after_detaching, True)
    count = sum(p.numel() for p in bert().parameters())
    assert found[0] == found[1] and sum(found[0][0]) == count and not found[0][2]


def test_a_rank_that_detaches_alone_is_warned_that_it_has_a_part(pool):
    sizes, _, texts = pool(2).run(on_hosts, 2, after_detaching, False)[0]
    assert 0 < sum(sizes) < sum(p.numel() for p in bert().parameters())
    assert any("only the state of the parameters that this host updates" in text for text in texts)
