"""Weights and rows travel while the device computes: the same bits whenever copies land, every wait needed, and a
model that stays usable after a transfer that fails."""

from __future__ import annotations

import copy
import gc
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

from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.logits import chunks
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.stash import spill
from hf_l2l.testing import copies_under_way, sim_copies, sim_stream
from memory_switches import land_the_rest, poisoned_releases
from models import Toy, assert_same_bits, attached, batch_for, gradients, llama, train_once
from runs import attach, seed_all, train
from tiers import ALL, more
from training import settled_memory, tiny_bert

WAITS = (
    wait_reasons.WEIGHTS_UPLOADED,
    wait_reasons.WEIGHTS_MEMORY_FREE,
    wait_reasons.WEIGHT_SLOT_FREE,
    wait_reasons.MASTERS_READ,
    wait_reasons.GRADIENTS_COMPUTED,
    wait_reasons.GRADIENT_SLOT_FREE,
    wait_reasons.ALL_GRADIENTS_DOWNLOADED,
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
    for options in ({}, on_host, {**on_host, "boundary": "host"}, {"gradient_slots": 1}, plan, eager):
        found = weights(**options)
        for name, value in on_the_host(options.get("max_norm", 0.5)).items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
    train(eps_update="serial", optimizer="SGD", steps=1, max_norm=0.0)
    fail_and_go_on(tiny_bert(layers=3, dropout=0.0))
    stop_half_way(tiny_bert(layers=3))


@pytest.mark.parametrize("why", WAITS if ALL else WAITS[1::3])
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
    batch = batch_for(model)
    plain = copy.deepcopy(model)
    attached(model, device="sim")
    train_once(model, batch)
    first = model.bert.encoder.layer[0].output.dense

    def fail(*args: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # when the layer is recomputed
            raise KeyError("from the user's hook")

    with first.register_forward_pre_hook(fail), pytest.raises(KeyError):
        train_once(model, batch)
    for p in model.parameters():
        p.grad.zero_()
    train_once(model, batch)
    train_once(plain, batch)
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(model)[name], gradient)


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
        plain = copy.deepcopy(model)
        assert not torch.equal(before, after)
        assert torch.equal(after.cpu(), plain(**batch).logits)


# ---- what moves a few rows at a time outside the layers: embeddings, final norms, dropout, heads in chunks, the disk

ROWS = 60
ON_HOST: dict[str, Any] = {"ubatch_size": 25, "stash": "host", "boundary": "host"}
"""A chunk of the head, of 128 tokens, ends amid a micro-batch of 150."""


def gpt2() -> nn.Module:
    """With dropout between embedding and layers."""
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, vocab_size=60))


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": partial(llama, tie_word_embeddings=True), "gpt2": gpt2}
"""The first with a final norm, and a tied head in chunks."""


def options_of(folder: Path | None) -> dict[str, Any]:
    """Of a stash in host memory, or in a file in `folder`."""
    return ON_HOST if folder is None else {**ON_HOST, "stash": "disk", "spill_dir": folder}


def trained(kind: str, folder: Path | None = None, **options: Any) -> dict[str, torch.Tensor]:
    """The weights after two steps with accumulation."""
    torch.manual_seed(3)
    model, eps, optimizer, _ = attach(MODELS[kind](), **{**options_of(folder), **options})
    batch = batch_for(model, rows=ROWS)
    for _ in range(2):
        with eps.accumulate():
            model(**batch).loss.backward()
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@cache
def expected(kind: str) -> dict[str, torch.Tensor]:
    return trained(kind)


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
def test_when_copies_land_changes_no_bit(seed, kind, on_disk, tmp_path):
    wanted = expected(kind)
    with sim_stream.random_landing(seed):
        assert_same_bits(trained(kind, tmp_path if on_disk else None), wanted)


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
    torch.manual_seed(3)
    model, _, _, _ = attach(MODELS[kind](), **options_of(tmp_path if place == "disk" else None))
    batch = batch_for(model, rows=ROWS)

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


def test_a_model_is_detached_after_its_head_has_failed(monkeypatch):
    """Hidden states of the next chunk are being uploaded then, to memory that is freed with the engine."""
    model = MODELS["llama"]()
    attach_l2l(model, L2LConfig(device="sim", stash="host", boundary="host", ubatch_size=4))
    loss = model(**batch_for(model, rows=ROWS)).loss

    def fails(*_: Any) -> Any:
        raise KeyError("the head has failed")

    monkeypatch.setattr(chunks.Head, "linear", fails)
    with pytest.raises(KeyError):
        loss.backward()
    detach_l2l(model)
    del model, loss
    gc.collect()
    torch.sim.synchronize()
