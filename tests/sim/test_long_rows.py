"""Long rows: dense masks by name, those that no device could hold refused, memory that is linear in the tokens; and
what else it grows with, by the formulas of `benchmarks/memory.py`."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from benchmarks import memory
from benchmarks.memory_runs import Case, measured
from hf_l2l import L2LConfig, estimate
from hf_l2l.compat import mask_functions
from hf_l2l.runtime import stream
from models import SMALL, attached, t5, train_once
from runs import attach
from tiers import ALL, more, nightly
from training import settled_memory

ROWS, TOKENS = 4, 32


OF_GEMMA = {"num_hidden_layers": 4, "head_dim": 8, "sliding_window": 8}
OF_GEMMA["layer_types"] = ["sliding_attention", "full_attention"] * 2
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, {"num_key_value_heads": 1, "max_position_embeddings": TOKENS}),
    "gemma": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, {"num_key_value_heads": 1, **OF_GEMMA}),
    "bert": (hf.BertForMaskedLM, hf.BertConfig, {}),
}


def model_of(name: str, attention: str = "sdpa", **changes: Any) -> nn.Module:
    """Of Gemma, two layers with a sliding window, and two with full attention."""
    if name == "t5":
        return t5()
    kind, config, sizes = MODELS[name]
    return kind._from_config(config(**{**SMALL, **sizes, **changes}), attn_implementation=attention)


def rows_of(tokens: int = TOKENS, *, count: int = ROWS, padded: bool = False) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 60, (count, tokens), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padded:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][:, -2:] = 0
    return batch


DENSE = ROWS * TOKENS * TOKENS
"""Entries of a mask for all rows."""
MASKS: dict[str, tuple[str, str, dict[str, torch.Tensor], int]] = {
    # model, attention, batch, bytes of its masks
    "none": ("llama", "sdpa", rows_of(), 0),
    "padding": ("llama", "sdpa", rows_of(padded=True), DENSE),
    "causal": ("llama", "eager", rows_of(), 4 * DENSE),
    "window": ("gemma", "sdpa", rows_of(), TOKENS * TOKENS),
    "window and full": ("gemma", "eager", rows_of(padded=True), 2 * 4 * DENSE),
    # Of each stack, the bias of positions of two heads, which the layer above gets with the mask in it; at least.
    "t5": ("t5", "eager", rows_of(), 2 * TOKENS * TOKENS * 4),
}


@nightly
@pytest.mark.parametrize("name", MASKS)
def test_a_dense_mask_is_a_line_of_the_report(name):
    """Once for all layers and micro-batches, as long as the graph lives."""
    family, kind, batch, expected = MASKS[name]
    settled_memory()
    torch.accelerator.reset_peak_memory_stats()
    options = {"stash": "host", "boundary": "host"} if kind == "sdpa" else {"stash": "device"}
    model, eps, _, _ = attach(model_of(family, kind), ubatch_size=2, **options)
    loss = model(**batch).loss
    now = eps.memory_report()["device"]["mask"]["now"]
    assert now == expected or (name == "t5" and now > expected)
    loss.backward()
    del loss
    settled_memory()
    report = eps.memory_report()["device"]
    assert report["mask"]["now"] == 0
    for when in ("now", "peak"):
        assert sum(size[when] for name, size in report.items() if name != "total") == report["total"][when]


# ---- refused in advance


def of_this_size(
    model: nn.Module, num_bytes: int | None, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> nn.Module:
    """The model, on a device that says that its memory has so many bytes; None: it does not say."""
    with monkeypatch.context() as patch:
        patch.setattr(stream, "memory_of", lambda device: num_bytes)
        return attached(model, ubatch_size=2, **options)


@pytest.mark.parametrize("name", ["window", *more("padding", "causal")])
def test_a_mask_that_the_device_cannot_hold_is_refused_before_it_is_there(name, monkeypatch):
    """With gradients or without, and with labels or without."""
    family, kind, batch, num_bytes = MASKS[name]
    model = of_this_size(model_of(family, kind), num_bytes - 1, monkeypatch)
    before = dict(mask_functions())
    held = settled_memory()
    rows = 1 if name == "window" else ROWS
    size = f"rows {rows} x queries {TOKENS} x keys {TOKENS} take .* attn_implementation='{kind}'"
    for grad, given in ((True, batch), (False, batch), (True, {**batch, "labels": None})):
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=size):
            model(**given)
        assert settled_memory() == held
        assert dict(mask_functions()) == before, "transformers is as it was"
    of_this_size(model_of(family, kind), num_bytes, monkeypatch)(**batch)
    model = of_this_size(model_of("bert", "eager"), 4 * DENSE - 1, monkeypatch)
    with pytest.raises(ValueError, match="must fit"):
        model(**rows_of(padded=True))  # in both directions


def test_nothing_is_allocated_for_a_mask_that_is_refused(monkeypatch):
    """What the device has held at most are the embeddings, which are small beside the mask. Training goes on."""
    tokens, batch = 1024, rows_of()
    model = of_this_size(model_of("llama", max_position_embeddings=tokens), ROWS * tokens**2 // 2, monkeypatch)
    settled_memory()
    torch.accelerator.reset_peak_memory_stats()
    with pytest.raises(ValueError, match="must fit"):
        train_once(model, rows_of(tokens, padded=True))
    assert torch.accelerator.max_memory_allocated() < ROWS * tokens**2 // 4
    assert train_once(model, batch) == train_once(attached(copy.deepcopy(model), ubatch_size=2), batch)


def test_nothing_is_refused_without_a_mask_or_a_size(monkeypatch):
    for family, kind, mask in (
        ("llama", "sdpa", {}),
        ("llama", "sdpa", {"attention_mask": torch.ones(ROWS, TOKENS)}),
        ("bert", "sdpa", {}),
        ("bert", "eager", {}),
    ):
        model = of_this_size(model_of(family, kind), 1, monkeypatch, stash="device", boundary="device")
        train_once(model, rows_of() | mask)
    train_once(of_this_size(model_of("llama", "eager"), None, monkeypatch), rows_of())  # it does not say how much


# ---- memory against the tokens of a row


def bytes_per_token(width: int, inner: int, head: int) -> int:
    """Of the device, in bfloat16, with one row as the micro-batch and as many keys as queries: the larger part is what
    one layer keeps for its backward."""
    return 34 * width + 12 * inner + 4 * head


@nightly
@pytest.mark.parametrize(("width", "inner", "heads"), [(64, 172, 2), (128, 512, 2)])
def test_bytes_per_token_in_one_layer(width, inner, heads):
    """In proportion: attention that is fused keeps nothing for pairs of tokens."""
    sizes = {"hidden_size": width, "intermediate_size": inner, "max_position_embeddings": 1024}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    peaks = []
    for tokens in (512, 1024):
        model = attached(model_of("llama", **sizes), ubatch_size=1, stash="host", boundary="host", cmp="bf16")
        for _ in range(2):  # the second step
            settled_memory()
            torch.accelerator.reset_peak_memory_stats()
            model.zero_grad()
            train_once(model, rows_of(tokens, count=1))
        peaks.append(torch.accelerator.max_memory_allocated())
        del model
    expected = bytes_per_token(width, inner, width // heads)
    assert (peaks[1] - peaks[0]) / 512 == pytest.approx(expected, rel=0.02)


def test_a_context_of_512k_tokens_by_shapes():
    """The figures of docs/memory.md, for a model that is not there."""
    tokens = 512 * 1024
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(hf.LlamaConfig())
    config, need = model.config, estimate(model, L2LConfig(device="sim", cmp="bf16"))
    passed = tokens * config.hidden_size * 2
    found = {
        "host, masters, gradients, moments, copies": need.host_bytes,
        "host, stash": config.num_hidden_layers * passed,
        "host, what passes between layers, at most": 3 * passed,
        "device, shell and slots": need.device_bytes,
        "device, one row": tokens * bytes_per_token(config.hidden_size, config.intermediate_size, config.head_dim),
    }
    text = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    for name, size in found.items():
        assert f"| {name} | {size / 2**30:.1f} GiB |" in text, f"{name}: {size / 2**30:.1f}"


# ---- memory against depth, rows, words and tokens


TINY = Case("l2l", layers=2, hidden=32, vocab=200, rows=8, tokens=16, ubatch=4)


def peaks(case: Case, grows: str, sizes: tuple[int, ...]) -> list[Any]:
    """Bytes of the first and the second step, of each size."""
    return [measured(replace(case, **{grows: size}), torch.device("sim"))["peaks"] for size in sizes]


def test_depth_costs_nothing():
    # The comparison of recomputes has some numbers for each layer.
    found = peaks(replace(TINY, options={"check_recompute": "off"}), "layers", (6, 48) if ALL else (2, 4))
    assert found[0] == found[1], "in the first step and in the second one"


@nightly
@pytest.mark.parametrize(
    ("grows", "slope", "sizes", "rel", "hidden"),
    [
        # Once tokens fill a few chunks of logits: while one is computed, the hidden states of others travel.
        ("rows", memory.per_row, (32, 64, 256), 0.01, 32),
        ("vocab", memory.per_word, (1000, 16000, 128000), 0.05, 128),
        ("tokens", memory.per_token, (2**13, 2**15, 2**16), 0.05, 32),
    ],
)
def test_device_memory_grows_as_the_formula_says(grows, slope, sizes, rel, hidden):
    """A row costs its ids, labels and losses, a word its weights, gradients and one chunk of logits, and a token what
    one layer takes."""
    case = replace(memory.LONG if grows == "tokens" else replace(TINY, rows=24), hidden=hidden)
    first, *others = (each[-1] for each in peaks(case, grows, sizes))
    for size, found in zip(sizes[1:], others, strict=True):
        assert (found - first) / (size - sizes[0]) == pytest.approx(slope(case, torch.device("sim")), rel=rel)
