"""Masters and optimizer state on disk: the same bits as in memory, a bounded window, nothing left behind."""

from __future__ import annotations

import copy
import gc
import os
import resource
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from devices import DEVICE
from hf_l2l import L2LConfig, detach_l2l, estimate
from hf_l2l.state_tier.files import Segment
from left_over import files, gone
from models import Toy, batch_for
from runs import OPTIMIZERS, assert_same_run, attach, run_of, seed_all, train
from saving import disk_is_full
from tiers import cpu_suffices, more, nightly, on_the_host

pytestmark = pytest.mark.filterwarnings("ignore:.*is in host memory:UserWarning")  # where folders of tests are

WIDTH = 64
"""So large that the moments of a layer's matrices, in 8 bits, too, are no small tensors, which stay in memory."""


def toy(layers: int = 3, width: int = WIDTH, **more: Any) -> Toy:
    return Toy(layers, width, **more)


def on_disk(folder: Path, **options: Any) -> dict[str, Any]:
    return {"state_tier": "disk", "state_dir": folder, "state_window": 3, **options}


def steps(model: nn.Module, eps: Any, optimizer: torch.optim.Optimizer, count: int, *, first: int = 0) -> Any:
    """Some steps with the draws of their numbers; what there is after them."""
    for number in range(first, first + count):
        seed_all()
        torch.manual_seed(number)
        model(**batch_for(model, masked=False, seed=number)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    eps.synchronize()
    return run_of(model, optimizer, [])


def after_steps(count: int, layers: int = 3, **options: Any) -> tuple[nn.Module, Any, torch.optim.Optimizer, Any]:
    """A model, its EPS, its optimizer, and what there is after some steps."""
    model, eps, optimizer, _ = attach(toy(layers), **options)
    return model, eps, optimizer, steps(model, eps, optimizer, count)


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("AdamW", "deferred", {}),
    ("LAMB", "serial", {"cmp": "bf16", "host_copies": "per_sweep"}),
    ("AdamW", "eager", {"moment_dtype": "bf16", "grad_dtype": "16bit"}),
    ("AdamW", "deferred", {"moment_dtype": "8bit", "cmp": "bf16"}),
    ("LAMB", "eager", {"moment_dtype": "8bit", "grad_dtype": "16bit"}),
    ("SGD", "serial", {"moment_dtype": "8bit"}),
    ("SGD", "deferred", {"stash": "disk"}),
    ("LAMB", "eager", {"cmp": "bf16"}),
]
if DEVICE != "cpu":
    CASES += [
        ("AdamW", "serial", {"stash": "host", "boundary": "host"}),
        ("SGD", "eager", {"resident": "shell"}),
        ("AdamW", "deferred", {"resident_layers": 1, "resident_update": "host"}),
        ("LAMB", "deferred", {"kept_weights": 1, "kept_graphs": 1}),
        ("SGD", "serial", {"gradient_slots": 1, "prefetch": False}),
    ]


@pytest.mark.parametrize(("optimizer", "mode", "options"), [*CASES[0 if DEVICE == "cpu" else 8 :], *more(*CASES[:8])])
def test_the_bits_are_those_of_state_in_memory(tmp_path, optimizer, mode, options):
    same = {"optimizer": optimizer, "eps_update": mode, "ubatch_size": 3, "accumulation": 2, **options}
    found = train(toy(), **same, **on_disk(tmp_path))
    assert_same_run(found, train(toy(), **same))
    assert list(tmp_path.iterdir()) == [], "no file has a name"


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether the tensor is in a file without a name."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            where, *_, name = line.split(None, 5)
            low, high = (int(each, 16) for each in where.split("-"))
            if low <= tensor.data_ptr() < high:
                return name.rstrip().endswith("(deleted)")
    return False


@cpu_suffices
@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_a_resumed_training_has_the_bits_of_the_unbroken_one(tmp_path, moments):
    """State that is loaded moves to disk, and what is saved is what a training in memory saves."""
    expected = after_steps(4, moment_dtype=moments)[-1]
    options = on_disk(tmp_path, moment_dtype=moments)
    model, _, optimizer, _ = after_steps(2, **options)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    detach_l2l(model)
    other = toy()
    other.load_state_dict(weights)
    other, eps, optimizer, _ = attach(other, **options)
    optimizer.load_state_dict(state)
    up = other.blocks[0].up.weight
    assert is_mapped(up) and all(is_mapped(optimizer.state[up][key]) for key in ("exp_avg", "exp_avg_sq"))
    assert_same_run(steps(other, eps, optimizer, 2, first=2), expected)


@cpu_suffices
def test_what_the_program_changes_counts(tmp_path):
    """Weights and moments that are written in place, or replaced, between steps."""

    def changed(**options: Any) -> Any:
        model, eps, optimizer, _ = after_steps(1, **options)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
                optimizer.state[p]["exp_avg"].mul_(0.25)
                optimizer.state[p]["exp_avg_sq"] = optimizer.state[p]["exp_avg_sq"] * 2
        return steps(model, eps, optimizer, 2)

    assert_same_run(changed(**on_disk(tmp_path)), changed())


def test_the_window_holds_its_layers(tmp_path):
    """Masters and moments of all layers pass through it, and the report names it instead of them. An optimizer that is
    made anew takes no more of it; tied weights are there once."""
    model, eps, optimizer, _ = attach(toy(8, tied=False), **on_disk(tmp_path))
    model.blocks[1].up.weight = model.blocks[0].up.weight
    steps(model, eps, optimizer, 2)
    window = eps.state.window
    all_bytes = sum(part.num_bytes for part in eps.state.parts)
    layer = max(part.num_bytes for part in eps.state.parts if part.in_layer)
    assert 3 * layer <= window.limit < all_bytes and 0 < window.peak <= window.limit
    assert window.bytes_read > 0 and window.bytes_written > 0
    host = eps.memory_report()["host"]
    assert host["window of state on disk"]["peak"] == window.peak and host["masters"]["now"] == 0
    counted = [m.parameter for part in eps.state.parts for m in part.masters]
    assert len(counted) == len(set(counted)) == len(list(model.parameters()))
    again = eps.wrap(OPTIMIZERS["AdamW"](model.parameters()))
    limit = window.limit
    steps(model, eps, again, 1)
    assert eps.state.window.limit == limit


@cpu_suffices
def test_parameters_with_other_memory_move_to_disk_again(tmp_path):
    """As of a program that resizes an embedding; what is frozen has its own file. Files of parts that are no more are
    gone, as when a program freezes parameters, and trains them again."""
    model, eps, optimizer, _ = after_steps(1, **on_disk(tmp_path))
    embedding = model.embed.weight
    embedding.data = embedding.data.clone()
    assert not is_mapped(embedding) and embedding not in eps.state.on_disk
    steps(model, eps, optimizer, 1)
    assert is_mapped(embedding) and embedding in eps.state.on_disk
    counts = []
    for step in range(6):
        model.blocks[0].requires_grad_(step % 2 == 1)
        steps(model, eps, optimizer, 1)
        gc.collect()
        counts.append(files())
        frozen = [part for part in eps.state.parts if part.frozen and not part.weights]
        assert bool(frozen) is (step % 2 == 0) and all(is_mapped(p) for p in model.parameters() if p.nbytes > 4096)
    assert counts[1] >= counts[3] >= counts[5] and counts[2] >= counts[4]


@nightly
@on_the_host
@pytest.mark.parametrize(("frozen", "more"), [(0, {}), (2, {}), (0, {"moment_dtype": "8bit"})], ids=str)
def test_the_estimate_knows_the_window_and_what_passes(tmp_path, frozen, more):
    """What a step reads and writes, in pages, before the run; frozen parameters are read, and not written."""
    model = toy(4, 128)
    model.blocks[:frozen].requires_grad_(False)
    options = on_disk(tmp_path, layer_classes=("Block",), **more)
    made = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    found = estimate(model, L2LConfig(device="cpu", **options), made)
    _, eps, _, _ = attach(model, lambda _: made, **options)
    steps(model, eps, made, 3)
    passing = eps.state.window
    read, written = passing.bytes_read, passing.bytes_written
    steps(model, eps, made, 5, first=3)
    measured = [(passing.bytes_read - read) / 5, (passing.bytes_written - written) / 5]
    assert found.state_traffic[1:3] == pytest.approx(measured, rel=0.1)
    assert found.state_window == pytest.approx(passing.peak, rel=0.05)
    assert found.on_disk == pytest.approx(sum(part.num_bytes for part in eps.state.parts), rel=0.05)
    assert found.host_bytes == found.state_window + found.gradients


class _Packed(torch.Tensor):
    """A tensor of another kind, as quantized moments are: its values are elsewhere."""


@on_the_host
def test_state_of_other_kinds_stays_what_it_is_and_the_model_trains_on_when_detached(tmp_path):
    """Its weights stay in their files, which have no names."""
    model, eps, optimizer, _ = after_steps(1, **on_disk(tmp_path))
    state = optimizer.state[model.blocks[0].up.weight]
    values, packed = state["exp_avg"], state["exp_avg"].clone().as_subclass(_Packed)
    state["exp_avg"] = packed
    eps.state.keep_all(optimizer)
    assert state["exp_avg"] is packed
    state["exp_avg"] = values
    detach_l2l(model)
    model(**batch_for(model, masked=False)).loss.backward()
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert list(tmp_path.iterdir()) == []


@on_the_host
def test_what_cannot_be_is_told_before_anything_moves(tmp_path, monkeypatch):
    """A folder in which no file can be made; few files; little room, of which some optimizers need less."""
    model = toy()
    with pytest.raises(ValueError, match="a file can be written"):
        attach(model, **on_disk(tmp_path / "missing"))
    with pytest.raises(ValueError, match="on the host"):
        L2LConfig(state_tier="disk", resident="all")
    with monkeypatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda kind: (16, 64))
        with pytest.raises(ValueError, match="limit of 64"):
            attach(model, **on_disk(tmp_path))
        raised: list[tuple[int, int]] = []
        patch.setattr(resource, "getrlimit", lambda kind: (16, 2**20))
        patch.setattr(resource, "setrlimit", lambda kind, limits: raised.append(limits))
        attach(toy(), **on_disk(tmp_path))
        assert raised[0][0] > 64 and raised[0][1] == 2**20
    some = int(1.2 * sum(p.nbytes for p in model.parameters()))
    with monkeypatch.context() as patch:
        for free, said in ((some, "room for optimizer state"), (10, "room for masters")):
            disk_is_full(patch, free)
            with pytest.raises(ValueError, match=said):
                attach(model, **on_disk(tmp_path))
            detach_l2l(model)
        disk_is_full(patch, some)
        model, eps, optimizer, _ = attach(model, lambda p: torch.optim.SGD(p, lr=0.1), **on_disk(tmp_path))
        steps(model, eps, optimizer, 1)
    with pytest.raises(ValueError, match=r"LBFGS|closure"):
        eps.wrap(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: 0.0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    attach(toy(), **on_disk(Path("here")))  # relative to the program


@on_the_host
def test_state_is_on_disk_before_the_next_update_uses_it(tmp_path, monkeypatch):
    """Though another thread makes that: the file of the first state takes its time."""
    expected = after_steps(3, num_threads=2)[-1]
    model, eps, optimizer, _ = attach(toy(), **on_disk(tmp_path, num_threads=2))
    make, slow_ones = Segment.__init__, [0.0, 0.0, 0.3]

    def slow(segment: Segment, folder: str, num_bytes: int, **how: Any) -> None:
        make(segment, folder, num_bytes, **how)
        if slow_ones:
            time.sleep(slow_ones.pop())

    monkeypatch.setattr(Segment, "__init__", slow)
    assert_same_run(steps(model, eps, optimizer, 3), expected)
    assert not slow_ones


def test_a_disk_that_has_failed_is_told_until_the_end(tmp_path, monkeypatch):
    """By each forward and by `synchronize`; the report goes on, `detach_l2l` warns, and nothing keeps the model."""
    model, eps, optimizer, _ = after_steps(1, layers=8, **on_disk(tmp_path))

    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", broken)
        with pytest.raises(OSError, match="Input/output error"):
            steps(model, eps, optimizer, 2)
            eps.synchronize()
    eps.memory_report()
    for _ in range(2):
        with pytest.raises(OSError, match="resume from a checkpoint"):
            eps.synchronize()
        with pytest.raises(OSError, match="Input/output error"):
            model(**batch_for(model, masked=False))
    with pytest.warns(UserWarning, match="may be those of an earlier step"):
        detach_l2l(model)
    left = weakref.ref(model)
    del model, eps, optimizer
    assert gone(lambda: left() is None)
