"""What a training holds on the device, and what travels to it and back."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import accumulated
from accumulated import ragged, tiny_llama
from hf_l2l import L2LConfig, attach_l2l, detach_l2l, estimate
from hf_l2l.testing import Costs, VirtualClock, virtual_clock
from models import batch_for, bert, llama, t5
from tiers import more, nightly
from training import settled_memory


def on_clock() -> AbstractContextManager[VirtualClock]:
    """A machine whose link takes a second for a byte, and that does all else at once."""
    return virtual_clock(Costs(link_bytes_per_s=1.0, flop_per_s=math.inf, host_bytes_per_s=math.inf))


def travelled(clock: VirtualClock) -> tuple[int, int]:
    """Bytes up and down so far."""
    lanes = {"upload": 0.0, "download": 0.0}
    for task in clock.tasks:
        if task.lane in lanes:
            lanes[task.lane] += task.end - task.start
    return round(lanes["upload"]), round(lanes["download"])


def bytes_of(*modules: nn.Module) -> int:
    return sum(p.nbytes for module in modules for p in module.parameters())


# ---- accumulated batches that run as one

ROWS, LAYERS = 8, 3


class AtSteps(hf.TrainerCallback):
    """What has travelled when each step ends."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock, self.found = clock, list[tuple[int, int]]()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        for p in model.parameters():
            p.detach()  # waits for its update
        self.found.append(travelled(self.clock))


def bytes_of_a_step(folder: Path, count: int, **options: Any) -> tuple[int, int]:
    """Bytes up and down in a second step of the same rows in `count` batches."""
    with on_clock() as clock:
        at_steps = AtSteps(clock)
        made = accumulated.made(
            folder,
            model=tiny_llama(layers=LAYERS),
            data=ragged(longest=6, shortest=6),
            per_device_train_batch_size=ROWS // count,
            gradient_accumulation_steps=count,
            max_steps=2,
            of_trainer={"callbacks": [at_steps]},
            **options,
        )
        accumulated.train(made)
    (up, down), (more_up, more_down) = at_steps.found
    return more_up - up, more_down - down


@pytest.mark.parametrize("options", [{}, *more({"stash": "host"}, {"stash": "host", "l2l_boundary": "host"})], ids=str)
def test_what_travels_grows_with_the_number_of_batches_only_if_they_run_one_by_one(tmp_path, options):
    merged = bytes_of_a_step(tmp_path, 4, **options)
    for count in more(2):
        assert bytes_of_a_step(tmp_path, count, **options) == merged
    model = tiny_llama(layers=LAYERS)
    weights, layer = bytes_of(model), bytes_of(model.model.layers[0])
    # The rows of batches that run one by one take fewer ways through the host.
    rows = ROWS * 6 * 16 * 4 * LAYERS if options.get("l2l_boundary") == "host" else 0
    for count in (4, *more(2)):  # the layers but the last two are uploaded in both sweeps
        up, down = bytes_of_a_step(tmp_path, count, **options, l2l_merge_accumulation="off")
        assert up - merged[0] >= (count - 1) * (weights + (LAYERS - 2) * layer)
        assert down - merged[1] >= (count - 1) * weights - rows


# ---- generation


def test_each_layer_is_uploaded_once_per_forward():
    """With a key-value cache, and micro-batches."""
    model = tiny_llama(layers=4).eval()
    prompt, calls = torch.randint(5, 60, (2, 5)).to("sim"), []
    attach_l2l(model, L2LConfig(ubatch_size=1))
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    options = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
    with on_clock() as clock:
        model.generate(prompt, **options)
    up, _ = travelled(clock)
    weights, layer = bytes_of(model), bytes_of(model.model.layers[0])
    assert len(calls) == 6
    # The last two layers of a forward are still in their slots when the next one begins.
    assert len(calls) * (weights - 2 * layer) <= up < len(calls) * (weights + layer / 2)


# ---- what a program keeps

STEPS = 4
KEPT: list[dict[str, Any]] = [
    {"stash": "host", "boundary": "host", "ubatch_size": 3},
    {"cmp": "bf16", "ubatch_size": 3},
    {"eps_update": "eager", "stash": "host"},
    {"resident": "shell"},
    {"kept_graphs": 1, "kept_weights": 2},
]
FAMILIES = (llama, bert, t5)


def bytes_after_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, losses: list[Any], logits: list[Any]
) -> list[int]:
    """Bytes on the device after each step, of which the loss and the logits are kept."""
    found, total = [], 0
    for _ in range(STEPS):
        out = model(**batch)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = out.loss + total
        losses.append(out.loss)
        logits.append(out.logits)
        del out
        found.append(settled_memory())
    losses.append(total)
    return found


def growth(found: list[int]) -> int:
    """Bytes per step; the first ones make the optimizer's state, and what else is made once."""
    return (found[-1] - found[1]) // (STEPS - 2)


@pytest.mark.parametrize(("options", "family"), [(KEPT[4], bert), *more(*product(KEPT, FAMILIES))])
def test_kept_losses_and_outputs_keep_no_weights(options, family):
    """As in plain torch."""
    settled_memory()
    start, losses, logits = settled_memory(), list[Any](), list[Any]()
    plain = family().train().to("sim")
    batch = batch_for(plain)
    on_device = {name: value.to("sim") for name, value in batch.items()}
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = growth(bytes_after_steps(plain, sgd, on_device, losses, logits))
    model, losses, logits = family().train(), [], []
    eps = attach_l2l(model, L2LConfig(**options))
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    found = bytes_after_steps(model, optimizer, batch, losses, logits)
    # Numbers without which no node is there: an element for each weight outside the layers.
    assert growth(found) <= expected + 4 * 16
    detach_l2l(model)
    logits.clear()  # the last of them may be not yet computed, and need a weight for that
    del plain, on_device, sgd, model, optimizer, eps
    if "resident" not in options:  # whose graph refers to the parameters that were on the device, as in plain torch
        assert settled_memory() - start <= STEPS * (4 + 4 * 16) + 4


# ---- mixed precision


@pytest.mark.parametrize("precision", ["autocast", *more("fp32", "cmp")])
def test_the_loss_of_all_tokens_at_once_takes_twelve_bytes_per_token_and_entry_of_the_vocabulary(precision):
    entries, sizes = 4000, {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}

    def peak(tokens: int) -> int:
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=entries))
        attach_l2l(model, L2LConfig(cmp="bf16" if precision == "cmp" else None, chunked_loss="off"))
        ids = torch.randint(0, entries, (tokens // 16, 16))
        settled_memory()
        torch.accelerator.reset_peak_memory_stats()
        with torch.autocast("sim", dtype=torch.bfloat16, enabled=precision == "autocast"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return int(torch.accelerator.max_memory_allocated())

    assert (peak(256) - peak(128)) / (128 * entries) == pytest.approx(12.0, rel=0.01)


def wide_bert(width: int, heads: int) -> nn.Module:
    """Four layers, with dropout."""
    torch.manual_seed(0)
    config = hf.BertConfig(
        hidden_size=width,
        num_hidden_layers=4,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        vocab_size=1000,
        # The host's fused attention, which stands in for the device's, computes in fp32 where there is dropout.
        attn_implementation="eager",
    )
    return hf.BertForSequenceClassification(config)


def workspace(width: int, heads: int, rows: int, tokens: int, dtype: torch.dtype) -> int:
    """The most bytes that one micro-batch takes inside one layer, forward and backward, with plain torch; without the
    layer's output and its gradient."""
    layer = wide_bert(width, heads).bert.encoder.layer[0].to(dtype).to("sim")
    for p in layer.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    x = torch.randn(rows, tokens, width).to(dtype).to("sim").requires_grad_()
    before = settled_memory()
    torch.sim.reset_peak_memory_stats()
    out = layer(x)
    torch.autograd.backward(out[0] if isinstance(out, tuple) else out, torch.ones_like(x))
    torch.sim.synchronize()
    return int(torch.sim.max_memory_allocated()) - before - 2 * x.numel() * x.itemsize


@nightly  # of other sizes and models: tests/sim/test_estimate.py
@pytest.mark.parametrize(
    ("width", "heads", "ubatch_rows", "rows", "tokens"), [(128, 2, 4, 8, 64), (1024, 16, 32, 32, 128)]
)
def test_device_memory_is_what_the_formula_says_and_at_most_six_tenths_of_fp32(
    width, heads, ubatch_rows, rows, tokens
):
    """Up to the width of BERT-large."""
    rest = {}
    for cmp, grad_dtype, dtype in ((None, "fp32", torch.float32), ("bf16", "16bit", torch.bfloat16)):
        inside = workspace(width, heads, ubatch_rows, tokens, dtype)
        before = settled_memory()
        model = wide_bert(width, heads)
        config = L2LConfig(device="sim", cmp=cmp, grad_dtype=grad_dtype, ubatch_size=ubatch_rows)
        optimizer = attach_l2l(model, config).wrap(torch.optim.SGD(model.parameters()))
        batch = {"input_ids": torch.randint(5, 1000, (rows, tokens)), "labels": torch.zeros(rows, dtype=torch.long)}
        for _ in range(2):  # slots for gradients are taken in the first backward
            torch.sim.reset_peak_memory_stats()
            model(**batch).loss.backward()
            torch.sim.synchronize()
        peak = torch.sim.max_memory_allocated() - before
        need, boundary = estimate(model, config), rows * tokens * width * dtype.itemsize
        # Of the shell, the gradients come when the layers are done; four layer inputs in the stash, two layer outputs,
        # two in the graph of the embedding.
        formula = need.shell // 2 + need.slots + inside + (4 + 2 + 2) * boundary
        assert 0.95 <= peak / formula <= 1.05
        rest[cmp] = peak - need.shell // 2 - need.slots
        detach_l2l(model)
        del model, optimizer
    assert rest["bf16"] <= 0.6 * rest[None]
