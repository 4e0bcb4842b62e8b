"""Ranks on several hosts: each of these processes takes itself for one of such a host."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed

from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.ranks.messages import LANDED
from host_cases import on_hosts
from left_over import own_threads
from models import batch_for, bert
from rank_cases import Ranked, mapped, state_digest
from rank_pool import digest


def sums_of(hosts: int) -> float:
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
        return max((values[name] - p.sub(sums[name])).abs().max().item() for name, p in plain.named_parameters())


def test_hosts_are_added_in_their_order_each_as_a_whole(pool):
    assert pool(4).run(on_hosts, 2, sums_of, 2) == [0.0] * 4


def state_of_hosts(moments: str) -> dict[str, Any]:
    """How many elements of moments this rank's host has, at some points of a training; and digests of its state."""
    run = Ranked(eps_update="deferred", moment_dtype=moments)
    sizes: dict[str, int] = {}

    def note(point: str) -> None:
        run.eps.synchronize()
        sizes[point] = sum(each["exp_avg"].numel() for each in run.optimizer.state.values() if each)

    found: dict[str, Any] = {"sizes": sizes, "all": sum(p.numel() for p in run.model.parameters())}
    for step in range(2):
        run.steps([step])
        with run.eps.updates.state_gathered():
            if run.rank == 0:
                found["saved"] = state_digest(run.optimizer.state_dict()["state"])
            note(f"gathered {step}")
        note(f"step {step}")
        state = run.optimizer.state_dict()
        note(f"asked {step}")
        assert len(state["state"]) == len(list(run.model.parameters()))
    first = copy.deepcopy(run.optimizer.state_dict())
    run.optimizer.load_state_dict(first)
    found["asked"] = state_digest(first["state"])
    found["loaded"] = state_digest(run.optimizer.state_dict()["state"])
    run.steps([2])
    run.eps.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        detach_l2l(run.model)
    values = [run.optimizer.state[p]["exp_avg"] for p in run.model.parameters()]
    return found | {"detached": digest(*values), "detached size": sum(v.numel() for v in values)}


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_each_host_has_its_share_of_the_state_and_all_who_asks(pool, moments):
    """The first host alone gets it for a checkpoint; what was loaded can be asked for again."""
    a, b = pool(2).run(on_hosts, 2, state_of_hosts, moments)
    for step in range(2):
        shares = [each["sizes"][f"step {step}"] for each in (a, b)]
        assert sum(shares) == a["all"] and min(shares) > 0.25 * a["all"]
        assert [each["sizes"][f"gathered {step}"] for each in (a, b)] == [a["all"], shares[1]]
        assert [each["sizes"][f"asked {step}"] for each in (a, b)] == [a["all"]] * 2
    assert a["saved"] == a["asked"] == b["asked"] == a["loaded"] == b["loaded"]
    assert a["detached"] == b["detached"] and a["detached size"] == b["detached size"] == a["all"]


def detached_alone() -> tuple[int, list[str]]:
    """Rank 1 has gone when rank 0 detaches: how much state that one has, and warnings."""
    run = Ranked(eps_update="deferred", rank_timeout=20.0)
    run.steps([0])
    run.eps.synchronize()
    if run.rank == 1:
        run.eps.team.close()
        return 0, []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        detach_l2l(run.model)
    values = [run.optimizer.state[p]["exp_avg"] for p in run.model.parameters() if run.optimizer.state[p]]
    return sum(v.numel() for v in values), [str(each.message) for each in caught]


def test_a_rank_that_detaches_alone_is_warned_that_it_has_a_part(pool):
    size, texts = pool(2).run(on_hosts, 2, detached_alone)[0]
    assert 0 < size < sum(p.numel() for p in bert().parameters())
    assert any("only the state of the parameters that this host updates" in text for text in texts)


def calls_and_reads() -> tuple[int, list[str]]:
    """How often this rank has asked its counterparts for a state; errors of reading gradients that others have."""
    run = Ranked(eps_update="serial")
    run.steps([0])
    counterparts = run.eps.team.counterparts
    before = counterparts.asked
    with run.eps.updates.state_gathered():
        pass
    asked = counterparts.asked
    assert asked > before
    run.backward(1)
    found = []
    for p in run.model.parameters():
        try:
            _ = p.grad is not None and p.grad.sum()
        except RuntimeError as error:
            found.append(str(error))
    detach_l2l(run.model)
    return asked, found


def test_all_hosts_count_as_many_calls_and_a_gradient_that_another_has_cannot_be_read(pool):
    """By calls they find out who is in a backward while another one waits."""
    found = pool(2).run(on_hosts, 2, calls_and_reads)
    assert len({asked for asked, _ in found}) == 1
    for rank, (_, texts) in enumerate(found):
        assert texts and all("updates" in text and f"rank {rank} " not in text for text in texts)


def head_alone() -> None:
    """The last steps train the head alone, while the other host hears late of what has landed."""

    def late(send: Callable[[bytes, float], None], message: bytes, until: float) -> None:
        if message[0] == LANDED:
            threading.Timer(0.05, send, (message, 0.0)).start()
        else:
            send(message, until)

    run = Ranked(eps_update="deferred")
    far = run.eps.team.peers.state.far
    far[:] = [partial(late, send) for send in far]
    for step in range(6):
        for name, p in run.model.named_parameters():
            p.requires_grad_(step < 4 or name.startswith("classifier"))
        run.steps([step])
    detach_l2l(run.model)


def test_a_backward_of_fewer_layers_is_not_taken_for_another_one(pool):
    """What hosts count goes on when what is trained changes."""
    pool(2).run(on_hosts, 2, head_alone)


def frozen_in_accumulation() -> tuple[str, list[float], list[tuple[int, int]]]:
    """Weights, norms, and calls that wait and bytes of sums, when embeddings are frozen between micro-batches."""
    run, norms, waiting = Ranked(eps_update="deferred"), [], []
    for step in range(3):
        for micro in range(2):
            run.model.bert.embeddings.requires_grad_(micro == 0)
            run.backward(10 * step + micro)
            if distributed.is_initialized():
                sums = run.eps.memory_report()["host"]["gradients"]["now"]
                waiting.append((len(run.eps.team.peers.state.far_calls), sums))
        norms.append(float(run.eps.clip_grad_norm_(0.1)))
        run.step()
    detach_l2l(run.model)
    return digest(*run.model.parameters()), norms, waiting


def test_what_is_frozen_within_an_accumulation_keeps_its_sum(pool):
    alone = pool(1).run(frozen_in_accumulation)[0]
    for *found, waiting in pool(2).run(on_hosts, 2, frozen_in_accumulation):
        assert found == [*alone[:2]]
        assert waiting == waiting[:1] * 6


def given_up() -> tuple[list[str], int]:
    """Threads and maps of shared memory that are left of a model which was given up without `detach_l2l`."""
    gc.collect()
    before, maps = own_threads(), mapped()
    run = Ranked(eps_update="deferred")
    run.steps(range(2))
    run.backward(2)  # p.grad are there
    run.eps.synchronize()
    distributed.barrier()
    del run
    gc.collect()
    for thread in own_threads() - before:
        thread.join(10)
    return sorted(thread.name for thread in own_threads() - before), mapped() - maps


def test_a_model_that_is_given_up_leaves_no_thread_and_no_memory(pool):
    assert pool(2).run(on_hosts, 2, given_up) == [([], 0), ([], 0)]
