"""What moves with resident weights, what stays where it is, and what cannot be resident."""

from __future__ import annotations

import copy
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from devices import DEVICE
from hf_l2l import L2LConfig, attach_l2l, copy_as, detach_l2l
from models import Toy, batch_for
from placements import PLACEMENTS
from runs import OPTIMIZERS, attach, config_for
from tiers import cpu_suffices, on_a_device
from training import tiny_bert

ON_HOST = DEVICE == "cpu"
"""Whether nothing is resident, since layers run where masters are."""
SHELL, FIRST, ALL = (PLACEMENTS[name].options for name in ("shell", "first layer", "all"))


def places(model: nn.Module) -> dict[str, str]:
    return {name: p.device.type for name, p in model.named_parameters()}


# ---- what is there


@cpu_suffices
@pytest.mark.parametrize("option", ["grad_dtype", "moment_dtype"])
def test_only_what_is_on_the_host_is_kept_in_16_bits(option):
    value = {"grad_dtype": "16bit", "moment_dtype": "bf16"}[option]
    model, eps, optimizer, batch = attach(resident="shell", **{option: value})
    for _ in range(2):
        model(**batch).loss.backward()
        gradients = {name: p.grad.dtype for name, p in model.named_parameters()}
        optimizer.step()
    eps.synchronize()
    moments = {name: optimizer.state[p]["exp_avg"].dtype for name, p in model.named_parameters()}
    for name, dtype in (gradients if option == "grad_dtype" else moments).items():
        is_resident = not ON_HOST and PLACEMENTS["shell"].is_resident(name)
        assert dtype == (torch.float32 if is_resident else torch.bfloat16), name
    detach_l2l(model)
    assert {name: optimizer.state[p]["exp_avg"].dtype for name, p in model.named_parameters()} == moments


class Counting(torch.optim.SGD):
    """Keeps a momentum in fp32, a count of integers, and steps as SGD does."""

    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            state["count"] = state.get("count", torch.zeros(p.shape, dtype=torch.int64, device=p.device)) + 1
            state["mean"] = state.get("mean", torch.zeros(p.shape, device=p.device)).lerp(p.grad.float(), 0.5)
        super().step()


def test_state_of_any_dtype_moves_as_it_is():
    model = Toy().to(torch.bfloat16)
    optimizer = Counting(model.parameters(), lr=0.1)
    model(**batch_for(model, masked=False)).loss.backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the master weights are torch.bfloat16")
        attach_l2l(model, config_for(model, device=DEVICE, **SHELL)).wrap(optimizer)
    for _ in range(2):
        for p in model.parameters():
            state = optimizer.state[p]
            assert (state["count"].dtype, state["mean"].dtype) == (torch.int64, torch.float32)
            assert state["count"].device == state["mean"].device == p.device
        detach_l2l(model)


def test_a_copy_of_the_model_and_what_is_saved_are_on_the_host(tmp_path):
    model = tiny_bert(layers=2)
    eps = attach_l2l(model, L2LConfig(device=DEVICE, **ALL))
    assert model.device.type == DEVICE
    assert {p.device.type for p in copy_as(model, torch.bfloat16).parameters()} == {"cpu"}
    model.save_pretrained(tmp_path)
    loaded, mine = type(model).from_pretrained(tmp_path), model.state_dict()
    assert all(torch.equal(value, mine[name].cpu()) for name, value in loaded.state_dict().items())
    # New embeddings are as resident as those they replace.
    model.resize_token_embeddings(70, mean_resizing=False)
    embeddings = model.bert.embeddings.word_embeddings
    assert embeddings.weight.device.type == DEVICE
    optimizer, batch = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1)), batch_for(model)
    before = embeddings.weight.detach().clone()
    model(**batch).loss.backward()
    optimizer.step()
    assert not torch.equal(embeddings.weight, before)
    other = copy.deepcopy(model)
    assert not hasattr(other, "generate") or "generate" not in vars(other)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*it moves to the host")
        attach_l2l(other, L2LConfig(device=DEVICE, **ALL))
    assert places(other) == places(model)
    assert other.bert.embeddings.word_embeddings.weight is not embeddings.weight


class Late(torch.optim.SGD):
    """Waits, when it updates weights of a shape, for an event."""

    shape: tuple[int, ...] = ()
    event: threading.Event
    in_time: list[bool]

    def step(self, closure: Any = None) -> None:
        if any(p.shape == self.shape and p.grad is not None for group in self.param_groups for p in group["params"]):
            self.in_time.append(self.event.wait(timeout=20.0))
        super().step()


@on_a_device
def test_resident_layers_compute_while_the_first_streamed_layer_is_updated():
    """Its update ends only when the second of two resident layers computes."""
    model = Toy()
    model.blocks[2].up, model.blocks[2].down = nn.Linear(8, 24), nn.Linear(24, 8)
    Late.shape, Late.event, Late.in_time = (24, 8), threading.Event(), []
    Late.event.set()  # of the look at the optimizer
    model, eps, optimizer, batch = attach(
        model, lambda parameters: Late(parameters, lr=0.1), resident="shell", resident_layers=2
    )
    model.blocks[1].up.register_forward_pre_hook(lambda *_: Late.event.set())
    for _ in range(3):
        model(**batch).loss.backward()
        Late.event.clear()
        optimizer.step()
    model(**batch)
    eps.synchronize()
    assert Late.in_time and all(Late.in_time)


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


# ---- what detaching does with graphs


def test_detaching_while_a_graph_lives():
    model, _, _, batch = attach(**SHELL)
    loss = model(**batch).loss
    detach_l2l(model)
    assert set(places(model).values()) == {"cpu"}
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


# ---- what cannot be resident


def with_a_weight_in_two_layers(model: nn.Module) -> None:
    model.blocks[2].up.weight = model.blocks[0].up.weight


def with_memory_of_another_layer(model: nn.Module) -> None:
    model.blocks[0].up.bias = nn.Parameter(model.blocks[2].up.bias.detach())


@on_a_device
@pytest.mark.parametrize(
    ("change", "options", "keyword"),
    [
        (lambda model: weakref.ref(model.head.bias), SHELL, "refers to it weakly"),
        (lambda model: model.head.bias.register_hook(lambda gradient: gradient), SHELL, "gradient hooks"),
        (lambda model: model.head.bias.square().sum(), SHELL, "before its first forward"),
        (with_a_weight_in_two_layers, FIRST, "has it, too"),
        (with_memory_of_another_layer, FIRST, "shares memory"),
        (lambda model: None, {"resident_layers": 4}, "at most the number of layers"),
        (lambda model: None, {"kept_weights": 4}, "at most the number of layers"),
        (lambda model: None, {"kept_graphs": 4}, "at most the number of layers"),
        (lambda model: None, {"device_stash": 4, "stash": "host"}, "at most the number of layers"),
        (lambda model: None, {"resident_layers": 1, "kept_weights": 3}, "2 layers"),
    ],
)
def test_what_cannot_be_resident_is_refused_before_anything_moves(change, options, keyword):
    model = Toy()
    held = change(model)
    config = config_for(model, device=DEVICE, **options)
    with pytest.raises(ValueError, match=keyword):
        attach_l2l(model, config)
    assert set(places(model).values()) == {"cpu"}
    detach_l2l(model)  # it is attached to nothing
    del held


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
def test_a_weight_that_is_put_where_it_does_not_belong_is_refused():
    def put_into_streamed(model: nn.Module) -> None:
        model.out = model.blocks[0].up.bias = nn.Parameter(torch.zeros(16, device=DEVICE))

    def put_into_resident(model: nn.Module) -> None:
        model.blocks[0].adapter = nn.Linear(8, 8)

    for options, put in ((SHELL, put_into_streamed), (FIRST, put_into_resident)):
        model, _, _, batch = attach(**options)
        put(model)
        with pytest.raises(ValueError, match=r"weights of a (streamed|resident) layer"):
            model(**batch)


class GlobalNorm(torch.optim.SGD):
    """Divides all gradients by their norm."""

    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
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
