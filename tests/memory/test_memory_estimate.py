"""Memory before the run: bytes from shapes, and a start that is refused before anything is allocated."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from pathlib import Path

import psutil
import pytest
import torch
import transformers as hf
from accelerate import Accelerator
from torch import nn
from transformers.optimization import Adafactor

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.memory import host_limits, memory_estimate
from hf_l2l.memory.memory_estimate import (
    SKIP_VARIABLE,
    MemoryEstimate,
    check_host_memory,
    estimate,
    moment_bytes,
)
from hf_l2l.optim.layerwise_check import state_after_one_step
from hf_l2l.report import summary as summaries
from hf_l2l.report.summary import summary
from hf_l2l.runtime.flat_memory import Pages, Room
from hf_l2l.runtime.tensors import size_text
from models import VOCAB, batch_for, bert, gpt2, train_once
from training import inner_optimizer, l2l_trainer

WIDTH, INNER, POSITIONS = 16, 24, 20
SHELL = (VOCAB + POSITIONS + 2) * WIDTH + 2 * WIDTH + (WIDTH * WIDTH + WIDTH) + (2 * WIDTH + 2)
"""Embeddings of words, positions and types, their norm, pooler, classifier."""
LAYER = 4 * (WIDTH * WIDTH + WIDTH) + (2 * WIDTH * INNER + INNER + WIDTH) + 2 * 2 * WIDTH
"""Query, key, value and output, the two dense layers, two norms."""


SLOT = sum(-(-4 * n // 256) * 256 for n in [WIDTH * WIDTH] * 4 + [2 * WIDTH * INNER // 2] * 2 + [INNER] + [WIDTH] * 9)
"""Bytes of a layer in a slot, where every parameter starts at a multiple of 256."""


def small_bert() -> nn.Module:
    return bert(max_position_embeddings=POSITIONS)


def test_bytes_of_a_model():
    model = small_bert()
    need = estimate(model)
    buffers = 2 * 8 * POSITIONS  # position and type ids
    assert need.masters == need.gradients == 4 * (SHELL + 2 * LAYER)
    assert need.moments == 2 * need.masters
    assert need.shell == 2 * 4 * SHELL + buffers
    assert need.slots == 4 * SLOT  # weights of two layers, gradients of two
    assert estimate(model, L2LConfig(gradient_slots=1)).slots == 3 * SLOT
    assert need.host_bytes == 4 * need.masters
    assert need.device_bytes == need.shell + need.slots


def test_frozen_parts_need_no_gradients_and_no_moments():
    model = small_bert()
    for name, p in model.named_parameters():
        p.requires_grad_(".layer.1." in name or "classifier" in name)
    head = 2 * WIDTH + 2
    need = estimate(model)
    assert need.masters == 4 * (SHELL + 2 * LAYER)
    assert need.gradients == 4 * (LAYER + head)
    assert need.moments == 2 * 4 * (LAYER + head)
    assert need.shell == 4 * (SHELL + head) + 2 * 8 * POSITIONS
    assert need.slots == 4 * SLOT  # the largest layer, whose gradients are all needed


def test_tied_weights_count_once():
    model = gpt2()
    unique = {id(p): p.numel() for p in model.parameters()}
    assert estimate(model).masters == 4 * sum(unique.values())


def test_dtypes_count():
    assert estimate(small_bert().double()).masters == 8 * (SHELL + 2 * LAYER)
    assert estimate(small_bert().bfloat16()).gradients == 2 * (SHELL + 2 * LAYER)


def test_nothing_needs_to_be_allocated():
    with torch.device("meta"):
        model = small_bert()
    need = estimate(model, L2LConfig(stash="host"), torch.optim.AdamW(model.parameters()))
    assert need.masters == 4 * (SHELL + 2 * LAYER)
    assert need.moments >= 2 * need.masters


def test_a_model_without_layers():
    need = estimate(nn.Linear(3, 2))
    assert need == MemoryEstimate(masters=32, gradients=32, moments=64, shell=64, slots=0)


OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True),
    "adamw foreach": lambda groups: torch.optim.AdamW(groups, lr=0.1, foreach=True),
    "adamw amsgrad": lambda groups: torch.optim.AdamW(groups, lr=0.1, amsgrad=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "sgd momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adafactor": lambda groups: Adafactor(groups, lr=0.1, relative_step=False, scale_parameter=False),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.1),
}


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_are_those_of_the_real_optimizer_after_a_step(name):
    model = small_bert()
    for key, p in model.named_parameters():
        p.requires_grad_(".layer.0." not in key)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = OPTIMIZERS[name]([{"params": decayed, "weight_decay": 0.1}, {"params": others}])
    before = {id(p): p.detach().clone() for p in model.parameters()}
    assert not optimizer.state
    found = moment_bytes(optimizer)
    assert all(torch.equal(p, before[id(p)]) and p.grad is None for p in model.parameters())
    train_once(model, batch_for(model))
    optimizer.step()
    assert found == state_bytes(optimizer)
    assert estimate(model, optimizer=optimizer).moments == found


def test_moments_by_hand():
    model = small_bert()
    tensors, numbers = len(list(model.parameters())), SHELL + 2 * LAYER
    parameters = list(model.parameters())
    assert moment_bytes(torch.optim.AdamW(parameters)) == 2 * 4 * numbers + 4 * tensors  # and a step count each
    assert moment_bytes(torch.optim.SGD(parameters, lr=0.1)) == 0
    assert moment_bytes(torch.optim.SGD(parameters, lr=0.1, momentum=0.9)) == 4 * numbers
    by_row_and_column = sum(sum(p.shape) if p.dim() == 2 else p.numel() for p in parameters)
    assert moment_bytes(OPTIMIZERS["adafactor"](parameters)) == 4 * by_row_and_column + 4 * tensors  # and a scale


def test_an_estimate_tries_each_shape_of_a_group_once(monkeypatch):
    """Layers have the same shapes, and the groups they are in may have other state."""
    model, tried = small_bert(), []

    def noted(optimizer, group, parameter):
        tried.append((group["momentum"], parameter.shape))
        return state_after_one_step(optimizer, group, parameter)

    monkeypatch.setattr(memory_estimate, "state_after_one_step", noted)
    later = list(model.bert.encoder.layer[1].parameters())
    others = [p for p in model.parameters() if all(p is not each for each in later)]
    groups = [{"params": others, "momentum": 0.0}, {"params": later, "momentum": 0.9}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    assert estimate(model, optimizer=optimizer).moments == 4 * LAYER
    expected = {(group["momentum"], p.shape) for group in groups for p in group["params"]}
    assert len(tried) == len(expected) and {*tried} == expected
    tried.clear()
    on_device = L2LConfig(device="cuda", resident="all")
    assert estimate(model, on_device, optimizer, torch.device("cuda")).moments == 0
    assert len(tried) == len(expected) and {*tried} == expected


def test_a_patched_step_is_not_called():
    """A scheduler patches `step` to count calls."""
    model = small_bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizer.step = lambda *args: pytest.fail("the user's step ran")
    assert moment_bytes(optimizer) > 0
    assert not optimizer.state


class Strange(torch.optim.Optimizer):
    """Reads values, which meta tensors do not have."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["norm"] = p.grad.norm().item()


def test_an_optimizer_that_needs_values_is_taken_for_adam():
    model = nn.Linear(3, 2)
    assert moment_bytes(Strange(model.parameters())) == 2 * 4 * 8


class Careless(torch.optim.SGD):
    """Keeps a map that it moves to where the parameters are, as some 8-bit optimizers do, and then gives up."""

    def __init__(self, params, *, makes_state):
        super().__init__(params, lr=0.1)
        self.map, self.makes_state = {"signed": torch.linspace(-1, 1, 256)}, makes_state

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.map["signed"] = self.map["signed"].to(p.device)
            if self.makes_state:
                self.state[p]["moment"] = torch.zeros_like(p, dtype=torch.uint8)
        raise Exception("the step needs a GPU")


@pytest.mark.parametrize(("makes_state", "expected"), [(False, 2 * 4 * 8), (True, 8)])
def test_a_trial_that_raises_anything_changes_nothing(makes_state, expected):
    model = nn.Linear(3, 2)
    optimizer = Careless(model.parameters(), makes_state=makes_state)
    assert moment_bytes(optimizer) == expected
    assert optimizer.map["signed"].device.type == "cpu"
    assert not optimizer.state


def test_an_optimizer_that_accelerate_has_wrapped_is_left_alone():
    model = small_bert()
    optimizer = Accelerator(cpu=True).prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    eps = attach_l2l(model)
    eps.wrap(optimizer)
    train_once(model, batch_for(model))
    optimizer.step()
    eps.synchronize()
    weights = {name: p.clone() for name, p in model.state_dict().items()}
    state, steps = copy.deepcopy(optimizer.state_dict()), []
    optimizer.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    train_once(model, batch_for(model))
    assert estimate(model, optimizer=optimizer) == estimate(model, optimizer=optimizer.optimizer)
    assert all(p.grad is not None for p in model.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert optimizer.state_dict()["param_groups"] == state["param_groups"]
    for index, moments in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, state["state"][index][key]) for key, value in moments.items())
    assert steps == []


def test_a_trial_leaves_the_generators_alone():
    class Noisy(torch.optim.SGD):
        def step(self, closure=None):
            torch.rand(3)
            random.random()

    model = nn.Linear(3, 2)
    before = torch.get_rng_state(), random.getstate()
    moment_bytes(Noisy(model.parameters(), lr=0.1))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


# ---- the check at the start

NEED = MemoryEstimate(masters=3 * 2**30, gradients=2 * 2**30, moments=6 * 2**30, shell=1, slots=1)


@pytest.fixture
def memory(monkeypatch):
    """Sets what the host has available, and what this process holds."""
    monkeypatch.delenv(SKIP_VARIABLE, raising=False)

    def have(available: int, own: int = 0) -> None:
        monkeypatch.setattr(host_limits, "available_host_bytes", lambda: available)
        monkeypatch.setattr(host_limits, "own_bytes", lambda: own)

    return have


def test_too_little_host_memory_is_refused_with_the_kinds(memory):
    memory(2**30)
    with pytest.raises(MemoryError) as error:
        check_host_memory(NEED)
    assert str(error.value) == (
        "training needs 11.0 GiB of host memory (masters 3.0 GiB, gradients 2.0 GiB, moments 6.0 GiB), and 1.0 GiB "
        "is available; use an optimizer with less state (optim='sgd' or 'adafactor'), freeze parameters, or try "
        "anyway with HF_L2L_SKIP_MEMORY_CHECK=1"
    )


def test_enough_host_memory(memory):
    memory(NEED.host_bytes)
    check_host_memory(NEED)
    memory(NEED.host_bytes - 1)
    with pytest.raises(MemoryError):
        check_host_memory(NEED)


def test_masters_in_memory_are_paid_for(memory):
    memory(8 * 2**30, own=3 * 2**30)
    check_host_memory(NEED)
    memory(8 * 2**30, own=2**30)  # the rest of them is still in a mapped file
    with pytest.raises(MemoryError, match="9.0 GiB is available"):
        check_host_memory(NEED)
    memory(7 * 2**30, own=2**40)  # other things that the process holds pay for nothing
    with pytest.raises(MemoryError, match="10.0 GiB is available"):
        check_host_memory(NEED)


def test_copies_that_were_made_at_attach_are_paid_for(memory):
    need = dataclasses.replace(NEED, copies=2 * 2**30)
    memory(8 * 2**30, own=5 * 2**30)
    check_host_memory(need)
    memory(8 * 2**30, own=5 * 2**30 - 1)
    with pytest.raises(MemoryError):
        check_host_memory(need)


def test_masters_and_copies_that_ranks_share_are_paid_for(memory):
    """A rank that has read none of them holds nothing of them; they are there all the same."""
    need = dataclasses.replace(NEED, copies=2 * 2**30)
    memory(8 * 2**30, own=0)
    check_host_memory(need, is_shared=True)
    memory(8 * 2**30 - 1, own=2**40)
    with pytest.raises(MemoryError):
        check_host_memory(need, is_shared=True)


def test_each_of_several_hosts_has_the_sums_and_moments_of_its_own_ranks():
    half = dataclasses.replace(NEED, copies=2**30).of_one_host(2)
    assert (half.masters, half.copies) == (NEED.masters, 2**30)
    assert (half.gradients, half.moments) == (NEED.gradients // 2, NEED.moments // 2)


@pytest.mark.parametrize(("value", "skips"), [("1", True), ("0", False), ("", False)])
def test_the_check_can_be_skipped(memory, monkeypatch, value, skips):
    memory(0)
    monkeypatch.setenv("HF_L2L_SKIP_MEMORY_CHECK", value)
    if skips:
        check_host_memory(NEED)
    else:
        with pytest.raises(MemoryError):
            check_host_memory(NEED)


def test_training_is_refused_before_anything_is_allocated(memory, tmp_path, monkeypatch):
    memory(0)
    made = l2l_trainer(tmp_path, optim="adamw_torch")
    with pytest.raises(MemoryError, match="training needs .* KiB of host memory .* 0 bytes is available"):
        made.train()
    assert made.state.global_step == 0
    assert not inner_optimizer(made).state
    assert all(p.grad is None for p in made.model.parameters())
    monkeypatch.setenv(SKIP_VARIABLE, "1")
    made.train()
    assert made.state.global_step == 4


def test_an_optimizer_that_needs_less_is_let_in(memory, tmp_path):
    masters = estimate(l2l_trainer(tmp_path).model).masters
    memory(2 * masters)
    with pytest.raises(MemoryError):
        l2l_trainer(tmp_path).train()
    l2l_trainer(tmp_path, optim="sgd").train()


# ---- what the host has


@pytest.fixture
def group(tmp_path):
    """Writes the files of a control group, and reads what is left in it."""

    def left(**files: str) -> int | None:
        for name, text in files.items():
            (tmp_path / name.replace("_", ".")).write_text(text)
        return host_limits._left_in_group(tmp_path / "memory.max", tmp_path / "memory.current")

    return left


def test_a_group_without_a_limit(group):
    assert group(memory_max="max\n", memory_current="300\n", memory_stat="anon 5\n") is None


def test_a_group_with_a_limit(group):
    assert group(memory_max="1000\n", memory_current="300\n", memory_stat="anon 5\n") == 700


def test_pages_of_files_are_given_back(group):
    stat = "anon 5\nactive_file 40\ninactive_file 120\nunevictable 0\n"
    assert group(memory_max="1000\n", memory_current="300\n", memory_stat=stat) == 820


def test_no_group_files(group):
    assert group() is None
    assert group(memory_current="300\n") is None
    assert group(memory_max="1000\n") == 700  # memory.stat is missing still, and the limit holds all the same


def test_the_groups_of_a_process_are_read_from_its_own_up(tmp_path):
    groups = host_limits._control_groups
    membership = tmp_path / "cgroup"
    membership.write_text("0::/user/job\n")
    assert [(str(folder), limit) for folder, limit, _ in groups(membership, Path("/cg"))] == [
        ("/cg/user/job", "memory.max"),
        ("/cg/user", "memory.max"),
        ("/cg", "memory.max"),
    ]
    membership.write_text("3:cpu,cpuacct:/x\n2:memory:/job\n")
    assert [(str(folder), limit) for folder, limit, _ in groups(membership, Path("/cg"))] == [
        ("/cg/memory/job", "memory.limit_in_bytes"),
        ("/cg/memory", "memory.limit_in_bytes"),
    ]
    assert list(groups(tmp_path / "none")) == []


@pytest.mark.parametrize(
    ("limit", "usage"), [("", "300"), ("lots", "300"), ("1000", ""), ("1000", "some"), ("-1", "3")]
)
def test_malformed_group_files(group, limit, usage):
    assert group(memory_max=limit, memory_current=usage, memory_stat="") is None


def test_available_memory_is_within_the_group(monkeypatch):
    system = psutil.virtual_memory().available
    for left, expected in ((None, None), (1000, 1000), (10 * system, None)):
        monkeypatch.setattr(host_limits, "_left_in_group", lambda limit, usage, left=left: left)
        found = host_limits.available_host_bytes()
        assert found == expected if expected is not None else math.isclose(found, system, rel_tol=0.5)


def test_models_of_transformers_have_the_layers_that_are_counted():
    assert isinstance(small_bert(), hf.PreTrainedModel)
    assert sum(p.numel() for p in small_bert().parameters()) == SHELL + 2 * LAYER


def test_page_locked_memory_is_the_processes_own():
    if not Path("/proc/self/status").exists():
        pytest.skip("only Linux tells kinds of memory apart")
    before = host_limits.own_bytes()
    size = 64 * 2**20
    room = Room(Pages(size), 0, size)
    held = room.tensor_like(torch.empty(size, dtype=torch.uint8)).fill_(1)
    assert 0.9 * size <= host_limits.own_bytes() - before <= 1.1 * size
    assert held.sum() == size


# ---- the block that training starts with


def told(monkeypatch, device: str, **options) -> dict[str, str]:
    """The lines of the summary, by their heads. No device of that type needs to be there."""
    for each in (summaries, memory_estimate):
        monkeypatch.setattr(each, "execution_devices", lambda asked: [torch.device(device)], raising=False)
        monkeypatch.setattr(each, "execution_device", lambda asked: torch.device(device), raising=False)
    for module in ("memory.memory_estimate", "report.summary"):
        monkeypatch.setattr(f"hf_l2l.{module}.computing_dtype", lambda cmp, on: cmp and torch.bfloat16)
    model, config = small_bert(), L2LConfig(**options)
    lines = summary(model, config, estimate(model, config)).splitlines()[1:]
    return {head.strip(): text for head, _, text in (line.partition(" = ") for line in lines)}


@pytest.mark.parametrize("cmp", [None, "bf16"])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("serial", "serial: the optimizer updates all layers on the host, in step()"),
        (
            "deferred",
            "deferred: the host updates layer by layer during the next forward, and the shell and the first layer "
            "before it",
        ),
        (
            "eager",
            "eager: the host updates layer by layer during the backward, and the shell and the first layer after it",
        ),
    ],
)
def test_the_summary_says_what_is_known_before_the_run(mode, says, device, cmp, monkeypatch):
    lines = told(monkeypatch, device, eps_update=mode, cmp=cmp)
    assert lines["Update"] == says
    weights = "16-bit copies" if cmp else "masters"
    if device == "cpu":
        assert (
            lines["Device memory"] == f"the host's, where layers compute with the {weights}: activations come on top"
        )
        assert lines["Link"] == "none: host and device are one, nothing travels"
    else:
        weights_bytes = 2 * LAYER * (2 if cmp else 4)
        assert lines["Device memory"].startswith("shell ") and "slots" in lines["Device memory"]
        assert lines["Link"] == (
            f"up to {size_text(weights_bytes)} of weights of layers in each forward and again in each backward, "
            f"{size_text(4 * (SHELL + 2 * LAYER))} of gradients back"
        )


def test_gradients_come_back_in_the_dtype_they_wait_in(monkeypatch):
    lines = told(monkeypatch, "cuda:0", cmp="bf16", grad_dtype="16bit")
    assert f"{size_text(2 * (SHELL + 2 * LAYER))} of gradients back" in lines["Link"]
