"""Attentions and router logits come out of the layers as in the plain model, and losses made of them train it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from devices import DEVICE
from models import EXACT, SMALL, TOLERANCE, attached, batch_for, bert, gradients, llama, relative_error
from tiers import cpu_suffices, more

FLOAT64 = torch.float64
ROUTED = {
    **SMALL,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.5,
    "output_router_logits": True,
}


def both(
    model: nn.Module, loss_of: Callable[[Any], torch.Tensor], ubatch_size: int | None, **asked: bool
) -> tuple[Any, Any, float]:
    """The outputs of the plain model and under L2L, and how far their gradients are apart."""
    plain = copy.deepcopy(model)
    attached(model, device=DEVICE, ubatch_size=ubatch_size)
    outputs = []
    for each in (plain, model):
        each.train()
        outputs.append(each(**batch_for(each), **asked))
        loss_of(outputs[-1]).backward()
    return outputs[0], outputs[1], relative_error(gradients(model), gradients(plain))


def assert_close(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], count: int, rel: float) -> None:
    assert len(found) == len(expected) == count
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=rel, atol=rel / 10)


def assert_routers_train(model: nn.Module, found: Any, expected: Any, count: int) -> None:
    assert_close(found.router_logits, expected.router_logits, count, 1e-5)
    assert all(each.requires_grad for each in found.router_logits)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    routers = [p for name, p in model.named_parameters() if "gate.weight" in name or "router" in name]
    assert len(routers) == count and all(p.grad.abs().max() > 0 for p in routers)


@pytest.mark.parametrize(("ubatch_size", "only"), [(3, True), (None, False), *more((3, False), (None, True))])
def test_the_auxiliary_loss_trains_the_router(ubatch_size, only):
    model = hf.MixtralForCausalLM(hf.MixtralConfig(**ROUTED, num_local_experts=4))
    expected, found, error = both(model, lambda out: out.aux_loss if only else out.loss, ubatch_size)
    assert error <= TOLERANCE[torch.float32]
    assert_routers_train(model, found, expected, 2)
    assert found.aux_loss.item() == pytest.approx(expected.aux_loss.item(), rel=1e-6)


@pytest.mark.parametrize(("dense", "ubatch_size"), [([0, 2], 3), ([1], None), *more(([0], 3), ([0, 2], None))])
def test_dense_layers_among_those_with_routers(dense, ubatch_size):
    """They are of one class, and only some capture router logits."""
    config = hf.Qwen3MoeConfig(
        **{**ROUTED, "num_hidden_layers": 3},
        head_dim=8,
        num_experts=4,
        moe_intermediate_size=8,
        mlp_only_layers=dense,
    )
    model = hf.Qwen3MoeForCausalLM(config)
    expected, found, error = both(model, lambda out: out.loss, ubatch_size)
    assert error <= TOLERANCE[torch.float32]
    assert_routers_train(model, found, expected, 3 - len(dense))


@pytest.mark.parametrize(("make", "ubatch_size"), [(bert, 3), (llama, None), *more((bert, None), (llama, 3))])
def test_attentions_and_hidden_states_are_returned_and_a_loss_may_be_made_of_them(make, ubatch_size):
    model = make(attn_implementation="eager").to(FLOAT64)

    def loss_of(out: Any) -> torch.Tensor:
        return out.loss + sum(a.square().sum() for a in (*out.attentions, out.hidden_states[1]))

    expected, found, error = both(model, loss_of, ubatch_size, output_attentions=True, output_hidden_states=True)
    assert error <= TOLERANCE[FLOAT64]
    assert_close(found.attentions, expected.attentions, 2, EXACT)
    assert_close(found.hidden_states, expected.hidden_states, 3, EXACT)


@cpu_suffices
def test_a_model_is_asked_for_more_and_then_for_less():
    """And in evaluation."""
    model = bert(attn_implementation="eager").to(FLOAT64)
    plain = copy.deepcopy(model)
    attached(model, device=DEVICE, ubatch_size=3)
    batch = batch_for(model)
    for asked in (False, True, False, True):
        model.zero_grad(), plain.zero_grad()
        found, expected = (m(**batch, output_attentions=asked) for m in (model, plain))
        assert (found.attentions is not None) == (expected.attentions is not None) == asked
        found.loss.backward(), expected.loss.backward()
        assert relative_error(gradients(model), gradients(plain)) <= TOLERANCE[FLOAT64]
    with torch.no_grad():
        found, expected = (m.eval()(**batch, output_attentions=True).attentions for m in (model, plain))
    assert_close(found, expected, 2, EXACT)
