"""The stash on disk, and chosen by size: bits of a stash in memory, room that is used again, disks that fill up."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from devices import DEVICE
from hf_l2l import attach_l2l, detach_l2l
from hf_l2l.runtime import stream
from hf_l2l.stash import spill, tiers
from memory_switches import forced_copies, poisoned_releases
from models import Toy, attached, batch_for, gradients, train_once
from runs import UPDATED_BY, assert_same_run, assert_same_tensors, attach, config_for, train
from tiers import combinations, cpu_suffices, more, on_a_device
from training import SAVING, l2l_trainer, stopped_at_two, tiny_bert


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is read after it was given back is NaN, in every test here; folders of tests count as on a disk."""
    monkeypatch.setattr(spill, "is_in_memory", lambda folder: False)
    with poisoned_releases(), forced_copies():
        yield


def spilled_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


@cpu_suffices
@pytest.mark.parametrize(
    ("mode", "options"),
    combinations(
        UPDATED_BY,
        [
            {"ubatch_size": None},
            {"cmp": "bf16", "accumulation": 2},
            {"boundary": "host", "gradient_slots": 1},
            *more({}, {"boundary": "host", "prefetch": False, "accumulation": 2}),
        ],
        together=1,
    ),
)
def test_weights_have_the_bits_of_a_stash_in_memory(mode, options, tmp_path):
    """With an uneven last micro-batch."""
    same = {"ubatch_size": 3, "steps": 2, "eps_update": mode, **options}
    found = train(stash="disk", spill_dir=tmp_path, **same)
    assert spilled_bytes(tmp_path) > 0
    assert_same_run(found, train(stash="host", **same))
    if "boundary" not in options:
        assert_same_run(found, train(stash="device", **same))


@cpu_suffices
def test_a_second_backward_and_forwards_without_one_use_the_same_room_again(tmp_path):
    model, *_ = attach(Toy(dropout=0.0), stash="disk", spill_dir=tmp_path, boundary="host")
    batch, sizes = batch_for(model, masked=False), []
    for _ in range(3):
        model(**batch)  # dropped
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward(retain_graph=True)
        once = gradients(model)
        loss.backward()
        assert_same_tensors(gradients(model), {name: 2 * value for name, value in once.items() if value is not None})
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


@on_a_device
@pytest.mark.parametrize(("where", "mode"), [("forward", "serial"), ("backward", "deferred")])
def test_a_disk_that_becomes_full_leaves_model_and_optimizer_usable(where, mode, tmp_path):
    losses: list[list[float]] = []
    for is_full in (True, False):
        folder = tmp_path / str(is_full)
        folder.mkdir()
        model, _, optimizer, batch = attach(
            tiny_bert(layers=3, dropout=0.0), boundary="host", eps_update=mode, stash="disk", spill_dir=folder
        )
        longer = {name: torch.cat([value, value]) for name, value in batch.items()}
        losses.append([])
        for turn in range(3):
            if is_full and turn == 1:
                # The rooms of the backward are one more than those of the forward.
                loss = model(**longer).loss if where == "backward" else None
                with full_disk(), pytest.raises(OSError, match="the stash on disk needs") as error:
                    loss.backward() if loss is not None else model(**longer)
                assert error.value.errno == errno.EFBIG
                del loss, error
                optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step(), optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]


class FillsUp(hf.TrainerCallback):
    """From the first step on, no file gets longer."""

    def on_step_begin(self, *args: Any, **more: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@cpu_suffices
def test_the_last_checkpoint_is_intact_after_a_full_disk(tmp_path):
    whole = l2l_trainer(tmp_path / "whole", **SAVING, ubatch_size=3)
    whole.train()
    spilled, folder = tmp_path / "spilled", tmp_path / "parts"
    spilled.mkdir()
    on_disk = {"ubatch_size": 3, "stash": "disk", "l2l_spill_dir": str(spilled)}
    checkpoint = stopped_at_two(l2l_trainer, folder, **on_disk)
    before = {file.name: file.read_bytes() for file in Path(checkpoint).iterdir()}
    failing = l2l_trainer(folder, model=tiny_bert(), **SAVING, **on_disk, callbacks=[FillsUp()])
    with full_disk(), pytest.raises(OSError, match="l2l_spill_dir"):
        failing.train(resume_from_checkpoint=checkpoint)
    assert {file.name: file.read_bytes() for file in Path(checkpoint).iterdir()} == before
    resumed = l2l_trainer(folder, model=tiny_bert(), **SAVING, **on_disk)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert_same_run(resumed, whole)


# ---- chosen by size


LAYER_INPUT = 8 * 6 * 8 * 4
"""Bytes of what one layer of a `Toy` gets for a batch of 8 rows of 6 tokens."""


@on_a_device
def test_auto_changes_with_the_length_of_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "memory_of", lambda device: 3 * 8 * LAYER_INPUT)
    monkeypatch.setattr(tiers, "available_host_bytes", lambda: 0)
    model, eps, _, short = attach(Toy(dropout=0.0), stash="auto", spill_dir=tmp_path, boundary="device")
    plain, *_ = attach(Toy(dropout=0.0), stash="device")
    longer, grown = {name: torch.cat([value] * 4) for name, value in short.items()}, []
    for batch in (short, longer, short, longer):
        before = spilled_bytes(tmp_path)
        for each in (model, plain):
            each.zero_grad()
            train_once(each, batch)
        grown.append(spilled_bytes(tmp_path) > before)
        assert_same_tensors(gradients(model), gradients(plain))
    assert grown == [False, True, False, False]  # the last one has the room of the second


@on_a_device
def test_what_the_first_step_will_take():
    model = Toy()
    for dtype, moments in (("fp32", 8), ("bf16", 4)):
        eps = attach_l2l(model, config_for(model, device=DEVICE, moment_dtype=dtype))
        count = sum(p.numel() for p in model.parameters())
        assert eps.bytes_of_first_step() == (4 + moments) * count
        optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
        train_once(model, batch_for(model, masked=False))
        assert eps.bytes_of_first_step() == moments * count
        optimizer.step()
        eps.synchronize()
        assert eps.bytes_of_first_step() == 0
        detach_l2l(model)
        model.zero_grad()


def test_outputs_that_the_program_reads(tmp_path):
    model, plain = (tiny_bert(layers=3, dropout=0.0) for _ in range(2))
    batch = batch_for(model)
    attached(model, device=DEVICE, ubatch_size=3, stash="disk", spill_dir=tmp_path, boundary="host")
    states = model(**batch, output_hidden_states=True).hidden_states
    assert any(type(state) is not torch.Tensor for state in states)
    with torch.no_grad():
        expected = plain(**batch, output_hidden_states=True).hidden_states
        for found, those in zip(states, expected, strict=True):
            torch.testing.assert_close(found.cpu(), those, rtol=1e-5, atol=1e-5)
