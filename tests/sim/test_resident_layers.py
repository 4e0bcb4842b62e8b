"""Whole layers that stay on the device with their state, and are updated there: the same bits, and nothing travels."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l import L2LConfig, L2LTrainingArguments, attach_l2l, detach_l2l, estimate
from hf_l2l.eps import updates
from hf_l2l.model.stacks import parameter_bytes
from models import FAMILIES, attached, batch_for, gradients, train_once
from tiers import combined
from training import SAVING, inner_optimizer, l2l_trainer, logs, plain_trainer, settled_memory, tiny_bert
from transit import Bytes
from update_cases import OPTIMIZERS, Run, assert_same, raw_loop, toy, toy_under

CLIPS = {"serial": 0.5, "deferred": 0.5, "eager": 0.0}
ALL: dict[str, Any] = {"resident": "all"}
FIRST: dict[str, Any] = {"resident_layers": 1}
WITH_SHELL: dict[str, Any] = {"resident": "shell", "resident_layers": 2}


def on_host(value: Any) -> Any:
    """`value` with all tensors in it on the host."""
    return torch.utils._pytree.tree_map(lambda v: v.cpu() if isinstance(v, torch.Tensor) else v, value)


def assert_as_streamed(found: Run, expected: Run) -> None:
    assert_same(Run(*(on_host(part) for part in found)), expected)


def places(model: nn.Module) -> dict[str, str]:
    return {name: p.device.type for name, p in model.named_parameters()}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("optimizer", "mode"), combined(OPTIMIZERS, CLIPS, one_in=3))
def test_they_train_as_streamed_ones(optimizer, mode):
    same = {"steps": 5, "accumulation": 2, "max_norm": CLIPS[mode]}
    streamed = raw_loop("sim", mode, optimizer, **same)
    for options in (FIRST, WITH_SHELL, ALL):
        assert_as_streamed(raw_loop("sim", mode, optimizer, **same, **options), streamed)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "options",
    [
        {"cmp": "bf16"},
        {"cmp": "fp16", "loss_scale_init": 1024.0},
        {"cmp": "bf16", "host_copies": "per_sweep", "stash": "host", "boundary": "host"},
        {"prefetch": False, "gradient_slots": 1},
        {"nonfinite": "skip"},
    ],
    ids=str,
)
def test_they_train_as_streamed_ones_with_other_options(options):
    same = {"steps": 4, "max_norm": 0.5, **options}
    streamed = raw_loop("sim", "deferred", "AdamW", **same)
    for where in (FIRST, WITH_SHELL, ALL):
        assert_as_streamed(raw_loop("sim", "deferred", "AdamW", **same, **where), streamed)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["serial", "deferred"])
def test_a_hundred_steps(mode):
    same = {"steps": 100, "max_norm": 0.5}
    streamed = raw_loop("sim", mode, "AdamW", **same)
    assert_as_streamed(raw_loop("sim", mode, "AdamW", **same, **WITH_SHELL), streamed)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("family", "options"), combined(FAMILIES, [FIRST, ALL], one_in=2))
def test_every_family_has_the_gradients_of_streamed_layers(family, options):
    torch.manual_seed(0)
    streamed = FAMILIES[family]()
    resident, batch = copy.deepcopy(streamed), batch_for(streamed)
    attached(streamed, device="sim", ubatch_size=3)
    attached(resident, device="sim", ubatch_size=3, **options)
    optimizer = resident._l2l.eps.wrap(torch.optim.SGD(resident.parameters(), lr=0.1))
    torch.sim.manual_seed(1)
    expected = train_once(streamed, batch)
    torch.sim.manual_seed(1)
    assert torch.equal(train_once(resident, batch), expected)
    found = gradients(resident)
    for name, gradient in gradients(streamed).items():
        assert (found[name] is None) == (gradient is None), name
        assert gradient is None or torch.equal(found[name].cpu(), gradient), name
    assert all(p.grad is None or p.grad.device == p.device for p in resident.parameters())
    first = resident._l2l.stacks[0].layers[0]
    assert {p.device.type for p in first.parameters()} == {"sim"}
    optimizer.step()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("resident", [0, 1, 2, 4])
def test_nothing_of_them_travels(resident, monkeypatch):
    model = tiny_bert(layers=4)
    batch = batch_for(model)
    attached(model, device="sim", ubatch_size=2, resident_layers=resident, resident="shell")
    optimizer = model._l2l.eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    train_once(model, batch)
    optimizer.step()
    layer_bytes = parameter_bytes([model.bert.encoder.layer[0]])
    moved = Bytes(model, monkeypatch)
    train_once(model, batch)
    streamed = 4 - resident
    aligned = layer_bytes if not streamed else model._l2l.eps.masters.layer_units[-1].layout.num_bytes
    assert moved.uploaded == max(0, 2 * streamed - 2) * aligned  # the last two stay for the backward
    assert moved.downloaded >= streamed * layer_bytes
    if streamed == 0:
        assert moved.downloaded < layer_bytes


def test_there_are_no_slots_without_streamed_layers():
    for options, has_slots in ((FIRST, True), (ALL, False)):
        model, eps, optimizer, batch = toy_under("sim", "deferred", **options)
        model(**batch).loss.backward()
        assert (eps.memory_report()["device"]["slots"]["now"] > 0) == has_slots
        optimizer.step()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [{}, {"cmp": "bf16"}], ids=str)
def test_they_have_a_name_and_an_estimate(options):
    settled_memory()
    model = tiny_bert(layers=3, width=32)
    config = L2LConfig(device="sim", resident_layers=2, ubatch_size=2, **options)
    eps = attach_l2l(model, config)
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(2):
        model(**batch_for(model)).loss.backward()
        optimizer.step()
    model(**batch_for(model)).loss.backward()
    need = estimate(model, config, optimizer)
    count = sum(p.numel() for layer in model.bert.encoder.layer[:2] for p in layer.parameters())
    found = eps.memory_report()["device"]["resident layers"]["now"]
    assert 16 * count <= found <= 1.02 * 16 * count
    assert need.resident == pytest.approx(found, rel=0.02)
    streamed = estimate(model, L2LConfig(device="sim", **options))
    assert streamed.masters - need.masters == 4 * count
    assert streamed.gradients - need.gradients == 4 * count


def test_slots_have_the_size_of_the_largest_streamed_layer():
    model = toy()
    model.blocks[0].up, model.blocks[0].down = nn.Linear(8, 512), nn.Linear(512, 8)
    found = []
    for resident in (0, 1):
        each = copy.deepcopy(model)
        eps = attach_l2l(each, L2LConfig(device="sim", layer_classes=("Block",), resident_layers=resident))
        optimizer = eps.wrap(torch.optim.SGD(each.parameters(), lr=0.1))
        each(**batch_for(each, masked=False)).loss.backward()
        found.append(eps.memory_report()["device"]["slots"]["now"])
        optimizer.step()
    assert found[1] < found[0] / 10


def test_they_compute_while_the_first_streamed_layer_is_updated(monkeypatch):
    """Its update ends only when the second of two resident layers computes."""
    called, in_time = threading.Event(), []
    carry_out = updates.carry_out

    def late(part: Any, masters: Any, *rest: Any) -> None:
        if masters[0].layer_number == 3:
            in_time.append(called.wait(timeout=60.0))
        carry_out(part, masters, *rest)

    monkeypatch.setattr(updates, "carry_out", late)
    model, eps, optimizer, batch = toy_under("sim", "deferred", resident="shell", resident_layers=2)
    model.blocks[1].up.register_forward_pre_hook(lambda *_: called.set())
    model(**batch).loss.backward()
    optimizer.step()
    for _ in range(2):
        model(**batch).loss.backward()
        called.clear()
        optimizer.step()
    model(**batch)
    eps.synchronize()
    assert in_time == [True, True, True]


def test_parameters_stay_the_same_objects_and_go_back():
    model = toy()
    before = list(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), **WITH_SHELL)).wrap(optimizer)
    streamed = {name for name, place in places(model).items() if place == "cpu"}
    assert streamed == {name for name, _ in model.named_parameters() if name.startswith("blocks.2")}
    for _ in range(2):
        model(**batch_for(model, masked=False)).loss.backward()
        optimizer.step()
    detach_l2l(model)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert set(places(model).values()) == {"cpu"}
    assert {v.device.type for state in optimizer.state.values() for v in state.values()} == {"cpu"}
    model(**batch_for(model, masked=False)).loss.backward()
    optimizer.step()


def test_a_run_goes_on_attached_and_detached():
    def trained(**options: Any) -> tuple[Any, Any]:
        model, logged = toy().eval(), []
        batch, optimizer = batch_for(model, masked=False), torch.optim.AdamW(model.parameters(), lr=1e-2)
        for turn in range(6):
            if turn == 2:
                attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), **options)).wrap(optimizer)
            if turn == 4:
                detach_l2l(model)
            loss = model(**batch).loss
            loss.backward()
            logged.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return logged, [p.detach().clone() for p in model.parameters()]

    (expected, streamed) = trained()
    for options in (FIRST, WITH_SHELL, ALL):
        losses, weights = trained(**options)
        assert losses == expected
        assert all(torch.equal(a, b) for a, b in zip(weights, streamed, strict=True))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [FIRST, ALL], ids=str)
def test_several_graphs(options):
    """Two forwards before a backward, a graph that is kept, a backward that fails, frozen weights, an evaluation."""
    found = []
    for place in ({}, options):
        model, _, optimizer, batch = toy_under("sim", "deferred", **place)
        first, second = model(**batch).loss, model(**batch_for(model, masked=False, seed=2)).loss
        (first + second).backward()
        optimizer.step()
        loss = model(**batch).loss
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
        model.blocks[0].up.requires_grad_(False)
        model(**batch).loss.backward()
        found[-1] |= {f"{name} then": p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        with torch.no_grad():
            found[-1]["evaluated"] = model.eval()(**batch).loss
    assert found[0].keys() == found[1].keys() and "blocks.0.up.weight then" not in found[0]
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


def test_a_change_between_forward_and_backward_is_an_error():
    model, _, _, batch = toy_under("sim", "deferred", **FIRST)
    loss = model(**batch).loss
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="must not change between its forward and its backward"):
        loss.backward()


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in trainer.model.state_dict().items()}


PLANS: dict[str, dict[str, Any]] = {
    "streamed": {},
    "first": {"l2l_resident_layers": 1},
    "all": {"l2l_resident": "all"},
}


CLIPPED = {**SAVING, "max_grad_norm": 0.5}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """What a training of streamed layers logs that nothing interrupts, and its weights."""
    made = l2l_trainer(tmp_path_factory.mktemp("whole"), **CLIPPED)
    made.train()
    return logs(made), {name: value.clone() for name, value in weights_of(made).items()}


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("all", "streamed"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("streamed", "first"), ("first", "all"))),
        *(pytest.param("all", then, marks=pytest.mark.slow) for then in ("first", "all")),
    ],
)
def test_a_checkpoint_resumes_under_any_plan(tmp_path, whole, first, then):
    logged, expected = whole
    l2l_trainer(tmp_path / "cut", **CLIPPED, **PLANS[first]).train()
    resumed = l2l_trainer(tmp_path / "resumed", **CLIPPED, **PLANS[then])
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))
    assert logs(resumed)[2:4] == logged[2:4]
    assert all(torch.equal(value, expected[name]) for name, value in weights_of(resumed).items())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("plan", PLANS)
def test_plain_trainer_resumes_and_is_resumed(tmp_path, plan):
    l2l_trainer(tmp_path / "begun", **SAVING, **PLANS[plan]).train()
    plain = plain_trainer(tmp_path / "plain", **SAVING)
    plain.train(resume_from_checkpoint=str(tmp_path / "begun" / "checkpoint-2"))
    assert plain.state.global_step == SAVING["max_steps"]
    resumed = l2l_trainer(tmp_path / "resumed", **SAVING, **PLANS[plan])
    resumed.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-4"))
    state = inner_optimizer(resumed).state
    assert all(state[p]["exp_avg"].device == p.device for p in resumed.model.parameters())


def test_saved_weights_load_into_a_plain_model(tmp_path):
    model = tiny_bert()
    attach_l2l(model, L2LConfig(device="sim", **ALL))
    assert model.device.type == "sim"
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    mine = model.state_dict()
    assert all(torch.equal(value, mine[name].cpu()) for name, value in loaded.state_dict().items())


def test_nothing_moves_where_layers_run_on_the_cpu():
    same = {"steps": 3, "max_norm": 0.5}
    expected = raw_loop("cpu", "serial", "AdamW", **same)
    assert_same(raw_loop("cpu", "serial", "AdamW", **same, **WITH_SHELL), expected)


# ---- what cannot be honoured


def refused(model: nn.Module, match: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=match):
        attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), **options))
    assert set(places(model).values()) == {"cpu"} and not hasattr(model, "_l2l")


def test_bad_values(tmp_path):
    with pytest.raises(ValueError, match=r"resident_layers must be a whole number of layers, at least 0 \(got -1\)"):
        L2LConfig(resident_layers=-1)
    with pytest.raises(ValueError, match=r"resident='all' has all layers \(got resident_layers=2 with it\)"):
        L2LConfig(resident="all", resident_layers=2)
    with pytest.raises(ValueError, match=r"l2l_resident_layers must be a whole number"):
        L2LTrainingArguments(tmp_path, l2l_resident_layers=True)
    most = r"must be at most the number of layers.* of the model \(got 4 for a model of 3 layers"
    for name in ("resident_layers", "kept_weights", "kept_graphs"):
        refused(toy(), f"{name} {most}", **{name: 4})
    refused(toy(), f"device_stash {most}", device_stash=4, stash="host")
    refused(toy(), r"kept_weights must be .*got 3 for a model of 2 layers that are", resident_layers=1, kept_weights=3)


def test_a_weight_that_a_streamed_layer_has_too_is_refused():
    model = toy()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    refused(model, r"got blocks.0.up.weight: a layer that is not resident has it, too", resident_layers=1)
    eps = attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), resident_layers=3))
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    model(**batch_for(model, masked=False)).loss.backward()
    optimizer.step()


def test_memory_that_another_tensor_has_too_is_refused():
    model = toy()
    model.blocks[0].up.bias = nn.Parameter(model.blocks[2].up.bias.detach())
    refused(model, r"got blocks.0.up.bias: it shares memory", resident_layers=1)


def test_a_weight_of_the_shell_may_be_one_of_a_resident_layer():
    runs = []
    for options in ({}, FIRST):
        model = toy()
        model.blocks[0].norm.weight = model.scale = nn.Parameter(torch.ones(8))
        model.head.register_forward_hook(lambda module, args, out: out * module.scale[0])
        model.head.scale = model.scale
        eps = attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), **options))
        optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
        model.eval()
        for _ in range(2):
            model(**batch_for(model, masked=False)).loss.backward()
            optimizer.step()
        eps.synchronize()
        runs.append({name: p.detach().cpu() for name, p in model.named_parameters()})
    for name, value in runs[0].items():
        torch.testing.assert_close(runs[1][name], value, rtol=1e-6, atol=1e-7)


def test_a_weight_on_the_host_that_is_put_into_one_is_refused():
    model, _, _, batch = toy_under("sim", "deferred", **FIRST)
    model.blocks[0].adapter = nn.Linear(8, 8)
    with pytest.raises(ValueError, match=r"weights of a resident layer are on the device \(got blocks.0.adapter"):
        model(**batch)


class _GlobalNorm(torch.optim.SGD):
    """Divides all gradients by their norm."""

    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.grad /= norm
        super().step()


def test_an_optimizer_that_mixes_parameters_needs_all_of_them_there():
    def make(parameters: Any) -> torch.optim.Optimizer:
        return _GlobalNorm(parameters, lr=0.1)

    with pytest.raises(ValueError, match=r"resident_layers have parameters on the host and on the device.*'all'"):
        toy_under("sim", "deferred", make, **FIRST)
    model, eps, optimizer, batch = toy_under("sim", "deferred", make, **ALL)
    before = model.blocks[0].up.weight.detach().clone()
    model(**batch).loss.backward()
    optimizer.step()
    assert not torch.equal(model.blocks[0].up.weight, before)
