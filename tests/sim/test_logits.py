"""Logits in chunks on a device that has memory of its own: what it holds, and that nothing else changes."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from torch import nn

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.logits import chunks
from models import SMALL, attached, gradients, relative_error
from tiers import combined
from training import settled_memory

HIDDEN = 16


def llama(vocab: int, *, tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    sizes = {**SMALL, "vocab_size": vocab, "num_key_value_heads": 1, "tie_word_embeddings": tied}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes))


def batch(rows: int, tokens: int, vocab: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocab, (rows, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def peak(model: nn.Module, rows: int, tokens: int) -> int:
    """Bytes of the device at the peak of the second forward and backward."""
    data = batch(rows, tokens, model.config.vocab_size)
    for _ in range(2):
        settled_memory()
        torch.accelerator.reset_peak_memory_stats()
        model.zero_grad()
        model(**data).loss.backward()
    return int(torch.accelerator.max_memory_allocated())


@pytest.mark.slow
@pytest.mark.parametrize("cmp", [None, "bf16"])
def test_bytes_do_not_grow_with_tokens_times_vocabulary(cmp, monkeypatch):
    """What more tokens add is of the hidden size, whatever the vocabulary."""
    monkeypatch.setattr(chunks, "FEWEST_ROWS", 16)

    def more(vocab: int, chunked_loss: str) -> int:
        model = attached(llama(vocab), chunked_loss=chunked_loss, stash="host", ubatch_size=1, cmp=cmp)
        return peak(model, 16, 64) - peak(model, 4, 64)

    few, many, whole = more(500, "auto"), more(4000, "auto"), more(4000, "off")
    tokens, entries = 12 * 64, 12 * 64 * 4000
    assert many - few < tokens * HIDDEN * 4, f"{few} bytes for 768 tokens more with 500 words, {many} with 4,000"
    assert whole >= 12 * entries - tokens * HIDDEN * 40  # what the log and the documents say


@pytest.mark.parametrize(("tied", "copies"), [(False, 2), (True, 3)])
def test_bytes_of_the_vocabulary(tied, copies, monkeypatch):
    """The weights of embedding and head, and their gradients; a chunk takes 12 bytes per row and word."""
    monkeypatch.setattr(chunks, "FEWEST_ROWS", 8)
    small, large = (
        peak(attached(llama(vocab, tied=tied), stash="host", ubatch_size=1), 4, 32) for vocab in (1000, 3000)
    )
    per_word = (large - small) / 2000
    chunk = 12 * 8
    assert per_word <= (2 * copies if not tied else copies) * HIDDEN * 4 + chunk + 8


def test_one_chunk_is_there_at_a_time(monkeypatch):
    """In the backward: the logits, their logarithmic softmax, and the gradients of both. The weights of embedding and
    head are there, and the gradient of the head, but not yet that of the embedding."""
    rows = 64
    monkeypatch.setattr(chunks, "FEWEST_ROWS", rows)
    small, large = (peak(attached(llama(vocab), stash="host", ubatch_size=1), 8, 32) for vocab in (1000, 3000))
    assert (large - small) / 2000 == pytest.approx(3 * HIDDEN * 4 + 4 * 4 * rows, rel=0.01)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("tied", "mode", "cmp"), combined([False, True], ["serial", "deferred", "eager"], [None, "bf16"], one_in=3)
)
def test_steps_in_chunks_are_those_of_whole_logits(cmp, mode, tied, monkeypatch):
    """Four steps of two accumulated micro-batches, clipped where the mode allows it."""
    monkeypatch.setattr(chunks, "FEWEST_ROWS", 5)

    def trained(chunked_loss: str) -> nn.Module:
        model = llama(60, tied=tied)
        config = L2LConfig(chunked_loss=chunked_loss, eps_update=mode, cmp=cmp, ubatch_size=3, stash="host")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        eps = attach_l2l(model, config)
        eps.wrap(optimizer)
        for _ in range(4):
            model(**batch(8, 6, 60)).loss.backward()
            if mode != "eager":
                eps.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        eps.synchronize()
        return model

    ours, plain = trained("auto"), trained("off")
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-2 if cmp else 1e-5, atol=2e-4 if cmp else 1e-6, msg=name)


def test_gradients_are_those_of_the_host(monkeypatch):
    monkeypatch.setattr(chunks, "FEWEST_ROWS", 5)
    model = llama(60)
    plain = copy.deepcopy(model)
    data = batch(8, 6, 60)
    expected = plain(**data).loss
    expected.backward()
    found = attached(model, ubatch_size=3)(**data).loss
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert relative_error(gradients(model), gradients(plain)) < 1e-5
