"""Wherever weights, state, graphs and stash are: the bits of a training that keeps them all on the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from devices import DEVICE
from hf_l2l import attach_l2l, detach_l2l
from models import Toy, batch_for
from placements import PLACEMENTS
from runs import (
    OPTIMIZERS,
    UPDATED_BY,
    Run,
    assert_close_tensors,
    assert_same_run,
    assert_same_tensors,
    attach,
    config_for,
    train,
)
from scenarios import SCENARIOS, Case
from tiers import combinations, more, on_a_device, times

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"cmp": "bf16"},
    "bf16, copies per sweep": {"cmp": "bf16", "host_copies": "per_sweep"},
    "fp16": {"cmp": "fp16", "loss_scale_init": 1024.0},
}
FEW = ["boundary on the host", "first layer", "all", "kept graphs"]
OTHERS = [
    *("tight", "stash on the host", "some stash on the device", "shell and layers"),
    *("layers, updated on the host", "all and graphs", "some of each"),
]
"""They differ from others in numbers alone."""
MAIN = [name for name in PLACEMENTS if name not in ("streamed", *OTHERS)]


@cache
def streamed(mode: str, precision: str) -> Run:
    return train(optimizer=UPDATED_BY[mode], eps_update=mode, accumulation=2, **PRECISIONS[precision])


@on_a_device
@pytest.mark.parametrize(
    ("placement", "mode", "precision"),
    combinations(
        *([*MAIN, *more(*OTHERS)], UPDATED_BY, PRECISIONS),
        together=1,
        at_night=2,
        where=lambda *case: case[1:] != ("eager", "fp16"),
    ),
)
def test_they_train_as_streamed_ones(placement, mode, precision):
    where, same = PLACEMENTS[placement], {"optimizer": UPDATED_BY[mode], "eps_update": mode, "accumulation": 2}
    found, expected = train(**same, **PRECISIONS[precision], **where.options), streamed(mode, precision)
    if where.has_same_bits:
        assert_same_run(found, expected)
    else:
        assert_close_tensors(found.weights, expected.weights, 1e-4 if precision == "fp32" else 2e-2)


def told_by(scenario: str, **options: Any) -> dict[str, Any]:
    made = attach(Toy(), **options)
    return SCENARIOS[scenario](Case(*made, config_for(made[0], ubatch_size=3, device=DEVICE, **options)))


@cache
def told_by_streamed(scenario: str, precision: str) -> dict[str, Any]:
    return told_by(scenario, **PRECISIONS[precision])


@on_a_device
@pytest.mark.parametrize(
    ("placement", "scenario", "precision"),
    combinations(
        [*FEW, *more(*(name for name in [*MAIN, *OTHERS] if name not in FEW))],
        SCENARIOS,
        ["fp32", *more("bf16")],
        together=1,
        at_night=2,
    ),
)
def test_every_program_finds_the_same(placement, scenario, precision):
    found = told_by(scenario, **PLACEMENTS[placement].options, **PRECISIONS[precision])
    if PLACEMENTS[placement].has_same_bits:
        assert_same_tensors(found, told_by_streamed(scenario, precision))
    else:
        assert_close_tensors(found, told_by_streamed(scenario, precision), 1e-5 if precision == "fp32" else 2e-2)


# ---- any plan


PLANS = st.fixed_dictionaries(
    {
        "resident": st.sampled_from(["none", "shell"]),
        "resident_update": st.sampled_from(["device", "host"]),
        **{name: st.integers(0, 3) for name in ("resident_layers", "kept_weights", "kept_graphs", "device_stash")},
    }
).filter(lambda plan: plan["resident_layers"] + plan["kept_weights"] <= 3)
PROGRAMS = st.fixed_dictionaries(
    {
        "eps_update": st.sampled_from(sorted(UPDATED_BY)),
        "optimizer": st.sampled_from(sorted(OPTIMIZERS)),
        "accumulation": st.integers(1, 2),
        "cmp": st.sampled_from([None, "bf16"]),
        "stash": st.sampled_from(["host", "disk"]),
        "boundary": st.sampled_from(["device", "host"]),
        "gradient_slots": st.integers(1, 2),
        "host_copies": st.sampled_from(["kept", "per_sweep"]),
    }
)


@on_a_device
@settings(deadline=None, derandomize=True, database=None, max_examples=times(3, 150))
@given(PLANS, PROGRAMS)
def test_any_plan_trains_as_streamed(plan, program):
    if program["cmp"] is None:
        program = {**program, "host_copies": "kept"}
    if plan["resident"] == "none" and not plan["resident_layers"]:
        plan = {**plan, "resident_update": "device"}
    found, expected = train(**program, **plan), train(**program)
    if DEVICE == "cuda" and plan["resident_update"] == "device":  # which rounds in another way than the host
        assert_close_tensors(found.weights, expected.weights, 2e-2 if program["cmp"] else 1e-4)
    else:
        assert_same_run(found, expected)


# ---- the objects


@on_a_device
@pytest.mark.parametrize("placement", [*MAIN, *more(*OTHERS)])
def test_parameters_stay_the_same_objects_and_go_back(placement):
    """With the state that the optimizer has, there and back; a weight's dtype and its groups do not change."""
    model = Toy(layers=4).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch, before = batch_for(model, masked=False), list(model.parameters())
    model(**batch).loss.backward()
    optimizer.step(), optimizer.zero_grad()
    group, where = optimizer.param_groups[0], PLACEMENTS[placement]
    attach_l2l(model, config_for(model, device=DEVICE, **where.options)).wrap(optimizer)
    for name, p in model.named_parameters():
        expected = DEVICE if where.is_resident(name) else "cpu"
        assert p.device.type == expected, name
        assert {value.device.type for key, value in optimizer.state[p].items() if key != "step"} == {expected}, name
    assert model.embed.weight is model.head.weight and optimizer.param_groups[0] is group
    assert model.to("cpu") is model and model.to(DEVICE) is model
    for _ in range(2):
        model(**batch).loss.backward()
        assert all(p.grad.device == p.device for p in model.parameters())
        optimizer.step(), optimizer.zero_grad()
    detach_l2l(model)
    assert all(a is b and type(a) is nn.Parameter for a, b in zip(model.parameters(), before, strict=True))
    places = {tensor.device.type for p in model.parameters() for tensor in (p, *optimizer.state[p].values())}
    assert places == {"cpu"} and optimizer.param_groups[0] is group
    model(**batch).loss.backward()
    optimizer.step()


def losses(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer], **options: Any) -> list[float]:
    """Those of four steps."""
    model, _, optimizer, batch = attach(model, make, **options)
    found = []
    for _ in range(4):
        loss = model(**batch).loss
        found.append(loss.item())
        loss.backward()
        optimizer.step()
    return found


@on_a_device
def test_every_update_is_seen_by_copies_on_the_device():
    """Also one that writes without a change of the version, as a fused optimizer may."""
    found = [
        losses(
            Toy(), lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True), eps_update=mode, **PLACEMENTS[name].options
        )
        for name in ("streamed", "all, updated on the host")
        for mode in ("serial", "deferred")
    ]
    assert all(each == found[0] for each in found)


@on_a_device
@pytest.mark.parametrize(("layers", "places"), [(1, ["first layer"]), (3, ["all, updated on the host", "all"])])
def test_a_weight_of_layers_and_the_shell_is_renewed_in_each_place(layers, places):
    found = []
    for name in ("streamed", *places):
        model = Toy(dropout=0.0)
        model.scale = model.head.scale = model.blocks[0].norm.weight
        for block in model.blocks[:layers]:
            block.norm.weight = model.scale
        model.head.register_forward_hook(lambda module, args, out: out * module.scale[0])
        model.requires_grad_(False)
        model.scale.requires_grad_(True)
        make = lambda _, p=model.scale: torch.optim.SGD([p], lr=1.0)  # noqa: E731
        found.append(losses(model, make, **PLACEMENTS[name].options))
    assert all(each == found[0] for each in found) and len(set(found[0])) == 4
