"""What is resident, and graphs that layers keep: what moves with weights, what stays where it is, what is refused. If
the model is resident and all layers keep their graphs, it runs as in plain torch."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from devices import DEVICE
from hf_l2l import L2LConfig, NonFiniteError, attach_l2l, copy_as, detach_l2l
from models import Toy, batch_for, gradients
from placements import PLACEMENTS
from runs import OPTIMIZERS, assert_same_run, assert_same_tensors, attach, config_for, on_host, run_of, seed_all
from tiers import cpu_suffices, nightly, on_a_device
from training import settled_memory, tiny_bert

SHELL, FIRST, ALL = (PLACEMENTS[name].options for name in ("shell", "first layer", "all"))


def places(model: nn.Module) -> dict[str, str]:
    return {name: p.device.type for name, p in model.named_parameters()}


@on_a_device
def test_only_what_is_on_the_host_is_kept_in_16_bits():
    model, eps, optimizer, batch = attach(resident="shell", grad_dtype="16bit", moment_dtype="bf16")
    for _ in range(2):
        model(**batch).loss.backward()
        gradients = {name: p.grad.dtype for name, p in model.named_parameters()}
        optimizer.step()
    eps.synchronize()
    moments = {name: optimizer.state[p]["exp_avg"].dtype for name, p in model.named_parameters()}
    for name in gradients:
        is_resident = PLACEMENTS["shell"].is_resident(name)
        assert gradients[name] == moments[name] == (torch.float32 if is_resident else torch.bfloat16), name
    detach_l2l(model)
    assert {name: optimizer.state[p]["exp_avg"].dtype for name, p in model.named_parameters()} == moments


class Counting(torch.optim.SGD):
    """Keeps a momentum in fp32, a count of integers, and steps as SGD does."""

    def step(self, closure: Any = None) -> None:
        for p in (p for p in self.param_groups[0]["params"] if p.grad is not None):
            state = self.state[p]
            state["count"] = state.get("count", torch.zeros(p.shape, dtype=torch.int64, device=p.device)) + 1
            state["mean"] = state.get("mean", torch.zeros(p.shape, device=p.device)).lerp(p.grad.float(), 0.5)
        super().step()


@pytest.mark.filterwarnings("ignore:the master weights are torch.bfloat16")
def test_state_of_any_dtype_moves_as_it_is():
    model = Toy().to(torch.bfloat16)
    optimizer = Counting(model.parameters(), lr=0.1)
    model(**batch_for(model, masked=False)).loss.backward()
    optimizer.step()
    attach_l2l(model, config_for(model, device=DEVICE, **SHELL)).wrap(optimizer)
    for _ in range(2):
        for p in model.parameters():
            state = optimizer.state[p]
            assert (state["count"].dtype, state["mean"].dtype) == (torch.int64, torch.float32)
            assert state["count"].device == state["mean"].device == p.device
        detach_l2l(model)


@pytest.mark.filterwarnings("ignore:.*it moves to the host")
def test_a_copy_of_the_model_and_what_is_saved_are_on_the_host(tmp_path):
    model = tiny_bert(layers=2)
    eps = attach_l2l(model, L2LConfig(device=DEVICE, **ALL))
    assert model.device.type == DEVICE
    assert {p.device.type for p in copy_as(model, torch.bfloat16).parameters()} == {"cpu"}
    model.save_pretrained(tmp_path)
    assert_same_tensors(type(model).from_pretrained(tmp_path).state_dict(), model.state_dict())
    # New embeddings are as resident as those they replace.
    model.resize_token_embeddings(70, mean_resizing=False)
    embeddings = model.bert.embeddings.word_embeddings
    assert embeddings.weight.device.type == DEVICE
    optimizer, before = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1)), embeddings.weight.detach().clone()
    model(**batch_for(model)).loss.backward()
    optimizer.step()
    assert not torch.equal(embeddings.weight, before)
    other = copy.deepcopy(model)
    assert "generate" not in vars(other)
    attach_l2l(other, L2LConfig(device=DEVICE, **ALL))
    assert places(other) == places(model)
    assert other.bert.embeddings.word_embeddings.weight is not embeddings.weight


class Late(torch.optim.SGD):
    """Waits for an event when it updates a weight with 24 rows."""

    event: threading.Event
    in_time: list[bool]

    def step(self, closure: Any = None) -> None:
        if any(len(p) == 24 and p.grad is not None for group in self.param_groups for p in group["params"]):
            self.in_time.append(self.event.wait(timeout=20.0))
        super().step()


@on_a_device
def test_resident_layers_compute_while_the_first_streamed_layer_is_updated():
    """Its update ends only when the second of two resident layers computes."""
    model = Toy()
    model.blocks[2].up, model.blocks[2].down = nn.Linear(8, 24), nn.Linear(24, 8)
    Late.event, Late.in_time = threading.Event(), []
    Late.event.set()  # of the look at the optimizer
    make = lambda parameters: Late(parameters, lr=0.1)  # noqa: E731
    model, eps, optimizer, batch = attach(model, make, resident="shell", resident_layers=2)
    model.blocks[1].up.register_forward_pre_hook(lambda *_: Late.event.set())
    for _ in range(3):
        model(**batch).loss.backward()
        Late.event.clear()
        optimizer.step()
    model(**batch)
    eps.synchronize()
    assert Late.in_time and all(Late.in_time)


# ---- what detaching does with graphs


def test_detaching_while_a_graph_lives():
    model, _, _, batch = attach(**SHELL)
    loss = model(**batch).loss
    detach_l2l(model)
    assert {*places(model).values()} == {"cpu"}
    del loss


@on_a_device
def test_a_parameter_that_a_graph_has_saved_stays_there_with_a_warning():
    model, _, optimizer, batch = attach(**SHELL)
    model(**batch).loss.backward()
    optimizer.step()
    penalty = model.embed.weight.square().sum()
    with pytest.warns(UserWarning, match="embed.weight stays on") as caught:
        detach_l2l(model)
    assert caught[0].filename == __file__
    assert [name for name, place in places(model).items() if place == DEVICE] == ["embed.weight"]
    assert optimizer.state[model.embed.weight]["exp_avg"].device.type == DEVICE
    assert optimizer.state[model.head.bias]["exp_avg"].device.type == "cpu"
    del penalty


@on_a_device
def test_weights_that_share_memory_stay_on_the_host_with_a_warning():
    model = Toy()
    model.head.weight = nn.Parameter(model.embed.weight.detach())  # tied by memory, not by name
    model.blocks[0].up.bias = model.out_bias = nn.Parameter(torch.zeros(16))  # of a layer, too
    with pytest.warns(UserWarning, match="leaves embed.weight, head.weight on the host") as caught:
        model, _, optimizer, batch = attach(model, OPTIMIZERS["SGD"], **SHELL)
    assert caught[0].filename.endswith("runs.py")  # where attach_l2l was called
    found = places(model)
    assert (found["embed.weight"], found["head.bias"], found["out_bias"]) == ("cpu", DEVICE, "cpu")
    model(**batch).loss.backward()
    optimizer.step()


@on_a_device
def test_a_weight_that_is_put_into_a_resident_layer_is_refused():
    model, _, _, batch = attach(**FIRST)
    model.blocks[0].adapter = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="weights of a resident layer"):
        model(**batch)


class GlobalNorm(torch.optim.SGD):
    """Divides all gradients by their norm."""

    def step(self, closure: Any = None) -> None:
        parameters = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.grad /= norm
        super().step()


@on_a_device
def test_an_optimizer_that_mixes_parameters_needs_all_of_them_in_one_place():
    make: Callable[[Any], torch.optim.Optimizer] = lambda parameters: GlobalNorm(parameters, lr=0.1)  # noqa: E731
    for options in (SHELL, FIRST):
        with pytest.raises(ValueError, match="GlobalNorm|on the host and on the device"):
            attach(None, make, **options)
    model, _, optimizer, batch = attach(None, make, **ALL)
    before = model.blocks[0].up.weight.detach().clone()
    model(**batch).loss.backward()
    optimizer.step()
    assert not torch.equal(model.blocks[0].up.weight, before)


@on_a_device
def test_an_optimizer_that_is_not_wrapped_is_refused():
    model = Toy()
    attach_l2l(model, config_for(model, device=DEVICE, **SHELL))
    with pytest.raises(RuntimeError, match="wrapped optimizer"):
        model(**batch_for(model, masked=False)).loss.backward()


# ---- graphs that layers keep; if all do, and the model is resident, it runs as in plain torch

PLAIN: dict[str, Any] = {"resident": "all", "kept_graphs": 3, "ubatch_size": None}
"""With a `Toy`."""


def on_device(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(DEVICE) for name, value in batch.items()}


@cpu_suffices
def test_a_layer_that_keeps_its_graph_runs_once():
    model, _, optimizer, batch = attach(kept_graphs=1)
    runs: list[nn.Module] = []
    for block in model.blocks:
        block.up.register_forward_pre_hook(lambda module, *_: runs.append(module))
    for _ in range(2):
        runs.clear()
        model(**batch).loss.backward()
        optimizer.step()
    ubatches = 3  # of 3, 3 and 2 rows
    assert [runs.count(block.up) for block in model.blocks] == [2 * ubatches] * 2 + [ubatches]


def test_a_change_of_the_input_of_a_kept_graph_is_an_error_as_in_plain_torch():
    model, _, _, batch = attach(kept_graphs=3)
    inputs = []
    model.blocks[1].register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    loss = model(**batch).loss
    with torch.no_grad():
        inputs[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    inputs.clear()  # the model has the hook, and what this holds has the model


class Inner(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda each: super(Inner, self).forward(each).tanh(), x, use_reentrant=False)


@pytest.mark.parametrize("kept_graphs", [0, 3])
def test_a_layer_with_checkpoints_of_its_own(kept_graphs):
    model = Toy(dropout=0.0)
    model.blocks[2].down = nn.Sequential(model.blocks[2].down, Inner(8, 8))
    plain = copy.deepcopy(model).to(DEVICE)
    model, _, _, batch = attach(model, kept_graphs=kept_graphs, ubatch_size=None)
    model(**batch).loss.backward()
    plain(**on_device(batch)).loss.backward()
    assert_same_tensors(gradients(model), on_host(gradients(plain)))


def test_gradients_of_inputs_alone():
    """`torch.autograd.grad` for an input of a layer adds none to its weights."""
    plain = Toy(dropout=0.0).blocks[2].to(DEVICE)
    model, *_ = attach(Toy(dropout=0.0), kept_graphs=3, ubatch_size=None)
    x = torch.randn(3, 4, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(model.blocks[2](x).sum(), x)
    y = x.detach().to(DEVICE).requires_grad_()
    plain(y).sum().backward()
    assert torch.equal(gradient, y.grad.cpu())
    assert all(p.grad is None for p in model.parameters())


# ---- a resident model that keeps all its graphs


class Operations(TorchDispatchMode):
    """Counts the operations that are dispatched inside."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def in_a_loop(
    *, plain: bool, layers: int = 3, buffers: bool = True, accumulation: int = 1, **options: Any
) -> tuple[Any, int]:
    """What AdamW leaves of a `Toy` with dropout and buffers in two steps, in plain torch on the device or layer to
    layer; and the operations of the second step."""
    model = Toy(layers, buffers=buffers).train()
    batch = batch_for(model, masked=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if plain:
        model, batch = model.to(DEVICE), on_device(batch)
    else:
        options = {**PLAIN, "kept_graphs": layers, **options}
        attach_l2l(model, config_for(model, device=DEVICE, **options)).wrap(optimizer)
    found: list[Any] = []
    seed_all()
    for _ in range(2):
        with Operations() as counted:
            for _ in range(accumulation):
                loss = model(**batch).loss
                loss.backward()
                found.append(loss)
            found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
    run = run_of(model, optimizer, [each.item() for each in found])
    assert plain or {b.device.type for b in model.buffers()} <= {"cpu"}
    return run, sum(counted.found.values())


@pytest.mark.parametrize(("mode", "accumulation"), [("serial", 1), ("deferred", 2)])
def test_it_trains_as_plain_torch_on_the_device(mode, accumulation):
    expected, _ = in_a_loop(plain=True, accumulation=accumulation)
    found, _ = in_a_loop(plain=False, accumulation=accumulation, eps_update=mode)
    assert found.logged == expected.logged
    assert_same_tensors(found.weights, expected.weights)


@nightly
@on_a_device
def test_a_step_has_the_operations_of_plain_torch():
    """And a few more: inputs that go to the device, and the vote on the norm. Batches of several micro-batches, which
    run layer by layer, have many more."""
    (_, expected), (_, found) = (in_a_loop(plain=plain, layers=32, buffers=False) for plain in (True, False))
    assert expected <= found <= 1.05 * expected


@cpu_suffices
def test_batches_of_one_and_of_several_micro_batches_take_turns_and_add_to_one_gradient():
    """As where no graphs are kept."""
    found = []
    for kept_graphs in (0, 3):
        model, eps, optimizer, _ = attach(eps_update="deferred", resident="all", kept_graphs=kept_graphs)
        logged = []
        for sizes in ((2,), (7,), (3, 8), (8, 3)):
            for rows in sizes:
                loss = model(**batch_for(model, masked=False, rows=rows)).loss
                loss.backward()
                logged.append(loss.item())
            logged.append(eps.grad_norm().item())
            assert logged[-1] == torch.nn.utils.get_total_norm([p.grad.clone() for p in model.parameters()]).item()
            eps.clip_grad_norm_(0.5)
            optimizer.step()
        eps.synchronize()
        found.append(run_of(model, optimizer, logged))
    assert_same_run(found[1], found[0])


@on_a_device
def test_gradients_of_parameters_and_several_graphs():
    """What L2L cannot do with copies of the weights, plain torch can."""
    model, _, _, batch = attach(Toy(dropout=0.0), **PLAIN)
    first, second = model(**batch).loss, model(**batch).loss
    (by_name,) = torch.autograd.grad(first, [model.blocks[0].up.weight], create_graph=True)
    assert by_name.requires_grad
    second.backward(retain_graph=True)
    second.backward()
    torch.testing.assert_close(model.blocks[0].up.weight.grad, 2 * by_name)


def test_the_last_vote_does_not_count_for_new_gradients():
    model, eps, optimizer, batch = attach(**PLAIN)
    model(**batch).loss.backward()
    eps.clip_grad_norm_(1.0)
    optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    (model(**batch).loss * torch.inf).backward()
    with pytest.raises(NonFiniteError):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_an_evaluation_and_a_call_of_a_layer():
    model = Toy(dropout=0.0)
    plain = copy.deepcopy(model).to(DEVICE)
    model, _, _, batch = attach(model, **PLAIN)
    held = settled_memory() if DEVICE == "sim" else 0
    with torch.no_grad():
        assert torch.equal(model(**batch).loss, plain(**on_device(batch)).loss)
    model.blocks[1](torch.ones(2, 3, 8)).sum().backward()
    assert model.blocks[1].up.weight.grad is not None
    for p in model.parameters():
        p.grad = None
    assert DEVICE != "sim" or settled_memory() == held
