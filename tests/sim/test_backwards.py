"""A backward is one thread's, is over when it is over, and leaves nothing on its way when it fails."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l import attach_l2l
from hf_l2l.eps.weight_copies import Copies
from models import Toy, assert_same_bits, batch_for, gradients, train_once
from models import attached as attached_to
from other_thread import REFUSAL, in_another_thread
from runs import config_for
from tiers import more
from training import tiny_bert


def toy() -> nn.Module:
    return Toy(dropout=0.0, tied=False)


def attached(model: nn.Module) -> nn.Module:
    attach_l2l(model, config_for(model))
    return model


class Meanwhile(torch.autograd.Function):
    """Does nothing but to call something in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Any) -> torch.Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.call()
        return gradient, None


def with_call_between_layers(model: nn.Module, call: Any) -> nn.Module:
    """Let the model call something in its backward, between two layers."""
    original = model.blocks[2].forward

    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(Meanwhile.apply(hidden, call) if torch.is_grad_enabled() else hidden, *args, **kwargs)

    model.blocks[2].forward = forward
    return model


@pytest.mark.parametrize("where", ["between layers", "inside a layer"])
def test_a_forward_in_another_thread_is_refused_during_a_backward(where):
    model = attached(toy())
    batch = batch_for(model, masked=False)
    train_once(model, batch)
    expected = gradients(model)
    model.zero_grad()
    refused: list[BaseException] = []

    def call(*args: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            with torch.no_grad():
                refused.extend(in_another_thread(lambda: model(**batch)))

    if where == "between layers":
        train_once(with_call_between_layers(model, call), batch)
    else:
        with model.blocks[2].down.register_forward_pre_hook(call):
            train_once(model, batch)
    assert [REFUSAL in str(error) for error in refused] == [True]
    assert_same_bits(gradients(model), expected)


def test_a_forward_inside_a_backward_is_no_other_thread():
    """As checkpointing makes it: autograd's own thread runs it."""
    model = attached(toy())
    batch = batch_for(model, masked=False)
    train_once(model, batch)
    expected = gradients(model)
    model.zero_grad()

    def call() -> None:
        with torch.no_grad():
            model(**batch)

    train_once(with_call_between_layers(model, call), batch)
    assert_same_bits(gradients(model), expected)


def test_a_backward_that_fails_outside_the_layers_leaves_nothing_on_its_way():
    model, fails = attached(toy()), [False]
    batch = batch_for(model, masked=False)
    train_once(model, batch)
    expected = gradients(model)

    def call() -> None:
        if fails[0]:
            raise KeyError("from between the layers")

    with_call_between_layers(model, call)
    fails[0] = True
    with pytest.raises(KeyError):
        train_once(model, batch)  # it was adding to the gradients
    fails[0] = False
    model.zero_grad(set_to_none=False)  # torch's thread gives the backward up when the caller knows, or just after
    torch.sim.synchronize()
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
    train_once(model, batch)
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize(
    ("set_to_none", "of_a_master"), [(False, True), *more((True, False), (True, True), (False, False))]
)
def test_a_backward_that_is_given_up_late_writes_to_no_gradient(set_to_none, of_a_master):
    """When torch's thread lets go of a backward that has failed is its own affair."""
    model, fails = toy(), [False]
    eps = attach_l2l(model, config_for(model))
    batch, kept = batch_for(model, masked=False), []

    def call() -> None:
        if fails[0]:
            kept.extend(end() for end in eps.backwards.under_way.values())
            raise KeyError("from between the layers")

    with_call_between_layers(model, call)
    train_once(model, batch)
    expected = {name: gradient.clone() for name, gradient in gradients(model).items()}
    weight = model.blocks[2].down.weight
    fails[0] = True
    with pytest.raises(KeyError):
        (model(**batch).loss + (weight.square().sum().to("sim") if of_a_master else 0.0)).backward()
    fails[0] = False
    assert len(kept) == 1
    for name, gradient in gradients(model).items():
        if "embed" in name or "blocks.0" in name or "blocks.1" in name:  # else it has what had been sent, too
            assert torch.equal(gradient, expected[name]), name
    model.zero_grad(set_to_none=set_to_none)
    kept.clear()
    eps.backwards.refuse_others(own=True)  # until it is given up
    torch.sim.synchronize()
    assert all(p.grad is None if set_to_none else not p.grad.any() for p in model.parameters())
    train_once(model, batch)
    assert_same_bits(gradients(model), expected)


def test_masters_may_be_written_after_a_backward_that_stops_half_way():
    model = attached_to(tiny_bert(layers=5, dropout=0.0), device="sim")
    for _ in range(2):
        outputs = model(**batch_for(model), output_hidden_states=True)
        torch.autograd.grad(outputs.loss, outputs.hidden_states[2])
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.0)
    torch.sim.synchronize()  # where the simulated device finds what was written too early


def test_a_layer_that_no_backward_reaches_does_not_travel(monkeypatch):
    model = tiny_bert(layers=6, dropout=0.0)
    index = {layer: i for i, layer in enumerate(model.bert.encoder.layer)}
    for module in (model.bert.embeddings, *model.bert.encoder.layer[:3]):
        module.requires_grad_(False)
    attached_to(model, device="sim")
    train_once(model, batch_for(model))
    filled: list[int] = []
    fill = Copies.of_unit

    def logged(copies: Copies, unit: Any, *rest: Any) -> Any:
        if unit.module in index:  # each copy that is asked for is uploaded
            filled.append(index[unit.module])
        return fill(copies, unit, *rest)

    monkeypatch.setattr(Copies, "of_unit", logged)
    train_once(model, batch_for(model))
    assert filled == [0, 1, 2, 3, 4, 5, 3]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.0)
    torch.sim.synchronize()


def test_two_backwards_in_turn_end_by_themselves():
    model = attached(toy())
    batch = batch_for(model, masked=False)
    plain = copy.deepcopy(model)
    eps = attach_l2l(model, config_for(model))
    for _ in range(2):
        model(**batch).loss.backward()
        plain(**batch).loss.backward()
        assert not eps.backwards.under_way
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(model)[name], gradient)


def test_what_a_loss_makes_of_a_master_is_added_to_a_sum_that_gets_more():
    """In the thread that called, while the sum is on its way."""
    plain = toy()
    model = attached(copy.deepcopy(plain))
    batch = batch_for(plain, masked=False)
    for each in (plain, model):
        for _ in range(3):
            penalty = sum(p.square().sum() for p in each.parameters())
            (each(**batch).loss.cpu() + penalty).backward()
    expected = gradients(plain)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


@pytest.mark.parametrize("set_to_none", [False, *more(True)])
def test_a_thread_that_is_late_in_a_failed_backward_writes_to_no_gradient(set_to_none, monkeypatch):
    """The loss fails on the CPU, in the thread that called, while the device's thread sends a gradient."""
    model = toy()
    eps = attach_l2l(model, config_for(model))
    batch = batch_for(model, masked=False)
    train_once(model, batch)
    is_late, may_go_on, received = threading.Event(), threading.Event(), []
    receive = eps.gradients.receive

    def slow(pairs: Any, *rest: Any) -> None:
        received.append(pairs)
        if len(received) == 2:
            is_late.set()
            assert may_go_on.wait(60)
        receive(pairs, *rest)

    monkeypatch.setattr(eps.gradients, "receive", slow)

    def fail(gradient: torch.Tensor) -> None:
        assert is_late.wait(60)
        raise KeyError("on the CPU")

    on_cpu = torch.ones(1, requires_grad=True) * 2
    on_cpu.register_hook(fail)
    with pytest.raises(KeyError):
        (model(**batch).loss + on_cpu.sum().to("sim")).backward()
    threading.Timer(0.1, may_go_on.set).start()  # while zero_grad waits for it, or later
    model.zero_grad(set_to_none=set_to_none)
    eps.backwards.wait_until_over()
    torch.sim.synchronize()
    assert len(received) >= 2
    assert all(p.grad is None if set_to_none else not p.grad.any() for p in model.parameters())


def test_two_forwards_before_two_backwards_take_no_second_memory_for_gradients(monkeypatch):
    model = toy()
    eps = attach_l2l(model, config_for(model))
    taken, gradient_like = [], eps.memory.gradient_like
    monkeypatch.setattr(eps.memory, "gradient_like", lambda master: taken.append(gradient_like(master)) or taken[-1])
    first, second = model(**batch_for(model, masked=False)).loss, model(**batch_for(model, masked=False, seed=2)).loss
    first.backward()
    sums = [p.grad for p in model.parameters()]
    second.backward()
    assert all(p.grad is found and found.is_pinned() for p, found in zip(model.parameters(), sums, strict=True))
    assert all(each.is_pinned() for each in taken)


def test_a_step_after_a_failed_backward_uses_gradients_that_are_there():
    """The simulated accelerator finds what is used before it has landed."""
    model, fails, kept = toy(), [False], []
    eps = attach_l2l(model, config_for(model, eps_update="deferred"))
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))

    def call() -> None:
        if fails[0]:
            kept.extend(end() for end in eps.backwards.under_way.values())
            raise KeyError("from between the layers")

    with_call_between_layers(model, call)
    train_once(model, batch_for(model, masked=False))
    fails[0] = True
    with pytest.raises(KeyError):
        model(**batch_for(model, masked=False)).loss.backward()
    fails[0] = False
    optimizer.step()
    eps.synchronize()
    assert all(p.grad is None for p in model.parameters())
    kept.clear()
    train_once(model, batch_for(model, masked=False))
