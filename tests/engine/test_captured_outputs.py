"""Attentions and router logits come out of the layers as in the plain model, and losses made of them train it."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
import transformers as hf
from torch import nn

from devices import DEVICE
from models import EXACT, SMALL, TOLERANCE, attached, batch_for, bert, gradients, llama, relative_error
from tiers import cpu_suffices

FLOAT64 = torch.float64
ROUTED = {
    **SMALL,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.5,
    "output_router_logits": True,
}


def assert_close(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], count: int, rel: float) -> None:
    assert len(found) == len(expected) == count
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=rel, atol=rel / 10)


def mixtral() -> nn.Module:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**ROUTED, num_local_experts=4))


def with_dense_layers(dense: list[int]) -> nn.Module:
    """They are of one class, and only some capture router logits."""
    sizes = {"num_hidden_layers": 3, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 8}
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**{**ROUTED, **sizes}, mlp_only_layers=dense))


@pytest.mark.parametrize(
    ("make", "routers", "ubatch_size", "only"),
    [
        (mixtral, 2, 3, True),
        (mixtral, 2, None, False),
        (lambda: with_dense_layers([0, 2]), 1, 3, False),
        (lambda: with_dense_layers([1]), 2, None, False),
    ],
    ids=["mixtral, its auxiliary loss alone", "mixtral", "one of three layers", "two of three layers"],
)
def test_the_auxiliary_loss_trains_the_router(make, routers, ubatch_size, only):
    model = make()
    plain = copy.deepcopy(model)
    attached(model, device=DEVICE, ubatch_size=ubatch_size)
    expected, found = (each.train()(**batch_for(each)) for each in (plain, model))
    for out in (expected, found):
        (out.aux_loss if only else out.loss).backward()
    assert relative_error(gradients(model), gradients(plain)) <= TOLERANCE[torch.float32]
    assert_close(found.router_logits, expected.router_logits, routers, 1e-5)
    assert all(each.requires_grad for each in found.router_logits)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert found.aux_loss.item() == pytest.approx(expected.aux_loss.item(), rel=1e-6)
    weights = [p for name, p in model.named_parameters() if "gate.weight" in name or "router" in name]
    assert len(weights) == routers and all(p.grad.abs().max() > 0 for p in weights)


@cpu_suffices
@pytest.mark.parametrize(("make", "ubatch_size"), [(bert, 3), (llama, None)])
def test_a_model_is_asked_for_attentions_and_hidden_states_and_then_for_none(make, ubatch_size):
    """A loss is made of them. And in evaluation."""
    model = make(attn_implementation="eager").to(FLOAT64)
    plain = copy.deepcopy(model)
    attached(model, device=DEVICE, ubatch_size=ubatch_size)
    batch = batch_for(model)
    for asked in (False, True, False, True):
        model.zero_grad(), plain.zero_grad()
        outputs = [m(**batch, output_attentions=asked, output_hidden_states=asked) for m in (model, plain)]
        for out in outputs:
            loss = out.loss
            if asked:
                loss = loss + sum(a.square().sum() for a in (*out.attentions, out.hidden_states[1]))
            loss.backward()
        assert relative_error(gradients(model), gradients(plain)) <= TOLERANCE[FLOAT64]
        if asked:
            assert_close(outputs[0].attentions, outputs[1].attentions, 2, EXACT)
            assert_close(outputs[0].hidden_states, outputs[1].hidden_states, 3, EXACT)
        else:
            assert outputs[0].attentions is outputs[0].hidden_states is None
    with torch.no_grad():
        found, expected = (m.eval()(**batch, output_attentions=True).attentions for m in (model, plain))
    assert_close(found, expected, 2, EXACT)
