"""What a layer was given is kept exactly as long as the graph, and the recompute uses what the forward used; on disk
it has the bits of a stash in memory, uses its room again, and survives a disk that fills up."""

from __future__ import annotations

import copy
import errno
import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from devices import DEVICE
from hf_l2l import attach_l2l, detach_l2l
from hf_l2l.runtime import stream
from hf_l2l.stash import spill, tiers
from hf_l2l.stash.stash import Stash
from memory_switches import forced_copies, poisoned_releases
from models import TOLERANCE, Toy, attached, batch_for, gradients, relative_error, train_once
from runs import UPDATED_BY, assert_same_run, assert_same_tensors, attach, config_for, train
from tiers import combinations, cpu_suffices, more, on_a_device
from training import SAVING, l2l_trainer, stopped_at_two, tiny_bert

FORMS = ["views", "copies"] if DEVICE == "cpu" else ["copies"]
PLACES = ({"stash": "device", "ubatch_size": None}, {"stash": "host"}, {"stash": "disk"})


@pytest.fixture
def apart() -> Iterator[None]:
    """Tensors are copied on the CPU, too, as on a device with memory of its own; what was given back is NaN."""
    with poisoned_releases(), forced_copies():
        yield


@pytest.fixture(autouse=True)
def _on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of tests count as such, wherever they are."""
    monkeypatch.setattr(spill, "is_in_memory", lambda folder: False)


def in_folder(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {**options, "spill_dir": folder} if options["stash"] == "disk" else options


def spilled_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


# ---- how long they live


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StorageWeakRef]]:
    """The memory of what every layer call keeps; the garbage collector is off meanwhile."""
    found: list[StorageWeakRef] = []
    keeping = Stash.keeping

    @contextmanager
    def watch(self: Stash, tensors: list[torch.Tensor], batched: list[bool]) -> Iterator[list[torch.Tensor]]:
        with keeping(self, tensors, batched) as kept:
            found.extend(StorageWeakRef(t.untyped_storage()) for t in kept)
            yield kept

    monkeypatch.setattr(Stash, "keeping", watch)
    gc.disable()
    try:
        yield found
    finally:
        gc.enable()


def alive(memory: list[StorageWeakRef]) -> int:
    assert memory
    if DEVICE != "cpu":
        torch.get_device_module(DEVICE).synchronize()
    return sum(not each.expired() for each in memory)


@cpu_suffices
@pytest.mark.parametrize("options", PLACES, ids=str)
def test_they_live_as_long_as_the_graph(options, apart, monkeypatch, tmp_path):
    """Freed by the backward that used them, with a batch that is thrown away, and after an error in a later layer;
    kept for a second backward."""
    model, _, _, batch = attach(Toy(2, dropout=0.0), **in_folder(options, tmp_path))
    with watched(monkeypatch) as memory:
        loss = model(**batch).loss
        loss.backward(retain_graph=True)
        assert alive(memory) == len(memory)
        once = gradients(model)
        loss.backward()
        assert alive(memory) == 0 and loss.grad_fn is not None
        memory.clear()
        assert_same_tensors(gradients(model), {name: 2 * gradient for name, gradient in once.items()})
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()

        out = model(**batch)
        assert alive(memory) == len(memory)
        del out
        assert alive(memory) == 0
        memory.clear()

        def fail(*args: object) -> None:
            raise KeyError("from the user's hook")

        model.blocks[1].down.register_forward_hook(fail)
        try:
            model(**batch)
        except KeyError as error:
            error.__traceback__ = None
        assert alive(memory) == 0


@pytest.mark.parametrize("options", PLACES[1:], ids=str)
def test_a_graph_outlives_the_engine(options, tmp_path):
    model, _, _, batch = attach(Toy(2, dropout=0.0), **in_folder(options, tmp_path))
    loss = model(**batch).loss
    detach_l2l(model)
    assert not list(tmp_path.iterdir())
    loss.backward()
    found = gradients(model)
    model.zero_grad()
    model(**batch).loss.backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(found[name].cpu(), gradient)


# ---- changes between the sweeps


@pytest.mark.parametrize("stash", ["device", "host"])
def test_an_input_changed_in_place_is_found_out_unless_its_copy_is_on_the_host(stash, apart):
    model, _, _, batch = attach(Toy(2, dropout=0.0).double(), stash=stash, ubatch_size=None)
    given: list[torch.Tensor] = []
    model.blocks[0].register_forward_hook(lambda block, args, out: given.append(out))
    model(**batch).loss.backward()
    expected = gradients(model)
    model.zero_grad()
    given.clear()
    loss = model(**batch).loss
    with torch.no_grad():
        given[-1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace") if stash == "device" else nullcontext():
        loss.backward()
    if stash == "host":
        assert relative_error(gradients(model), expected) <= TOLERANCE[torch.float64]


class Overwriting(nn.LayerNorm):
    """Overwrites what the layer that it begins is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.add_(self.weight))


@pytest.mark.parametrize(
    ("ubatch_size", "frozen", "stash", "form"),
    combinations([None, 2], [False, True], ["device", "host"], FORMS, together=2),
)
def test_a_layer_that_overwrites_its_input_is_refused_in_training(ubatch_size, frozen, stash, form):
    """Whether the input needs a gradient or not."""
    plain = Toy(2, dropout=0.0)
    plain.blocks[1].norm = Overwriting(8)
    if frozen:
        plain.embed.requires_grad_(False)
        plain.blocks[0].requires_grad_(False)
    copies = forced_copies() if form == "copies" else nullcontext()
    # The simulated accelerator finds that the input is being downloaded.
    with copies, pytest.raises(RuntimeError, match="in.?place|write-after-read race"):
        ours, _, _, batch = attach(copy.deepcopy(plain.double()), stash=stash, ubatch_size=ubatch_size)
        loss = ours(**batch).loss
        torch.testing.assert_close(loss.cpu(), plain(**batch).loss)
        loss.backward()


# ---- on disk


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
def test_weights_have_the_bits_of_a_stash_in_memory(mode, options, apart, tmp_path):
    """With an uneven last micro-batch."""
    same = {"ubatch_size": 3, "eps_update": mode, **options}
    found = train(stash="disk", spill_dir=tmp_path, **same)
    assert spilled_bytes(tmp_path) > 0
    assert_same_run(found, train(stash="host", **same))
    if "boundary" not in options:
        assert_same_run(found, train(stash="device", **same))


@cpu_suffices
def test_a_second_backward_and_forwards_without_one_use_the_same_room_again(apart, tmp_path):
    model, _, _, batch = attach(Toy(dropout=0.0), stash="disk", spill_dir=tmp_path, boundary="host")
    sizes = []
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
def test_a_disk_that_becomes_full_leaves_model_and_optimizer_usable(where, mode, tmp_path, apart):
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
def test_the_last_checkpoint_is_intact_after_a_full_disk(tmp_path, apart):
    folder, spilled = tmp_path / "parts", tmp_path / "spilled"
    spilled.mkdir()
    on_disk = {"stash": "disk", "l2l_spill_dir": str(spilled)}

    def made(folder: Path, **options: Any) -> hf.Trainer:
        return l2l_trainer(folder, model=tiny_bert(layers=2), ubatch_size=3, **{**SAVING, **options})

    whole = made(tmp_path / "whole")
    whole.train()
    checkpoint = stopped_at_two(made, folder, **on_disk)
    before = {file.name: file.read_bytes() for file in Path(checkpoint).iterdir()}
    with full_disk(), pytest.raises(OSError, match="l2l_spill_dir"):
        made(folder, **on_disk, callbacks=[FillsUp()]).train(resume_from_checkpoint=checkpoint)
    assert {file.name: file.read_bytes() for file in Path(checkpoint).iterdir()} == before
    resumed = made(folder, **on_disk)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert_same_run(resumed, whole)


# ---- chosen by size


LAYER_INPUT = 8 * 6 * 8 * 4
"""Bytes of what one layer of a `Toy` gets for a batch."""


@on_a_device
def test_auto_changes_with_the_length_of_batches(tmp_path, apart, monkeypatch):
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
def test_what_the_first_step_will_take(apart):
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


def test_outputs_that_the_program_reads(tmp_path, apart):
    model, plain = (tiny_bert(layers=3, dropout=0.0) for _ in range(2))
    batch = batch_for(model)
    attached(model, device=DEVICE, ubatch_size=3, stash="disk", spill_dir=tmp_path, boundary="host")
    states = model(**batch, output_hidden_states=True).hidden_states
    assert any(type(state) is not torch.Tensor for state in states)
    with torch.no_grad():
        expected = plain(**batch, output_hidden_states=True).hidden_states
        for found, those in zip(states, expected, strict=True):
            torch.testing.assert_close(found.cpu(), those, rtol=1e-5, atol=1e-5)
