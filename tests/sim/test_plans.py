"""Plans for budgets, trained on a device that has no more memory: random models, batches and budgets."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from torch import nn

from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.plan.planner import BudgetError, Plan, make_plan
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.plan.step_time import Rates
from hf_l2l.testing import enable_simulated_accelerator
from training import settled_memory

OPTIMIZERS: tuple[dict[str, Any], ...] = ({"foreach": False}, {"foreach": True}, {"fused": True})


@pytest.fixture(autouse=True)
def _no_limit_afterwards() -> Iterator[None]:
    yield
    enable_simulated_accelerator()


class Draw(NamedTuple):
    """A random model and batch, and how it is trained."""

    model: nn.Module
    batch: dict[str, torch.Tensor]
    config: L2LConfig
    optimizer: dict[str, Any]
    rates: Rates
    share: float
    """Where the budget lies, between the least that any options need and what those need that keep all."""

    def adamw(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3, **self.optimizer)

    def run_shapes(self) -> RunShapes:
        return RunShapes(self.model, self.config, self.batch, optimizer=self.adamw())


def draw(seed: int) -> Draw:
    r = random.Random(seed)
    heads, width, layers = r.choice([2, 4]), r.choice([32, 64, 96, 128]), r.choice([2, 3, 4, 6])
    rows, tokens, vocab = r.choice([1, 2, 3, 4, 6, 8]), r.choice([8, 16, 33, 64, 128]), r.choice([100, 500, 2000])
    ids = torch.randint(5, vocab - 5, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    batch = {"input_ids": ids, "labels": ids.clone()}
    sizes = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": r.choice([2, 4]) * width,
    }
    dropout, tied = r.choice([0.0, 0.0, 0.1]), r.choice([True, False])
    dropped = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    kind = r.choice(["bert", "gpt2", "llama", "t5", "vit", "mixtral"])
    model: nn.Module
    if kind == "bert":
        model = hf.BertForSequenceClassification(hf.BertConfig(**sizes, **dropped, vocab_size=vocab))
        batch["labels"] = ids[:, 0] % 2
    elif kind == "vit":
        model = hf.ViTForImageClassification(hf.ViTConfig(**sizes, **dropped, image_size=32, patch_size=4))
        batch = {"pixel_values": torch.zeros(rows, 3, 32, 32), "labels": ids[:, 0] % 2}
    elif kind == "gpt2":
        shape = {"n_embd": width, "n_layer": layers, "n_head": heads, "vocab_size": vocab, "n_positions": 128}
        drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        model = hf.GPT2LMHeadModel(hf.GPT2Config(**shape, **drops, **ends, tie_word_embeddings=tied))
    elif kind == "t5":
        shape = {"d_model": width, "num_heads": heads, "d_kv": width // heads, "d_ff": 2 * width, "vocab_size": vocab}
        t5 = hf.T5Config(**shape, num_layers=layers, dropout_rate=dropout, decoder_start_token_id=0)
        model = hf.T5ForConditionalGeneration(t5)
    elif kind == "llama":
        llama = hf.LlamaConfig(**sizes, vocab_size=vocab, num_key_value_heads=2, tie_word_embeddings=tied)
        model = hf.LlamaForCausalLM(llama)
    else:
        experts = {"num_key_value_heads": 2, "num_local_experts": 4}
        model = hf.MixtralForCausalLM(hf.MixtralConfig(**sizes, **experts, vocab_size=vocab))
    options: dict[str, Any] = {}
    if r.random() < 0.4:
        options = {"cmp": "bf16", "grad_dtype": r.choice(["fp32", "16bit"])}
    if r.random() < 0.2:
        options["chunked_loss"] = "off"
    rates = Rates(
        flops=10 ** r.uniform(10, 13),
        link_up=10 ** r.uniform(8, 11),
        link_down=10 ** r.uniform(8, 11),
        adamw=10 ** r.uniform(7, 10),
        device_adamw=1e10,
        per_call=r.choice([0, 1e-5, 1e-4]),
    )
    return Draw(model.train(), batch, L2LConfig(**options), r.choice(OPTIMIZERS), rates, r.random() ** 2)


def train(drawn: Draw, config: L2LConfig, capacity: float) -> None:
    """Two steps on a device of this capacity."""
    enable_simulated_accelerator(settled_memory() + int(capacity))
    try:
        eps = attach_l2l(drawn.model, config)
        optimizer = eps.wrap(drawn.adamw())
        for _ in range(2):
            drawn.model(**drawn.batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        eps.synchronize()
    finally:
        detach_l2l(drawn.model)


def least(run: RunShapes, rates: Rates) -> Plan:
    """The plan for the smallest budget that can be met."""
    with pytest.raises(BudgetError) as caught:
        make_plan(run, 1, rates)
    return make_plan(run, caught.value.smallest, rates)


FAST = (2, 23)
TOO_HIGH = (7,)
"""A draw whose estimate for the least options is more than 5 % too high: of a ViT, whose final norm runs by
micro-batches."""


def seeds(known: Collection[int]) -> list[Any]:
    """All, of which some are slow, and `known` ones are known to fail."""
    known_to_fail = pytest.mark.xfail(reason="the estimate is not close enough", strict=True)
    marks = [
        [*([] if n in FAST else [pytest.mark.slow]), *([known_to_fail] if n in known else [])] for n in range(100)
    ]
    return [pytest.param(n, marks=each) for n, each in enumerate(marks)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", seeds(()))
def test_a_plan_trains_on_a_device_of_its_budget(seed):
    drawn = draw(seed)
    run = drawn.run_shapes()
    smallest = least(run, drawn.rates).budget
    everything = L2LConfig(**{**vars(drawn.config), "resident": "all", "kept_graphs": len(run.layers)})
    most = max(smallest, sum(run.peak(everything)[1].values()))
    plan = make_plan(run, int(smallest + drawn.share * (most - smallest)), drawn.rates)
    train(drawn, plan.config, plan.budget)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", seeds(TOO_HIGH))
def test_no_plan_trains_on_less_than_the_smallest_budget(seed):
    drawn = draw(seed)
    run = drawn.run_shapes()
    plan = least(run, drawn.rates)
    with pytest.raises(torch.OutOfMemoryError):
        train(drawn, plan.config, 0.95 * plan.peak_bytes)
