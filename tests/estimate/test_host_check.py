"""A host that is too small for training: what it has, the refusal before anything is allocated, and what helps."""

from __future__ import annotations

import dataclasses
import gc
import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers as hf
from torch import nn

from hf_l2l import L2LConfig, attach_l2l, detach_l2l, estimate
from hf_l2l.memory import host_limits
from hf_l2l.memory.held import Held
from hf_l2l.memory.host_remedies import disk_remedies, host_advice, remedies
from hf_l2l.memory.ledger import Transients
from hf_l2l.memory.memory_estimate import MemoryEstimate, check_host_memory
from hf_l2l.option_names import options_of_the_trainer
from hf_l2l.runtime.flat_memory import Pages
from models import batch_for, bert, train_once
from tiers import nightly
from training import inner_optimizer, l2l_trainer

GIB = 2**30
NEED = MemoryEstimate(masters=3 * GIB, gradients=2 * GIB, moments=6 * GIB, shell=1, slots=1)
SKIP = "HF_L2L_SKIP_MEMORY_CHECK"


@pytest.fixture
def memory(monkeypatch):
    """Sets what the host has available, and what this process holds."""
    monkeypatch.delenv(SKIP, raising=False)

    def have(available: int, own: int = 0) -> None:
        monkeypatch.setattr(host_limits, "available_host_bytes", lambda: available)
        monkeypatch.setattr(host_limits, "own_bytes", lambda: own)

    return have


def test_what_is_there_is_paid_for(memory):
    """GiB that are available, and held."""
    for available, own, copies, is_shared, fits in (
        (11, 0, 0, False, True),
        (11 - 1e-9, 0, 0, False, False),
        (8, 3, 0, False, True),  # masters in memory are paid for
        (8, 1, 0, False, False),  # the rest of them is still in a mapped file
        (7, 1000, 0, False, False),  # other things that the process holds pay for nothing
        (8, 5, 2, False, True),  # so are copies that were made at attach
        (8, 0, 2, True, True),  # of a rank that has read none of what the ranks share
        (8 - 1e-9, 1000, 2, True, False),
    ):
        memory(int(available * GIB), int(own * GIB))
        need = dataclasses.replace(NEED, copies=copies * GIB)
        refused = pytest.raises(MemoryError, match="masters 3.0 GiB, gradients 2.0 GiB, moments 6.0 GiB")
        with nullcontext() if fits else refused:
            check_host_memory(need, is_shared=is_shared)


def test_training_is_refused_before_anything_is_allocated(memory, tmp_path, monkeypatch):
    memory(0)
    made = l2l_trainer(tmp_path, optim="adamw_torch", max_steps=1)
    for value in ("", "0"):
        monkeypatch.setenv(SKIP, value)
        with pytest.raises(MemoryError, match="host memory"):
            made.train()
    assert made.state.global_step == 0 and not inner_optimizer(made).state
    assert all(p.grad is None for p in made.model.parameters())
    monkeypatch.setenv(SKIP, "1")
    made.train()
    assert made.state.global_step == 1


def test_an_optimizer_that_needs_less_is_let_in(memory, tmp_path):
    memory(2 * estimate(l2l_trainer(tmp_path).model).masters)
    with pytest.raises(MemoryError):
        l2l_trainer(tmp_path).train()
    l2l_trainer(tmp_path, optim="sgd", max_steps=1).train()


# ---- what the host has


@pytest.fixture
def left(tmp_path, monkeypatch):
    """What is available in a control group with these files, of a host that has as much as it likes."""

    def of(**files: str) -> int:
        for name, text in files.items():
            (tmp_path / name.replace("_", ".")).write_text(text)
        groups = [(tmp_path / "none", "memory.max", "memory.current"), (tmp_path, "memory.max", "memory.current")]
        monkeypatch.setattr(host_limits, "control_groups", lambda: iter(groups))
        return host_limits.available_host_bytes()

    return of


def test_available_memory_is_within_the_group(left):
    """Pages of files are given back."""
    assert left(memory_max="1000\n", memory_current="300\n") == 700
    assert left(memory_stat="anon 5\nactive_file 40\ninactive_file 120\nunevictable 0\n") == 820


def test_a_group_that_tells_no_limit_has_none(left):
    assert math.isclose(left(memory_current="300"), psutil.virtual_memory().available, rel_tol=0.5)
    for limit, usage in (("max\n", "300"), ("lots", "300"), ("1000", ""), ("1000", "some"), ("-1", "3")):
        found = left(memory_max=limit, memory_current=usage, memory_stat="")
        assert math.isclose(found, psutil.virtual_memory().available, rel_tol=0.5)


def test_the_groups_of_a_process_are_read_from_its_own_up(tmp_path):
    groups = host_limits.control_groups
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


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells kinds of memory apart")
def test_page_locked_memory_is_the_processes_own():
    before, size = host_limits.own_bytes(), 64 * 2**20
    held = torch.frombuffer(Pages(size), dtype=torch.uint8).fill_(1)
    assert 0.9 * size <= host_limits.own_bytes() - before <= 1.1 * size and held[-1] == 1


# ---- what helps


def llama() -> nn.Module:
    config = hf.LlamaConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=2, intermediate_size=128, vocab_size=1000
    )
    with torch.device("meta"):
        return hf.LlamaForCausalLM(config)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


class Squares(torch.optim.Optimizer):
    """Steps by the sum over all gradients, so that the engine keeps them in fp32."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = sum(float(p.grad.square().sum()) for p in given)
        for p in given:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"] / (1 + total))


@pytest.mark.parametrize(
    ("config", "kind", "per_parameter"),
    [
        (
            {"cmp": "bf16"},
            "AdamW",
            [
                (2, ["grad_dtype"]),
                (4, ["moment_dtype"]),
                (2, ["host_copies"]),
                (8, ["grad_dtype", "moment_dtype", "host_copies"]),
            ],
        ),
        ({}, "SGD", [(2, ["grad_dtype"])]),  # without moments
    ],
)
def test_each_remedy_saves_so_many_bytes_per_parameter(config, kind, per_parameter):
    """Gradients and moments save as much on all hosts together as on one."""
    model, asked = llama(), L2LConfig(**config)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    for hosts in (1, 2) if "cmp" not in config else (1,):
        need = estimate(model, asked, optimizer).of_one_host(hosts).host_bytes
        found = [(need - each.host_bytes, list(each.changes)) for each in remedies(model, asked, optimizer, hosts)]
        saved = [(round(hosts * size / parameters(model), 2), names) for size, names in found]
        assert saved == per_parameter


def test_the_disk_is_the_last_remedy():
    """For a process that has no ranks beside it; alone, and with all others."""
    model, config = llama(), L2LConfig()
    optimizer = torch.optim.AdamW(model.parameters())
    alone, last = disk_remedies(model, config, optimizer)
    assert alone.changes == {"state_tier": "disk"}
    assert last.changes == {"grad_dtype": "16bit", "moment_dtype": "bf16", "state_tier": "disk"}
    assert last.host_bytes < alone.host_bytes < estimate(model, config, optimizer).host_bytes
    assert not list(disk_remedies(model, L2LConfig(state_tier="disk"), optimizer))
    assert "state_tier" not in host_advice(model, config, optimizer, 2**40, has_ranks=True)


@pytest.mark.parametrize(
    ("have", "kind", "end"),
    [
        (13, torch.optim.AdamW, "this fits: l2l_moment_dtype='bf16'"),
        (11, torch.optim.AdamW, "this fits: l2l_grad_dtype='16bit', l2l_moment_dtype='bf16'"),
        (3, torch.optim.AdamW, "no options fit, and LoRA does"),
        (11, Squares, "no options fit, and LoRA does"),
    ],
)
def test_advice_ends_with_the_first_that_fits(have, kind, end):
    """With `have` bytes per parameter, of an optimizer; before it is said of each whether it fits."""
    model = llama()
    with options_of_the_trainer():
        said = host_advice(model, L2LConfig(), kind(model.parameters(), lr=0.1), have * parameters(model))
    assert said.endswith(f"; {end}")
    assert kind is Squares or ("(fits) with l2l_moment_dtype='bf16'," in said) == (have >= 12)


@nightly
def test_training_is_refused_with_the_command_line_of_the_user(memory, tmp_path, monkeypatch):
    made = l2l_trainer(tmp_path, optim="adamw_torch")
    memory(estimate(made.model).host_bytes * 13 // 16)
    monkeypatch.setattr(sys, "argv", ["train.py", "--output_dir", "out", "--l2l_moment_dtype", "fp32"])
    with pytest.raises(MemoryError, match=r"python\S* train.py --output_dir out --l2l_moment_dtype=bf16$"):
        made.train()


# ---- what is held, where layers run on the CPU


def test_on_the_cpu_there_is_no_tier_of_a_device():
    model = bert()
    eps = attach_l2l(model, L2LConfig(device="cpu"))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        train_once(model, batch_for(model))
        gradients = eps.memory_report()["host"]["gradients"]["now"]
        optimizer.step()
    report = eps.memory_report()
    assert set(report) == {"host", "of which"}
    count = sum(p.numel() for p in model.parameters())
    found = {name: size["now"] for name, size in report["host"].items()}
    assert found["masters"] == 4 * count == gradients and found["gradients"] == 0
    assert report["host"]["gradients"]["peak"] == gradients, "a step begins with all of them"
    assert found["moments"] == 8 * count + 4 * len(list(model.parameters())), "and a step count of each"
    assert found["simulated device"] == found["copies"] == report["of which"]["page-locked"]["now"] == 0
    assert found["Python, libraries and other"] > 2**24
    assert sum(size for name, size in found.items() if name != "total") == found["total"]
    assert detach_l2l(model) is model and eps.memory_report()["host"]["moments"]["now"] == found["moments"]


def test_updates_at_once_are_counted_together():
    transients = Transients()
    with transients.of_update() as first:
        first(10)
        with transients.of_update() as second:
            second(5)
            first(1)
        assert transients.now == 11
    with pytest.raises(ValueError), transients.of_update() as third:
        third(7)
        raise ValueError
    assert (transients.now, transients.peak) == (0, 16)


def test_references_to_memory_do_not_pile_up():
    """Neither to what lives long and is named in every step, nor to what is gone."""
    held, lives = Held(torch.device("cpu")), torch.empty(10)
    for number in range(1000):
        held.add([lives, lives[2:], torch.empty(1000 + number)])
        assert lives.data_ptr() in held.alive()
    assert held.alive() == {lives.data_ptr(): 40}
    kept = gc.get_referents(*(each for each in vars(held).values() if isinstance(each, dict)))
    assert 0 < len(kept) < 400, "an address, and what is known of the memory there, of each"
    held.add([torch.empty(5, device="meta"), torch.empty(0), torch.eye(2).to_sparse()])
    assert len(held.alive()) == 1, "no memory of this device"
