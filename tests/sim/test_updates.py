"""Updates beside a device: the same bits whenever they run, every wait needed, faults told."""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l import EngineFailedError, L2LConfig, attach_l2l
from hf_l2l.eps import gradients, updates, weight_copies
from hf_l2l.runtime import wait_reasons
from hf_l2l.runtime.worker import Task
from hf_l2l.testing import sim_stream
from memory_switches import land_the_rest, poisoned_releases
from models import batch_for, train_once
from training import settled_memory
from update_cases import (
    Toy,
    assert_same,
    check_clipping_between_backwards,
    check_hooks_of_a_step,
    check_penalty,
    raw_loop,
    result,
    toy,
    toy_under,
)

SEEDS = [seed if seed < 3 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(100)]


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """What is read after it was given back is NaN, in every test here."""
    with poisoned_releases():
        yield


@contextmanager
def delayed_updates(delay: Callable[[], float]) -> Iterator[None]:
    """The worker sleeps before and after each update, for as many seconds as `delay` says."""
    original = updates.carry_out

    def late(*args: Any) -> None:
        time.sleep(delay())
        original(*args)
        time.sleep(delay())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates, "carry_out", late)
        yield


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", ["deferred", "eager"])
@pytest.mark.parametrize("seed", SEEDS)
def test_when_the_worker_runs_changes_no_bit(seed, mode):
    draw = random.Random(seed)
    same: dict[str, Any] = {"steps": 3, "accumulation": 1 + seed % 2, "max_norm": 0.5 if mode == "deferred" else 0.0}
    same["stash"] = ("device", "host")[seed // 2 % 2]
    expected = raw_loop("sim", "serial", "AdamW", **same)
    with sim_stream.random_landing(seed), delayed_updates(lambda: draw.choice((0.0, 0.0, 0.002, 0.01))):
        assert_same(raw_loop("sim", mode, "AdamW", **same, num_threads=2 - seed // 3 % 2), expected)


WAITS = (
    wait_reasons.WEIGHTS_UPDATED,
    wait_reasons.ALL_UPDATES_FINISHED,
)
"""Of the host for the worker; those for the device are in `test_sim_overlap.WAITS`."""


@pytest.mark.parametrize("why", WAITS)
def test_every_wait_for_the_worker_is_needed(why, monkeypatch):
    expected = raw_loop("sim", "serial", "AdamW", steps=2)
    original, found = Task.wait, set()

    def wait(self: Task, reason: str) -> None:
        found.add(reason)
        if reason != why:
            original(self, reason)

    with delayed_updates(lambda: 0.02):
        assert_same(raw_loop("sim", "deferred", "AdamW", steps=2), expected)
        monkeypatch.setattr(Task, "wait", wait)
        with pytest.raises((AssertionError, RuntimeError)):  # the relay may notice that weights have changed
            assert_same(raw_loop("sim", "deferred", "AdamW", steps=2), expected)
    monkeypatch.undo()
    assert why in found
    time.sleep(0.5)  # until the task without a wait has ended
    land_the_rest()


# ---- faults


class FaultError(Exception):
    pass


def master_of(model: nn.Module, index: int) -> torch.Tensor:
    return model.blocks[index].down.weight


@contextmanager
def fault_in_upload(model: Toy, index: int, patch: pytest.MonkeyPatch) -> Iterator[None]:
    copies = weight_copies.Copies.of_unit

    def broken(self: Any, unit: Any, *rest: Any) -> Any:
        if unit.module is model.blocks[index]:
            raise FaultError("no upload")
        return copies(self, unit, *rest)

    patch.setattr(weight_copies.Copies, "of_unit", broken)
    yield


@contextmanager
def fault_in_download(model: Toy, index: int, patch: pytest.MonkeyPatch) -> Iterator[None]:
    receive = gradients.Gradients.receive

    def broken(self: Any, sums: Any, *rest: Any) -> None:
        if any(master.parameter is master_of(model, index) for master, _ in sums):
            raise FaultError("no download")
        receive(self, sums, *rest)

    patch.setattr(gradients.Gradients, "receive", broken)
    yield


@contextmanager
def fault_in_norm(model: Toy, index: int, patch: pytest.MonkeyPatch) -> Iterator[None]:
    send = gradients.Gradients._send_norms

    def broken(self: Any, totals: list[tuple[Any, torch.Tensor]]) -> None:
        if any(master.parameter is master_of(model, index) for master, _ in totals):
            raise FaultError("no norm")
        send(self, totals)

    patch.setattr(gradients.Gradients, "_send_norms", broken)
    yield


@contextmanager
def fault_in_update(model: Toy, index: int, patch: pytest.MonkeyPatch) -> Iterator[None]:
    original = updates.carry_out

    def broken(part: Any, masters: list[Any], *rest: Any) -> None:
        if any(master.parameter is master_of(model, index) for master in masters):
            raise FaultError("no update")
        original(part, masters, *rest)

    patch.setattr(updates, "carry_out", broken)
    yield


FAULTS = {
    "upload": fault_in_upload,
    "download": fault_in_download,
    "norm": fault_in_norm,
    "update": fault_in_update,
}


CASES = [(fault, mode) for fault in FAULTS for mode in ("serial", "deferred", "eager")]
CASES.remove(("update", "serial"))  # there the optimizer's own step raises


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("fault", "mode", "index"),
    [
        pytest.param(*case, index, marks=() if index == 2 * (number % 2) else pytest.mark.slow)
        for number, case in enumerate(CASES)
        for index in range(3)
    ],
)
def test_a_fault_is_told_with_its_layer(fault, mode, index, monkeypatch):
    """With its type; in its own step, or in the next one if the update is deferred. Then the step can be made again,
    or the engine says that it has failed."""
    model = toy()
    options: dict[str, Any] = {"eps_update": mode, "ubatch_size": 3, "num_threads": 1 + index % 2}
    eps = attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), **options))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    batch = batch_for(model, masked=False)

    def step() -> None:
        model.zero_grad()
        train_once(model, batch)
        optimizer.step()
        if mode == "eager":  # the updates of the first layers, which come last, may still be under way
            eps.synchronize()

    step()
    before_told = 0
    with pytest.MonkeyPatch.context() as patch, FAULTS[fault](model, index, patch):
        with pytest.raises(FaultError) as told:
            for _ in range(2):
                step()
                before_told += 1
    assert before_told == 0 or (fault, mode) == ("update", "deferred")
    assert f"blocks.{index}" in " ".join(told.value.__notes__)
    # Masters that have been updated cannot be put back; in an eager step, the head's and those of the layers above.
    lost = fault == "update" or (mode == "eager" and fault in ("download", "norm"))
    with pytest.raises(EngineFailedError, match="Load the last checkpoint") if lost else nullcontext():
        step()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_whose_engine_has_failed_can_be_collected(fault):
    """The error refers to frames of the backward, and those to its graph: nothing of the engine may refer to it."""

    def failed() -> weakref.ref[nn.Module]:
        model, eps, optimizer, batch = toy_under("sim", "eager", num_threads=2)
        with pytest.MonkeyPatch.context() as patch, FAULTS[fault](model, 1, patch), pytest.raises(FaultError):
            for _ in range(2):
                train_once(model, batch)
                optimizer.step()
        return weakref.ref(model)

    gone = failed()
    settled_memory()
    assert gone() is None


def test_the_step_after_a_fault_has_the_bits_of_one_without(monkeypatch):
    runs = []
    for broken in (False, True):
        model = toy()
        eps = attach_l2l(model, L2LConfig(device="sim", eps_update="deferred", layer_classes=("Block",)))
        optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
        batch = batch_for(model, masked=False)
        model.eval()
        for step in range(3):
            if broken and step == 1:
                for fault in ("upload", "download", "norm"):
                    with pytest.MonkeyPatch.context() as patch, FAULTS[fault](model, 1, patch):
                        with pytest.raises(FaultError):
                            model(**batch).loss.backward()
                    model.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
        runs.append(result(model, optimizer, []))
    assert_same(*runs)


# ---- what else may happen to gradients


def test_an_eager_update_leaves_a_gradient_that_autograd_put_there_to_the_step(monkeypatch):
    """It comes while the sum of the layers is on its way."""
    runs = []
    for mode in ("serial", "eager"):
        model, eps, optimizer, batch = toy_under("sim", mode)
        master, arrived = master_of(model, 1), eps.updates.arrived

        def meanwhile(masters: Any, master: Any = master, arrived: Any = arrived) -> None:
            if any(each.parameter is master for each in masters):
                master.grad = torch.ones_like(master)
            arrived(masters)

        if mode == "eager":
            monkeypatch.setattr(eps.updates, "arrived", meanwhile)
        train_once(model, batch)
        if mode == "serial":
            master.grad += 1.0
        optimizer.step()
        runs.append(result(model, optimizer, []))
    assert_same(runs[1], runs[0])


def test_a_sum_is_in_its_place_again_after_a_backward_that_failed():
    model, _, _, batch = toy_under("sim", "deferred")
    train_once(model, batch)
    kept = {name: p.grad for name, p in model.named_parameters()}
    with pytest.MonkeyPatch.context() as patch, FAULTS["norm"](model, 0, patch), pytest.raises(FaultError):
        train_once(model, batch)
    assert all(p.grad is kept[name] for name, p in model.named_parameters())


def test_what_was_clipped_is_added_to():
    check_clipping_between_backwards("sim")


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("mode", ["serial", "deferred"])
def test_norms_contain_what_a_loss_makes_of_the_masters_themselves(mode, together):
    check_penalty("sim", mode, together=together)


def test_hooks_of_a_step_see_the_gradients():
    check_hooks_of_a_step("sim")


def test_small_numbers_are_treated_alike_in_all_modes():
    """Eager updates are begun by a thread of torch's, whose mode is not the program's."""
    left = {}
    for mode in ("serial", "deferred", "eager"):
        model, eps, optimizer, batch = toy_under("sim", mode)
        train_once(model, batch)
        optimizer.step()
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
