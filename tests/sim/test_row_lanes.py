"""What moves a few rows at a time outside the layers: embeddings, final norms, dropout, heads in chunks, the disk.

The same bits whenever copies land, every wait needed, and a model that stays usable after a transfer that fails.
"""

from __future__ import annotations

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
from models import assert_same_bits, batch_for, gradients, llama, train_once
from runs import attach, seed_all
from tiers import more
from training import settled_memory

ROWS = 60
ON_HOST: dict[str, Any] = {"ubatch_size": 25, "stash": "host", "boundary": "host"}
"""A chunk of the head, of 128 tokens, ends amid a micro-batch of 150."""


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is read after it was given back is NaN; test folders are on a disk."""
    monkeypatch.setattr(spill, "is_in_memory", lambda folder: False)
    with poisoned_releases():
        yield


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


# ---- waits


ROW_WAITS = {
    wait_reasons.OUTPUT_COMPUTED: ("llama", "host"),
    wait_reasons.OUTPUT_DOWNLOADED: ("llama", "disk"),
    wait_reasons.ROWS_DOWNLOADED: ("gpt2", "disk"),
    wait_reasons.ROWS_MEMORY_FREE: ("gpt2", "disk"),
    wait_reasons.ROWS_UPLOADED: ("gpt2", "host"),
}


@pytest.mark.parametrize(
    ("why", "kind", "place"),
    [
        *((why, *where) for why, where in ROW_WAITS.items()),
        *more(*((why, kind, "host") for why in ROW_WAITS for kind in MODELS if (kind, "host") != ROW_WAITS[why])),
    ],
)
def test_every_wait_is_needed(why, kind, place, monkeypatch, tmp_path):
    wanted = expected(kind)
    wait, found = stream.wait, set()

    def without(event: Any, reason: str, **options: Any) -> None:
        found.add(reason)
        if reason != why:
            wait(event, reason, **options)

    monkeypatch.setattr(stream, "wait", without)
    with pytest.raises((RuntimeError, AssertionError), match="sim stream|not finite|weight"):
        assert_same_bits(trained(kind, tmp_path if place == "disk" else None), wanted)
    assert why in found
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
