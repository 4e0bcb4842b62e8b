"""Serial, deferred and eager updates: the same bits whenever they run, and reads that wait for them."""

from __future__ import annotations

import copy
import io
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from devices import DEVICE
from hf_l2l import EagerParamServer
from hf_l2l.eps import updates
from hf_l2l.runtime import wait_reasons
from hf_l2l.runtime.worker import Task
from late_updates import late_updates
from memory_switches import land_the_rest, poisoned_releases
from models import Toy, batch_for, train_once
from runs import (
    CLIPS,
    OPTIMIZERS,
    Run,
    assert_run_of_plain,
    assert_same_run,
    assert_same_tensors,
    attach,
    groups_of,
    on_host,
    run_of,
    seed_all,
    train,
)
from tiers import ALL, combinations, cpu_suffices, more, times

MODES = ("serial", "deferred", "eager")
STEPS = 3 if DEVICE == "cpu" else 2


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """What is read after it was given back is NaN, in every test here."""
    with poisoned_releases() if DEVICE == "sim" else nullcontext():
        yield


@contextmanager
def delayed_updates(delay: Callable[[], float]) -> Iterator[None]:
    """Each update in the background begins so many seconds late, as `delay` says."""
    original = updates.carry_out

    def late(*args: Any) -> None:
        time.sleep(delay())
        original(*args)

    with mock.patch.object(updates, "carry_out", late):
        yield


# ---- the same bits


def plain(optimizer: str, accumulation: int, max_norm: float, steps: int) -> Run:
    """The loop of `train` without L2L."""
    model = Toy().to(DEVICE).train()
    made = OPTIMIZERS[optimizer](groups_of(model))
    scheduler = LinearLR(made, 1.0, 0.1, steps)
    seed_all()
    logged: list[Any] = []
    for step in range(steps):
        for turn in range(accumulation):
            batch = batch_for(model, masked=False, seed=step * accumulation + turn)
            loss = model(**{name: each.to(DEVICE) for name, each in batch.items()}).loss / accumulation
            loss.backward()
            logged.append(loss.item())
        if max_norm:
            logged.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        made.step()
        scheduler.step()
        made.zero_grad()
        logged.append(scheduler.get_last_lr())
    return run_of(model, made, logged)


@pytest.mark.parametrize(
    ("optimizer", "mode", "accumulation", "steps"),
    combinations(OPTIMIZERS, MODES, (1, 2), (STEPS, *more(100))),
)
def test_bits_are_those_of_plain_torch(optimizer, mode, accumulation, steps):
    """Losses, norms, learning rates, weights, and the optimizer's state in its order."""
    same = {"accumulation": accumulation, "max_norm": CLIPS[mode], "steps": steps}
    expected = plain(optimizer, **same)
    # Two layers are updated at once: what may come in any order must change no bit.
    found = train(optimizer=optimizer, eps_update=mode, ubatch_size=None, num_threads=2, **same)
    assert_run_of_plain(found, expected)
    norms = [each for each in found.logged if isinstance(each, float)]
    assert mode == "eager" or max(norms) > CLIPS[mode]


@cpu_suffices
@pytest.mark.parametrize("mode", ["deferred", *more("eager")])
def test_a_loop_with_accelerate_has_the_same_bits(mode):
    same = {"optimizer": "AdamW", "accumulation": 2, "max_norm": CLIPS[mode], "steps": STEPS}
    found, expected = train(loop="accelerate", eps_update=mode, **same), serial(**same)
    assert_run_of_plain(found._replace(logged=expected.logged), expected)  # it logs other numbers


@cache
def serial(optimizer: str, accumulation: int, max_norm: float, steps: int) -> Run:
    return train(optimizer=optimizer, eps_update="serial", accumulation=accumulation, max_norm=max_norm, steps=steps)


@pytest.mark.parametrize(
    ("seed", "mode"), [(0, "eager"), (1, "deferred"), *more(*itertools.product(range(20), ("deferred", "eager")))]
)
def test_when_updates_run_and_copies_land_changes_no_bit(seed, mode):
    draw = random.Random(seed)
    same = {"steps": STEPS, "accumulation": 1 + seed % 2, "max_norm": CLIPS[mode]}
    landing: Any = nullcontext()
    if DEVICE == "sim":
        from hf_l2l.testing.sim_stream import random_landing

        landing = random_landing(seed)
    with landing, delayed_updates(lambda: draw.choice((0.0, 0.0, 0.002, 0.01))):
        found = train(eps_update=mode, stash=("device", "host")[seed % 2], num_threads=2 - seed % 2, **same)
    assert_same_run(found, serial("AdamW", **same))


def stepped(count: int, **options: Any) -> Any:
    """What `attach` returns, after some steps."""
    model, eps, optimizer, batch = attach(**options)
    for _ in range(count):
        train_once(model, batch)
        optimizer.step()
    return model, eps, optimizer, batch


def two_steps(mode: str) -> Run:
    model, _, optimizer, _ = stepped(2, eps_update=mode)
    state = copy.deepcopy(on_host(optimizer.state_dict()))  # before weights are read, for whose updates that waits
    return run_of(model, optimizer, [])._replace(state=state)


@pytest.mark.parametrize("why", [wait_reasons.WEIGHTS_UPDATED, wait_reasons.ALL_UPDATES_FINISHED])
def test_every_wait_for_the_worker_is_needed(why):
    expected, original, found = two_steps("serial"), Task.wait, set()

    def wait(self: Task, reason: str) -> None:
        found.add(reason)
        if reason != why:
            original(self, reason)

    with delayed_updates(lambda: 0.02):
        assert_same_run(two_steps("deferred"), expected)
        # The relay may notice that weights have changed, and what is copied may change meanwhile.
        with mock.patch.object(Task, "wait", wait), pytest.raises((AssertionError, RuntimeError)):
            assert_same_run(two_steps("deferred"), expected)
    assert why in found
    time.sleep(0.3)  # until the task without a wait has ended
    if DEVICE == "sim":
        land_the_rest()


MOST = 3 if ALL else 2
BACKWARDS = st.tuples(st.integers(1, MOST), st.integers(0, MOST - 1))
"""Micro-steps: forwards whose losses are summed before the one backward, and those that are thrown away."""
PROGRAMS = st.lists(st.lists(BACKWARDS, min_size=1, max_size=MOST), min_size=1, max_size=MOST)


@cpu_suffices
@settings(max_examples=times(4 if DEVICE == "cpu" else 3, 60), deadline=None)
@given(program=PROGRAMS, calls=st.integers(1, MOST))
def test_eager_updates_know_when_all_gradients_of_a_step_are_there(program, calls):
    """Whatever the loop does, and however often a layer is called."""
    runs = []
    for mode in ("serial", "eager"):
        model, eps, optimizer, batch = attach(Toy(2, calls=calls), eps_update=mode)
        norms = []
        for step in program:
            for turn, (forwards, thrown_away) in enumerate(step):
                with eps.accumulate() if turn < len(step) - 1 else nullcontext():
                    losses = [model(**batch).loss for _ in range(forwards + thrown_away)]
                    torch.stack(losses[:forwards]).sum().backward()
            norms.append(eps.grad_norm().item())
            optimizer.step()
            model.zero_grad()
        runs.append(run_of(model, optimizer, norms))
    assert_same_run(runs[1], runs[0])


def test_eager_updates_are_made_in_the_backward_where_nothing_is_thrown_away():
    model, eps, optimizer, batch = attach(Toy(2, calls=2), eps_update="eager")

    def changed() -> list[bool]:
        return [not torch.equal(p, before[name]) for name, p in model.named_parameters()]

    before = named(model, lambda p: p.detach().clone())
    torch.stack([model(**batch).loss, model(**batch).loss]).sum().backward()
    eps.synchronize()
    assert all(changed())
    before = named(model, lambda p: p.detach().clone())
    optimizer.step()
    assert not any(changed())
    model(**batch)
    model(**batch).loss.backward()
    assert not any(each for each, name in zip(changed(), before, strict=True) if "blocks" in name)
    optimizer.step()
    assert all(changed())


@cpu_suffices
def test_small_numbers_are_treated_alike_in_all_modes():
    """Eager updates are begun by a thread of torch's, whose mode is not the program's."""
    left = {}
    for mode in MODES:
        model, eps, optimizer, batch = stepped(1, eps_update=mode)
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor flushes nothing to zero")
        try:
            for state in optimizer.state_dict()["state"].values():
                state["exp_avg_sq"].fill_(0.0)
            (model(**batch).loss * 1e-19).backward()
            optimizer.step()
            eps.synchronize()
        finally:
            torch.set_flush_denormal(False)
        moments = [state["exp_avg_sq"] for state in optimizer.state_dict()["state"].values()]
        left[mode] = sum(int(((m != 0) & (m < 1.2e-38)).sum()) for m in moments)
    assert left == {"serial": 0, "deferred": 0, "eager": 0}


@cpu_suffices
def test_hooks_of_a_step_see_the_gradients():
    """Whenever they were registered, they find the gradients, and what they make of them counts."""
    runs = []
    for mode in ("serial", "deferred"):
        model, _, optimizer, batch = attach(eps_update=mode)
        found: list[int] = []

        def sign(each: torch.optim.Optimizer, args: Any, kwargs: Any, found: list[int] = found) -> None:
            given = [p for group in each.param_groups for p in group["params"] if p.grad is not None]
            found.append(len(given))
            for p in given:
                p.grad.sign_()

        optimizer.register_step_pre_hook(sign)
        for _ in range(3):
            train_once(model, batch)
            optimizer.step()
        runs.append(run_of(model, optimizer, found))
    assert_same_run(runs[1], runs[0])
    assert runs[0].logged == [len(list(Toy().parameters()))] * 3


def test_weights_are_updated_in_the_order_of_the_steps():
    """Also without a use in between, and with a free thread."""
    found, delays = [], [0.2, 0.0, 0.0]
    for mode in ("serial", "deferred"):
        model, _, optimizer, _ = attach(eps_update=mode, num_threads=2)
        with delayed_updates(lambda: delays.pop(0)) if mode == "deferred" else nullcontext():
            for step in range(3):
                model.head.bias.grad = torch.full_like(model.head.bias, 10.0**step, requires_grad=False)
                optimizer.step()
            found.append(model.head.bias.detach().clone())
    assert torch.equal(*found) and not delays


class Collecting(torch.optim.SGD):
    """Keeps what it is busy with, for the length of a step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2)
        self.busy: list[Any] = []

    def step(self, closure: Any = None) -> Any:
        self.busy.append(self.param_groups)
        super().step(closure)
        time.sleep(0.01)
        [mine] = self.busy
        assert mine is self.param_groups, "another step has come in between"
        self.busy.clear()


def test_updates_share_nothing_that_a_step_writes_to():
    """Neither with each other nor with `optimizer.step()`, which goes on meanwhile."""
    _, eps, _, _ = stepped(2, make=Collecting, eps_update="deferred", num_threads=2)
    eps.synchronize()


# ---- reads


@cache
def updated() -> dict[str, torch.Tensor]:
    """Weights after one step."""
    model, _, optimizer, _ = stepped(1, eps_update="serial")
    return run_of(model, optimizer, []).weights


@contextmanager
def pending() -> Iterator[tuple[nn.Module, EagerParamServer, torch.optim.Optimizer, dict[str, torch.Tensor]]]:
    """A model whose step has been made and whose updates begin when somebody waits for them; its EPS, optimizer and
    batch."""
    with late_updates():
        model, eps, optimizer, batch = stepped(1, eps_update="deferred")
        assert all(map(is_pending, model.parameters()))
        yield model, eps, optimizer, batch


def is_pending(p: torch.Tensor) -> bool:
    return type(p) is not nn.Parameter


def saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def named(model: nn.Module, read: Callable[[nn.Parameter], torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: read(p) for name, p in model.named_parameters()}


def read_by_another_thread(model: nn.Module) -> dict[str, torch.Tensor]:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(named, model, lambda p: p.detach().clone()).result()


READS: dict[str, Callable[[nn.Module], dict[str, torch.Tensor]]] = {
    "deepcopy": lambda m: copy.deepcopy(m).state_dict(),
    "torch.save": saved,
    "data": lambda m: named(m, lambda p: p.data.clone()),
    "numpy": lambda m: named(m, lambda p: torch.from_numpy(p.detach().numpy().copy())),
    "foreach": lambda m: dict(
        zip((n for n, _ in m.named_parameters()), torch._foreach_mul(list(m.parameters()), 1.0), strict=True)
    ),
    "another thread": read_by_another_thread,
}


@cpu_suffices
@pytest.mark.parametrize("name", READS)
def test_reading_a_weight_waits_until_its_update_is_done(name):
    with pending() as (model, *_):
        found = READS[name](model)
        expected = {each: value for each, value in updated().items() if each in found}
        assert len(found) >= len(list(model.parameters()))
        assert_same_tensors(found, expected)
        assert not any(map(is_pending, model.parameters()))


def test_what_callbacks_of_transformers_do_waits_for_nothing():
    with pending() as (model, eps, _, _):
        model.zero_grad()
        model.train()
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) > 0
        assert all(p.grad is None and p.device.type == "cpu" and p.dim() and p.dtype for p in model.parameters())
        assert all(map(is_pending, model.parameters()))
        eps.synchronize()
        assert not any(map(is_pending, model.parameters()))


def test_optimizer_state_waits_for_all():
    with pending() as (model, _, optimizer, _):
        state = optimizer.state_dict()["state"]
        assert len(state) == len(list(model.parameters())) and all("exp_avg" in entry for entry in state.values())


@cpu_suffices
def test_a_forward_waits_layer_by_layer():
    with pending() as (model, _, _, batch):
        seen, last = [], model.blocks[2].up.bias
        for block in model.blocks:
            block.register_forward_hook(lambda *_: seen.append(is_pending(last)))
        model(**batch)
    assert seen[0] and not seen[-1], "the first layer does not wait for the last"


# ---- after an eager step


@contextmanager
def tasks_that_do_not_end(release: threading.Event) -> Iterator[threading.Event]:
    """Inside, a task of the worker has done its work and does not say so until `release` is set. Yields an event that
    is set when the first task is as far."""
    has_worked, tell, carry_out, here = threading.Event(), threading.Event.set, updates.carry_out, threading.local()

    def worked(*args: Any) -> None:
        carry_out(*args)
        here.has_worked = True

    def late(event: threading.Event) -> None:
        if getattr(here, "has_worked", False):
            here.has_worked = False
            tell(has_worked)
            assert release.wait(60)
        tell(event)

    with mock.patch.object(updates, "carry_out", worked), mock.patch.object(threading.Event, "set", late):
        try:
            yield has_worked
        finally:
            release.set()


@pytest.mark.parametrize("when", ["before", "while", "after"])
def test_parameters_are_ordinary_again_after_an_eager_step(when):
    """Whether the step ends before the update has been made, before its task is over, or after that."""
    model, eps, optimizer, batch = attach(eps_update="eager")

    def wait_for_tasks() -> None:
        """Wait for the updates that have begun, without a look at the parameters."""
        until = time.monotonic() + 60
        for master in eps.masters.all():
            while master.update is not None and not master.update.task.done:
                assert time.monotonic() < until
                time.sleep(0.001)

    if when == "before":
        with late_updates() as gate:
            train_once(model, batch)
            optimizer.step()
            gate.open_all()
            wait_for_tasks()
    elif when == "while":
        release = threading.Event()
        with tasks_that_do_not_end(release) as has_worked:
            train_once(model, batch)
            assert has_worked.wait(60)
            optimizer.step()
            release.set()
            wait_for_tasks()
    else:
        train_once(model, batch)
        wait_for_tasks()
        optimizer.step()
    assert not any(map(is_pending, model.parameters()))
