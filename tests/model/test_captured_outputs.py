"""Attentions and router logits come out of the layers as in the plain model, and losses made of them train it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from torch import nn

from hf_l2l.model.captured_outputs import CapturedOutputs
from models import SMALL, TOLERANCE, attached, batch_for, bert, gradients, llama, relative_error

UBATCH_SIZES = pytest.mark.parametrize("ubatch_size", [None, 3])
FLOAT64 = torch.float64


def mixtral() -> nn.Module:
    config = hf.MixtralConfig(
        **SMALL,
        num_key_value_heads=1,
        max_position_embeddings=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.5,
        output_router_logits=True,
    )
    return hf.MixtralForCausalLM(config)


def both(
    model: nn.Module, loss_of: Callable[[object], torch.Tensor], options: dict[str, object], batch: dict[str, object]
) -> tuple[object, object, float]:
    """The outputs of the plain model and under L2L, and how far their gradients are apart."""
    plain = copy.deepcopy(model)
    attached(model, **options)
    outputs = []
    for each in (plain, model):
        each.train()
        outputs.append(each(**batch))
        loss_of(outputs[-1]).backward()
    return outputs[0], outputs[1], relative_error(gradients(model), gradients(plain))


def routers(model: nn.Module) -> list[torch.Tensor]:
    return [p for name, p in model.named_parameters() if "gate.weight" in name or "router" in name]


@pytest.mark.one_in(2)
@UBATCH_SIZES
@pytest.mark.parametrize("only", [False, True], ids=["loss", "auxiliary"])
def test_the_auxiliary_loss_trains_the_router(ubatch_size, only):
    model = mixtral()
    options, batch = {"ubatch_size": ubatch_size}, batch_for(model)

    def loss_of(out):
        return out.aux_loss if only else out.loss

    expected, found, error = both(model, loss_of, options, batch)
    assert error <= TOLERANCE[torch.float32]
    assert len(found.router_logits) == len(expected.router_logits) == 2
    for ours, theirs in zip(found.router_logits, expected.router_logits, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6) and ours.requires_grad
    assert found.aux_loss.item() == pytest.approx(expected.aux_loss.item(), rel=1e-6)
    assert len(routers(model)) == 2
    assert all(p.grad.abs().max() > 0 for p in routers(model))


@pytest.mark.one_in(2)
@UBATCH_SIZES
@pytest.mark.parametrize("dense", [[0], [1], [0, 2]], ids=str)
def test_dense_layers_among_those_with_routers(ubatch_size, dense):
    """They are of one class, and only some capture router logits."""
    config = hf.Qwen3MoeConfig(
        **{**SMALL, "num_hidden_layers": 3},
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        mlp_only_layers=dense,
        router_aux_loss_coef=0.5,
        output_router_logits=True,
    )
    model = hf.Qwen3MoeForCausalLM(config)
    expected, found, error = both(model, lambda out: out.loss, {"ubatch_size": ubatch_size}, batch_for(model))
    assert error <= TOLERANCE[torch.float32]
    assert len(found.router_logits) == len(expected.router_logits) == 3 - len(dense)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert len(routers(model)) == 3 - len(dense)
    assert all(p.grad.abs().max() > 0 for p in routers(model))


@pytest.mark.one_in(2)
@UBATCH_SIZES
@pytest.mark.parametrize("make", [bert, llama], ids=lambda make: make.__name__)
def test_attentions_and_hidden_states(make, ubatch_size):
    model = make(attn_implementation="eager").to(FLOAT64)
    batch = {**batch_for(model), "output_attentions": True, "output_hidden_states": True}
    expected, found, error = both(model, lambda out: out.loss, {"ubatch_size": ubatch_size}, batch)
    assert error <= TOLERANCE[FLOAT64]
    for name, count in (("attentions", 2), ("hidden_states", 3)):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert len(ours) == len(theirs) == count
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(ours, theirs, strict=True))


@UBATCH_SIZES
def test_a_loss_made_of_attentions(ubatch_size):
    model = bert(attn_implementation="eager").to(FLOAT64)
    batch = {**batch_for(model), "output_attentions": True}

    def loss_of(out):
        return out.loss + sum(a.square().sum() for a in out.attentions)

    _, _, error = both(model, loss_of, {"ubatch_size": ubatch_size}, batch)
    assert error <= TOLERANCE[FLOAT64]
    query = model.bert.encoder.layer[0].attention.self.query.weight
    with_attentions = query.grad.clone()
    model.zero_grad()
    model(**batch).loss.backward()
    assert not torch.allclose(query.grad, with_attentions)


@UBATCH_SIZES
def test_a_model_is_asked_for_more_and_then_for_less(ubatch_size):
    model = bert(attn_implementation="eager").to(FLOAT64)
    plain = copy.deepcopy(model)
    attached(model, ubatch_size=ubatch_size)
    batch = batch_for(model)
    for asked in (False, True, False, True):
        model.zero_grad(), plain.zero_grad()
        found, expected = (m(**batch, output_attentions=asked) for m in (model, plain))
        assert (found.attentions is not None) == (expected.attentions is not None) == asked
        found.loss.backward(), expected.loss.backward()
        assert relative_error(gradients(model), gradients(plain)) <= TOLERANCE[FLOAT64]


def test_evaluation_returns_them_too():
    plain = bert(attn_implementation="eager").to(FLOAT64).eval()
    model = attached(copy.deepcopy(plain), ubatch_size=3)
    batch = {**batch_for(model), "output_attentions": True}
    with torch.no_grad():
        ours, theirs = model(**batch).attentions, plain(**batch).attentions
    assert len(ours) == 2
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(ours, theirs, strict=True))


# ---- the collector


@pytest.fixture
def collector(monkeypatch):
    """A stand-in for transformers' variable, set as by a running model."""
    variable = ContextVar("collector", default=None)
    monkeypatch.setitem(
        sys.modules, "transformers.utils.output_capturing", SimpleNamespace(_active_collector=variable)
    )
    return variable


def test_pieces_are_taken_and_the_model_collects_none(collector):
    running = {"attentions": [], "hidden_states": []}
    collector.set(running)
    with CapturedOutputs() as captured:
        assert captured.keys == ("attentions",)  # hidden states come from hooks on whole layers
        collector.get()["attentions"].append(1)
    assert captured.taken == {"attentions": [1]}
    assert collector.get() is running and running == {"attentions": [], "hidden_states": []}
    CapturedOutputs.deliver(captured.taken)
    assert running["attentions"] == [1]


def test_the_collector_is_back_after_an_error(collector):
    running = {"attentions": []}
    collector.set(running)
    with pytest.raises(KeyError), CapturedOutputs():
        raise KeyError
    assert collector.get() is running


def test_a_recompute_takes_the_keys_of_its_forward(collector):
    with CapturedOutputs(("attentions",)) as captured:
        collector.get()["attentions"].append(1)
    assert captured.taken == {"attentions": [1]}
    CapturedOutputs.deliver(captured.taken)  # no model runs: there is no collector
    running = {"attentions": []}
    collector.set(running)
    with CapturedOutputs(()):
        assert collector.get() == {}
    assert running == {"attentions": []}


def test_without_transformers_nothing_is_captured(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers.utils.output_capturing", raising=False)
    with CapturedOutputs() as captured:
        pass
    assert captured.taken == {} and captured.keys == ()
    CapturedOutputs.deliver({"attentions": [1]})
