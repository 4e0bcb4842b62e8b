"""Masters and optimizer state on disk: the same bits as in memory, a bounded window, nothing left behind."""

from __future__ import annotations

import copy
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l import L2LConfig, Lamb, attach_l2l, detach_l2l, estimate
from hf_l2l.hf.attach import attach_new, attachment_of
from hf_l2l.state_tier import files, server
from hf_l2l.state_tier.files import Segment
from training import batch_for, tiny_bert

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "lamb": lambda p: Lamb(p, lr=1e-2),
}


@pytest.fixture(autouse=True)
def on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of tests count as such, wherever they are."""
    monkeypatch.setattr(server, "is_in_memory", lambda folder: False)
    monkeypatch.setattr("hf_l2l.state_tier.state._SMALL", 64)  # models of tests are small


def model_of(width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return tiny_bert(layers=4, width=width)


def steps(model: nn.Module, eps: Any, optimizer: torch.optim.Optimizer, count: int, *, clips: bool = True) -> None:
    batch = batch_for(model)
    model.train()
    for number in range(count):
        torch.manual_seed(number)
        model(**batch).loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    eps.synchronize()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            found[f"{name} {key}"] = torch.as_tensor(value).clone()
    return found


def trained(kind: str = "adamw", count: int = 3, **options: Any) -> dict[str, torch.Tensor]:
    model = model_of()
    eps = attach_l2l(model, L2LConfig(device="cpu", **options))
    optimizer = eps.wrap(OPTIMIZERS[kind](model.parameters()))
    steps(model, eps, optimizer, count, clips=options.get("eps_update") != "eager")
    return everything(model, optimizer)


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.one_in(5)
@pytest.mark.parametrize("mode", ["serial", "deferred", "eager"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_bits_are_those_of_state_in_memory(kind, mode, tmp_path):
    same = {"eps_update": mode, "ubatch_size": 3}
    found = trained(kind, state_tier="disk", state_dir=tmp_path, state_window=3, **same)
    assert_same(found, trained(kind, **same))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        {"cmp": "bf16"},
        {"cmp": "bf16", "host_copies": "per_sweep"},
        {"moment_dtype": "bf16", "grad_dtype": "16bit", "eps_update": "deferred"},
        {"stash": "disk"},
    ],
    ids=str,
)
def test_with_other_options(options, tmp_path):
    assert_same(trained(state_tier="disk", state_dir=tmp_path, state_window=3, **options), trained(**options))


def test_a_resumed_training_has_the_bits_of_the_unbroken_one(tmp_path):
    """State that is loaded moves to disk, and what is saved is what a training in memory saves."""
    expected = trained(count=4)
    model = model_of()
    eps = attach_l2l(model, L2LConfig(state_tier="disk", state_dir=tmp_path))
    optimizer = eps.wrap(OPTIMIZERS["adamw"](model.parameters()))
    steps(model, eps, optimizer, 2)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    detach_l2l(model)

    other = model_of()
    other.load_state_dict(weights)
    eps = attach_l2l(other, L2LConfig(state_tier="disk", state_dir=tmp_path))
    optimizer = eps.wrap(OPTIMIZERS["adamw"](other.parameters()))
    optimizer.load_state_dict(state)
    on_disk = eps.state.kept_of(optimizer)
    moments = [value for of in optimizer.state.values() for key, value in of.items() if key != "step"]
    assert len([value for value in moments if value in on_disk]) >= 0.5 * len(moments)
    batch = batch_for(other)
    other.train()
    for number in (2, 3):
        torch.manual_seed(number)
        other(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        optimizer.step()
    eps.synchronize()
    assert_same(everything(other, optimizer), expected)


def test_what_the_program_changes_counts(tmp_path):
    """Weights and moments that are written in place, or replaced, between steps."""

    def changed(**options: Any) -> dict[str, torch.Tensor]:
        model = model_of()
        eps = attach_l2l(model, L2LConfig(**options))
        optimizer = eps.wrap(OPTIMIZERS["adamw"](model.parameters()))
        steps(model, eps, optimizer, 1)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
                optimizer.state[p]["exp_avg"].mul_(0.25)
                optimizer.state[p]["exp_avg_sq"] = optimizer.state[p]["exp_avg_sq"] * 2
        steps(model, eps, optimizer, 2)
        return everything(model, optimizer)

    assert_same(changed(state_tier="disk", state_dir=tmp_path, state_window=3), changed())


def test_the_window_holds_its_layers(tmp_path):
    """Masters and moments of all layers pass through it, and the report names it instead of them."""
    model = model_of()
    eps = attach_l2l(model, L2LConfig(state_tier="disk", state_dir=tmp_path, state_window=3))
    optimizer = eps.wrap(OPTIMIZERS["adamw"](model.parameters()))
    steps(model, eps, optimizer, 2)
    window, parts = eps.state.window, eps.state.parts
    layer = max(part.num_bytes for part in parts if part.in_layer)
    assert window.limit == max(3 * layer, max(part.num_bytes for part in parts) + layer)
    assert 0 < window.peak <= window.limit < sum(part.num_bytes for part in parts)
    assert window.bytes_read > 0 and window.bytes_written > 0
    host = eps.memory_report()["host"]
    assert host["window of state on disk"]["peak"] == window.peak
    assert host["masters"]["now"] == 0


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether the tensor is in a file without a name."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            where, *_, name = line.split(None, 5)
            low, high = (int(each, 16) for each in where.split("-"))
            if low <= tensor.data_ptr() < high:
                return name.rstrip().endswith("(deleted)")
    return False


def test_parameters_with_other_memory_move_to_disk_again(tmp_path):
    """transformers resizes an embedding by giving its parameter other memory; what is frozen has its own file."""
    model = model_of()
    eps = attach_l2l(model, L2LConfig(state_tier="disk", state_dir=tmp_path))
    model.resize_token_embeddings(64)
    embedding = model.get_input_embeddings().weight
    assert not is_mapped(embedding) and embedding not in eps.state.on_disk
    optimizer = eps.wrap(OPTIMIZERS["adamw"](model.parameters()))
    steps(model, eps, optimizer, 1)
    assert is_mapped(embedding) and embedding in eps.state.on_disk
    for p in model.bert.encoder.layer[0].parameters():
        p.requires_grad_(False)
    steps(model, eps, optimizer, 1)
    part = next(part for part in eps.state.parts if part.in_layer)
    assert part.frozen and not part.weights and all(is_mapped(p) for p in model.parameters())


def passed_per_step(model: nn.Module, eps: Any, optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    """Bytes that a step reads and writes, the mean of some: what one writes last may be counted for the next."""
    window, count = eps.state.window, 5
    before = window.bytes_read, window.bytes_written
    steps(model, eps, optimizer, count)
    after = window.bytes_read, window.bytes_written
    return tuple((now - then) / count for then, now in zip(before, after, strict=True))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("frozen", ["embeddings", "layers", "base"])
def test_frozen_parameters_are_read_and_not_written(tmp_path, frozen):
    def trains(name: str) -> bool:
        if frozen == "embeddings":
            return "embeddings" not in name
        return "layer.0." not in name and "layer.1." not in name if frozen == "layers" else "bias" in name

    def run(**options: Any) -> tuple[Any, ...]:
        model = model_of(width=128)
        for name, p in model.named_parameters():
            p.requires_grad_(trains(name))
        config = L2LConfig(**options)
        optimizer = OPTIMIZERS["adamw"](p for p in model.parameters() if p.requires_grad)
        found = estimate(model, config, optimizer)
        eps = attach_l2l(model, config)
        eps.wrap(optimizer)
        steps(model, eps, optimizer, 3)
        return everything(model, optimizer), found, passed_per_step(model, eps, optimizer) if options else (0, 0)

    expected, _, _ = run()
    found, estimated, measured = run(state_tier="disk", state_dir=tmp_path, state_window=3)
    assert_same(found, expected)
    assert measured == pytest.approx(estimated.state_traffic[1:3], rel=0.1)


class _Packed(torch.Tensor):
    """A tensor of another kind, as quantized moments are: its values are elsewhere."""


def test_state_of_other_kinds_stays_what_it_is(tmp_path):
    model = model_of()
    eps = attach_l2l(model, L2LConfig(state_tier="disk", state_dir=tmp_path))
    optimizer = eps.wrap(OPTIMIZERS["adamw"](model.parameters()))
    steps(model, eps, optimizer, 1)
    p = next(iter(model.parameters()))
    packed = optimizer.state[p]["exp_avg"].clone().as_subclass(_Packed)
    optimizer.state[p]["exp_avg"] = packed
    eps.state.keep_all(optimizer)
    assert optimizer.state[p]["exp_avg"] is packed


def test_a_limit_of_open_files_is_told_before_anything_moves(tmp_path, monkeypatch):
    monkeypatch.setattr(server.resource, "getrlimit", lambda kind: (16, 64))
    with pytest.raises(ValueError, match=r"opens files for each layer, here up to \d+ \(got a limit of 64\)"):
        attach_l2l(model_of(), L2LConfig(state_tier="disk", state_dir=tmp_path))


def test_a_folder_that_cannot_be_written_is_told_for_inference_too(tmp_path):
    """Before the model is changed."""
    model, config = model_of(), L2LConfig(state_tier="disk", state_dir=tmp_path / "missing", device="cpu")
    with pytest.raises(ValueError, match="state_dir must be a folder in which a file can be written"):
        attach_new(model, config, trains=False)
    assert attachment_of(model) is None


def test_an_optimizer_that_is_made_anew_takes_no_more_of_the_window(tmp_path):
    model = model_of()
    eps = attach_l2l(model, L2LConfig(state_tier="disk", state_dir=tmp_path))
    old = eps.wrap(OPTIMIZERS["adamw"](model.parameters()))
    steps(model, eps, old, 1)
    limit = eps.state.window.limit
    new = eps.wrap(OPTIMIZERS["adamw"](model.parameters()))
    steps(model, eps, new, 1)
    assert eps.state.window.limit == limit


def test_tied_weights_are_there_once(tmp_path):
    model = model_of()
    layers = model.bert.encoder.layer
    layers[1].output.dense.weight = layers[0].output.dense.weight
    eps = attach_l2l(model, L2LConfig(state_tier="disk", state_dir=tmp_path))
    optimizer = eps.wrap(OPTIMIZERS["adamw"](model.parameters()))
    steps(model, eps, optimizer, 1)
    counted = [m.parameter for part in eps.state.parts for m in part.masters]
    assert len(counted) == len(set(counted)) == len(list(model.parameters()))


def test_after_detach_the_model_trains_on(tmp_path):
    """Its weights stay in their files, which have no names."""
    model = model_of()
    eps = attach_l2l(model, L2LConfig(state_tier="disk", state_dir=tmp_path))
    optimizer = eps.wrap(OPTIMIZERS["adamw"](model.parameters()))
    steps(model, eps, optimizer, 1)
    detach_l2l(model)
    torch.manual_seed(0)
    model(**batch_for(model)).loss.backward()
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_ends_the_training_with_its_error(tmp_path, monkeypatch):
    model = model_of()
    eps = attach_l2l(model, L2LConfig(state_tier="disk", state_dir=tmp_path, state_window=3))
    optimizer = eps.wrap(OPTIMIZERS["adamw"](model.parameters()))

    def broken(file: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.fdatasync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        steps(model, eps, optimizer, 3)


def test_an_optimizer_that_needs_all_layers_at_once_is_refused(tmp_path):
    model = model_of()
    eps = attach_l2l(model, L2LConfig(state_tier="disk", state_dir=tmp_path))
    with pytest.raises(ValueError, match="state_tier='disk' .* layer at a time, but LBFGS|closure"):
        eps.wrap(torch.optim.LBFGS(model.parameters()))
    optimizer = eps.wrap(OPTIMIZERS["adamw"](model.parameters()))
    with pytest.raises(ValueError, match="state_tier='disk' .* takes no closure"):
        optimizer.step(lambda: 0.0)


def test_folders_of_the_option_are_relative_to_the_program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert server.state_folder("here") == str(Path(tmp_path, "here"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("window", [3, 4, 8])
@pytest.mark.parametrize("kind", ["adamw", "foreach", "sgd"])
def test_the_estimate_knows_the_window(kind, window, tmp_path):
    """And what a step reads and writes, in pages, before the run."""
    model = model_of(width=128)
    config = L2LConfig(state_tier="disk", state_dir=tmp_path, state_window=window)
    optimizer = OPTIMIZERS[kind](model.parameters())
    found = estimate(model, config, optimizer)
    eps = attach_l2l(model, config)
    eps.wrap(optimizer)
    steps(model, eps, optimizer, 3)
    measured = passed_per_step(model, eps, optimizer)
    assert found.state_traffic[1:3] == pytest.approx(measured, rel=0.1)
    assert found.state_window == pytest.approx(eps.state.window.peak, rel=0.05)
    assert found.on_disk == pytest.approx(sum(part.num_bytes for part in eps.state.parts), rel=0.05)
    assert found.host_bytes == found.state_window + found.gradients


def test_state_is_on_disk_before_the_next_update_uses_it(tmp_path, monkeypatch):
    """Though another thread makes that: the file of the first state takes its time."""
    is_slow = threading.Event()
    make, slow_ones = Segment.__init__, [0.0, 0.0, 0.5]

    def slow(segment: Segment, folder: str, num_bytes: int, **how: Any) -> None:
        make(segment, folder, num_bytes, **how)
        if is_slow.is_set() and slow_ones:
            time.sleep(slow_ones.pop())

    expected = trained(eps_update="deferred", num_threads=2)
    with monkeypatch.context() as patch:
        patch.setattr(Segment, "__init__", slow)
        model = model_of()
        config = L2LConfig(device="cpu", eps_update="deferred", num_threads=2, state_tier="disk", state_dir=tmp_path)
        eps = attach_l2l(model, config)
        optimizer = eps.wrap(OPTIMIZERS["adamw"](model.parameters()))
        is_slow.set()
        steps(model, eps, optimizer, 3, clips=True)
        assert_same(everything(model, optimizer), expected)


def test_a_disk_that_has_failed_is_told_until_the_end(tmp_path, monkeypatch):
    """By each forward and by `synchronize`; the report goes on, and `detach_l2l` warns."""
    model = model_of()
    eps = attach_l2l(model, L2LConfig(device="cpu", state_tier="disk", state_dir=tmp_path, state_window=3))
    optimizer = eps.wrap(OPTIMIZERS["adamw"](model.parameters()))
    steps(model, eps, optimizer, 1)
    with monkeypatch.context() as patch:
        patch.setattr(
            files.os, "fdatasync", lambda descriptor: (_ for _ in ()).throw(OSError(5, "Input/output error"))
        )
        with pytest.raises(OSError, match="Input/output error"):
            steps(model, eps, optimizer, 2)
            eps.synchronize()
    eps.memory_report()
    for _ in range(2):
        with pytest.raises(OSError, match="must be written and read .*Input/output error.*resume from a checkpoint"):
            eps.synchronize()
        with pytest.raises(OSError, match="Input/output error"):
            model(**batch_for(model))
    with pytest.warns(UserWarning, match="may be those of an earlier step"):
        detach_l2l(model)


def test_files_of_parts_that_are_no_more_are_gone(tmp_path):
    """As when a program freezes parameters, and trains them again."""
    model = model_of()
    eps = attach_l2l(model, L2LConfig(device="cpu", state_tier="disk", state_dir=tmp_path))
    optimizer = eps.wrap(OPTIMIZERS["adamw"](model.parameters()))
    counts = []
    for step in range(8):
        model.bert.encoder.layer[0].requires_grad_(step % 2 == 0)
        steps(model, eps, optimizer, 1)
        eps.synchronize()
        gc.collect()
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    assert counts[3] >= counts[5] >= counts[7] and counts[2] >= counts[4] >= counts[6]


def test_state_on_disk_is_for_masters_on_the_host():
    with pytest.raises(ValueError, match="state_tier='disk' is for masters that are on the host"):
        L2LConfig(state_tier="disk", resident="all")


def test_the_room_is_that_of_the_optimizer(tmp_path, monkeypatch):
    """One without state needs none beside the masters."""
    model = model_of()
    free = SimpleNamespace(free=int(1.2 * sum(p.nbytes for p in model.parameters())))
    monkeypatch.setattr(server.shutil, "disk_usage", lambda folder: free)
    eps = attach_l2l(model, L2LConfig(device="cpu", state_tier="disk", state_dir=tmp_path))
    with pytest.raises(ValueError, match="state_dir must have room for optimizer state, .* are free.; make space"):
        eps.wrap(OPTIMIZERS["adamw"](model.parameters()))
    steps(model, eps, eps.wrap(OPTIMIZERS["sgd"](model.parameters())), 1)
