"""Resident weights that are updated on the host: masters stay there, and copies are uploaded once per update."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l import L2LConfig, attach_l2l, detach_l2l, estimate
from models import FAMILIES, attached, batch_for, gradients, train_once
from tiers import combined
from training import SAVING, l2l_trainer, logs, settled_memory, tiny_bert
from transit import Bytes
from update_cases import assert_same, raw_loop, toy, toy_under

ON_HOST: dict[str, Any] = {"resident": "all", "resident_update": "host"}
FIRST: dict[str, Any] = {"resident_layers": 2, "resident_update": "host"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("updates", "options"),
    combined(
        [("serial", "SGD"), ("deferred", "AdamW"), ("eager", "LAMB")],
        [{}, {"cmp": "bf16"}, {"cmp": "bf16", "host_copies": "per_sweep"}],
        one_in=3,
    ),
)
def test_they_train_as_streamed_ones(updates, options):
    mode, optimizer = updates
    same = {"steps": 3, "accumulation": 2, "max_norm": 0.0 if mode == "eager" else 0.5, **options}
    streamed = raw_loop("sim", mode, optimizer, **same)
    for where in (FIRST, ON_HOST, {**ON_HOST, "kept_graphs": 3}):
        assert_same(raw_loop("sim", mode, optimizer, **same, **where), streamed)


@pytest.mark.parametrize("fused", [pytest.param(False, marks=pytest.mark.slow), True])
def test_every_update_is_seen(fused):
    """Also one that writes without a change of the version, as a fused optimizer may."""
    found = []
    for options in ({}, ON_HOST):
        for mode in ("serial", "deferred"):
            model, eps, optimizer, batch = toy_under(
                "sim", mode, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=fused), **options
            )
            losses = []
            for _ in range(3):
                loss = model(**batch).loss
                losses.append(loss.item())
                loss.backward()
                optimizer.step()
            found.append(losses)
    assert found[0] == found[1] == found[2] == found[3]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_gradients_of_streamed_layers(family):
    torch.manual_seed(0)
    streamed = FAMILIES[family]()
    resident, batch = copy.deepcopy(streamed), batch_for(streamed)
    attached(streamed, device="sim", ubatch_size=3), attached(resident, device="sim", ubatch_size=3, **ON_HOST)
    for _ in range(2):
        torch.sim.manual_seed(1)
        expected = train_once(streamed, batch)
        torch.sim.manual_seed(1)
        assert torch.equal(train_once(resident, batch), expected)
    found = gradients(resident)
    for name, gradient in gradients(streamed).items():
        assert (found[name] is None) == (gradient is None), name
        assert gradient is None or torch.equal(found[name], gradient), name
    assert {p.device.type for p in resident.parameters()} == {"cpu"}


def test_copies_are_uploaded_once_per_update(monkeypatch):
    """Two batches of a step, and an evaluation after it."""
    model = tiny_bert(layers=4)
    batch = batch_for(model)
    attached(model, device="sim", ubatch_size=2, resident="shell", resident_layers=2, resident_update="host")
    optimizer = model._l2l.eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    train_once(model, batch)
    with torch.no_grad():
        model(**batch)  # its first call finds how evaluations are split
    optimizer.step()
    model._l2l.eps.synchronize()
    layer = model._l2l.eps.masters.layer_units[0].layout.num_bytes
    shell = sum(p.nbytes for name, p in model.named_parameters() if "encoder" not in name)
    streamed = 2 * layer  # the last two layers, which stay for the backward
    moved = Bytes(model, monkeypatch)
    for expected in (shell + 2 * layer + streamed, streamed):
        before = moved.uploaded
        model(**batch).loss.backward()
        assert moved.uploaded - before == expected
    before = moved.uploaded
    with torch.no_grad():
        model(**batch)
    assert moved.uploaded - before == streamed
    optimizer.step()
    before = moved.uploaded
    model(**batch).loss.backward()
    assert moved.uploaded - before == shell + 2 * layer + streamed


def writes() -> dict[str, Any]:
    def in_place(model: nn.Module) -> None:
        with torch.no_grad():
            model.blocks[0].up.weight.mul_(2)
            model.embed.weight.mul_(2)

    def unseen(model: nn.Module) -> None:
        model.blocks[0].up.weight.data.mul_(2)
        model.embed.weight.data.mul_(2)

    def loaded(model: nn.Module) -> None:
        model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})

    def by_another_view(model: nn.Module) -> None:
        view = model.blocks[0].up.weight.detach().numpy()
        view *= 2
        model._l2l.eps.synchronize()

    return {"in place": in_place, "unseen": unseen, "loaded": loaded, "by a view": by_another_view}


@pytest.mark.parametrize("write", writes())
def test_what_the_program_writes_is_seen(write):
    found = []
    for options in ({}, ON_HOST):
        model, eps, optimizer, batch = toy_under("sim", "deferred", **options)
        model.eval()
        losses = []
        for _ in range(2):
            loss = model(**batch).loss
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
        for _ in range(2):
            losses.append(model(**batch).loss.item())  # there is a copy of all masters now
            writes()[write](model)
        losses.append(model(**batch).loss.item())
        found.append(losses)
    assert found[0] == found[1]
    assert len(set(found[0])) == 5


def test_a_weight_of_a_layer_and_the_shell():
    """Each of its copies is renewed, whichever is uploaded first."""
    found = []
    for options in ({}, ON_HOST):
        model = toy().eval()
        for block in model.blocks:
            block.norm.weight = model.blocks[0].norm.weight
        model.scale = model.blocks[0].norm.weight
        model.head.scale = model.scale
        model.head.register_forward_hook(lambda module, args, out: out * module.scale[0])
        model.requires_grad_(False)
        model.scale.requires_grad_(True)
        eps = attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), **options))
        optimizer = eps.wrap(torch.optim.SGD([model.scale], lr=1.0))
        losses = []
        for _ in range(4):
            loss = model(**batch_for(model, masked=False)).loss
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
        found.append(losses)
    assert found[0] == found[1]


def test_they_have_a_name_and_an_estimate():
    settled_memory()
    model = tiny_bert(layers=3)
    config = L2LConfig(device="sim", resident_layers=2, resident_update="host", ubatch_size=2)
    eps = attach_l2l(model, config)
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(2):
        model(**batch_for(model)).loss.backward()
        optimizer.step()
    layer = eps.masters.layer_units[0].layout.num_bytes
    device, need = eps.memory_report()["device"], estimate(model, config, optimizer)
    assert device["resident layers"]["now"] == need.resident == 2 * layer
    assert device["kept weights"]["now"] == need.kept_weights == 0
    assert need.host_bytes == estimate(model, L2LConfig(device="sim"), optimizer).host_bytes
    assert model.device.type == "cpu"


@pytest.mark.parametrize("change", ["frozen", "assigned"])
def test_evaluations_of_a_changed_model_leave_no_copies_behind(change):
    """Each such call has units of its own, until one that trains."""
    model = tiny_bert()
    attach_l2l(model, L2LConfig(device="sim", **ON_HOST))
    ids = torch.randint(5, 50, (2, 6))
    model(input_ids=ids, labels=torch.zeros(2, dtype=torch.long)).loss.backward()
    if change == "frozen":
        model.requires_grad_(False)
    else:
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    held = []
    for _ in range(4):
        with torch.no_grad():
            model(input_ids=ids)
        settled_memory()
        held.append(torch.accelerator.memory_allocated())
    assert held[1] == held[2] == held[3]
    detach_l2l(model)


def test_it_goes_on_when_it_is_detached():
    model, eps, optimizer, batch = toy_under("sim", "deferred", **ON_HOST)
    for _ in range(2):
        model(**batch).loss.backward()
        optimizer.step()
    held = settled_memory()
    detach_l2l(model)
    assert settled_memory() < held
    assert all(type(p) is nn.Parameter for p in model.parameters())
    model(**batch).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("mode", [pytest.param("serial", marks=pytest.mark.slow), "deferred"])
def test_the_trainer_resumes_it_under_another_plan(tmp_path, mode):
    saving = {**SAVING, "max_grad_norm": 0.5, "eps_update": mode}
    whole = l2l_trainer(tmp_path / "whole", **saving)
    whole.train()
    cut = l2l_trainer(tmp_path / "cut", **saving, l2l_resident="all", l2l_resident_update="host")
    cut.train()
    assert logs(cut)[:4] == logs(whole)[:4]
    resumed = l2l_trainer(tmp_path / "resumed", **saving, l2l_resident_layers=1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))
    assert logs(resumed)[2:4] == logs(whole)[2:4]


def test_it_is_refused_without_resident_weights():
    with pytest.raises(ValueError, match=r"resident_update is for resident weights \(got 'host' with resident='none'"):
        L2LConfig(resident_update="host")
    with pytest.raises(ValueError, match=r"resident_update must be one of 'device', 'host' \(got 'cpu'\)"):
        L2LConfig(resident_update="cpu")


def test_a_look_at_how_calls_are_split_leaves_them_there(monkeypatch):
    """The first call of a kind replays its beginning with the masters, which are only read."""
    model = tiny_bert(layers=2)
    attached(model, device="sim", ubatch_size=2, resident="shell", resident_update="host")
    train_once(model, batch_for(model))
    moved = Bytes(model.bert.embeddings, monkeypatch)
    with torch.no_grad():
        model(**batch_for(model))
    assert moved.uploaded == 0
