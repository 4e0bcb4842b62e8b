"""What moves a few rows at a time outside the layers: embeddings, final norms, dropout, heads in chunks, the disk.

The same bits whenever copies land, every wait needed, and a model that stays usable after a transfer that fails.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from accumulated import tiny_llama
from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.logits import chunks
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.stash import spill
from hf_l2l.stash.stash import Stash
from hf_l2l.testing import copies_under_way, sim_copies, sim_stream
from memory_switches import land_the_rest, poisoned_releases
from models import SMALL, assert_same_bits, attached, batch_for, gradients, train_once
from training import settled_memory, weights_after

ON_HOST: dict[str, Any] = {"ubatch_size": 3, "stash": "host", "boundary": "host"}


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is read after it was given back is NaN; a chunk ends amid a micro-batch; test folders are on a disk."""
    monkeypatch.setattr(chunks, "FEWEST_ROWS", 16)
    monkeypatch.setattr(spill, "is_in_memory", lambda folder: False)
    with poisoned_releases():
        yield


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return make()


def llama(tied: bool = True) -> nn.Module:
    """With a final norm, and a head in chunks of 16 tokens."""
    sizes = {**SMALL, "num_key_value_heads": 1, "tie_word_embeddings": tied, "max_position_embeddings": 32}
    return seeded(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)))


def gpt2() -> nn.Module:
    """With dropout between embedding and layers."""
    config = hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, vocab_size=60)
    return seeded(lambda: hf.GPT2LMHeadModel(config))


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "gpt2": gpt2}


def trained(kind: str, folder: Path | None = None, **options: Any) -> dict[str, torch.Tensor]:
    """The weights after two steps with accumulation, with a stash in host memory or in a file in `folder`."""
    on_disk = {} if folder is None else {"stash": "disk", "spill_dir": folder}
    return weights_after(MODELS[kind](), count=2, accumulation=2, **{**ON_HOST, **on_disk, **options})


@cache
def expected(kind: str) -> dict[str, torch.Tensor]:
    return trained(kind)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", MODELS)
def test_rows_move_in_all_ways(kind, monkeypatch):
    moved: list[str] = []
    for name in ("fetch", "fetch_ahead", "send"):
        monkeypatch.setattr(Stash, name, _logged(name, getattr(Stash, name), moved))
    assert_same_bits(trained(kind), expected(kind))
    assert set(moved) == {"fetch", "fetch_ahead", "send"}


def test_it_trains_as_on_the_device():
    """The sums of what is computed by micro-batches outside the layers have another order."""
    for name, value in trained("llama", stash="device", boundary="device").items():
        torch.testing.assert_close(expected("llama")[name], value, rtol=1e-4, atol=1e-5)


def _logged(name: str, original: Callable[..., Any], log: list[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        log.append(name)
        return original(*args, **kwargs)

    return call


# ---- waits


ROW_WAITS = (
    wait_reasons.OUTPUT_COMPUTED,
    wait_reasons.OUTPUT_DOWNLOADED,
    wait_reasons.ROWS_DOWNLOADED,
    wait_reasons.ROWS_MEMORY_FREE,
    wait_reasons.ROWS_UPLOADED,
)


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("why", ROW_WAITS)
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


SEEDS = [seed if seed < 1 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(100)]


@pytest.mark.parametrize("seed", SEEDS)
def test_when_copies_land_changes_no_bit(seed, tmp_path):
    """Of a language model with a tied head; of every tenth seed, also on disk and with dropout."""
    wanted = expected("llama")
    with sim_stream.random_landing(seed):
        assert_same_bits(trained("llama"), wanted)
    if seed % 10 == 0:
        others = expected("gpt2")
        with sim_stream.random_landing(seed):
            assert_same_bits(trained("llama", tmp_path), wanted)
            assert_same_bits(trained("gpt2"), others)


def test_memory_that_is_used_again_for_rows_cut_in_another_way():
    """As when the gradients of a layer's rows make room for those of the chunks of a second head."""
    model = attached(llama(), device="sim", **ON_HOST)
    stash = model.model.layers[0]._hf_hook.runner.stash
    stash.start_forward()
    values = [torch.full((8, 1000), float(turn), device="sim") for turn in range(6)]
    places = []
    for turn, value in enumerate(values):
        rows = stash.rows_like(value[:3], 8)
        places.append(rows.rows.host.data_ptr())
        for start, stop in [(0, 3), (3, 6), (6, 8)] if turn < 3 else [(0, 4), (4, 8)]:
            stash.send(value[start:stop], rows.rows.host[start:stop])
        assert torch.equal(stash.fetch(rows.rows.host[3:6]), value[3:6])
    assert places[2] in places[3:]


# ---- transfers that fail


class Broken(Exception):
    pass


@contextmanager
def failing_at(number: int, name: str) -> Iterator[list[int]]:
    """Inside, the copy with this number that `Stash.<name>` makes raises; yields what counts down, copy by copy."""
    left, inside = [number], [False]
    original, copy_ = getattr(Stash, name), sim_copies.copy

    def entered(*args: Any) -> Any:
        inside[0] = True
        try:
            return original(*args)
        finally:
            inside[0] = False

    def copy(source: torch.Tensor, target: torch.Tensor, *rest: Any) -> None:
        if inside[0] and source.device != target.device:
            left[0] -= 1
            if left[0] == 0:
                raise Broken
        copy_(source, target, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stash, name, entered)
        patch.setattr(sim_copies, "copy", copy)
        yield left


@pytest.mark.at_most(8)
@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("place", "every"),
    [
        ("host", 7),  # not a multiple of the micro-batches, so that each of them has its turn
        pytest.param("host", 1, marks=pytest.mark.slow),
        pytest.param("disk", 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["_begin", "send", "_download"])
def test_a_transfer_that_fails_leaves_the_model_usable(name, kind, place, every, tmp_path):
    """Each upload (`_begin`) and each download (`send`, `_download`) of rows in a step fails once: of an embedding, of
    layers, of a norm or dropout, of a chunk of the head, and of their gradients."""
    model = MODELS[kind]()
    batch = batch_for(model)
    options = ON_HOST if place == "host" else {**ON_HOST, "stash": "disk", "spill_dir": tmp_path}
    attached(model, device="sim", **options)

    def step() -> dict[str, torch.Tensor | None]:
        torch.manual_seed(11)
        torch.sim.manual_seed(11)
        model.zero_grad()
        train_once(model, batch)
        return gradients(model)

    step()
    wanted = step()
    with failing_at(0, name) as left:
        step()
    count = -left[0]
    model.zero_grad()
    held = settled_memory()
    assert count > 10 or name == "_download" and count > 0
    for number in range(1, count + 1, every):
        with failing_at(number, name), pytest.raises(Broken):
            step()
        assert_same_bits(step(), wanted)
        assert not copies_under_way()
        model.zero_grad()
        if number % 8 == 1:
            assert settled_memory() == held, number


def test_a_model_is_detached_after_its_head_has_failed(monkeypatch):
    """Hidden states of the next chunk are being uploaded then, to memory that is freed with the engine."""
    model = tiny_llama(hidden_size=32)
    attach_l2l(model, L2LConfig(device="sim", stash="host", boundary="host", ubatch_size=1))
    ids = torch.ones(8, 32, dtype=torch.long)
    loss = model(input_ids=ids, labels=ids).loss

    def fails(*_: Any) -> Any:
        raise RuntimeError("the head has failed")

    monkeypatch.setattr("hf_l2l.logits.chunks._gradient_of_logits", fails)
    with pytest.raises(RuntimeError, match="the head has failed"):
        loss.backward()
    detach_l2l(model)
    del model, loss
    gc.collect()
    torch.sim.synchronize()
