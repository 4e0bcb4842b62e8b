"""Logits in chunks on several devices, which compute every n-th chunk each."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional

from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.logits import chunks
from hf_l2l.testing import enable_simulated_accelerator
from models import SMALL, VOCAB
from pipelined import Trained, devices, trained
from tiers import more, nightly

MODES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"stash": "host", "boundary": "host"},
    "bf16": {"cmp": "bf16"},
    "all resident": {"resident": "all"},
}
ROWS, LENGTH = 8, 48
"""Three chunks of 128 tokens."""


@pytest.fixture(autouse=True)
def _four() -> Iterator[None]:
    enable_simulated_accelerator(devices=4)
    yield
    enable_simulated_accelerator()


def _llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, num_key_value_heads=1, tie_word_embeddings=False))


def _bert() -> nn.Module:
    """Its head has a bias that is trained."""
    return hf.BertForMaskedLM(hf.BertConfig(**SMALL, tie_word_embeddings=False))


FAMILIES = {"llama": _llama, "bert": _bert}
CASES = [("llama", "host", 3), *more(("bert", "bf16", 2), ("bert", "device", 2), ("llama", "all resident", 2))]


def batch(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(step)
    ids = torch.randint(2, VOCAB, (ROWS - step % 2, LENGTH), generator=drawn).to("sim:0")
    return {"input_ids": ids, "labels": ids.masked_fill(ids % 5 == 0, -100)}


@cache
def model_of(family: str) -> nn.Module:
    torch.manual_seed(1)
    return FAMILIES[family]()


def run(family: str, count: int, mode: str, **options: Any) -> Trained:
    return trained(
        copy.deepcopy(model_of(family)), count, steps=2, batches=batch, **{"ubatch_size": 4, **MODES[mode], **options}
    )


def far(one: Trained, other: Trained) -> float:
    return max(float((one.weights[n] - other.weights[n]).abs().max()) for n in one.weights)


@nightly
@pytest.mark.parametrize(("family", "mode", "count"), CASES)
def test_chunks_on_several_devices_have_the_gradients_of_one(family, mode, count, monkeypatch):
    placed = []
    send = chunks.Place.send
    for kind in chunks.Place.__subclasses__():
        of_other = kind.send
        monkeypatch.setattr(kind, "send", lambda at, t, send=of_other: placed.append(at.device) or send(at, t))
    assert send is chunks.Place.send
    found = run(family, count, mode)
    assert {str(device) for device in placed} == {*devices(count)[1:]}
    one = run(family, 1, mode)
    # The gradients of the head are added in another order.
    assert far(found, one) < (1e-2 if mode == "bf16" else 1e-5)
    for loss, expected in zip(found.losses, one.losses, strict=True):
        torch.testing.assert_close(loss, expected)
    assert not found.differences(run(family, count, mode)), "a training can be repeated"
    # Nothing has another order if the first device computes all of them.
    assert not run(family, count, mode, head_device="first").differences(one)


def _head(count: int, **options: Any) -> nn.Module:
    model = copy.deepcopy(model_of("llama"))
    attach_l2l(model, L2LConfig(device=devices(count), ubatch_size=4, **options))
    return model.eval()


@pytest.mark.parametrize("frozen", [False, True], ids=["weights of classes", "a frozen head has no sums"])
def test_what_each_device_needs_is_copied_to_it(frozen):
    losses, gradients = [], []
    for count in (1, 3):
        model = _head(count)
        model.lm_head.requires_grad_(not frozen)
        given = batch(model, 0)
        logits = model(input_ids=given["input_ids"]).logits.flatten(0, 1)
        weight = torch.linspace(0.5, 1.5, VOCAB).to("sim:0")
        loss = functional.cross_entropy(logits, given["labels"].flatten(), weight, label_smoothing=0.1)
        loss.backward()
        losses.append(loss.detach().cpu())
        detach_l2l(model)
        assert (model.lm_head.weight.grad is None) == frozen
        gradients.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
        assert not frozen or torch.equal(one, other), "no sums differ"
    torch.testing.assert_close(*losses)


def test_few_rows_stay_on_the_first_device(monkeypatch):
    monkeypatch.setattr(chunks.Place, "send", lambda *given: pytest.fail("one chunk is not sent"))
    model = _head(4)
    ids = torch.zeros(2, LENGTH, dtype=torch.long, device="sim:0")
    model(input_ids=ids, labels=ids).loss.backward()
    detach_l2l(model)


def test_without_peer_access_the_head_stays_on_the_first_device(caplog):
    enable_simulated_accelerator(devices=2, peer_access=False)
    with caplog.at_level(logging.DEBUG, "hf_l2l"):
        found = run("llama", 2, "device")
    assert "logits are computed on sim:0 alone" in caplog.text
    assert not found.differences(run("llama", 1, "device"))


def test_the_devices_compute_chunks_at_the_same_time():
    """No wait of the first device lies between a chunk that it computes and the next one."""
    model = _head(2)
    given = batch(model, 0)
    order: list[str] = []
    linear = chunks.Head.linear

    def recorded(head: chunks.Head, hidden: torch.Tensor) -> torch.Tensor:
        if len(hidden) > 1:
            order.append(str(hidden.device))
        return linear(head, hidden)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks.Head, "linear", recorded)
        model(**given).loss.backward()
    detach_l2l(model)
    assert order == ["sim:0", "sim:1", "sim:0"] * 2
