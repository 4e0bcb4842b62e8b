"""A backward is one thread's, is over when it is over, and leaves nothing on its way when it fails."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l import attach_l2l
from hf_l2l.eps.weight_copies import Copies
from hf_l2l.hf.attach import attachment_of
from hf_l2l.testing import engine_on_clock, virtual_clock
from models import Toy, assert_same_bits, attached, batch_for, gradients, train_once
from other_thread import REFUSAL, in_another_thread
from runs import OPTIMIZERS, attach, config_for
from tiers import more
from timed_machine import WIDTH, Block, Machine
from training import tiny_bert


def attached_toy(**options: Any) -> tuple[Toy, Any, dict[str, torch.Tensor]]:
    """A model that has made a backward, its EPS, and a batch."""
    model = Toy(dropout=0.0, tied=False)
    eps, batch = attach_l2l(model, config_for(model, **options)), batch_for(model, masked=False)
    train_once(model, batch)
    return model, eps, batch


@contextmanager
def call_between_layers(model: nn.Module, call: Callable[[], object]) -> Iterator[None]:
    """Let the model call something in its backward, between two layers."""
    original = model.blocks[2].forward

    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            hidden.register_hook(lambda gradient: call() and None)
        return original(hidden, *args, **kwargs)

    model.blocks[2].forward = forward
    yield
    model.blocks[2].forward = original


@pytest.mark.parametrize("where", ["between layers", "inside a layer"])
def test_a_forward_in_another_thread_is_refused_during_a_backward(where):
    """One in autograd's own thread, as checkpointing makes it, is not."""
    model, _, batch = attached_toy()
    expected = gradients(model)
    model.zero_grad()
    refused: list[BaseException] = []

    def call(*args: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            with torch.no_grad():
                refused.extend(in_another_thread(lambda: model(**batch)))
                if where == "between layers":
                    model(**batch)

    inside = model.blocks[2].down.register_forward_pre_hook
    with call_between_layers(model, call) if where == "between layers" else inside(call):
        train_once(model, batch)
    assert [REFUSAL in str(error) for error in refused] == [True]
    assert_same_bits(gradients(model), expected)


def fails_between_layers(model: nn.Module, batch: dict[str, torch.Tensor], kept: list[Any] | None = None) -> None:
    """A backward that fails; with `kept`, it is given up when that is empty: when torch's thread does is its own
    affair."""

    def call() -> None:
        if kept is not None:
            kept.extend(end() for end in attachment_of(model).eps.backwards.under_way.values())
        raise KeyError("from between the layers")

    with call_between_layers(model, call), pytest.raises(KeyError):
        (model(**batch).loss + model.blocks[2].down.weight.square().sum().to("sim")).backward()


@pytest.mark.parametrize(("late", "set_to_none"), [(False, False), (True, False), *more((True, True))])
def test_a_backward_that_fails_outside_the_layers_leaves_nothing_on_its_way(late, set_to_none):
    (model, eps, batch), kept = attached_toy(), []
    expected = gradients(model)
    fails_between_layers(model, batch, kept if late else None)
    assert len(kept) == late
    for name, gradient in gradients(model).items():
        if late and ("embed" in name or "blocks.0" in name or "blocks.1" in name):  # else it has what had been sent
            assert torch.equal(gradient, expected[name]), name
    model.zero_grad(set_to_none=set_to_none)  # torch's thread gives the backward up when the caller knows, or later
    kept.clear()
    eps.backwards.refuse_others(own=True)  # until it is given up
    torch.sim.synchronize()
    assert all(p.grad is None if set_to_none else not p.grad.any() for p in model.parameters())
    train_once(model, batch)
    assert_same_bits(gradients(model), expected)


def write_to_masters(model: nn.Module) -> None:
    """The simulated accelerator finds what is written too early."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.0)
    torch.sim.synchronize()


def test_masters_may_be_written_after_a_backward_that_stops_half_way():
    model = attached(tiny_bert(layers=5, dropout=0.0), device="sim")
    for _ in range(2):
        outputs = model(**batch_for(model), output_hidden_states=True)
        torch.autograd.grad(outputs.loss, outputs.hidden_states[2])
        write_to_masters(model)


def test_a_layer_that_no_backward_reaches_does_not_travel(monkeypatch):
    model = tiny_bert(layers=6, dropout=0.0)
    index = {layer: i for i, layer in enumerate(model.bert.encoder.layer)}
    for module in (model.bert.embeddings, *model.bert.encoder.layer[:3]):
        module.requires_grad_(False)
    attached(model, device="sim")
    train_once(model, batch_for(model))
    filled: list[int] = []
    fill = Copies.of_unit

    def logged(copies: Copies, unit: Any, *rest: Any) -> Any:
        filled.append(index.get(unit.module, -1))  # each copy that is asked for is uploaded
        return fill(copies, unit, *rest)

    monkeypatch.setattr(Copies, "of_unit", logged)
    train_once(model, batch_for(model))
    assert [each for each in filled if each >= 0] == [0, 1, 2, 3, 4, 5, 3]
    write_to_masters(model)


def test_what_a_loss_makes_of_a_master_is_added_to_a_sum_that_gets_more():
    """In the thread that called, while the sum is on its way."""
    plain = Toy(dropout=0.0, tied=False)
    model, batch = copy.deepcopy(plain), batch_for(plain, masked=False)
    eps = attach_l2l(model, config_for(model))
    for each in (plain, model):
        for _ in range(3):
            penalty = sum(p.square().sum() for p in each.parameters())
            (each(**batch).loss.cpu() + penalty).backward()
            assert not eps.backwards.under_way
    torch.testing.assert_close(gradients(model), gradients(plain))


def test_a_thread_that_is_late_in_a_failed_backward_writes_to_no_gradient(monkeypatch):
    """The loss fails on the CPU, in the thread that called, while the device's thread sends a gradient."""
    model, eps, batch = attached_toy()
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
    model.zero_grad(set_to_none=False)
    eps.backwards.wait_until_over()
    torch.sim.synchronize()
    assert len(received) >= 2
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_step_after_a_failed_backward_uses_gradients_that_are_there():
    """The simulated accelerator finds what is used before it has landed."""
    (model, eps, batch), kept = attached_toy(eps_update="deferred"), []
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    fails_between_layers(model, batch, kept)
    optimizer.step()
    eps.synchronize()
    assert all(p.grad is None for p in model.parameters())
    kept.clear()


# ---- a layer that is called several times in a row


class Repeated(nn.Module):
    """Calls its first layer several times, each time with the output before or with an input of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor, times: int = 3, *, apart: bool = False) -> list[torch.Tensor]:
        found = [x]
        for number in range(times):
            found.append(self.blocks[0](x * number if apart else found[-1]))
        return [*found[1:-1], self.blocks[1](found[-1])]


def repeated(mode: str = "deferred") -> tuple[nn.Module, nn.Module, Any, torch.optim.Optimizer, torch.Tensor]:
    """Attached, and plain; the EPS and the optimizer; an input."""
    model = Repeated()
    plain = copy.deepcopy(model)
    options = {"ubatch_size": None, "layer_classes": ("Block",), "eps_update": mode}
    model, eps, optimizer, _ = attach(model, **options)
    return model, plain, eps, optimizer, torch.randn(4, WIDTH)


def downloads_of_a_step(times: int) -> int:
    model, _, eps, optimizer, x = repeated()
    with virtual_clock(Machine(2, 1, 1.0, 1.0, 1.0).costs()) as clock, engine_on_clock(clock, eps):
        model(x.to("sim"), times)[-1].sum().backward()
        eps.synchronize()
        optimizer.step()
    return sum(task.lane == "download" for task in clock.tasks)


def test_the_gradients_of_a_layer_leave_the_device_once_for_calls_in_a_row():
    assert downloads_of_a_step(5) == downloads_of_a_step(1)


@pytest.mark.parametrize("mode", ["deferred", "eager"])
def test_calls_in_a_row_have_the_gradients_of_plain_torch(mode):
    model, plain, eps, optimizer, x = repeated(mode)
    of_plain = OPTIMIZERS["AdamW"](plain.parameters())
    for _ in range(2):
        model(x.to("sim"))[-1].sum().backward()
        plain(x)[-1].sum().backward()
        if mode == "deferred":
            assert_same_bits(gradients(model), gradients(plain))
        for each in (optimizer, of_plain):
            each.step()
            each.zero_grad()
    eps.synchronize()
    assert_same_bits(dict(model.named_parameters()), dict(plain.named_parameters()))


def test_sums_that_no_further_call_adds_to_arrive():
    """A backward that reaches the last call of a layer, and none of those before."""
    model, plain, _, _, x = repeated()
    for each, place in ((model, "sim"), (plain, "cpu")):
        each(x.to(place), apart=True)[-1].sum().backward()
    assert_same_bits(gradients(model), gradients(plain))


def test_sums_of_a_backward_that_failed_are_dropped():
    model, plain, _, _, x = repeated()
    outputs = model(x.to("sim"))
    outputs[0].register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        outputs[-1].sum().backward()
    for each, place in ((model, "sim"), (plain, "cpu")):
        each.zero_grad()
        each(x.to(place))[-1].sum().backward()
    assert_same_bits(gradients(model), gradients(plain))
