"""Weights and graphs that layers keep on the device until their backward: the same bits, without the second upload."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from hf_l2l import L2LConfig, L2LTrainingArguments, attach_l2l, estimate
from models import FAMILIES, attached, batch_for, gradients, train_once
from tiers import combined
from training import l2l_trainer, logs, settled_memory, tiny_bert
from transit import Bytes
from update_cases import Run, assert_same, raw_loop, toy_under

WEIGHTS: dict[str, Any] = {"kept_weights": 2}
GRAPHS: dict[str, Any] = {"kept_graphs": 2}
STASH: dict[str, Any] = {"device_stash": 2}
BOTH: dict[str, Any] = {"resident_layers": 1, "kept_weights": 2, "kept_graphs": 1}
ALL: dict[str, Any] = {"resident": "all", "kept_graphs": 3}


def on_host(value: Any) -> Any:
    """`value` with all tensors in it on the host."""
    return torch.utils._pytree.tree_map(lambda v: v.cpu() if isinstance(v, torch.Tensor) else v, value)


def assert_as_streamed(found: Run, expected: Run) -> None:
    assert_same(Run(*(on_host(part) for part in found)), expected)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("mode", "options"),
    combined(
        ["serial", "deferred", "eager"],
        [{}, {"cmp": "bf16", "stash": "host", "boundary": "host"}, {"prefetch": False, "stash": "host"}],
        one_in=3,
    ),
)
def test_they_train_as_streamed_ones(mode, options):
    same = {"steps": 3, "accumulation": 2, "max_norm": 0.0 if mode == "eager" else 0.5, **options}
    streamed = raw_loop("sim", mode, "AdamW", **same)
    for kept in (WEIGHTS, GRAPHS, BOTH, ALL, *([STASH] if "stash" in options else [])):
        assert_as_streamed(raw_loop("sim", mode, "AdamW", **same, **kept), streamed)


PLANS = st.fixed_dictionaries(
    {
        "resident": st.sampled_from(["none", "shell"]),
        "resident_update": st.sampled_from(["device", "host"]),
        "resident_layers": st.integers(0, 3),
        "kept_weights": st.integers(0, 3),
        "kept_graphs": st.integers(0, 3),
        "device_stash": st.integers(0, 3),
    }
).filter(lambda plan: plan["resident_layers"] + plan["kept_weights"] <= 3)
PROGRAMS = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["serial", "deferred", "eager"]),
        "optimizer": st.sampled_from(["AdamW", "SGD", "LAMB"]),
        "accumulation": st.integers(1, 2),
        "cmp": st.sampled_from([None, "bf16"]),
        "stash": st.sampled_from(["host", "disk"]),
        "boundary": st.sampled_from(["device", "host"]),
        "gradient_slots": st.integers(1, 2),
        "host_copies": st.sampled_from(["kept", "per_sweep"]),
    }
)


def check_plan(plan: dict[str, Any], program: dict[str, Any]) -> None:
    program = {**program, "host_copies": "kept"} if program["cmp"] is None else program
    if plan["resident"] == "none" and not plan["resident_layers"]:
        plan = {**plan, "resident_update": "device"}
    same = {"steps": 2, "max_norm": 0.0 if program["mode"] == "eager" else 0.5, "device": "sim", **program}
    assert_as_streamed(raw_loop(**same, **plan), raw_loop(**same))


DRAWN = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@settings(DRAWN, max_examples=3)
@given(PLANS, PROGRAMS)
def test_any_plan_trains_as_streamed(plan, program):
    check_plan(plan, program)


@pytest.mark.slow
@settings(DRAWN, max_examples=150)
@given(PLANS, PROGRAMS)
def test_many_plans_train_as_streamed(plan, program):
    check_plan(plan, program)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("family", "kept"),
    combined(FAMILIES, [{"kept_weights": 1}, {"kept_graphs": 1}, {"resident": "all", "kept_graphs": 2}], one_in=3),
)
def test_every_family_has_the_gradients_of_recomputed_layers(family, kept):
    """Several micro-batches, an uneven last one, and the stash on the host.

    With T5, whose mask requires a gradient, torch chooses another kernel of attention in grad mode, where
    graphs are made: the one of plain torch, which the forward of a recomputed layer does not take.
    """
    torch.manual_seed(0)
    streamed = FAMILIES[family]()
    other, batch = copy.deepcopy(streamed), batch_for(streamed)
    found = []
    for model, options in ((streamed, {}), (other, kept)):
        attached(model, device="sim", ubatch_size=3, stash="host", **options).train()
        optimizer = model._l2l.eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
        torch.manual_seed(1), torch.sim.manual_seed(1)
        found.append((train_once(model, batch), {**gradients(model), "next draw": torch.rand(1, device="sim")}))
        optimizer.step()
    tolerance = 1e-6 if family == "t5" and "kept_graphs" in kept else 0.0
    torch.testing.assert_close(found[1][0], found[0][0], rtol=tolerance, atol=0.0)
    for name, gradient in found[0][1].items():
        assert (found[1][1][name] is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(found[1][1][name].cpu(), gradient.cpu(), rtol=10 * tolerance, atol=tolerance)


def frozen_but_for_adapters(model: nn.Module) -> None:
    model.requires_grad_(False)
    for layer in model.bert.encoder.layer:
        layer.output.dense.weight.requires_grad_(True)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kept", [WEIGHTS, GRAPHS, BOTH, {"resident": "all", "kept_graphs": 4}], ids=str)
def test_a_model_with_frozen_weights(kept):
    runs = []
    for options in ({}, kept):
        model = tiny_bert()
        frozen_but_for_adapters(model)
        eps = attach_l2l(model, L2LConfig(device="sim", ubatch_size=3, **options))
        optimizer = eps.wrap(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))
        torch.sim.manual_seed(1)
        for _ in range(2):
            model.train()(**batch_for(model)).loss.backward()
            optimizer.step()
        eps.synchronize()
        runs.append({name: p.detach().cpu() for name, p in model.named_parameters()})
    assert all(torch.equal(runs[1][name], value) for name, value in runs[0].items())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kept", [0, 1, 2, 4])
def test_kept_weights_are_uploaded_once(kept, monkeypatch):
    """2 N - 2 - kept layers are uploaded in a step: without any, the last two stay for the backward anyway."""
    model = tiny_bert(layers=4)
    batch = batch_for(model)
    attached(model, device="sim", ubatch_size=2, kept_weights=kept, resident="shell")
    optimizer = model._l2l.eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    train_once(model, batch)
    optimizer.step()
    moved = Bytes(model, monkeypatch)
    train_once(model, batch)
    assert moved.uploaded == max(4, 2 * 4 - 2 - kept) * model._l2l.eps.masters.layer_units[0].layout.num_bytes


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_layer_that_keeps_its_graph_runs_once(kept):
    model, eps, optimizer, batch = toy_under("sim", "deferred", kept_graphs=kept)
    runs: list[nn.Module] = []
    for block in model.blocks:
        block.up.register_forward_pre_hook(lambda module, *_: runs.append(module))
    for _ in range(2):
        runs.clear()
        model(**batch).loss.backward()
        optimizer.step()
    ubatches = 3  # of 3, 3 and 1 rows
    assert [runs.count(block.up) for block in model.blocks] == [2 * ubatches] * (3 - kept) + [ubatches] * kept


def test_nothing_of_them_is_stashed():
    model, eps, optimizer, batch = toy_under("sim", "deferred", stash="host", kept_graphs=3, resident="shell")
    model(**batch).loss.backward()
    optimizer.step()
    loss = model(**batch).loss
    assert eps.memory_report()["host"]["stash"]["peak"] == 0
    loss.backward()


@pytest.mark.parametrize("boundary", [pytest.param("device", marks=pytest.mark.slow), "host"])
@pytest.mark.parametrize("kept", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(3, marks=pytest.mark.slow)])
def test_inputs_that_stay_do_not_travel(kept, boundary, monkeypatch):
    """Of four layers, the inputs of the first ones go to the host and come back, one micro-batch after the other."""
    seen, width = [], 32
    for on_device in (0, kept):
        model = tiny_bert(layers=4, width=width)
        batch = batch_for(model)
        config = L2LConfig(device="sim", ubatch_size=2, stash="host", boundary=boundary, device_stash=on_device)
        eps = attach_l2l(model, config)
        for _ in range(2):
            train_once(model, batch)
        with monkeypatch.context() as patch:
            moved = Bytes(model, patch)
            loss = model(**batch).loss
            stash = eps.memory_report()["device"]["stash"]["now"]
            seen.append((moved.downloaded, stash))
        loss.backward()
    inputs = batch["input_ids"].numel() * width * 4
    shared = seen[0][1]
    assert seen[1][1] - shared == kept * inputs
    assert seen[0][0] - seen[1][0] == kept * inputs


@pytest.mark.parametrize("kept", [{}, GRAPHS, {"resident": "all", "kept_graphs": 3}], ids=str)
def test_a_call_without_a_backward_frees_its_memory(kept):
    model, eps, optimizer, batch = toy_under("sim", "deferred", **kept)
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(**batch)
    held = settled_memory()
    for _ in range(2):
        loss = model(**batch).loss
        assert settled_memory() > held
        del loss
        assert settled_memory() == held
    with torch.no_grad():
        model(**batch)
    assert settled_memory() == held


def test_the_backward_frees_the_graph_though_the_loss_lives():
    model, eps, optimizer, batch = toy_under("sim", "deferred", stash="device", kept_graphs=3)
    for _ in range(2):
        loss = model(**batch).loss
        assert eps.memory_report()["device"]["kept graphs"]["now"] > 0
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert eps.memory_report()["device"]["kept graphs"]["now"] == 0
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kept", [WEIGHTS, GRAPHS, ALL], ids=str)
def test_several_graphs(kept):
    """Two forwards before a backward, graphs that are kept, a backward that fails, parts of the graph, evaluations."""
    found = []
    for options in ({}, kept):
        model, _, optimizer, batch = toy_under("sim", "deferred", **options)
        first, second = model(**batch).loss, model(**batch_for(model, masked=False, seed=2)).loss
        with torch.no_grad():
            model(**batch)
        (first + second).backward()
        optimizer.step()
        loss = model(**batch).loss
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        handle = model.blocks[0].register_forward_hook(lambda module, args, out: out * 1)
        failing = model(**batch).loss
        failing.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            failing.backward()
        handle.remove()
        found.append({name: p.grad.cpu() for name, p in model.named_parameters()})
        optimizer.step()
        model.blocks[2].up.requires_grad_(False)
        model(**batch).loss.backward()
        found[-1] |= {f"{name} then": p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        with torch.no_grad():
            found[-1]["evaluated"] = model.eval()(**batch).loss.cpu()
    assert found[0].keys() == found[1].keys() and "blocks.2.up.weight then" not in found[0]
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


@pytest.mark.parametrize("kept", [WEIGHTS, GRAPHS, ALL], ids=str)
def test_an_error_in_a_layer_leaves_nothing(kept):
    model, eps, optimizer, batch = toy_under("sim", "deferred", **kept)
    expected, *_ = toy_under("sim", "deferred")
    with pytest.raises(ZeroDivisionError), model.blocks[2].up.register_forward_hook(lambda *_: 1 / 0):
        model(**batch)

    def failing(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda gradient: 1 / 0)

    backward = model.blocks[2].up.register_forward_hook(failing)
    with pytest.raises(ZeroDivisionError):
        model(**batch).loss.backward()
    backward.remove()
    optimizer.zero_grad()
    expected_optimizer = expected._l2l.eps.wrap(torch.optim.SGD(expected.parameters(), lr=0.1))
    for each in (model, expected):
        torch.sim.manual_seed(5)
        each(**batch).loss.backward()
    for (name, p), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(p.grad.cpu(), other.grad.cpu()), name
    expected_optimizer.step()


@pytest.mark.parametrize("kept", [WEIGHTS, GRAPHS, ALL], ids=str)
def test_a_change_between_forward_and_backward_is_an_error(kept):
    model, _, _, batch = toy_under("sim", "deferred", **kept)
    loss = model(**batch).loss
    with torch.no_grad():
        model.blocks[2].up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="must not change between its forward and its backward"):
        loss.backward()


def test_a_change_of_the_input_of_a_layer_is_an_error_as_in_plain_torch():
    model, _, _, batch = toy_under("sim", "deferred", kept_graphs=3)
    inputs = []
    model.blocks[1].register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    loss = model(**batch).loss
    with torch.no_grad():
        inputs[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    inputs.clear()  # the model has the hook, and what this holds has the model


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.slow), {"cmp": "bf16"}], ids=str)
def test_they_have_names(options):
    settled_memory()
    model = tiny_bert(layers=3, width=32)
    config = L2LConfig(device="sim", kept_weights=1, kept_graphs=2, ubatch_size=2, **options)
    eps = attach_l2l(model, config)
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(3):
        loss = model(**batch_for(model)).loss
        device = eps.memory_report()["device"]
        layer = eps.masters.layer_units[-1].layout.num_bytes
        assert device["kept weights"]["now"] == 2 * layer
        assert device["kept graphs"]["now"] > device["stash"]["now"] > 0
        loss.backward()
        optimizer.step()
    need = estimate(model, config, optimizer)
    assert need.kept_weights == 2 * layer
    assert need.slots == estimate(model, L2LConfig(device="sim", **options)).slots


def test_they_have_no_slots_if_all_keep_their_weights():
    model, eps, optimizer, batch = toy_under("sim", "deferred", kept_weights=3, gradient_slots=1)
    model(**batch).loss.backward()
    layer = eps.masters.layer_units[0]
    device = eps.memory_report()["device"]
    assert device["slots"]["now"] == layer.gradient_layout.num_bytes
    assert device["kept weights"]["now"] == 3 * layer.layout.num_bytes
    optimizer.step()


def test_the_trainer_takes_them(tmp_path):
    expected = l2l_trainer(tmp_path / "streamed", max_steps=2, ubatch_size=2)
    expected.train()
    found = l2l_trainer(tmp_path / "kept", max_steps=2, ubatch_size=2, l2l_kept_weights=1, l2l_kept_graphs=2)
    found.train()
    assert logs(found) == logs(expected)
    with pytest.raises(ValueError, match=r"device_stash is for layers .*got device_stash=1 with stash='device'"):
        L2LConfig(device_stash=1)
    with pytest.raises(ValueError, match=r"l2l_kept_graphs must be a whole number of layers, at least 0 \(got -2\)"):
        L2LTrainingArguments(tmp_path, l2l_kept_graphs=-2)
