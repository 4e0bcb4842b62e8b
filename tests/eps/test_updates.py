"""Serial, deferred and eager updates: the same bits, reads that wait, failures that are told."""

from __future__ import annotations

import copy
import gc
import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hf_l2l import EagerParamServer, EngineFailedError, L2LConfig, attach_l2l, detach_l2l
from hf_l2l.eps import updates
from hf_l2l.runtime import worker
from late_updates import late_updates
from models import VOCAB, attached, batch_for, train_once
from training import tiny_bert
from update_cases import (
    assert_same as assert_same_runs,
)
from update_cases import (
    check_clipping_between_backwards,
    check_hooks_of_a_step,
    check_penalty,
    result,
    toy,
    toy_under,
)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "fused AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "SGD with momentum": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
}


def run(
    eps_update: str,
    make: Callable[[Any], torch.optim.Optimizer] = OPTIMIZERS["AdamW"],
    *,
    count: int = 4,
    accumulation: int = 1,
    max_norm: float = 0.0,
    device: str = "cpu",
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    """A model after some steps with dropout and a scheduler, its optimizer, and the norms of the gradients."""
    model = tiny_bert(layers=3)
    eps = attach_l2l(model, L2LConfig(device=device, eps_update=eps_update, ubatch_size=3, **options))
    decay, rest = ([p for p in model.parameters() if (p.dim() > 1) is matrix] for matrix in (True, False))
    optimizer = eps.wrap(make([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, count)
    torch.manual_seed(11)
    batch, norms = batch_for(model), []
    model.train()
    for _ in range(count):
        for turn in range(accumulation):
            with eps.accumulate() if turn < accumulation - 1 else nullcontext():
                (model(**batch).loss / accumulation).backward()
        norms.append((eps.clip_grad_norm_(max_norm) if max_norm else eps.grad_norm()).item())
        optimizer.step()
        scheduler.step()
        model.zero_grad()
    return model, optimizer, norms


def assert_same(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    model, optimizer, norms = found
    assert norms == expected[2]
    for (name, p), q in zip(model.named_parameters(), expected[0].parameters(), strict=True):
        assert torch.equal(p, q), name
    states = optimizer.state_dict(), expected[1].state_dict()
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert list(states[0]["state"]) == list(states[1]["state"])  # a file of it is the same, too
    for index, state in states[1]["state"].items():
        assert list(states[0]["state"][index]) == list(state)
        assert all(torch.equal(states[0]["state"][index][key], value) for key, value in state.items())


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "accumulation"),
    [
        pytest.param(name, count, marks=() if (i + count // 2) % 2 == 0 else pytest.mark.slow)
        for i, name in enumerate(OPTIMIZERS)
        for count in (1, 3)
    ],
)
def test_all_modes_give_the_same_bits(name, accumulation):
    same = {"make": OPTIMIZERS[name], "accumulation": accumulation}
    serial = run("serial", **same)
    for mode in ("deferred", "eager"):
        assert_same(run(mode, **same), serial)
    clipped = run("serial", **same, max_norm=0.1)
    assert not torch.equal(clipped[0].classifier.weight, serial[0].classifier.weight)
    assert_same(run("deferred", **same, max_norm=0.1), clipped)


def test_clipping_is_torchs_own():
    model = tiny_bert()
    eps = attach_l2l(model, L2LConfig(device="cpu"))
    train_once(model, batch_for(model))
    expected = copy.deepcopy(model)
    for p, q in zip(expected.parameters(), model.parameters(), strict=True):
        p.grad = None if q.grad is None else q.grad.clone()
    norm = eps.clip_grad_norm_(0.1)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.1))
    for p, q in zip(expected.parameters(), model.parameters(), strict=True):
        assert p.grad is None or torch.equal(p.grad, q.grad)


@contextmanager
def slow_updates(seconds: float = 0.1) -> Iterator[list[list[torch.Tensor]]]:
    """Every update in the background begins late; gives what was updated, in order."""
    original, done = updates.carry_out, []

    def late(step: Any, masters: list[torch.Tensor], *rest: Any) -> None:
        time.sleep(seconds)
        original(step, masters, *rest)
        done.append(masters)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates, "carry_out", late)
        yield done


def pending_model(
    **options: Any,
) -> tuple[nn.Module, EagerParamServer, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    """A model whose step is on its way, and the weights it will have."""
    config = {"device": "cpu", **options}
    expected = tiny_bert(dropout=0.0, layers=2)
    optimizer = attach_l2l(expected, L2LConfig(**config, eps_update="serial")).wrap(
        torch.optim.AdamW(expected.parameters(), lr=1e-2)
    )
    batch = batch_for(expected)
    train_once(expected, batch)
    optimizer.step()
    weights = {name: p.detach().clone() for name, p in expected.named_parameters()}
    model = tiny_bert(dropout=0.0, layers=2)
    eps = attach_l2l(model, L2LConfig(**config, eps_update="deferred"))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    train_once(model, batch)
    optimizer.step()
    return model, eps, optimizer, weights


def in_another_thread(read: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(read()))
    thread.start()
    thread.join()
    return found[0]


def saved(model: nn.Module) -> dict[str, torch.Tensor]:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded: dict[str, torch.Tensor] = torch.load(file, weights_only=True)
    return loaded


READS: dict[str, Callable[[nn.Module], dict[str, torch.Tensor]]] = {
    "state_dict": lambda m: m.state_dict(),
    "deepcopy": lambda m: dict(copy.deepcopy(m).named_parameters()),
    "torch.save": saved,
    "data": lambda m: {n: p.data.clone() for n, p in m.named_parameters()},
    "an average": lambda m: {n: torch.zeros_like(p).lerp_(p.detach(), 1.0) for n, p in m.named_parameters()},
    "numpy": lambda m: {n: torch.from_numpy(p.detach().numpy().copy()) for n, p in m.named_parameters()},
    "foreach": lambda m: dict(
        zip((n for n, _ in m.named_parameters()), torch._foreach_mul(list(m.parameters()), 1.0), strict=True)
    ),
    "another thread": lambda m: in_another_thread(lambda: {n: p.detach().clone() for n, p in m.named_parameters()}),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", READS)
def test_reading_a_weight_waits_until_its_update_is_done(name):
    with slow_updates(0.05):
        model, _, _, weights = pending_model()
        found = READS[name](model)
        for key, value in weights.items():
            assert torch.equal(found[key], value), key
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_optimizer_state_waits_for_all():
    with slow_updates(0.05) as done:
        model, _, optimizer, _ = pending_model()
        state = optimizer.state_dict()["state"]
    assert sum(map(len, done)) == len(list(model.parameters())) == len(state)
    assert all("exp_avg" in entry for entry in state.values())


def test_what_callbacks_of_transformers_do_waits_for_nothing():
    with slow_updates(0.3) as done:
        model, eps, _, weights = pending_model()
        model.zero_grad()
        model.train()
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) > 0
        assert all(p.grad is None and p.device.type == "cpu" and p.dim() and p.dtype for p in model.parameters())
        assert not done
        eps.synchronize()
        assert sum(map(len, done)) == len(weights)


def test_a_forward_waits_layer_by_layer():
    with slow_updates(0.1) as done:
        model, _, _, _ = pending_model()
        order = []
        for layer in model.bert.encoder.layer:
            layer.register_forward_pre_hook(lambda *args: order.append(len(done)))
        model(**batch_for(model))
    assert order[0] < 3, "the first layer does not wait for the last"


def test_the_gradient_is_the_truth_until_the_step():
    """A read between clipping and step returns clipped gradients, and a write there takes effect."""
    models = []
    for mode in ("serial", "deferred"):
        model = tiny_bert(dropout=0.0)
        eps = attach_l2l(model, L2LConfig(device="cpu", eps_update=mode))
        optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
        train_once(model, batch_for(model))
        eps.clip_grad_norm_(0.1)
        total = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
        assert total**0.5 == pytest.approx(0.1, rel=1e-3)
        model.classifier.weight.grad.zero_()
        optimizer.step()
        assert all(p.grad is None for p in model.parameters())
        models.append(model)
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(p, q)
    assert torch.equal(models[0].classifier.weight, tiny_bert().classifier.weight)


class BrokenError(Exception):
    pass


class Broken(torch.optim.AdamW):
    """Fails in the update of one parameter."""

    victim: int | None = None  # its address

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"]]
        if any(p.data_ptr() == self.victim and p.grad is not None for p in held):
            raise BrokenError("no update")
        super().step(closure)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", ["deferred", "eager"])
@pytest.mark.parametrize(("index", "num_threads"), [(0, 1), (0, 2), (1, 2), (2, 2)])
def test_a_failed_update_is_told_with_its_layer_and_stops_the_engine(index, num_threads, mode):
    model = tiny_bert(dropout=0.0, layers=3)
    eps = attach_l2l(model, L2LConfig(device="cpu", eps_update=mode, num_threads=num_threads))
    optimizer = eps.wrap(Broken(model.parameters()))
    address = model.bert.encoder.layer[index].output.dense.bias.data_ptr()
    optimizer.victim = address
    before_told = 0
    with pytest.raises(BrokenError) as told:
        for _ in range(2):
            train_once(model, batch_for(model))
            optimizer.step()
            before_told += 1
    assert before_told == 0 or mode == "deferred"  # then it may be told of in the next step
    assert f"layer.{index}" in "".join(told.value.__notes__)
    with pytest.raises(EngineFailedError, match="BrokenError: no update"):
        model(**batch_for(model))
    with pytest.raises(EngineFailedError):
        eps.synchronize()
    with pytest.warns(UserWarning, match="an update failed"):
        detach_l2l(model)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert not eps.updates.worker.lives


def test_a_step_that_raises_in_the_program_stops_the_engine():
    """Serial updates are the optimizer's own: some layers have made the step, and others have not."""
    model = tiny_bert(dropout=0.0, layers=3)
    eps = attach_l2l(model, L2LConfig(device="cpu", eps_update="serial"))
    optimizer = eps.wrap(Broken(model.parameters()))  # its step calls that of its base class
    for _ in range(2):
        train_once(model, batch_for(model))
        optimizer.step()
    optimizer.victim = model.bert.encoder.layer[1].output.dense.bias.data_ptr()
    train_once(model, batch_for(model))
    with pytest.raises(BrokenError):
        optimizer.step()
    with pytest.raises(EngineFailedError, match=r"step\(\) of Broken did not finish"):
        model(**batch_for(model))
    with pytest.raises(EngineFailedError):
        optimizer.state_dict()
    with pytest.warns(UserWarning, match="an update failed"):
        detach_l2l(model)
    model(**batch_for(model))


def test_a_closure_may_run_the_model_inside_a_serial_step():
    model = tiny_bert(dropout=0.0)
    optimizer = attach_l2l(model, L2LConfig(device="cpu", eps_update="serial")).wrap(
        torch.optim.SGD(model.parameters(), lr=1e-2)
    )
    for _ in range(2):
        assert optimizer.step(lambda: train_once(model, batch_for(model)))


def test_weights_are_updated_in_the_order_of_the_steps(monkeypatch):
    """Also without a use in between, and with a free thread."""
    original, delays = updates.carry_out, [0.3, 0.0, 0.0]

    def late(*args: Any) -> None:
        time.sleep(delays.pop(0))
        original(*args)

    monkeypatch.setattr(updates, "carry_out", late)
    found = []
    for mode in ("serial", "deferred"):
        model = tiny_bert(layers=2)
        eps = attach_l2l(model, L2LConfig(device="cpu", eps_update=mode, num_threads=2))
        optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
        for step in range(3):
            model.classifier.weight.grad = torch.full([2, 16], 10.0**step)
            optimizer.step()
        found.append(model.classifier.weight.detach().clone())
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
    model = tiny_bert(layers=3)
    eps = attach_l2l(model, L2LConfig(device="cpu", eps_update="deferred", num_threads=2))
    optimizer = eps.wrap(Collecting(model.parameters()))
    for _ in range(2):
        train_once(model, batch_for(model))
        optimizer.step()
    eps.synchronize()


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hf_l2l worker"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_no_thread_is_left(num_threads):
    gc.collect()
    before = len(workers())
    model, _, _ = run("deferred", count=2, num_threads=num_threads)
    gc.collect()
    assert len(workers()) == before + num_threads
    detach_l2l(model)
    assert len(workers()) == before
    model, optimizer, _ = run("eager", count=2, num_threads=num_threads)
    del model, optimizer
    until = time.monotonic() + 60  # the last reference may be dropped by the thread itself, which then ends by itself
    while len(workers()) > before and time.monotonic() < until:
        gc.collect()
    assert len(workers()) == before


def test_eager_reads_no_gradient_and_takes_no_second_backward():
    model = tiny_bert(layers=2)
    eps = attach_l2l(model, L2LConfig(device="cpu", eps_update="eager"))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
    batch = batch_for(model)
    train_once(model, batch)
    for read in (
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: model.zero_grad(),
        lambda: model.classifier.weight.grad,
    ):
        with pytest.raises(RuntimeError, match=r"eps\.grad_norm\(\)"):
            read()
    with pytest.raises(ValueError, match="deferred"):
        eps.clip_grad_norm_(1.0)
    assert eps.grad_norm() > 0
    optimizer.step()
    assert model.classifier.weight.grad is None
    train_once(model, batch)
    with pytest.raises(RuntimeError, match=r"eps\.accumulate\(\)"):
        train_once(model, batch)


@contextmanager
def tasks_that_do_not_end(release: threading.Event) -> Iterator[threading.Event]:
    """Inside, a task of the worker has done its work and is not over until `release` is set. Yields an event that is
    set when the first task is as far."""
    has_worked, report = threading.Event(), worker._Reporting.__exit__

    def late(reporting: Any, *error: Any) -> bool:
        has_worked.set()
        assert release.wait(60)
        return report(reporting, *error)

    with mock.patch.object(worker._Reporting, "__exit__", late):
        try:
            yield has_worked
        finally:
            release.set()


@pytest.mark.parametrize("when", ["before", "while", "after"])
def test_parameters_are_ordinary_again_after_an_eager_step(when):
    """Whether the step ends before the update has been made, before its task is over, or after that."""
    model, eps, optimizer, batch = toy_under("cpu", "eager")
    release = threading.Event()
    if when == "before":
        with late_updates() as gate:
            model(**batch).loss.backward()
            optimizer.step()
            gate.open_all()
            wait_for_tasks(eps)
    elif when == "while":
        with tasks_that_do_not_end(release) as has_worked:
            model(**batch).loss.backward()
            assert has_worked.wait(60)
            optimizer.step()
            release.set()
            wait_for_tasks(eps)
    else:
        model(**batch).loss.backward()
        wait_for_tasks(eps)
        optimizer.step()
    assert {type(p) for p in model.parameters()} == {nn.Parameter}


def wait_for_tasks(eps: EagerParamServer) -> None:
    """Wait for the updates that have begun, without a look at the parameters."""
    for task in eps.updates._begun:
        assert task._over.wait(60)


def test_eager_needs_its_optimizer_and_its_hyperparameters_before():
    model = attached(tiny_bert(layers=2), device="cpu", eps_update="eager")
    with pytest.raises(RuntimeError, match=r"eps\.wrap"):
        train_once(model, batch_for(model))
    model = tiny_bert(layers=2)
    eps = attach_l2l(model, L2LConfig(device="cpu", eps_update="eager"))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
    train_once(model, batch_for(model))
    optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(RuntimeError, match="hyper-parameters"):
        optimizer.step()


class Whole(torch.optim.SGD):
    """Divides by the norm of all gradients: it cannot be split."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            p.sub_(p.grad / norm, alpha=0.1)


def test_an_optimizer_that_cannot_be_split_steps_as_a_whole():
    models = []
    for mode in ("serial", "deferred"):
        model = tiny_bert(layers=2, dropout=0.0)
        eps = attach_l2l(model, L2LConfig(device="cpu", eps_update=mode))
        with pytest.warns(UserWarning, match="Whole cannot update one layer") if mode == "deferred" else nullcontext():
            optimizer = eps.wrap(Whole(model.parameters(), lr=0.1))
        for _ in range(2):
            train_once(model, batch_for(model))
            optimizer.step()
        models.append(model)
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(p, q)
    model = attached(tiny_bert(layers=2), device="cpu")
    eps = attach_l2l(tiny_bert(), L2LConfig(device="cpu", eps_update="eager"))
    with pytest.raises(ValueError, match="Whole cannot update one layer"):
        eps.wrap(Whole(eps.model.parameters(), lr=0.1))


@pytest.mark.parametrize("mode", ["serial", "deferred", "eager"])
def test_parameters_that_changed_shape_are_refused(mode):
    model = tiny_bert(layers=2)
    eps = attach_l2l(model, L2LConfig(device="cpu", eps_update=mode))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
    with torch.no_grad():
        model.classifier.bias.set_(torch.zeros(5))
    with pytest.raises(ValueError, match=r"must keep its shape.*classifier\.bias"):
        model(**batch_for(model))
    del optimizer
    model.classifier.bias = nn.Parameter(torch.zeros(2))
    model(**batch_for(model))  # with no optimizer that would be wrong


# ---- a new optimizer in the place of an old one, which is still alive


@pytest.mark.parametrize("mode", ["serial", "deferred", "eager"])
def test_a_resized_model_trains_with_a_new_optimizer(mode):
    model = tiny_bert(layers=2)
    eps = attach_l2l(model, L2LConfig(device="cpu", eps_update=mode))
    old = eps.wrap(torch.optim.AdamW(model.parameters()))
    model.resize_token_embeddings(VOCAB + 3)
    with pytest.raises(ValueError, match="make a new optimizer"):
        train_once(model, batch_for(model))
    new = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    train_once(model, batch_for(model))
    new.step()
    assert eps.updates.optimizers == [new]
    assert not old.state


@pytest.mark.parametrize("freeze", [False, True])
def test_eager_updates_are_those_of_the_newest_optimizer(freeze):
    model, reference = tiny_bert(dropout=0.0, layers=2), tiny_bert(dropout=0.0, layers=2)
    eps = attach_l2l(model, L2LConfig(device="cpu", eps_update="eager"))
    old = eps.wrap(torch.optim.SGD(model.parameters(), lr=10.0))
    for each in (model, reference):
        each.bert.embeddings.requires_grad_(not freeze)  # `old` has more than the new one then
    new = eps.wrap(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    plain = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.1)
    for each, optimizer in ((model, new), (reference, plain)):
        train_once(each, batch_for(each))
        optimizer.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)
    train_once(model, batch_for(model))
    with pytest.raises(RuntimeError, match=r"got a step of another SGD of the same parameters\); call eps.wrap"):
        old.step()


@pytest.mark.parametrize("mode", ["serial", "deferred", "eager"])
def test_an_optimizer_of_other_masters_stays_though_its_own_are_frozen(mode):
    model = tiny_bert(dropout=0.0, layers=2)
    eps = attach_l2l(model, L2LConfig(device="cpu", eps_update=mode))
    model.bert.requires_grad_(False)
    optimizers = [eps.wrap(torch.optim.SGD(part.parameters(), lr=0.1)) for part in (model.bert, model.classifier)]
    model.bert.requires_grad_(True)
    assert eps.updates.optimizers == optimizers
    before = [p.detach().clone() for p in model.parameters()]
    train_once(model, batch_for(model))
    for optimizer in optimizers:
        optimizer.step()
    eps.synchronize()
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_eager_refuses_an_optimizer_that_came_after_the_backward():
    model = tiny_bert(dropout=0.0, layers=2)
    eps = attach_l2l(model, L2LConfig(device="cpu", eps_update="eager"))
    old = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    train_once(model, batch_for(model))
    new = eps.wrap(torch.optim.SGD(model.parameters(), lr=1e-9))
    with pytest.raises(
        RuntimeError, match=r"got a step of another SGD\); call eps\.wrap\(optimizer\) before backward"
    ):
        new.step()
    assert old is not new


@pytest.mark.parametrize("mode", ["serial", "deferred"])
def test_optimizers_of_the_same_masters_may_take_turns(mode):
    def trained(attach: bool) -> nn.Module:
        model = tiny_bert(dropout=0.0, layers=2)
        eps = attach_l2l(model, L2LConfig(device="cpu", eps_update=mode, nonfinite="skip")) if attach else None
        optimizers = [torch.optim.AdamW(model.parameters(), lr=lr) for lr in (1e-2, 1e-3)]
        for optimizer in optimizers if eps else ():
            eps.wrap(optimizer)
        for turn in range(4):
            train_once(model, batch_for(model, seed=turn))
            optimizers[turn % 2].step()
            assert eps is None or eps.updates.optimizers == [optimizers[turn % 2]]
            model.zero_grad()
        return model

    for p, q in zip(trained(True).parameters(), trained(False).parameters(), strict=True):
        assert torch.equal(p, q)


def test_gradient_hooks_that_come_later_are_refused():
    model = tiny_bert(layers=2)
    eps = attach_l2l(model, L2LConfig(device="cpu"))
    eps.wrap(torch.optim.AdamW(model.parameters()))
    model.classifier.bias.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ValueError, match=r"gradient hooks.*classifier\.bias"):
        model(**batch_for(model))


def test_a_closure_makes_the_step_a_whole_one():
    model = tiny_bert(layers=2, dropout=0.0)
    eps = attach_l2l(model, L2LConfig(device="cpu", eps_update="deferred"))
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    batch = batch_for(model)
    before = model.classifier.weight.detach().clone()

    def closure() -> float:
        return train_once(model, batch)

    assert optimizer.step(closure) > 0
    assert not torch.equal(model.classifier.weight, before)


def test_what_was_clipped_is_added_to():
    check_clipping_between_backwards("cpu")


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("mode", ["serial", "deferred"])
def test_norms_contain_what_a_loss_makes_of_the_masters_themselves(mode, together):
    check_penalty("cpu", mode, together=together)


def test_hooks_of_a_step_see_the_gradients():
    check_hooks_of_a_step("cpu")
    model, _, optimizer, batch = toy_under("cpu", "eager")
    optimizer.register_step_pre_hook(lambda *args: None)
    model(**batch).loss.backward()
    with pytest.raises(RuntimeError, match="a hook that was registered after eps.wrap"):
        optimizer.step()


def test_an_eager_update_cannot_miss_a_gradient_that_comes_around_the_eps():
    model, _, optimizer, batch = toy_under("cpu", "eager")
    model(**batch).loss.backward()
    next(model.blocks[0].parameters()).sum().backward()
    with pytest.raises(RuntimeError, match=r"has updated blocks\.0\.norm\.weight with the gradients of a backward"):
        optimizer.step()
    with pytest.raises(EngineFailedError):
        model(**batch)


@pytest.mark.parametrize("mode", ["serial", "deferred", "eager"])
@pytest.mark.parametrize("name", ["embed.weight", "head.bias"])
def test_a_fault_outside_the_layers_is_told_with_its_name(name, mode, monkeypatch):
    model, eps, optimizer, batch = toy_under("cpu", mode)
    victim, receive = dict(model.named_parameters())[name], eps.gradients.receive

    def broken(pairs: Any, *rest: Any) -> None:
        if any(master.parameter is victim for master, _ in pairs):
            raise BrokenError("no download")
        receive(pairs, *rest)

    monkeypatch.setattr(eps.gradients, "receive", broken)
    with pytest.raises(BrokenError) as told:
        model(**batch).loss.backward()
        optimizer.step()
    assert f"raised in the download of {name}" in told.value.__notes__
    if mode == "eager" and name == "embed.weight":  # the last that comes
        with pytest.raises(EngineFailedError):
            optimizer.step()


class Curious(torch.optim.SGD):
    """Reads a parameter that is not its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        if Curious.other is not None:
            Curious.other.sum()

    other: torch.Tensor | None = None


def test_the_worker_does_not_wait_for_itself(monkeypatch):
    model, eps, optimizer, batch = toy_under("cpu", "deferred", lambda ps: Curious(ps, lr=0.1))
    monkeypatch.setattr(Curious, "other", model.blocks[2].down.weight)
    model(**batch).loss.backward()
    with pytest.raises(RuntimeError, match=r"needs weights that the update of blocks\.2 has not finished"):
        optimizer.step()
        eps.synchronize()


def test_hooks_on_gradients_are_refused_without_an_optimizer_too():
    """As LOMO has it, and optimizers that step in backward."""
    model = toy()
    attach_l2l(model, L2LConfig(device="cpu", layer_classes=("Block",)))
    model.head.bias.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ValueError, match=r"gradient hooks.*head\.bias"):
        model(**batch_for(model, masked=False))


def test_eager_updates_take_sparse_gradients():
    found = []
    for mode in ("serial", "eager"):
        model = toy()
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())  # no ties
        model.embed.sparse = True
        eps = attach_l2l(model, L2LConfig(device="cpu", eps_update=mode, layer_classes=("Block",)))
        optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
        torch.manual_seed(0)
        for _ in range(2):
            model(**batch_for(model, masked=False)).loss.backward()
            norm = eps.grad_norm()
            optimizer.step()
        found.append(result(model, optimizer, [norm.item()]))
    assert_same_runs(found[1], found[0])


def test_an_optimizer_whose_closure_raises_can_step_again():
    model, _, optimizer, batch = toy_under("cpu", "serial")

    def closure() -> torch.Tensor:
        raise BrokenError("no loss")

    model(**batch).loss.backward()
    with pytest.raises(BrokenError):
        optimizer.step(closure)
    model(**batch).loss.backward()
    optimizer.step()
