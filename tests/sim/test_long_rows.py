"""Long rows: dense masks by name, those that no device could hold refused, and memory that is linear in the tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from families import attached, train_once
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.compat import mask_functions
from hf_l2l.runtime import stream
from training import settled_memory

WIDTH, ROWS, TOKENS = 16, 4, 32
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 60,
}
DENSE = ROWS * TOKENS * TOKENS
"""Entries of a mask for all rows."""


def llama(kind: str = "sdpa", *, tokens: int = TOKENS, **more: Any) -> nn.Module:
    config = hf.LlamaConfig(**{**SIZES, **more}, max_position_embeddings=tokens)
    return hf.LlamaForCausalLM._from_config(config, attn_implementation=kind)


def gemma(kind: str = "sdpa") -> nn.Module:
    """Two layers with a sliding window, and two with full attention."""
    sizes = {**SIZES, "num_hidden_layers": 4}
    layers = ["sliding_attention", "full_attention"] * 2
    config = hf.Gemma3TextConfig(**sizes, head_dim=8, sliding_window=8, layer_types=layers)
    return hf.Gemma3ForCausalLM._from_config(config, attn_implementation=kind)


def bert(kind: str = "sdpa") -> nn.Module:
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    return hf.BertForMaskedLM._from_config(hf.BertConfig(**sizes), attn_implementation=kind)


def t5(kind: str = "eager") -> nn.Module:
    config = hf.T5Config(d_model=WIDTH, d_ff=32, num_layers=2, num_heads=2, d_kv=8, vocab_size=60)
    config.decoder_start_token_id = 0
    return hf.T5ForConditionalGeneration._from_config(config, attn_implementation=kind)


def rows_of(tokens: int = TOKENS, *, count: int = ROWS, padded: bool = False) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 60, (count, tokens), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padded:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][:, -2:] = 0
    return batch


def packed(tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    """Two texts in each row, which positions tell apart."""
    positions = torch.arange(tokens) % (tokens // 2)
    return {**rows_of(tokens), "position_ids": positions.expand(ROWS, tokens).contiguous()}


MASKS = [
    # model, batch, bytes of its masks
    pytest.param(llama, "sdpa", rows_of(), 0, id="sdpa"),
    pytest.param(llama, "sdpa", rows_of(padded=True), DENSE, id="sdpa, padding"),
    pytest.param(llama, "sdpa", packed(), DENSE, id="sdpa, packed"),
    pytest.param(llama, "eager", rows_of(), 4 * DENSE, id="eager"),
    pytest.param(gemma, "sdpa", rows_of(), TOKENS * TOKENS, id="sdpa, window"),
    pytest.param(gemma, "eager", rows_of(padded=True), 2 * 4 * DENSE, id="eager, window and full"),
    pytest.param(bert, "eager", rows_of(), 0, id="eager, in both directions"),
    pytest.param(bert, "sdpa", rows_of(padded=True), DENSE, id="sdpa, in both directions, padding"),
    # Of each stack, the bias of positions, which the layer above gets with the mask in it.
    pytest.param(t5, "eager", rows_of(), None, id="t5"),
]


@pytest.mark.parametrize(("make", "kind", "batch", "expected"), MASKS)
@pytest.mark.parametrize("options", [{"stash": "device"}, {"stash": "host", "boundary": "host"}], ids=str)
def test_a_dense_mask_is_a_line_of_the_report(make, kind, batch, expected, options):
    """Once for all layers and micro-batches, as long as the graph lives."""
    settled_memory()
    torch.accelerator.reset_peak_memory_stats()
    model = make(kind)
    eps = attach_l2l(model, L2LConfig(ubatch_size=2, **options))
    loss = model(**batch).loss
    now = eps.memory_report()["device"]["mask"]["now"]
    if expected is None:
        assert now >= 2 * TOKENS * TOKENS * 4, "of two heads"
    else:
        assert now == expected
    loss.backward()
    del loss
    settled_memory()
    report = eps.memory_report()["device"]
    assert report["mask"]["now"] == 0
    for when in ("now", "peak"):
        assert sum(size[when] for name, size in report.items() if name != "total") == report["total"][when]


def test_a_long_dense_mask_is_what_the_peak_is_made_of():
    tokens, rows = 512, 2
    settled_memory()
    torch.accelerator.reset_peak_memory_stats()
    model = llama("eager", tokens=tokens)
    eps = attach_l2l(model, L2LConfig(ubatch_size=1, stash="host", boundary="host"))
    train_once(model, rows_of(tokens, count=rows))
    assert eps.memory_report()["device"]["mask"]["peak"] == 4 * rows * tokens * tokens


# ---- refused in advance


def of_this_size(model: nn.Module, num_bytes: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> nn.Module:
    """The model, on a device that says that its memory has so many bytes."""
    with monkeypatch.context() as patch:
        patch.setattr(stream, "memory_of", lambda device: num_bytes)
        return attached(model, ubatch_size=2, **options)


REFUSED = [
    pytest.param(llama, "sdpa", rows_of(padded=True), DENSE, ROWS, id="sdpa, padding"),
    pytest.param(llama, "sdpa", rows_of(padded=True) | {"labels": None}, DENSE, ROWS, id="without labels"),
    pytest.param(llama, "eager", rows_of(), 4 * DENSE, ROWS, id="eager"),
    pytest.param(gemma, "sdpa", rows_of(), TOKENS * TOKENS, 1, id="sdpa, window"),
    pytest.param(bert, "eager", rows_of(padded=True), 4 * DENSE, ROWS, id="eager, in both directions"),
]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("make", "kind", "batch", "num_bytes", "rows"), REFUSED)
def test_a_mask_that_the_device_cannot_hold_is_refused(make, kind, batch, num_bytes, rows, grad, monkeypatch):
    before = dict(mask_functions())
    model = of_this_size(make(kind), num_bytes - 1, monkeypatch)
    held = settled_memory()
    torch.accelerator.reset_peak_memory_stats()
    size = f"rows {rows} x queries {TOKENS} x keys {TOKENS} take .* attn_implementation='{kind}'"
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=size) as error:
        model(**batch)
    assert "\n" not in str(error.value) and "rows without padding" in str(error.value)
    del error
    assert settled_memory() == held
    assert dict(mask_functions()) == before, "transformers is as it was"
    model = of_this_size(make(kind), num_bytes, monkeypatch)
    model(**batch)


def test_nothing_is_allocated_for_a_mask_that_is_refused(monkeypatch):
    """What the device has held at most are the embeddings, which are small beside the mask."""
    tokens = 2048
    model = of_this_size(llama(tokens=tokens), ROWS * tokens * tokens // 2, monkeypatch)
    settled_memory()
    torch.accelerator.reset_peak_memory_stats()
    with pytest.raises(ValueError, match="the attention mask of a batch must fit"):
        model(**rows_of(tokens, padded=True))
    assert torch.accelerator.max_memory_allocated() < ROWS * tokens * tokens // 4


RUNS = [
    pytest.param(llama, "sdpa", rows_of(), id="sdpa"),
    pytest.param(llama, "sdpa", rows_of() | {"attention_mask": torch.ones(ROWS, TOKENS)}, id="sdpa, all ones"),
    pytest.param(bert, "sdpa", rows_of(), id="sdpa, in both directions"),
    pytest.param(bert, "eager", rows_of(), id="eager, in both directions"),
]


@pytest.mark.parametrize(("make", "kind", "batch"), RUNS)
def test_what_needs_no_mask_is_not_refused(make, kind, batch, monkeypatch):
    train_once(of_this_size(make(kind), 1, monkeypatch, stash="device", boundary="device"), batch)


def test_a_device_that_does_not_say_how_much_memory_it_has_refuses_nothing(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(stream, "memory_of", lambda device: None)
        model = attached(llama("eager"), ubatch_size=2)
    train_once(model, rows_of())


def test_the_model_goes_on_after_a_refusal(monkeypatch):
    torch.manual_seed(0)
    model = of_this_size(llama(), DENSE - 1, monkeypatch)
    expected = train_once(model, rows_of())
    model.zero_grad()
    with pytest.raises(ValueError, match="must fit"):
        train_once(model, rows_of(padded=True))
    assert train_once(model, rows_of()) == expected


# ---- memory against the tokens of a row


def peak_of_a_step(tokens: int, *, rows: int = 1, layers: int = 2) -> int:
    """Bytes of the device at the peak of a training step, the second one."""
    torch.manual_seed(0)
    model = attached(llama(tokens=tokens, num_hidden_layers=layers), ubatch_size=1, stash="host", boundary="host")
    batch = rows_of(tokens, count=rows)
    for _ in range(2):
        settled_memory()
        torch.accelerator.reset_peak_memory_stats()
        model.zero_grad()
        train_once(model, batch)
    return int(torch.accelerator.max_memory_allocated())


@pytest.mark.parametrize(
    "lengths",
    [(1024, 2048, 4096), pytest.param((16384, 32768, 65536), marks=pytest.mark.slow)],
    ids=str,
)
def test_device_memory_is_linear_in_the_tokens_of_a_row(lengths):
    """The bytes per further token are the same for the first and for the second step up, within 1 %."""
    found = [peak_of_a_step(tokens) for tokens in lengths]
    first, second = ((b - a) / (n - m) for a, b, m, n in zip(found, found[1:], lengths, lengths[1:], strict=False))
    assert abs(second / first - 1) < 0.01, f"{first:.0f} and {second:.0f} bytes per token"
