"""What each of several devices holds at its peak, against the estimate; and its names in the report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.testing import enable_simulated_accelerator
from pipelined import devices

SIZES = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "vocab_size": 100}


def bert(layers: int) -> nn.Module:
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hf.BertForSequenceClassification(hf.BertConfig(**SIZES, **no_dropout, num_hidden_layers=layers))


def llama(layers: int) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=1, num_hidden_layers=layers))


def vocabulary(layers: int) -> nn.Module:
    """Most of it is the head, whose logits take more than a layer: eight chunks."""
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(**{**SIZES, "vocab_size": 3000}, num_key_value_heads=1, num_hidden_layers=layers)
    )


@pytest.fixture(autouse=True, scope="module")
def _four() -> Iterator[None]:
    enable_simulated_accelerator("4GB", devices=4)
    yield
    enable_simulated_accelerator()


def batch_of(make: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 100, (16, 64 if make is vocabulary else 32), generator=generator)
    labels = ids.clone() if make is not bert else torch.randint(0, 2, (16,), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


@pytest.mark.one_in(20)
@pytest.mark.parametrize(
    ("make", "layers", "options"),
    [
        (bert, 8, {}),
        (llama, 7, {"cmp": "bf16", "gradient_slots": 1}),
        (bert, 6, {"stash": "host", "boundary": "device"}),
        (llama, 6, {"stash": "host", "boundary": "host"}),
        (llama, 6, {"resident_layers": 3}),
        (bert, 5, {"kept_weights": 2}),
        (vocabulary, 6, {}),
        (vocabulary, 6, {"cmp": "bf16"}),
        (vocabulary, 6, {"stash": "host", "boundary": "host"}),
        (vocabulary, 6, {"head_device": "first"}),
    ],
    ids=lambda each: str(each) if isinstance(each, dict | int) else each.__name__,
)
@pytest.mark.parametrize("count", [2, 4])
def test_each_device_holds_what_was_estimated(make, layers, options, count):
    torch.manual_seed(0)
    model, batch = make(layers).train(), batch_of(make)
    config = L2LConfig(device=devices(count), ubatch_size=4, eps_update="serial", **options)
    optimizer = torch.optim.AdamW(model.parameters())
    run = RunShapes(model, config, batch, optimizer=optimizer, device=torch.device("sim:0"), devices=count)
    expected = [sum(run.on_device(config, number).peak()[1].values()) for number in range(count)]
    eps = attach_l2l(model, config)
    eps.wrap(optimizer)
    for step in range(4):
        if step == 2:
            for number in range(count):
                torch.accelerator.reset_peak_memory_stats(torch.device("sim", number))
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = [torch.accelerator.memory_stats(torch.device("sim", number)) for number in range(count)]
    found = [each["allocated_bytes.all.peak"] for each in stats]
    report = eps.memory_report()
    detach_l2l(model)
    assert found == pytest.approx(expected, rel=0.03)
    assert run.most(config) >= max(expected)
    tiers = ["device", *(f"sim:{number}" for number in range(1, count))]
    assert [*report] == [*tiers, "host", "of which"]
    assert [report[tier]["total"]["peak"] for tier in tiers] == pytest.approx(found, rel=0.01)
    assert all(report[tier]["shell"]["peak"] == 0 for tier in tiers[1:])
