"""The relay on calls that are unlike the last one: other flags, other roots, other ways to ask for gradients."""

from __future__ import annotations

import gc
import traceback
import types
import weakref
from collections import UserDict
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from devices import DEVICE
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.engine import shell
from models import (
    EXACT,
    SMALL,
    TOLERANCE,
    attached,
    batch_for,
    bert,
    gradients,
    has_bits_of_plain,
    reference,
    relative_error,
    train_once,
)
from tiers import combinations, cpu_suffices


@cpu_suffices
def test_gradients_of_inputs_alone_leave_the_weights_alone():
    model = bert().double()
    ids = batch_for(model)["input_ids"]
    embedded = torch.randn(*ids.shape, 16, dtype=torch.float64, requires_grad=True)
    labels = torch.zeros(len(ids), dtype=torch.long)
    (expected,) = torch.autograd.grad(model(inputs_embeds=embedded, labels=labels).loss, embedded)
    attached(model, ubatch_size=3)
    (found,) = torch.autograd.grad(model(inputs_embeds=embedded, labels=labels).loss, embedded)
    assert torch.allclose(found, expected, rtol=EXACT, atol=EXACT)
    assert all(p.grad is None for p in model.parameters())
    model(inputs_embeds=embedded, labels=labels).loss.backward(inputs=[embedded])
    assert torch.allclose(embedded.grad, expected, rtol=EXACT, atol=EXACT)
    assert all(p.grad is None for p in model.parameters())
    model(inputs_embeds=embedded, labels=labels).loss.backward()
    assert any(p.grad is not None for p in model.parameters())


@cpu_suffices
def test_a_direct_call_of_a_layer_teaches_nothing_about_the_model(monkeypatch):
    model = bert().double()
    rows_seen = []
    layer = model.bert.encoder.layer[0]
    layer.output.dense.register_forward_pre_hook(lambda module, args: rows_seen.append(len(args[0])))
    attached(model, ubatch_size=3).eval()
    layer(torch.randn(8, 6, 16, dtype=torch.float64), None)
    assert rows_seen == [8]
    model(**batch_for(model, masked=False))
    assert rows_seen[-3:] == [3, 3, 2]


# ---- what cannot be differentiated


OWN = {
    "grad": lambda model, loss: torch.autograd.grad(loss, list(model.parameters())),
    "one of a layer": lambda model, loss: torch.autograd.grad(
        loss, model.bert.encoder.layer[1].output.dense.weight, allow_unused=True
    ),
    "backward": lambda model, loss: loss.backward(inputs=list(model.parameters())),
}


@pytest.mark.parametrize(("how", "later"), combinations(OWN, [False, True], together=1))
def test_gradients_of_own_parameters_are_not_to_be_asked_for_by_name(how, later):
    model = bert()
    batch = batch_for(model)
    _, expected = reference(model, batch)
    attached(model)
    if later:  # every gradient is there, and is zero
        train_once(model, batch)
        model.zero_grad(set_to_none=False)
    loss = model(**batch).loss
    with pytest.raises(RuntimeError, match=r"are in p\.grad after loss\.backward\(\)"):
        OWN[how](model, loss)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    train_once(model, batch)
    assert relative_error(gradients(model), expected) <= TOLERANCE[torch.float32]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_second_derivatives_are_refused():
    model = attached(bert())
    batch = batch_for(model)
    with pytest.raises(RuntimeError, match=r"first derivatives only.*\(got create_graph=True\)"):
        model(**batch).loss.backward(create_graph=True)
    embedded = torch.randn(*batch.pop("input_ids").shape, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(model(inputs_embeds=embedded, **batch).loss, embedded, create_graph=True)


def fails(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("no memory for the weights")


def call_of_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> str:
    """What a call with other weights raises."""
    try:
        with torch.no_grad():
            torch.func.functional_call(model, weights, kwargs=batch_for(model))
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)
        return str(error)
    return ""


def test_a_call_that_fails_while_its_weights_are_uploaded_keeps_none(monkeypatch):
    """Of `functional_call`, whose weights are those of one call alone."""
    model = attached(bert())
    weights = {"classifier.weight": torch.randn_like(model.classifier.weight)}
    given = weakref.ref(weights["classifier.weight"])
    monkeypatch.setattr(shell, "uploaded" if DEVICE == "cpu" else "NonLayerWeights", fails)
    assert call_of_weights(model, weights) == "no memory for the weights"
    del weights
    gc.collect()
    assert given() is None


def test_functional_call_is_for_evaluation_only():
    model, other = bert(), bert()
    attached(model)
    batch = batch_for(model)
    tensors = {name: p.detach().requires_grad_() for name, p in other.named_parameters()}
    with pytest.raises(ValueError, match=r"must be its own parameters.*\[60, 16\].*functional_call"):
        torch.func.functional_call(model, tensors, kwargs=batch)
    with pytest.raises(ValueError, match=r"\[2, 16\]"):
        torch.func.functional_call(model, {"classifier.weight": tensors["classifier.weight"]}, kwargs=batch)
    loss = torch.func.functional_call(model, dict(other.named_parameters()), kwargs=batch).loss
    with pytest.raises(RuntimeError, match=r"same parameters.*a BertLayer were replaced.*functional_call"):
        loss.backward()
    with torch.no_grad():
        found = torch.func.functional_call(model, tensors, kwargs=batch).loss
        assert has_bits_of_plain(found, other(**batch).loss)


# ---- layers that write to their arguments


class WritingLayer(nn.Module):
    """Keeps what it computes in an argument, for layers after it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.dense, self.how = nn.Linear(4, 4), how

    def forward(self, hidden_states: torch.Tensor, shared: Any = None) -> torch.Tensor:
        out = self.dense(hidden_states)
        if self.how == "gains":
            shared[len(shared)] = out, out
        elif self.how == "changes":
            shared["given"] += 1
        elif self.how == "replaces":
            shared["given"] = out
        elif self.how == "an attribute" and shared is not None:
            shared.inner = [out]
        elif self.how == "the end":
            while isinstance(shared.inner, types.SimpleNamespace):
                shared = shared.inner
            shared.inner = out
        return out


class Writers(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WritingLayer(how) for _ in range(2))

    def forward(self, x: torch.Tensor, shared: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, shared=shared)
        return x


class Slotted:
    __slots__ = ("__hidden", "unset")

    @property
    def inner(self) -> Any:
        return self.__hidden

    @inner.setter
    def inner(self, value: Any) -> None:
        self.__hidden = value


class OfSlotted(Slotted):
    __slots__ = "later"


class Called(UserDict):  # type: ignore[type-arg]
    def __call__(self) -> None:
        raise AssertionError("an argument is not called to see what it holds")


def chain(length: int) -> types.SimpleNamespace:
    inner = None
    for _ in range(length):
        inner = types.SimpleNamespace(inner=inner)
    return inner


@pytest.mark.parametrize(
    ("how", "make"),
    [
        ("nothing", lambda: UserDict(given=torch.ones(2))),
        ("gains", Called),
        ("changes", lambda: Called(given=torch.ones(2))),
        ("replaces", lambda: UserDict(given=torch.ones(2))),
        ("an attribute", types.SimpleNamespace),
        ("an attribute", OfSlotted),
        ("the end", lambda: chain(3000)),
    ],
)
def test_a_layer_that_trains_must_not_write_tensors_into_its_arguments(how, make):
    model = Writers(how)
    attach_l2l(model, L2LConfig(layer_classes=("WritingLayer",)))
    if how == "nothing":
        model(torch.ones(3, 4), make()).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
    else:
        with pytest.raises(ValueError, match=r"a WritingLayer wrote to 'shared'\); train this model without L2L"):
            model(torch.ones(3, 4), make())
    with torch.no_grad():
        model(torch.ones(3, 4), make())


def test_gemma_3n_is_refused_where_a_layer_reads_keys_of_another():
    config = hf.Gemma3nTextConfig(
        **{**SMALL, "intermediate_size": [24] * 4, "num_hidden_layers": 4},
        num_key_value_heads=1,
        head_dim=8,
        vocab_size_per_layer_input=60,
        hidden_size_per_layer_input=4,
        laurel_rank=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=None,
        pad_token_id=0,
    )
    model = hf.Gemma3nForCausalLM(config)
    batch = batch_for(model)
    with pytest.raises(ValueError, match="a Gemma3nTextDecoderLayer wrote to 'shared_kv_states'"):
        train_once(attached(model), batch)
