"""A rank that dies, hangs or raises, or does what the others do not, ends the others in time, with an error that says
so, and leaves nothing."""

from __future__ import annotations

import copy
import gc
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import distributed, nn

from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.ranks import meeting
from hf_l2l.shared_eps import host_memory
from host_cases import on_hosts
from left_over import own_threads
from models import batch_for, bert
from rank_cases import Ranked, mapped, rank_here
from tiers import more


def training(steps: int, limit_s: float, raises_at: str = "", options: dict[str, Any] | None = None) -> str:
    """Train as a script: an exception ends the process. Rank 1 raises at a place in its third step."""

    def fail(place: str, step: int) -> None:
        if raises_at == place and rank_here() == 1 and step == 2:
            raise torch.OutOfMemoryError("no memory")

    try:
        model = bert(num_hidden_layers=4)
        eps = attach_l2l(model, L2LConfig(rank_timeout=limit_s, eps_update="deferred", **(options or {})))
        optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
        for step in range(steps):
            fail("data", step)
            out = model(**batch_for(model, seed=step))
            out.loss.register_hook(lambda gradient, step=step: fail("backward", step))
            out.loss.backward()
            fail("step", step)
            eps.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    except torch.OutOfMemoryError:
        os._exit(1)
    return "ended"


PLACES: dict[str, tuple[bool, int, dict[str, Any]]] = {
    "host": (False, 1, {}),
    "devices": (True, 1, {}),
    "sums on devices": (True, 1, {"reduce": "device"}),
    "two hosts": (False, 2, {}),
}
"""Whether ranks have simulated devices, how many hosts there are, and options."""


def check_others(found: list[tuple[bool, Any]], text: str, *, may_be_ended: bool = False) -> None:
    """All ranks but 1 have raised, and name it; or they are ended, as those which wait elsewhere."""
    for rank, each in enumerate(found):
        if rank != 1:
            is_right, what = each
            is_ended = may_be_ended and what == f"rank {rank} has ended"
            assert not is_right and (f"rank 1 has failed: {text}" in what or is_ended), what


@pytest.mark.parametrize(
    ("sent", "place", "size", "after_s"),
    [
        *((signal.SIGKILL, "host", 3, 0.5), (signal.SIGSTOP, "host", 2, 0.5)),
        *more((signal.SIGKILL, "sums on devices", 3, 0.5), (signal.SIGKILL, "two hosts", 4, 0.5)),
        *more((signal.SIGSTOP, "two hosts", 2, 0.5)),
        *more(*((signal.SIGKILL, "host", 2 + seed % 2, random.Random(seed).random()) for seed in range(10))),
    ],
)
def test_a_rank_that_dies_or_hangs_ends_the_others(pool, sent, place, size, after_s):
    """At any time. Nothing is left of it. One whose device lets its host wait for a collective is ended."""
    sim, hosts, options = PLACES[place]
    ranks = pool(size, sim=sim)
    ranks.run(on_hosts, hosts, training, 2, 60.0, "", options)  # so that what is imported at first is there
    pids = [process.pid for process in ranks.processes]
    limit_s = 2.0 if sent == signal.SIGSTOP else 8.0 if hosts > 1 else 4.0  # in which a call to the lost rank fails
    ranks.begin(on_hosts, hosts, training, 10**6, limit_s, "", options)
    time.sleep(after_s)
    os.kill(pids[1], sent)
    began = time.monotonic()
    if sent == signal.SIGSTOP:  # as long as it hangs, its pipe says nothing
        found = ranks.results(but=[1])
        os.kill(pids[1], signal.SIGKILL)
    else:
        found = ranks.results()
    assert time.monotonic() - began < 2 * limit_s + 4, "the limit, and what a busy machine takes"
    ranks.close()
    for pid in pids:
        maps = Path(f"/proc/{pid}/maps")
        assert not maps.exists() or "memfd:hf_l2l" not in maps.read_text()
    text = "its process has ended" if sent == signal.SIGKILL else "it has not answered"
    check_others(found, text, may_be_ended=place == "sums on devices")


@pytest.mark.parametrize(
    ("raises_at", "place"),
    [("step", "sums on devices"), ("backward", "two hosts"), *more(("data", "host"), ("backward", "devices"))],
)
def test_an_exception_in_one_rank_ends_the_others(pool, raises_at, place):
    """Out of memory, say: its process ends with the error, and the others with one that names it."""
    sim, hosts, options = PLACES[place]
    ranks = pool(2, sim=sim)
    ranks.begin(on_hosts, hosts, training, 4, 4.0, raises_at, options)
    found = ranks.results()
    ranks.close()
    assert "rank 1 has ended" in found[1][1]
    check_others(found, "")


# ---- what the others do not do, or what would be done once per rank: an error in each, and no endless wait


TOGETHER = "all ranks must run the same forwards"
ONE_SUM = "one tensor in shared memory"


class Coupled(torch.optim.SGD):
    """Uses the norm of all gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.norm() for p in given)
        for p in given:
            p.grad /= norm
        super().step()


def told(call: Callable[[], Any], kind: type[Exception] | tuple[type[Exception], ...] = RuntimeError) -> str:
    """The error of a call."""
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def refused() -> dict[str, str]:
    """What raises, by its name; the training goes on."""
    run = Ranked()
    parameters = list(run.model.parameters())
    run.backward(0)
    found = {
        "clip": told(lambda: nn.utils.clip_grad_norm_(parameters, 1.0)),
        "write": told(lambda: parameters[0].grad.mul_(2)),
        "zero": told(lambda: run.optimizer.zero_grad(set_to_none=False)),
        "optimizer": told(lambda: run.eps.wrap(Coupled(parameters, lr=1.0)), ValueError),
        "closure": told(lambda: run.optimizer.step(lambda: 0.0), ValueError),
    }
    run.step()
    run.backward(1)
    handle = run.optimizer.register_step_pre_hook(lambda *_: None)
    found["hook"] = told(run.step, ValueError)
    handle.remove()
    run.step()
    run.steps([2])
    run.ended()
    model = bert()
    weight = model.bert.embeddings.word_embeddings.weight
    model.bert.first_row, before = weight.detach()[0], weight.data_ptr()
    found["view"] = told(lambda: attach_l2l(model, L2LConfig()), ValueError)
    assert before == weight.data_ptr()
    return found


RULES = {
    "clip": "eps.clip_grad_norm_(max_norm)",
    "write": ONE_SUM,
    "zero": "zero_grad(set_to_none=True)",
    "optimizer": "Coupled",
    "closure": "without a closure",
    "hook": "register it before",
    "view": "got bert.embeddings.word_embeddings.weight",
}


def test_what_would_be_done_once_per_rank_is_refused(pool):
    for found in pool(2).run(refused):
        assert found.keys() == RULES.keys()
        for name, rule in RULES.items():
            assert rule in found[name]


def other_calls(what: str) -> str:
    """Of two ranks, one does something else; the error of this rank."""
    run = Ranked("layers", rank_timeout=4.0, eps_update="deferred" if what in LOADS else "serial")
    rank, model = run.rank, run.model
    try:
        if what == "optimizers":
            run.wrap("adamw", [p for p in model.parameters() if not rank or p is not model.layers[0].linear.bias])
        if what == "order":
            run.wrap("adamw", list(model.parameters())[:: -1 if rank else 1])
        run.backward(0)
        if what == "clips once":
            run.eps.clip_grad_norm_(0.01)
            run.backward(1)
        if what == "part of a backward":
            sum(p.square().sum() for p in model.head.parameters()).backward()
        if what == "gradients" and rank == 1:
            model.head.weight.grad = None
        if what == "batch" and rank == 0:
            run.backward(1)
        run.step()
        for step in range(1, 4):
            run.steps([step])
            if step == 1 and what in LOADS and (what != "alone" or rank == 0):
                state = copy.deepcopy(run.optimizer.state_dict())
                for number in range(rank if what == "some" else 0):
                    del state["state"][number]
                run.optimizer.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        detach_l2l(model)
    return "nothing"


LOADS = ("alone", "some", "order")
OTHERS = {
    "alone": TOGETHER,
    "some": "have loaded state of other parameters",
    "order": "in another order",
    "gradients": "head.weight has a gradient on rank 0 and has no gradient on rank 1",
    "optimizers": "layers.0.linear.bias has a gradient on rank 0 and is in no such optimizer on rank 1",
    "batch": "give each rank as many batches",
    "part of a backward": "part of one backward with the model's",
    "clips once": "clip gradients once",
}


@pytest.mark.parametrize(
    ("what", "hosts"),
    [
        *(("alone", 1), ("order", 1), ("batch", 1), ("part of a backward", 1), ("clips once", 1), ("gradients", 2)),
        *more(("some", 1), ("optimizers", 1)),
    ],
)
def test_ranks_that_do_something_else_are_refused(pool, what, hosts):
    """Instead of other moments. Whichever rank comes to it later may hear of the other's error first."""
    found = pool(2).run(on_hosts, hosts, other_calls, what)
    assert any(OTHERS[what] in text for text in found), found
    assert all(OTHERS[what] in text or "rank" in text for text in found) and "nothing" not in found


def state_of_one_rank() -> str:
    """The first rank alone drops the state of an embedding whose rows all ranks update."""
    run = Ranked("large", eps_update="deferred", rank_timeout=4)
    run.steps([0])
    if run.rank == 0:
        run.eps.synchronize()
        run.optimizer.state[run.model.model.embed_tokens.weight] = {}
    return told(lambda: run.steps([1, 2, 3]))


def test_a_state_that_one_rank_has_dropped_ends_the_training(pool):
    texts = pool(2).run(state_of_one_rank)
    pool(2).close()
    assert any("the same optimizer state" in text for text in texts)


def attached_otherwise(what: str) -> tuple[str, str, int, int]:
    """Rank 1 attaches something else, or has no memory: the error, and what is left of it."""
    is_other = distributed.get_rank() == 1
    model = bert(**{"num_hidden_layers": 3} if is_other and what == "parameters" else {})
    if is_other and what == "frozen":
        model.bert.embeddings.requires_grad_(False)
    given = {"cmp": "bf16"} if is_other and what == "cmp" else {}
    before = [p.data_ptr() for p in model.parameters()]
    try:
        with pytest.MonkeyPatch.context() as patch:
            if is_other and what == "memory":  # where masters move to shared memory
                patch.setattr(host_memory, "version_kept", Mock(side_effect=MemoryError("none")))
            attach_l2l(model, L2LConfig(**{"eps_update": "deferred", **given}, rank_timeout=5.0))
    except (ValueError, RuntimeError, MemoryError) as error:
        found = type(error).__name__, str(error)
        del error
    else:
        found = "", "nothing was raised"
    assert what == "memory" or before == [p.data_ptr() for p in model.parameters()]
    gc.collect()
    return *found, mapped(), len(own_threads())


@pytest.mark.parametrize("what", ["parameters", *more("frozen", "cmp")])
def test_ranks_that_attach_something_else_are_refused_and_do_not_wait(pool, what):
    named = "parameters" if what == "frozen" else what
    for rank, (kind, text, maps, threads) in enumerate(pool(2).run(attached_otherwise, what)):
        assert (kind, maps, threads) == ("ValueError", 0, 0), text
        assert f"(got {named}: " in text and f"on rank {rank}, and " in text


def test_an_error_of_one_rank_while_it_attaches(pool):
    (kind, text, *left), second = pool(2).run(attached_otherwise, "memory")
    assert kind == "RankFailedError" and "rank 1 has failed: its model cannot be attached" in text
    assert left == [0, 0] and second == ("MemoryError", "none", 0, 0)


def refused_when_attached(*options: dict[str, Any]) -> list[str]:
    """The error for each of these options; of a list of options, each rank has one."""
    rank, found = distributed.get_rank(), []
    for each in options:
        given = each[rank] if isinstance(each, list) else dict(each)
        if "devices" in given:
            given["device"] = tuple(f"sim:{rank + 2 * number}" for number in range(given.pop("devices")))
        found.append(told(lambda given=given: attach_l2l(bert(), L2LConfig(**given)), ValueError))
    return found


def test_options_that_ranks_cannot_have_and_hosts_with_other_numbers_of_ranks(pool):
    for [text] in pool(2).run(refused_when_attached, {"reduce": "device"}):
        assert "(got ranks that compute on the host)" in text
    rules = {
        "(got 2 devices of a rank)": {"reduce": "device", "devices": 2},
        "(got reduce: ": [{"reduce": "host"}, {"reduce": "device"}],
        "set resident_update='host'": {"resident": "shell"},
    }
    for found in pool(2, sim=True).run(refused_when_attached, *rules.values()):
        assert all(rule in text for rule, text in zip(rules, found, strict=True))
    for [text] in pool(3).run(on_hosts, 2, refused_when_attached, {}):
        assert "as many ranks as the others (got 2, 1)" in text


def late() -> str:
    """The second rank never attaches the model."""
    if distributed.get_rank() == 1:
        return "elsewhere"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "MEETS_WITHIN_S", 0.5)
        return told(lambda: attach_l2l(bert(), L2LConfig()))


def test_a_rank_that_does_not_come_is_told(pool):
    first, second = pool(2).run(late)
    assert "all ranks attach the model within 0.5 seconds" in first and second == "elsewhere"


def much_to_say() -> list[Any]:
    """What ranks of two hosts tell each other, of which one has much to say."""
    run = Ranked()
    found = [run.eps.team.tell(str(run.rank) * (50_000 if run.rank == number else 3), "test") for number in range(2)]
    run.ended()
    return found


def test_texts_that_hosts_tell_each_other_are_whole(pool):
    for found in pool(2).run(on_hosts, 2, much_to_say):
        assert found == [["0" * 50_000, "111"], ["000", "1" * 50_000]]
