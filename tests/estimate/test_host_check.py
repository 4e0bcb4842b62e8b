"""Host memory and disks: what a host has, the refusal before anything is allocated and what helps, what is held, and
what a disk makes of a training."""

from __future__ import annotations

import dataclasses
import gc
import math
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from budgeted import SumOfSquares
from cli_models import LLAMA, ran, refused, written
from hf_l2l import L2LConfig, attach_l2l, detach_l2l, estimate
from hf_l2l.memory import host_limits
from hf_l2l.memory.held import Held
from hf_l2l.memory.host_remedies import disk_remedies, host_advice, remedies
from hf_l2l.memory.ledger import Transients
from hf_l2l.memory.memory_estimate import MemoryEstimate, check_host_memory
from hf_l2l.memory.state_traffic import StatePart, StateTraffic, state_traffic
from hf_l2l.option_names import options_of_the_trainer
from hf_l2l.probe.disk import DiskRates, disk_rates, write_rate
from hf_l2l.runtime.flat_memory import Pages
from hf_l2l.sizing.disk import disk_seconds, disk_sentences, measured_rates
from models import batch_for, bert, llama, train_once
from training import inner_optimizer, l2l_trainer, tiny_bert

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
        with nullcontext() if fits else refused as told:
            check_host_memory(need, is_shared=is_shared)
        assert fits or (f", copies {copies}.0 GiB" in str(told.value)) == (copies > 0)


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
    memory(2 * estimate(tiny_bert()).masters)
    with pytest.raises(MemoryError):
        l2l_trainer(tmp_path).train()
    l2l_trainer(tmp_path, optim="sgd", max_steps=1).train()


@pytest.fixture
def left(tmp_path, monkeypatch):
    """What is available in a control group with these files, of a host that has as much as it likes."""

    def of(**files: str) -> int:
        for name, text in files.items():
            (tmp_path / name.replace("_", ".")).write_text(text)
        groups = [(folder, "memory.max", "memory.current") for folder in (tmp_path / "none", tmp_path)]
        monkeypatch.setattr(host_limits, "control_groups", lambda: iter(groups))
        return host_limits.available_host_bytes()

    return of


def test_available_memory_is_within_the_group(left):
    """Pages of files are given back; a group that tells no limit has none."""
    whole = psutil.virtual_memory().available
    assert math.isclose(left(memory_current="300"), whole, rel_tol=0.5)
    assert left(memory_max="1000\n", memory_current="300\n") == 700
    assert left(memory_stat="anon 5\nactive_file 40\ninactive_file 120\nunevictable 0\n") == 820
    for limit, usage in (("max\n", "300"), ("lots", "300"), ("1000", ""), ("1000", "some"), ("-1", "3")):
        found = left(memory_max=limit, memory_current=usage, memory_stat="")
        assert math.isclose(found, whole, rel_tol=0.5)


def test_the_groups_of_a_process_are_read_from_its_own_up(tmp_path):
    membership = tmp_path / "cgroup"
    for text, folders, file in (
        ("0::/user/job\n", ["/cg/user/job", "/cg/user", "/cg"], "memory.max"),
        ("3:cpu,cpuacct:/x\n2:memory:/job\n", ["/cg/memory/job", "/cg/memory"], "memory.limit_in_bytes"),
    ):
        membership.write_text(text)
        found = host_limits.control_groups(membership, Path("/cg"))
        assert [(str(folder), limit) for folder, limit, _ in found] == [(folder, file) for folder in folders]
    assert list(host_limits.control_groups(tmp_path / "none")) == []


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells kinds of memory apart")
def test_page_locked_memory_is_the_processes_own():
    before, size = host_limits.own_bytes(), 64 * 2**20
    held = torch.frombuffer(Pages(size), dtype=torch.uint8).fill_(1)
    assert 0.9 * size <= host_limits.own_bytes() - before <= 1.1 * size and held[-1] == 1


# ---- what helps


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


ALL_WITH_BF16 = {"16bit": 2, "bf16": 4, "per_sweep": 2, "16bit, bf16, per_sweep": 8}


@pytest.mark.parametrize(
    ("config", "kind", "per_parameter"),
    [
        ({"cmp": "bf16"}, "AdamW", {**ALL_WITH_BF16, "16bit, 8bit, per_sweep": 9.99}),
        ({"cmp": "bf16"}, "NAdam", ALL_WITH_BF16),  # which keeps no 8 bits
        ({"moment_dtype": "bf16"}, "AdamW", {"16bit": 2, "16bit, 8bit": 3.99}),
        ({"moment_dtype": "8bit", "grad_dtype": "16bit"}, "AdamW", {}),
        ({}, "SGD", {"16bit": 2}),  # without moments
    ],
)
def test_each_remedy_saves_so_many_bytes_per_parameter(config, kind, per_parameter):
    """Gradients and moments save as much on all hosts together as on one."""
    model, asked = llama(), L2LConfig(**config)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    for hosts in (1, 2) if "cmp" not in config else (1,):
        need = estimate(model, asked, optimizer).of_one_host(hosts).host_bytes
        found = remedies(model, asked, optimizer, hosts)
        saved = {
            ", ".join(each.changes.values()): round(hosts * (need - each.host_bytes) / parameters(model), 2)
            for each in found
        }
        assert list(saved.items()) == list(per_parameter.items())


def test_the_disk_is_the_last_remedy():
    """For a process that has no ranks beside it; alone, and with all others."""
    model, config = bert(num_hidden_layers=6), L2LConfig()
    optimizer = torch.optim.AdamW(model.parameters())
    alone, last = disk_remedies(model, config, optimizer)
    assert alone.changes == {"state_tier": "disk"}
    assert last.changes == {"grad_dtype": "16bit", "moment_dtype": "8bit", "state_tier": "disk"}
    assert last.host_bytes < alone.host_bytes < estimate(model, config, optimizer).host_bytes
    assert not list(disk_remedies(model, L2LConfig(state_tier="disk"), optimizer))
    assert "state_tier" not in host_advice(model, config, optimizer, 2**40, has_ranks=True)


@pytest.mark.parametrize(
    ("have", "kind", "end"),
    [
        (13, torch.optim.AdamW, "this fits: l2l_moment_dtype='bf16'"),
        (11, torch.optim.AdamW, "this fits: l2l_grad_dtype='16bit', l2l_moment_dtype='bf16'"),
        (9, torch.optim.AdamW, "this fits: l2l_grad_dtype='16bit', l2l_moment_dtype='8bit'"),
        (3, torch.optim.AdamW, "no options fit, and LoRA does"),
        (11, SumOfSquares, "no options fit, and LoRA does"),
    ],
)
def test_advice_ends_with_the_first_that_fits(have, kind, end):
    """With `have` bytes per parameter, of an optimizer; before it is said of each whether it fits."""
    model = llama()
    with options_of_the_trainer():
        said = host_advice(model, L2LConfig(), kind(model.parameters(), lr=0.1), have * parameters(model))
    assert said.endswith(f"; {end}")
    assert kind is SumOfSquares or ("(fits) with l2l_moment_dtype='bf16'," in said) == (have >= 12)


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


# ---- what a disk makes of a training: rates, bytes of a step, real-time checkpoints


GB = 10**9
ON_DISK = MemoryEstimate(
    masters=4 * GB,
    gradients=4 * GB,
    moments=8 * GB,
    shell=0,
    slots=0,
    on_disk=12 * GB,
    state_traffic=StateTraffic(window=2 * GB, read=16 * GB, written=12 * GB),
)
RATES = DiskRates(read=2.0 * GB, written=1.0 * GB, read_beside=0.0 + GB, written_beside=0.5 * GB)
"""Of a disk that shares its time among reading and writing."""


def test_the_probe_leaves_nothing(tmp_path):
    rates = disk_rates(tmp_path, 2**20)
    assert min(rates) > 0 and write_rate(tmp_path, 2**20) > 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="No such file or directory"):
        measured_rates(str(tmp_path / "nowhere"))


def test_a_step_takes_as_long_as_the_disk_does():
    assert disk_seconds(ON_DISK, RATES) == pytest.approx(8.0 + 12.0)
    # One that does both at once: 12 s of writing, and of the reading what comes before it.
    both = DiskRates(2.0 * GB, 1.0 * GB, 2.0 * GB, 1.0 * GB)
    assert disk_seconds(ON_DISK, both) == pytest.approx(12.0)
    assert both.seconds(16 * GB, 12 * GB, alone=4 * GB) == pytest.approx(2.0 + 12.0)
    assert both.seconds(30 * GB, 12 * GB, alone=4 * GB) == pytest.approx(2.0 + 13.0)
    assert both.seconds(0, 0) == 0
    told = "\n".join(disk_sentences(ON_DISK, RATES, 5.0))
    assert "keeps it busy for 20 s: at most 180 steps per hour, the disk bounds it" in told
    # A checkpoint of 12 GB after every second step: 6 s to read the state on disk, 12 s to write, 6 s for digests.
    assert "which this disk takes in 24 s, with digests; copies of layers" in told
    assert "With l2l_realtime_every='auto', a crash loses at most 4 steps" in told
    assert f"{12e9 * 86400 / 40 / 1e12:.3g} TB are written per day" in told
    assert "at most 120 steps per hour, the rest of the step bounds it" in "\n".join(
        disk_sentences(ON_DISK, RATES, 30.0)
    )


@pytest.mark.parametrize(
    ("layers", "read", "written"),
    [
        # All parts and moments: nothing is read again where the window holds everything.
        (8, 0, 0),
        # Room for two layers, and for one that is being written. The forward finds the masters of layer 4, which was
        # updated last, the backward those of all; updates find those of 1 and 2. State is read for each update.
        (3, 3 + (2 + 2 + 3 + 3), 3 * 4),
    ],
)
def test_what_a_step_reads_and_writes(layers, read, written):
    """Four layers of one page of masters and two of state."""
    page = 4096
    parts = [StatePart(float(number), page, 2 * page) for number in range(1, 5)]
    found = state_traffic(parts, layers, reads_masters=True, stays=0)
    assert (found.read // page, found.written // page) == (read, written)
    # Each forward follows the update; the backward reads the masters of two layers, which the next updates find.
    after = state_traffic(parts, layers, reads_masters=True, stays=0, updates="deferred")
    assert (after.read // page, after.written // page) == ((0, 0) if layers == 8 else (2 + 4 * 3 - 2, 12))
    eager = state_traffic(parts, layers, reads_masters=True, stays=0, updates="eager")
    assert eager[:3] == found[:3]
    alone = [each.read_alone // page for each in (found, eager, after)]
    assert alone == ([0, 0, 0] if layers == 8 else [3, 3, 2])
    copies = state_traffic(parts, layers, reads_masters=False, stays=0)
    assert (copies.read // page, copies.written // page) == ((0, 0) if layers == 8 else (12, 12))


def test_ranks_have_no_state_on_disk(tmp_path, capsys):
    """The estimate refuses what a training refuses."""
    given = ("estimate", written(tmp_path / "model", LLAMA), "--l2l_state_tier", "disk")
    assert "is for one process" in refused(capsys, *given, "--ranks", "2")
    assert ran(capsys, *given, "--ranks", "1").status == 0
