"""The boundary on the host, on a device with memory of its own: bytes, bits, and what travels when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from hf_l2l import L2LConfig, attach_l2l, estimate
from hf_l2l.eps import masters
from hf_l2l.hf import attach
from hf_l2l.logits import chunks
from hf_l2l.report.summary import summary
from hf_l2l.rows.host_rows import HostRows
from hf_l2l.runtime import stream
from hf_l2l.stash.boundary import Boundary
from hf_l2l.testing import sim_copies
from memory_switches import poisoned_releases
from models import attached, batch_for, bert, gradients, llama, relative_error, train_once
from tiers import combined
from training import settled_memory, tiny_bert, weights_after

WIDTH, TOKENS, UBATCH = 64, 16, 2
A = TOKENS * WIDTH * 4
"""Bytes of one layer output per row."""


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """What is read after it was given back is NaN, in every test here."""
    with poisoned_releases():
        yield


class Stack(nn.Module):
    """The layers of a BERT alone: what grows with the device batch is theirs."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        config = hf.BertConfig(
            hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=2 * WIDTH
        )
        config._attn_implementation = "sdpa"
        self.encoder = hf.models.bert.modeling_bert.BertEncoder(config)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.encoder(rows, attention_mask=None).last_hidden_state


def peak(rows: int, *, layers: int = 4, steps: int = 2, **options: Any) -> int:
    """Bytes of the device at the peak of a forward and backward; the gradient of the output is one number."""
    torch.manual_seed(0)
    model = attached(Stack(layers).eval(), ubatch_size=UBATCH, stash="host", **options)
    inputs = torch.randn(rows, TOKENS, WIDTH)
    for _ in range(steps):
        settled_memory()
        torch.accelerator.reset_peak_memory_stats()
        model(inputs).backward(torch.ones((), device="sim").expand(rows, TOKENS, WIDTH))
    return int(torch.accelerator.max_memory_allocated())


@pytest.mark.parametrize(("few", "many"), [(6, 10), pytest.param(16, 64, marks=pytest.mark.slow)])
def test_layers_need_memory_for_one_micro_batch(few, many):
    """What is left of the device batch are the inputs, and the output of the last layer."""
    on_device, on_host = (
        (peak(many, boundary=b) - peak(few, boundary=b)) / (many - few) / A for b in ("device", "host")
    )
    assert on_host <= 2.02 < on_device, f"{on_host:.2f} layer outputs per row, on the device {on_device:.2f}"


def slope(make: Any, **options: Any) -> float:
    """Layer outputs that one more row of the batch adds to the peak of a step."""

    def peak_of(rows: int) -> int:
        torch.manual_seed(0)
        model = attached(make(), ubatch_size=UBATCH, stash="host", **options)
        ids = torch.randint(5, 60, (rows, TOKENS), generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            settled_memory()
            torch.accelerator.reset_peak_memory_stats()
            model.zero_grad()
            model(input_ids=ids, labels=ids[:, 0] % 2 if "Sequence" in type(model).__name__ else ids).loss.backward()
        return int(torch.accelerator.max_memory_allocated())

    return (peak_of(56) - peak_of(24)) / 32 / A


def wide_bert() -> nn.Module:
    return bert(hidden_size=WIDTH, intermediate_size=2 * WIDTH)


WORDS = 60
HEADS = {"num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": WORDS}


def wide_llama() -> nn.Module:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(**HEADS, hidden_size=WIDTH, intermediate_size=2 * WIDTH, max_position_embeddings=TOKENS)
    )


def wide_gpt2() -> nn.Module:
    """With dropout between embedding and layers."""
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=WIDTH, n_layer=2, n_head=2, vocab_size=WORDS, n_positions=TOKENS))


def wide_t5() -> nn.Module:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            d_model=WIDTH,
            d_ff=2 * WIDTH,
            d_kv=32,
            num_heads=2,
            num_layers=2,
            vocab_size=WORDS,
            decoder_start_token_id=0,
        )
    )


def wide_mlm() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**HEADS, hidden_size=WIDTH, intermediate_size=2 * WIDTH))


@pytest.mark.at_most(4)
@pytest.mark.slow
@pytest.mark.parametrize("cmp", [None, "bf16"])
@pytest.mark.parametrize("make", [wide_bert, wide_llama, wide_gpt2, wide_t5, wide_mlm])
def test_the_device_batch_costs_its_ids(make, cmp):
    """And labels, and a loss per token: what is computed before and after the layers runs by micro-batches, too."""
    found = slope(make, boundary="host", cmp=cmp)
    assert found < 0.15, f"{found:.2f} layer outputs per row"


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("mode", "options"),
    combined(["serial", "deferred", "eager"], [{}, {"cmp": "bf16"}, {"resident": "shell"}], one_in=3),
)
def test_embeddings_by_micro_batches_are_trained(mode, options):
    """Three steps, against a boundary on the device: the gradient of the tables is summed in another order."""
    same = {"ubatch_size": 3, "stash": "host", "count": 3, "eps_update": mode, "clips": mode != "eager", **options}
    model = {"layers": 3, "dropout": 0.0}
    expected, found = (weights_after(tiny_bert(**model), boundary=b, **same) for b in ("device", "host"))
    assert relative_error(found, expected) < (2e-2 if "cmp" in options else 1e-5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("mode", "options"),
    combined(
        ["serial", "deferred", "eager"],
        [{}, {"cmp": "bf16", "resident": "shell"}, {"accumulation": 2, "grad_dtype": "16bit"}],
        one_in=3,
    ),
)
def test_a_final_norm_and_a_tied_head_by_micro_batches_are_trained(mode, options, monkeypatch):
    monkeypatch.setattr(chunks, "FEWEST_ROWS", 8)
    same = {"ubatch_size": 3, "stash": "host", "count": 2, "eps_update": mode, "clips": mode != "eager", **options}
    models = []
    for boundary in ("device", "host"):
        torch.manual_seed(0)
        models.append(weights_after(llama(tie_word_embeddings=True), boundary=boundary, **same))
    expected, found = models
    # AdamW makes much of rounding where a gradient is nearly 0.
    assert relative_error(found, expected) < (2e-2 if {"cmp", "grad_dtype"} & {*options} else 1e-4)


class Projected(nn.Module):
    """Uses a weight that is in no module that is called, beside what its layers return."""

    def __init__(self, use: Any) -> None:
        super().__init__()
        self.stack, self.box, self.use = Stack(2), nn.Linear(WIDTH, WIDTH, bias=False), use
        self.scale = nn.Linear(1, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.scale(self.use(self.stack(rows), self.box.weight).square().mean()[None])[0]


USES = {
    "matrix": lambda hidden, weight: hidden @ weight,
    "linear": lambda hidden, weight: nn.functional.linear(hidden, weight),
    "scale": lambda hidden, weight: hidden * weight[0],
    "as many tokens as rows": lambda hidden, weight: hidden + hidden.select(1, 0),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("name", "trains"), combined(USES, [True, False], one_in=2))
def test_a_large_weight_beside_rows_on_the_host_is_uploaded_first(name, trains, monkeypatch):
    monkeypatch.setattr(masters, "LARGE", WIDTH)
    found = []
    for boundary in ("device", "host"):
        torch.manual_seed(0)
        model = Projected(USES[name]).eval()
        model.box.requires_grad_(trains)
        attach_l2l(model, L2LConfig(ubatch_size=3, stash="host", boundary=boundary, device="sim"))
        inputs = torch.randn(TOKENS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            model.zero_grad()
            model(inputs).backward()
        found.append(gradients(model))
    assert relative_error(*reversed(found)) < 1e-5


def test_the_first_step_needs_no_more_than_later_ones():
    assert peak(12, boundary="host", steps=1) <= peak(12, boundary="host", steps=2) * 1.01


def test_depth_costs_nothing():
    assert peak(10, layers=6, boundary="host") == peak(10, layers=3, boundary="host")


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("options", "mode"),
    combined(
        [{}, {"cmp": "bf16"}, {"accumulation": 2, "gradient_slots": 1}], ["serial", "deferred", "eager"], one_in=3
    ),
)
def test_weights_have_the_bits_of_a_boundary_on_the_device(mode, options, monkeypatch):
    # The sums of what is computed by micro-batches outside the layers have another order.
    monkeypatch.setattr(attach, "run_by_rows", lambda modules, apart: set())
    same = {"ubatch_size": 3, "stash": "host", "count": 3, "eps_update": mode, "clips": mode != "eager", **options}
    expected, found = (weights_after(tiny_bert(layers=3), boundary=b, **same) for b in ("device", "host"))
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_each_row_travels_once_in_each_direction():
    """Per layer: its output down, and up for the next layer; in the backward its input up once more, and gradients."""
    model = attached(Stack(4).eval(), ubatch_size=UBATCH, stash="host", boundary="host", device="sim")
    inputs = torch.randn(8, TOKENS, WIDTH)
    counts = []
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            counts.append(_count_rows(patch))
            model(inputs).sum().backward()
    # Layer 0 gets a device tensor, which is stashed, and whose gradient stays there; layer 3 returns one.
    assert counts[1] == {"down": (3 + 1 + 3) * 8, "up": (3 + 4 + 3) * 8}


def _count_rows(patch: pytest.MonkeyPatch) -> dict[str, int]:
    counts = {"down": 0, "up": 0}
    copy_ = sim_copies.copy

    def counting(source: torch.Tensor, target: torch.Tensor, *rest: Any) -> None:
        crosses = (source.device.type == "cpu") != (target.device.type == "cpu")
        if crosses and source.shape[1:] == (TOKENS, WIDTH) and not (source.is_cpu and source.shape[0] == 8):
            counts["up" if source.is_cpu else "down"] += source.shape[0]
        copy_(source, target, *rest)

    patch.setattr(sim_copies, "copy", counting)
    return counts


@pytest.mark.parametrize("capacity", ["64 MiB", "64 GiB"])
def test_auto_is_the_host_where_the_device_is_small(capacity, monkeypatch):
    num_bytes = {"64 MiB": 64 * 2**20, "64 GiB": 64 * 2**30}[capacity]
    monkeypatch.setattr(stream, "memory_of", lambda device: num_bytes)
    rows = 2**20 // A * 3  # the output of a layer has 3 MiB
    model = attached(Stack(2).eval(), ubatch_size=rows // 2, stash="host", device="sim")
    kinds = []
    model.encoder.layer[0].register_forward_hook(lambda module, args, output: kinds.append(type(output)))
    model(torch.randn(rows, TOKENS, WIDTH))
    assert kinds == [HostRows if capacity == "64 MiB" else torch.Tensor]


def test_a_device_that_does_not_say_how_much_memory_it_has_keeps_the_boundary(monkeypatch):
    monkeypatch.setattr(stream, "memory_of", lambda device: None)
    boundary = Boundary(L2LConfig(stash="host"), [torch.device("sim", 0)])
    assert boundary.after(nn.Linear(1, 1), lambda: True) is None


@pytest.mark.parametrize("where", ["download", "upload"])
def test_a_transfer_that_fails_leaves_the_model_usable(where, monkeypatch):
    model = tiny_bert(layers=3, dropout=0.0)
    batch = batch_for(model)
    attach_l2l(model, L2LConfig(ubatch_size=2, stash="host", boundary="host"))
    train_once(model, batch)
    expected = model.bert.encoder.layer[0].output.dense.weight.grad.clone()
    copy_, seen = sim_copies.copy, []

    def failing(source: torch.Tensor, target: torch.Tensor, *rest: Any) -> None:
        down = target.device.type == "cpu"
        if source.dim() == 3 and source.shape[0] == 2 and down == (where == "download"):
            seen.append(1)
            if len(seen) == 3:
                raise RuntimeError("the link is gone")
        copy_(source, target, *rest)

    model.zero_grad()
    with monkeypatch.context() as patch:
        patch.setattr(sim_copies, "copy", failing)
        with pytest.raises(RuntimeError, match="the link is gone"):
            train_once(model, batch)
    model.zero_grad()
    train_once(model, batch)
    assert torch.equal(model.bert.encoder.layer[0].output.dense.weight.grad, expected)


def test_the_summary_says_where_the_boundary_is():
    model = tiny_bert()
    for boundary, text in (
        (
            "auto",
            "in host memory; what passes between layers is on the device if it is small, else with the stash",
        ),
        ("device", "in host memory; what passes between layers is on the device"),
        ("host", "in host memory, and so is what passes between layers"),
    ):
        config = L2LConfig(stash="host", boundary=boundary, device="sim")
        assert f"\n  Stash = {text}\n" in summary(model, config, estimate(model, config))
