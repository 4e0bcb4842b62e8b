"""The stash on disk, and chosen by size, on a device with memory of its own: the bits of a stash in host memory."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l import L2LConfig, attach_l2l, detach_l2l, estimate
from hf_l2l.report.summary import summary
from hf_l2l.rows.host_rows import HostRows
from hf_l2l.runtime import stream
from hf_l2l.stash import spill, tiers
from hf_l2l.testing import sim_stream
from memory_switches import poisoned_releases
from models import attached, batch_for, gradients, train_once
from training import assert_same_run, l2l_trainer, stopped_at_two, tiny_bert, weights_after

SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine"}


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is read after it was given back is NaN, in every test here; folders of tests count as on a disk."""
    monkeypatch.setattr(spill, "is_in_memory", lambda folder: False)
    with poisoned_releases():
        yield


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def spilled_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


MODES = ("serial", "deferred", "eager")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"ubatch_size": None},
    {"cmp": "bf16", "accumulation": 2},
    {"boundary": "host", "gradient_slots": 1},
    {"boundary": "host", "prefetch": False, "accumulation": 2},
)
RUNS = [
    # One of those without a precision of its own is in the normal tier.
    pytest.param(
        mode,
        options,
        id=f"{mode}-{options}",
        marks=() if (i - j) % 3 == 0 and "cmp" not in options else pytest.mark.slow,
    )
    for i, options in enumerate(OPTIONS)
    for j, mode in enumerate(MODES)
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("mode", "options"), RUNS)
def test_weights_have_the_bits_of_a_stash_in_host_memory(mode, options, tmp_path):
    """With an uneven last micro-batch."""
    same = {"ubatch_size": 3, "count": 2, "eps_update": mode, "clips": mode != "eager", **options}
    expected = weights_after(tiny_bert(layers=3), stash="host", **same)
    model = tiny_bert(layers=3)
    assert_same_bits(weights_after(model, stash="disk", spill_dir=tmp_path, **same), expected)
    assert spilled_bytes(tmp_path) > 0
    if "boundary" not in options:
        assert_same_bits(weights_after(tiny_bert(layers=3), stash="device", **same), expected)


SEEDS = [seed if seed < 1 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(30)]


@cache
def of_two_layers(**options: Any) -> dict[str, torch.Tensor]:
    return weights_after(tiny_bert(layers=2, width=32), count=2, **options)


@pytest.mark.parametrize("seed", SEEDS)
def test_when_copies_land_changes_no_bit(seed, tmp_path):
    same = {"ubatch_size": 4, "accumulation": 2}
    for options in (same, {**same, "boundary": "host"}):
        expected = of_two_layers(stash="host", **options)
        with sim_stream.random_landing(seed):
            model = tiny_bert(layers=2, width=32)
            found = weights_after(model, count=2, stash="disk", spill_dir=tmp_path, **options)
        assert_same_bits(found, expected)


@pytest.mark.parametrize("boundary", [pytest.param("device", marks=pytest.mark.slow), "host"])
def test_a_second_backward_and_forwards_without_one(boundary, tmp_path):
    """Space of what was dropped is used again."""
    model = tiny_bert(layers=3, dropout=0.0)
    batch = batch_for(model)
    attach_l2l(model, L2LConfig(device="sim", ubatch_size=3, stash="host", boundary=boundary))
    train_once(model, batch)
    once = gradients(model)
    detach_l2l(model)
    attached(model, device="sim", ubatch_size=3, stash="disk", spill_dir=tmp_path, boundary=boundary)
    sizes = []
    for _ in range(3):
        model(**batch)  # dropped
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward(retain_graph=True)
        assert_same_bits(gradients(model), once)
        loss.backward()
        assert_same_bits(gradients(model), {name: 2 * value for name, value in once.items()})
        del loss
        sizes.append(spilled_bytes(tmp_path))
    assert sizes[0] == sizes[1] == sizes[2] > 0


# ---- a disk that becomes full


@contextmanager
def full_disk() -> Iterator[None]:
    """The kernel refuses to make any file longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("where", "mode"),
    [
        ("forward", "serial"),
        ("backward", "serial"),
        ("forward", "deferred"),
        ("backward", "deferred"),
        ("forward", "eager"),
    ],
)
def test_a_disk_that_becomes_full_leaves_model_and_optimizer_usable(where, mode, tmp_path, monkeypatch):
    model, twin = tiny_bert(layers=3, dropout=0.0), tiny_bert(layers=3, dropout=0.0)
    batch = batch_for(model)
    losses: dict[str, list[float]] = {}
    for each, folder in ((model, tmp_path / "one"), (twin, tmp_path / "two")):
        folder.mkdir()
        options = {"ubatch_size": 3, "boundary": "host", "stash": "disk", "spill_dir": folder, "eps_update": mode}
        eps = attach_l2l(each, L2LConfig(device="sim", **options))
        optimizer = eps.wrap(torch.optim.AdamW(each.parameters(), lr=1e-2))
        longer = {name: torch.cat([value, value]) for name, value in batch.items()}
        for turn in range(3):
            if each is model and turn == 1:
                # The rooms of the backward are one more than those of the forward.
                loss = model(**longer).loss if where == "backward" else None
                with (
                    full_disk(),
                    pytest.raises(OSError, match="the stash on disk needs .* more in .*one for") as error,
                ):
                    loss.backward() if loss is not None else model(**longer)
                assert error.value.errno == errno.EFBIG
                del loss, error
                optimizer.zero_grad()
            loss = each(**batch).loss
            loss.backward()
            optimizer.step()
            losses.setdefault(folder.name, []).append(loss.item())
            optimizer.zero_grad()
    assert losses["one"] == losses["two"]


def test_the_last_checkpoint_is_intact_after_a_full_disk(tmp_path):
    whole = l2l_trainer(tmp_path / "whole", **SAVING, ubatch_size=3)
    whole.train()
    spilled, folder = tmp_path / "spilled", tmp_path / "parts"
    spilled.mkdir()
    on_disk = {"ubatch_size": 3, "stash": "disk", "l2l_spill_dir": str(spilled)}
    checkpoint = stopped_at_two(l2l_trainer, folder, **on_disk)
    before = {file.name: file.read_bytes() for file in Path(checkpoint).iterdir()}
    failing = l2l_trainer(folder, model=tiny_bert(), **SAVING, **on_disk)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spill.SpillFile, "_grow", _no_space)
        patch.setattr(spill.SpillFile, "check", lambda self: None)  # it becomes full after the start
        with pytest.raises(OSError, match="name another folder as l2l_spill_dir"):
            failing.train(resume_from_checkpoint=checkpoint)
    assert {file.name: file.read_bytes() for file in Path(checkpoint).iterdir()} == before
    resumed = l2l_trainer(folder, model=tiny_bert(), **SAVING, **on_disk)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert_same_run(resumed, whole)


def _no_space(self: spill.SpillFile, file: int, size: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_errors_of_the_trainer_name_its_argument(tmp_path):
    trainer = None
    with pytest.raises(ValueError, match="l2l_spill_dir must be a folder .*missing': No such file or directory"):
        trainer = l2l_trainer(tmp_path, stash="disk", l2l_spill_dir=str(tmp_path / "missing"))
        trainer.train()


# ---- chosen by size


@pytest.mark.one_in(6)
@pytest.mark.parametrize("boundary", ["auto", "host"])
@pytest.mark.parametrize("place", ["device", "host", "disk"])
def test_auto_takes_the_first_tier_that_fits(place, boundary, tmp_path, monkeypatch):
    model = tiny_bert(layers=3)
    batch = batch_for(model)
    layer_input = batch["input_ids"].numel() * model.config.hidden_size * 4
    same = {"ubatch_size": 3, "boundary": boundary, "count": 2}
    device_bytes = 3 * 8 * layer_input if place == "device" else 3 * 8 * layer_input - 1
    monkeypatch.setattr(stream, "memory_of", lambda device: device_bytes)
    monkeypatch.setattr(tiers, "available_host_bytes", lambda: 0 if place == "disk" else 2**40)
    expected = weights_after(tiny_bert(layers=3), stash="host", **same)
    found = weights_after(model, stash="auto", spill_dir=tmp_path, **same)
    assert_same_bits(found, expected)
    chosen = model._l2l.tiers
    # A boundary on the host keeps the stash there; where it is "auto", outputs of this size pass through the host.
    assert chosen._logged == ("host" if (place, boundary) == ("device", "host") else place)
    assert (spilled_bytes(tmp_path) > 0) == (place == "disk")


def test_auto_changes_with_the_length_of_batches(tmp_path, monkeypatch):
    model, plain = tiny_bert(layers=3, dropout=0.0), tiny_bert(layers=3, dropout=0.0)
    short = batch_for(model)
    longer = {name: torch.cat([value] * 4) for name, value in short.items()}
    layer_input = short["input_ids"].numel() * model.config.hidden_size * 4
    monkeypatch.setattr(stream, "memory_of", lambda device: 3 * 8 * layer_input)
    monkeypatch.setattr(tiers, "available_host_bytes", lambda: 0)
    attached(model, device="sim", ubatch_size=3, stash="auto", spill_dir=tmp_path, boundary="device")
    attached(plain, device="sim", ubatch_size=3, stash="device")
    chosen = []
    for batch in (short, longer, short, longer):
        for each in (model, plain):
            each.zero_grad()
            train_once(each, batch)
        chosen.append(model._l2l.tiers._chosen)
        assert_same_bits(gradients(model), gradients(plain))
    assert chosen == ["device", "disk", "device", "disk"]


def test_what_the_first_step_will_take():
    model = tiny_bert()
    for dtype, moments in (("fp32", 8), ("bf16", 4)):
        eps = attach_l2l(model, L2LConfig(device="sim", moment_dtype=dtype))
        count = sum(p.numel() for p in model.parameters())
        assert eps.bytes_of_first_step() == (4 + moments) * count
        optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
        train_once(model, batch_for(model))
        assert eps.bytes_of_first_step() == moments * count
        optimizer.step()
        eps.synchronize()
        assert eps.bytes_of_first_step() == 0
        detach_l2l(model)


def test_outputs_that_the_program_reads(tmp_path):
    model = tiny_bert(layers=3, dropout=0.0)
    batch = batch_for(model)
    attached(model, device="sim", ubatch_size=3, stash="disk", spill_dir=tmp_path, boundary="host")
    states = model(**batch, output_hidden_states=True).hidden_states
    assert any(isinstance(state, HostRows) for state in states)
    with torch.no_grad():
        plain: nn.Module = tiny_bert(layers=3, dropout=0.0)
        for found, expected in zip(states, plain(**batch, output_hidden_states=True).hidden_states, strict=True):
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_the_summary_says_where_the_stash_is(tmp_path):
    model = tiny_bert()
    either = f"in host memory or in a file in {tmp_path}, the first that it fits"
    small = "; what passes between layers is on the device if it is small, else with the stash"
    for options, text in (
        ({"stash": "disk"}, f"in a file in {tmp_path}{small}"),
        ({"stash": "disk", "boundary": "host"}, f"in a file in {tmp_path}, and so is what passes between layers"),
        ({"stash": "auto"}, f"on the device, {either}{small}"),
        ({"stash": "auto", "boundary": "host"}, f"{either}, and so is what passes between layers"),
        ({"stash": "disk", "device": "cpu"}, f"in a file in {tmp_path}"),
        ({"stash": "auto", "device": "cpu"}, "in host memory"),
    ):
        config = L2LConfig(**{"device": "sim", "spill_dir": tmp_path, **options})
        assert f"\n  Stash = {text}\n" in summary(model, config, estimate(model, config))
