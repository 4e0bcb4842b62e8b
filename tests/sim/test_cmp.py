"""Cross mixed precision on a device that has memory of its own and computes beside the host."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from bf16_moments import trained
from cmp_cases import CASES, DTYPES, ROWS, assert_as_by_hand, by_hand, check_written_buffers, layer_to_layer
from hf_l2l import L2LConfig, attach_l2l, detach_l2l, estimate
from memory_switches import poisoned_releases
from training import settled_memory


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """What is read after it was given back is NaN, in every test here."""
    with poisoned_releases():
        yield


def check(cmp: str, rows: int, mode: str, steps: int, **options: Any) -> None:
    # Norms are the device's, which may differ from the host's in the last bit.
    max_norm = 0.0 if mode == "eager" else 0.5
    reference = layer_to_layer("serial", rows, max_norm, "sim", steps, cmp=cmp, **options)
    assert_as_by_hand(reference, layer_to_layer(mode, rows, max_norm, "sim", steps, cmp=cmp, **options))


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("rows", "options"),
    [(ROWS, {}), (2, {}), (2, {"grad_dtype": "16bit", "host_copies": "per_sweep", "gradient_slots": 1})],
)
@pytest.mark.parametrize(("cmp", "mode"), [case for case in CASES if case[1] != "serial"])
def test_bits_are_those_of_serial_updates(cmp, rows, mode, options):
    check(cmp, rows, mode, 3, **options)


@pytest.mark.at_most(4)
@pytest.mark.slow
@pytest.mark.parametrize("rows", [ROWS, 2])
@pytest.mark.parametrize(("cmp", "mode"), CASES)
def test_bits_over_a_hundred_steps(cmp, rows, mode):
    check(cmp, rows, mode, 100)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("grad_dtype", ["fp32", "16bit"])
@pytest.mark.parametrize(("cmp", "mode"), [("bf16", "eager"), ("fp16", "serial")])
def test_unclipped_bits_are_those_of_plain_torch_on_the_device(cmp, mode, grad_dtype):
    expected = by_hand(DTYPES[cmp], 2, 0.0, grad_dtype=grad_dtype, device="sim")
    assert_as_by_hand(expected, layer_to_layer(mode, 2, 0.0, "sim", cmp=cmp, grad_dtype=grad_dtype))


@pytest.mark.parametrize("mode", ["deferred", "eager"])
def test_moments_in_16_bits_have_the_bits_of_the_host(mode):
    reference, expected = trained("serial")
    model, optimizer = trained(mode, device="sim")
    torch.testing.assert_close(dict(model.named_parameters()), dict(reference.named_parameters()), rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict()["state"], expected.state_dict()["state"], rtol=0, atol=0)


# ---- device memory


@pytest.mark.parametrize("precision", ["fp32", "cmp", "autocast"])
def test_the_loss_of_all_tokens_at_once_takes_twelve_bytes_per_token_and_entry_of_the_vocabulary(precision):
    entries, sizes = 4000, {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}

    def peak(tokens: int) -> int:
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=entries))
        attach_l2l(model, L2LConfig(device="sim", cmp="bf16" if precision == "cmp" else None, chunked_loss="off"))
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
    layer = copy.deepcopy(wide_bert(width, heads).bert.encoder.layer[0]).to(dtype).to("sim")
    for p in layer.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    x = torch.randn(rows, tokens, width).to(dtype).to("sim").requires_grad_()
    before = settled_memory()
    torch.sim.reset_peak_memory_stats()
    out = layer(x)
    torch.autograd.backward(out[0] if isinstance(out, tuple) else out, torch.ones_like(x))
    torch.sim.synchronize()
    return int(torch.sim.max_memory_allocated()) - before - 2 * x.numel() * x.itemsize


def check_memory(width: int, heads: int, ubatch_rows: int, rows: int, tokens: int) -> None:
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


@pytest.mark.parametrize("ubatch_rows", [pytest.param(8, marks=pytest.mark.slow), 4])
def test_device_memory_is_what_the_formula_says_and_at_most_six_tenths_of_fp32(ubatch_rows):
    check_memory(128, 2, ubatch_rows, 8, 64)


@pytest.mark.slow
def test_device_memory_at_the_width_of_bert_large():
    check_memory(1024, 16, 32, 32, 128)


@pytest.mark.parametrize("mode", ["serial", "deferred", "eager"])
def test_buffers_that_layers_write_to_have_one_dtype_in_all_calls(mode):
    check_written_buffers(mode, "sim")
