"""The relay on calls that are unlike the last one: other flags, other roots, other ways to ask for gradients."""

from __future__ import annotations

import copy
import gc
import os
import sys
import traceback
import types
import weakref
from collections import UserDict
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import hf_l2l
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
    gpt2,
    gradients,
    has_bits_of_plain,
    llama,
    reference,
    relative_error,
    t5,
    train_once,
)
from tiers import combinations, cpu_suffices, on_the_host
from training import tiny_bert


@cpu_suffices
def test_gradients_of_inputs_alone_leave_the_weights_alone():
    model = bert().double()
    ids = batch_for(model)["input_ids"]
    embedded = torch.randn(*ids.shape, 16, dtype=torch.float64, requires_grad=True)
    given = {"inputs_embeds": embedded, "labels": torch.zeros(len(ids), dtype=torch.long)}
    (expected,) = torch.autograd.grad(model(**given).loss, embedded)
    attached(model, ubatch_size=3)
    (found,) = torch.autograd.grad(model(**given).loss, embedded)
    model(**given).loss.backward(inputs=[embedded])
    for each in (found, embedded.grad):
        assert torch.allclose(each, expected, rtol=EXACT, atol=EXACT)
    assert all(p.grad is None for p in model.parameters())
    model(**given).loss.backward()
    assert any(p.grad is not None for p in model.parameters())


@cpu_suffices
def test_a_direct_call_of_a_layer_teaches_nothing_about_the_model():
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


OWN: dict[str, Callable[[Any, torch.Tensor], object]] = {
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


def test_a_call_that_fails_while_its_weights_are_uploaded_keeps_none(monkeypatch):
    """Of `functional_call`, whose weights are those of one call alone."""

    def fails(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no memory for the weights")

    model = attached(bert())
    weights = {"classifier.weight": torch.randn_like(model.classifier.weight)}
    given = weakref.ref(weights["classifier.weight"])
    monkeypatch.setattr(shell, "uploaded" if DEVICE == "cpu" else "NonLayerWeights", fails)
    with pytest.raises(torch.OutOfMemoryError, match="no memory for the weights") as raised, torch.no_grad():
        torch.func.functional_call(model, weights, kwargs=batch_for(model))
    traceback.clear_frames(raised.tb)
    del weights, raised
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

    def __init__(self, write: Callable[[Any, torch.Tensor], object]) -> None:
        super().__init__()
        self.dense, self.write = nn.Linear(4, 4), write

    def forward(self, hidden_states: torch.Tensor, shared: Any = None) -> torch.Tensor:
        out = self.dense(hidden_states)
        self.write(shared, out)
        return out


class Writers(nn.Module):
    def __init__(self, write: Callable[[Any, torch.Tensor], object]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WritingLayer(write) for _ in range(2))

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


def chain(length: int = 3000) -> types.SimpleNamespace:
    inner = None
    for _ in range(length):
        inner = types.SimpleNamespace(inner=inner)
    return inner


def at_the_end(shared: Any, out: torch.Tensor) -> None:
    while isinstance(shared.inner, types.SimpleNamespace):
        shared = shared.inner
    shared.inner = out


@pytest.mark.parametrize(
    ("make", "write"),
    [
        (lambda: Called(given=torch.ones(2)), lambda shared, out: shared["given"].add_(1)),
        (Called, lambda shared, out: shared.update({len(shared): (out, out)})),
        (lambda: UserDict(given=torch.ones(2)), lambda shared, out: shared.update(given=out)),
        (types.SimpleNamespace, lambda shared, out: setattr(shared, "inner", [out])),
        (OfSlotted, lambda shared, out: setattr(shared, "inner", [out])),
        (chain, at_the_end),
    ],
    ids=["changes", "gains", "replaces", "sets an attribute", "sets a slot", "at the end of a chain"],
)
def test_a_layer_that_trains_must_not_write_tensors_into_its_arguments(make, write):
    model = attached(Writers(write), layer_classes=("WritingLayer",))
    with pytest.raises(ValueError, match=r"a WritingLayer wrote to 'shared'\); train this model without L2L"):
        model(torch.ones(3, 4), make())
    with torch.no_grad():
        model(torch.ones(3, 4), make())
    model.layers[0].write = model.layers[1].write = lambda shared, out: None
    model(torch.ones(3, 4), make()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


# ---- attentions, router logits and key-value caches

ROUTED = {
    **{**SMALL, "num_key_value_heads": 1, "max_position_embeddings": 32},
    **{"num_experts_per_tok": 2, "router_aux_loss_coef": 0.5, "output_router_logits": True},
}


def beside_plain(model: nn.Module, **options: Any) -> tuple[Any, Any]:
    """A plain copy, and the model layer to layer."""
    return copy.deepcopy(model), attached(model, device=DEVICE, **options)


def assert_close(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], count: int, rel: float) -> None:
    assert len(found) == len(expected) == count
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=rel, atol=rel / 10)


def with_dense_layers(dense: list[int]) -> nn.Module:
    """They are of one class, and only some capture router logits."""
    sizes = {"num_hidden_layers": 3, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 8}
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**{**ROUTED, **sizes}, mlp_only_layers=dense))


@pytest.mark.parametrize(
    ("make", "routers", "ubatch_size", "only"),
    [
        (lambda: with_dense_layers([]), 3, 3, True),
        (lambda: with_dense_layers([0, 2]), 1, 3, False),
        (lambda: with_dense_layers([1]), 2, None, False),
    ],
    ids=["the auxiliary loss alone", "one of three layers", "two of three layers"],
)
def test_the_auxiliary_loss_trains_the_router(make, routers, ubatch_size, only):
    plain, model = beside_plain(make(), ubatch_size=ubatch_size)
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
    plain, model = beside_plain(make(attn_implementation="eager").double(), ubatch_size=ubatch_size)
    batch = batch_for(model)
    for asked in (False, True, False, True):
        model.zero_grad(), plain.zero_grad()
        outputs = [m(**batch, output_attentions=asked, output_hidden_states=asked) for m in (model, plain)]
        for out in outputs:
            loss = out.loss
            if asked:
                loss = loss + sum(a.square().sum() for a in (*out.attentions, out.hidden_states[1]))
            loss.backward()
        assert relative_error(gradients(model), gradients(plain)) <= TOLERANCE[torch.float64]
        if asked:
            assert_close(outputs[0].attentions, outputs[1].attentions, 2, EXACT)
            assert_close(outputs[0].hidden_states, outputs[1].hidden_states, 3, EXACT)
        else:
            assert outputs[0].attentions is outputs[0].hidden_states is None
    with torch.no_grad():
        found, expected = (m.eval()(**batch, output_attentions=True).attentions for m in (model, plain))
    assert_close(found, expected, 2, EXACT)


# ---- key-value caches in a forward that trains: none is made, and one with content is read


class Prefixed(nn.Module):
    """Trains a prefix of 3 keys and values before every row, as PEFT's prefix tuning does."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, config = model, model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        shape = (config.num_hidden_layers, 2, 1, heads, 3, config.hidden_size // config.num_attention_heads)
        self.prefix = nn.Parameter(torch.randn(shape, dtype=next(model.parameters()).dtype))

    def forward(self, input_ids, labels):
        cache = hf.DynamicCache()
        for number, (keys, values) in enumerate(self.prefix.expand(-1, -1, len(input_ids), -1, -1, -1)):
            cache.update(keys, values, number)
        return self.model(input_ids=input_ids, labels=labels, past_key_values=cache)


@cpu_suffices
@pytest.mark.parametrize(("make", "ubatch_size"), [(llama, None), (gpt2, 3)])
def test_a_prefix_trains(make, ubatch_size):
    plain, model = beside_plain(Prefixed(make().double()), ubatch_size=ubatch_size)
    expected, found = (each(**batch_for(each.model, masked=False)).loss for each in (plain, model))
    expected.backward(), found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=EXACT)
    assert model.prefix.grad.abs().max() > 0
    assert relative_error(gradients(model), gradients(plain)) < TOLERANCE[torch.float64]


def test_a_layer_is_given_its_own_entry_alone():
    model = attached(Prefixed(llama()), device=DEVICE)
    given = []
    for layer in model.model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: given.append(kwargs["past_key_values"].layers), with_kwargs=True
        )
    model(**batch_for(model.model, masked=False))
    assert [[entry.keys.is_meta for entry in layers] for layers in given] == [[False, True], [True, False]]


def test_a_cache_of_an_earlier_call_is_read_and_not_changed():
    plain, model = beside_plain(gpt2().double(), ubatch_size=2)
    ids = batch_for(model, masked=False)["input_ids"]

    def loss(each):
        with torch.no_grad():
            cache = each(input_ids=ids, use_cache=True).past_key_values
        found = each(input_ids=ids, past_key_values=cache, labels=ids).loss
        found.backward()
        return found.item(), cache

    with pytest.warns(UserWarning, match="adds nothing to a key-value cache in a forward that trains .*GPT2LMHead"):
        found, cache = loss(model)
    assert found == pytest.approx(loss(plain)[0], rel=EXACT)
    assert relative_error(gradients(model), gradients(plain)) < TOLERANCE[torch.float64]
    assert cache.get_seq_length() == ids.shape[1]


@pytest.mark.parametrize("make", [llama, t5])
def test_a_model_that_makes_a_cache_by_default_makes_none_and_tells_who_asks_for_one(make):
    model = make()
    model.config.use_cache = True
    attached(model, device=DEVICE)
    batch = batch_for(model)
    assert model(**batch).past_key_values is None
    with torch.no_grad():
        assert model(**batch).past_key_values is not None
    with pytest.warns(UserWarning, match=f"makes no key-value cache .*{type(model).__name__}"):
        assert model(**batch, use_cache=True).past_key_values is None


@cpu_suffices
def test_the_option_is_found_by_position_too():
    model = attached(llama(), device=DEVICE)
    before = [*signature(hf.LlamaForCausalLM.forward).parameters].index("use_cache") - 2  # but for `self` and the ids
    with pytest.warns(UserWarning, match="makes no key-value cache"):
        assert model(batch_for(model)["input_ids"], *[None] * before, True).past_key_values is None


# ---- how much of it there is


def calls_of_the_package(layers: int) -> int:
    """Calls of functions of the package, on the thread of the program, in one step of a BERT with so many layers."""
    model = tiny_bert(layers=layers)
    eps = attach_l2l(model, L2LConfig(device="cpu", eps_update="deferred"))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), fused=True))
    batch = batch_for(model)

    def step() -> None:
        model(**batch).loss.backward()
        eps.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    eps.synchronize()
    found, inside = 0, os.path.dirname(hf_l2l.__file__) + os.sep

    def count(frame: types.FrameType, event: str, argument: Any) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(inside)

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(before)
    eps.synchronize()
    return found


@on_the_host
def test_the_work_of_python_for_a_layer_stays_small():
    """What launches kernels of a device must not be late for it: this is a limit of the design, not of a machine."""
    assert calls_of_the_package(6) - calls_of_the_package(2) <= 4 * 700
