"""Weights and rows travel while the device computes: the same bits whenever copies land, every wait needed, and a
model that stays usable after a transfer that fails."""

from __future__ import annotations

import copy
import gc
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as hf
from torch import nn

from hf_l2l import detach_l2l
from hf_l2l.logits import chunks
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.stash import spill
from hf_l2l.testing import copies_under_way, sim_copies, sim_stream
from memory_switches import land_the_rest, poisoned_releases
from models import Toy, assert_same_bits, attached, batch_for, gradients, llama, train_once
from placements import PLACEMENTS
from runs import UPDATED_BY, Run, assert_same_run, attach, seed_all, train
from tiers import ALL, combinations, more
from training import settled_memory, tiny_bert, weights_after

WAITS = (
    wait_reasons.WEIGHTS_UPLOADED,
    wait_reasons.WEIGHTS_MEMORY_FREE,
    wait_reasons.WEIGHT_SLOT_FREE,
    wait_reasons.MASTERS_READ,
    wait_reasons.GRADIENTS_COMPUTED,
    wait_reasons.GRADIENT_SLOT_FREE,
    wait_reasons.NORMS_DOWNLOADED,
    wait_reasons.GRADIENT_DOWNLOADED,
    wait_reasons.LAYER_GRADIENTS_DOWNLOADED,
    wait_reasons.FAILED_DOWNLOADS_FINISHED,
    wait_reasons.INPUT_COMPUTED,
    wait_reasons.INPUT_STASHED,
    wait_reasons.STASH_COPIES_FINISHED,
)
ROW_WAITS = {
    wait_reasons.OUTPUT_COMPUTED: ("llama", "host"),
    wait_reasons.OUTPUT_DOWNLOADED: ("llama", "disk"),
    wait_reasons.ROWS_DOWNLOADED: ("gpt2", "disk"),
    wait_reasons.ROWS_MEMORY_FREE: ("gpt2", "disk"),
    wait_reasons.ROWS_UPLOADED: ("gpt2", "host"),
}
"""Of what moves a few rows at a time outside the layers -> a model and a place of its rows."""


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is read after it was given back is NaN, in every test here; test folders are on a disk."""
    monkeypatch.setattr(spill, "is_in_memory", lambda folder: False)
    with poisoned_releases():
        yield


class Waits:
    """Every reason that something waited for, and those waits that are left out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, without: str = "") -> None:
        self.found: set[str] = set()
        original = stream.wait

        def wait(event: Any, why: str, **options: Any) -> None:
            self.found.add(why)
            if why != without:
                original(event, why, **options)

        monkeypatch.setattr(stream, "wait", wait)


def weights(**options: Any) -> dict[str, torch.Tensor]:
    return train(Toy(dropout=0.0), steps=2, accumulation=2, **options).weights


@cache
def on_the_host(max_norm: float) -> dict[str, torch.Tensor]:
    return weights(device="cpu", eps_update="serial", max_norm=max_norm)


def everything() -> None:
    """Raise or assert if anything is wrong in training, evaluation and after an error."""
    evaluate_and_write(tiny_bert(layers=3))
    eager = {"eps_update": "eager", "max_norm": 0.0}
    on_host = {"stash": "host", "ubatch_size": 3}
    plan = {"resident": "shell", "resident_layers": 1, "kept_weights": 2, "kept_graphs": 1}
    for options in ({}, eager, on_host, {**on_host, "boundary": "host"}, {"gradient_slots": 1}, plan):
        found = weights(**options)
        for name, value in on_the_host(options.get("max_norm", 0.5)).items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
    train(eps_update="serial", optimizer="SGD", steps=1, max_norm=0.0)
    fail_and_go_on(tiny_bert(layers=3, dropout=0.0))
    stop_half_way(tiny_bert(layers=3))


@pytest.mark.parametrize("why", WAITS)
def test_every_wait_is_needed(why, monkeypatch):
    waits = Waits(monkeypatch, without=why)
    with pytest.raises((RuntimeError, AssertionError), match="sim stream|not close|not finite"):
        everything()
    assert why in waits.found
    land_the_rest()


def evaluate_and_write(model: nn.Module) -> None:
    """Write into all masters while nothing has waited for what a forward computed."""
    attached(model.eval(), device="sim")
    with torch.no_grad():
        model(**batch_for(model))
        for p in model.parameters():
            p.mul_(2.0)
        model(**batch_for(model))


def fail_and_go_on(model: nn.Module) -> None:
    """Write into the gradients when a backward that was adding to them has failed."""
    batch, plain = batch_for(model), copy.deepcopy(model)
    attached(model, device="sim")
    train_once(model, batch)

    def fail(*args: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # when the layer is recomputed
            raise KeyError("from the user's hook")

    with model.bert.encoder.layer[0].output.dense.register_forward_pre_hook(fail), pytest.raises(KeyError):
        train_once(model, batch)
    for p in model.parameters():
        p.grad.zero_()
    for each in (model, plain):
        train_once(each, batch)
    torch.testing.assert_close(gradients(model), gradients(plain))


def stop_half_way(model: nn.Module) -> None:
    """Fetch what the next layer backwards would recompute from, and let there be no next layer."""
    attached(model, device="sim", stash="host")
    for _ in range(2):
        outputs = model(**batch_for(model), output_hidden_states=True)
        torch.autograd.grad(outputs.loss, outputs.hidden_states[1])


def test_all_waits_are_listed(monkeypatch):
    waits = Waits(monkeypatch)
    everything()
    weights(resident="all", loop="accelerate")
    # The copies that follow these make the host wait by themselves: the waits are there for the logs, and of several
    # devices for layers that compute on other streams.
    of_copies = {wait_reasons.RECOMPUTE_COMPARED, wait_reasons.NORMS_COMPUTED}
    assert waits.found == {*WAITS, *ROW_WAITS, *of_copies}


def test_weights_written_unseen_between_two_forwards_are_used():
    model = attached(tiny_bert(layers=2, dropout=0.0), device="sim").eval()
    batch = batch_for(model)
    with torch.no_grad():
        before = model(**batch).logits
        model.bert.encoder.layer[1].output.dense.weight.data.mul_(2.0)  # moves no version counter
        after = model(**batch).logits
        assert not torch.equal(before, after) and torch.equal(after.cpu(), copy.deepcopy(model)(**batch).logits)


# ---- what moves a few rows at a time outside the layers: embeddings, final norms, dropout, heads in chunks, the disk

ROWS = 60
ON_HOST: dict[str, Any] = {"ubatch_size": 25, "stash": "host", "boundary": "host"}
"""A chunk of the head, of 128 tokens, ends amid a micro-batch of 150."""


GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 60}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": partial(llama, tie_word_embeddings=True),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
}
"""The first with a final norm, and a tied head in chunks; the second with dropout between embedding and layers."""


def made(kind: str, folder: Path | None) -> tuple[Any, ...]:
    """A model under L2L, its EPS, an optimizer and a batch, with a stash in host memory or in a file in `folder`."""
    torch.manual_seed(3)
    on_disk = {} if folder is None else {"stash": "disk", "spill_dir": folder}
    model, eps, optimizer, _ = attach(MODELS[kind](), **{**ON_HOST, **on_disk})
    return model, eps, optimizer, batch_for(model, rows=ROWS)


def trained(kind: str, folder: Path | None = None) -> dict[str, torch.Tensor]:
    """The weights after two steps with accumulation."""
    model, eps, optimizer, batch = made(kind, folder)
    for _ in range(2):
        with eps.accumulate():
            model(**batch).loss.backward()
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


expected = cache(trained)


@pytest.mark.parametrize(
    ("why", "kind", "place"),
    [
        *((why, *where) for why, where in ROW_WAITS.items()),
        *more(*((why, kind, "host") for why in ROW_WAITS for kind in MODELS if (kind, "host") != ROW_WAITS[why])),
    ],
)
def test_every_wait_for_rows_is_needed(why, kind, place, monkeypatch, tmp_path):
    wanted = expected(kind)
    waits = Waits(monkeypatch, without=why)
    with pytest.raises((RuntimeError, AssertionError), match="sim stream|not finite|weight"):
        assert_same_bits(trained(kind, tmp_path if place == "disk" else None), wanted)
    assert why in waits.found
    land_the_rest()


@pytest.mark.parametrize(
    ("seed", "kind", "on_disk"),
    [(0, "llama", True), *more((1, "gpt2", False), (2, "llama", True), (3, "llama", False))],
)
def test_when_copies_of_rows_land_changes_no_bit(seed, kind, on_disk, tmp_path):
    wanted = expected(kind)
    with sim_stream.random_landing(seed):
        assert_same_bits(trained(kind, tmp_path if on_disk else None), wanted)


# ---- wherever weights, their state, graphs and stash are

PLACES: dict[str, dict[str, Any]] = {name: each.options for name, each in PLACEMENTS.items()}
PLACES |= {"stash on disk": {"stash": "disk"}, "all on disk": {"stash": "disk", "boundary": "host"}}
SOME = ("streamed", "boundary on the host", "layers, updated on the host", "some of each")


@cache
def with_late_copies(name: str, mode: str) -> Run:
    return train(**PLACES[name], eps_update=mode, accumulation=2, steps=2)


@pytest.mark.parametrize(
    ("name", "mode", "seed"),
    combinations(PLACES if ALL else SOME, UPDATED_BY, [0, *more(1, 2)], together=1, at_night=2),
)
def test_when_copies_land_changes_no_bit(name, mode, seed):
    with sim_stream.random_landing(seed):
        found = train(**PLACES[name], eps_update=mode, accumulation=2, steps=2)
    assert_same_run(found, with_late_copies(name, mode))


@pytest.mark.parametrize("seed", [0, *more(1, 2, 3)])
def test_when_copies_of_state_on_disk_land_changes_no_bit(seed, tmp_path):
    wanted = train(Toy(3, 32), steps=2)
    with sim_stream.random_landing(seed):
        found = train(Toy(3, 32), steps=2, state_tier="disk", state_dir=tmp_path, state_window=3)
    assert_same_run(found, wanted)


# ---- transfers that fail


class Broken(Exception):
    pass


@contextmanager
def failing_at(number: int, kind: str) -> Iterator[list[int]]:
    """Inside, the copy with this number of this kind raises; yields what counts down, copy by copy."""
    left, inside = [number], [False]
    span, copy_ = stream.span, sim_copies.copy

    @contextmanager
    def entered(device: torch.device, row: str, of: Any) -> Iterator[None]:
        with span(device, row, of):
            inside[0] = row == kind
            try:
                yield
            finally:
                inside[0] = False

    def copy(source: torch.Tensor, target: torch.Tensor, *rest: Any) -> None:
        if inside[0] and source.device != target.device:
            left[0] -= 1
            if left[0] == 0:
                raise Broken
        copy_(source, target, *rest)

    with mock.patch.object(stream, "span", entered), mock.patch.object(sim_copies, "copy", copy):
        yield left


@pytest.mark.parametrize("copies", ["stash upload", "stash download"])
@pytest.mark.parametrize(
    ("kind", "place", "every"),  # not a multiple of the micro-batches, so that each of them has its turn
    [("llama", "host", 17), *more(("llama", "host", 1), ("gpt2", "disk", 7))],
)
def test_a_transfer_that_fails_leaves_the_model_usable(copies, kind, place, every, tmp_path):
    """Each upload and each download of rows in a step fails once: of an embedding, of layers, of a norm or dropout, of
    a chunk of the head, and of their gradients."""
    model, _, _, batch = made(kind, tmp_path if place == "disk" else None)

    def step() -> dict[str, torch.Tensor | None]:
        seed_all()
        model.zero_grad()
        train_once(model, batch)
        return gradients(model)

    step()
    wanted = step()
    with failing_at(0, copies) as left:
        step()
    count = -left[0]
    model.zero_grad()
    held = settled_memory()
    assert count > 10
    for number in range(1, count + 1, every):
        with failing_at(number, copies), pytest.raises(Broken):
            step()
        assert_same_bits(step(), wanted)
        assert not copies_under_way()
        model.zero_grad()
        assert settled_memory() == held, number


@pytest.mark.parametrize("sweep", ["forward", "backward"])
def test_a_model_is_detached_after_its_head_has_failed(sweep, monkeypatch):
    """Hidden states of the next chunk are being uploaded then, to memory that is freed with the engine."""
    model, *_, batch = made("llama", None)
    loss = model(**batch).logits.logsumexp(-1).mean()  # whose backward makes the logits again
    of_none = chunks.Head.linear

    def fails(head: chunks.Head, hidden: torch.Tensor) -> torch.Tensor:
        if not len(hidden):
            return of_none(head, hidden)
        del head, hidden  # it keeps nothing that it is given
        raise KeyError("the head has failed")

    monkeypatch.setattr(chunks.Head, "linear", fails)
    with pytest.raises(KeyError):
        loss.backward() if sweep == "backward" else model(**batch)
    detach_l2l(model)
    del model, loss, _
    gc.collect()
    torch.sim.synchronize()


# ---- a device whose torch module has no streams of its own: torch's interface for any accelerator has them

SIM = torch.device("sim", 0)


class Like(types.ModuleType):
    """A module that has what another one has, but for some names, and some names of its own."""

    def __init__(self, other: types.ModuleType, *, without: tuple[str, ...] = (), **own: Any) -> None:
        super().__init__("like another")
        self.__dict__.update(own, other=other, without=without)

    def __getattr__(self, name: str) -> Any:
        if name in self.without:
            raise AttributeError(name)
        return getattr(self.other, name)


@pytest.fixture
def without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of the device has no names for streams."""
    of, bare = stream.device_module, Like(torch.sim, without=("Stream", "Event", "stream"))
    monkeypatch.setattr(stream, "device_module", lambda device: bare if device.type == "sim" else of(device))


OPTIONS: dict[str, Any] = {"count": 2, "stash": "host", "ubatch_size": 4}


@pytest.fixture(scope="module")
def usual() -> dict[str, torch.Tensor]:
    return weights_after(tiny_bert(layers=2), **OPTIONS)


def test_copies_run_beside_the_computation_with_the_same_bits(usual, without_streams, monkeypatch, tmp_path):
    """By `torch.accelerator` of a device in C++, with the streams of the simulated one."""
    made: list[str] = []

    def make_event(device: str, *, enable_timing: bool = False) -> Any:
        made.append("timed event" if enable_timing else "event")
        return torch.sim.Event(enable_timing=enable_timing)

    def make_stream(*, device: torch.device, priority: int) -> Any:
        made.append("stream")
        return torch.sim.Stream(device, priority)

    accelerator = Like(torch.accelerator, current_stream=lambda device: torch.sim.current_stream(device))
    monkeypatch.setattr(stream, "torch", Like(torch, accelerator=accelerator, Event=make_event, Stream=make_stream))
    assert stream.is_asynchronous(SIM)
    found = weights_after(tiny_bert(layers=2), **OPTIONS, trace=str(tmp_path / "trace.json"))
    assert made.count("stream") > 2 and made.count("timed event") > 20
    assert_same_bits(found, usual)


def test_a_backend_without_streams_computes_in_program_order(usual, without_streams):
    """torch then has one stream for the device, and no events."""
    assert not stream.is_asynchronous(SIM) and stream.record(SIM) is None
    assert_same_bits(weights_after(tiny_bert(layers=2), **OPTIONS), usual)


def test_memory_is_asked_of_the_module_or_of_torch(monkeypatch):
    module = types.ModuleType("torch.bare")
    monkeypatch.setattr(stream, "device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (30, 100))
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: {"reserved_bytes.all.current": 12})
    assert (stream.memory_of(SIM), stream.memory_free(SIM)) == (100, 42)
    module.mem_get_info = lambda device: (1, 7)
    assert (stream.memory_of(SIM), stream.memory_free(SIM)) == (7, 13)
    del module.mem_get_info
    monkeypatch.setattr(torch.accelerator, "get_memory_info", mock.Mock(side_effect=RuntimeError("it does not say")))
    assert (stream.memory_of(SIM), stream.memory_free(SIM)) == (None, None)
