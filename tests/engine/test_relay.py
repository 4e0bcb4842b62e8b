"""The relay on calls that are unlike the last one: other flags, other roots, other ways to ask for gradients."""

from __future__ import annotations

import copy
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
from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.engine import shell
from hf_l2l.runtime.tensors import OBJECTS_INSPECTED, tensors_within
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

FLOAT64 = TOLERANCE[torch.float64]


def eager_bert() -> nn.Module:
    model = bert().double()
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("flags", [(False, True), (True, False)])
def test_a_flag_may_change_from_call_to_call(flags):
    model = eager_bert()
    batch = batch_for(model)
    plain = copy.deepcopy(model).eval()
    attached(model, ubatch_size=3).eval()
    for flag in flags:
        found = model(**batch, output_attentions=flag)
        expected = plain(**batch, output_attentions=flag)
        assert torch.allclose(found.logits.cpu(), expected.logits, rtol=EXACT)
        assert len(found.attentions or ()) == len(expected.attentions or ()) == (2 if flag else 0)
        for ours, theirs in zip(found.attentions or (), expected.attentions or (), strict=True):
            assert torch.allclose(ours.cpu(), theirs, rtol=EXACT)


@cpu_suffices
def test_router_logits_may_be_asked_for_later():
    config = hf.MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2)
    model = hf.MixtralForCausalLM(config)
    batch = batch_for(model)
    attached(model, ubatch_size=3)
    assert model(**batch).router_logits is None
    model.zero_grad()
    _, expected = reference_with(model, batch, output_router_logits=True)
    model(**batch, output_router_logits=True).loss.backward()
    assert relative_error(gradients(model), expected) <= TOLERANCE[torch.float32]


def reference_with(model: nn.Module, batch: dict[str, Any], **options: Any) -> tuple[torch.Tensor, Any]:
    return reference(model, {**batch, **options})


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


def test_position_ids_of_one_row_do_not_hide_the_batch():
    model = bert().double()
    batch = batch_for(model)
    batch = {"position_ids": torch.arange(6)[None], **batch}
    loss, expected = reference(model, batch)
    rows_seen = []
    model.bert.encoder.layer[0].output.dense.register_forward_pre_hook(lambda m, args: rows_seen.append(len(args[0])))
    attached(model, ubatch_size=3)
    assert torch.allclose(train_once(model, batch), loss, rtol=EXACT)
    assert relative_error(gradients(model), expected) <= FLOAT64
    assert max(rows_seen[-6:]) == 3


class NormalizedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.norm(self.linear(hidden))


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([NormalizedBlock() for _ in range(2)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.pow(2).mean()


def test_layers_that_normalize_over_the_batch_are_not_split():
    model = Stacked().double()
    batch = torch.randn(8, 4, dtype=torch.float64)
    plain = copy.deepcopy(model)
    plain(batch).backward()
    attach_l2l(model, L2LConfig(ubatch_size=2, layer_classes=("NormalizedBlock",)))
    with pytest.warns(
        UserWarning, match=r"no effect on calls of NormalizedBlock: it normalizes over the rows.*BatchNorm"
    ):
        model(batch).backward()
    assert relative_error(gradients(model), gradients(plain)) <= FLOAT64
    assert torch.allclose(model.blocks[0].norm.running_mean, plain.blocks[0].norm.running_mean, rtol=EXACT)


def test_arguments_without_the_rows_of_the_batch_are_said_once():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4)])
            self.table = nn.Parameter(torch.randn(5, 4))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return (rows @ self.blocks[0](self.table).T).pow(2).mean()

    model = Shared().double()
    batch = torch.randn(8, 4, dtype=torch.float64)
    plain = copy.deepcopy(model)
    plain(batch).backward()
    attach_l2l(model, L2LConfig(ubatch_size=2, layer_classes=("Linear",)))
    with pytest.warns(UserWarning, match="none of its arguments has the 8 rows"):
        model(batch).backward()
    assert relative_error(gradients(model), gradients(plain)) <= FLOAT64


def test_detach_gives_the_optimizer_back():
    model = bert()
    eps = attach_l2l(model)
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    detach_l2l(model)
    train_once(model, batch_for(model))
    optimizer.step()
    assert all(p.grad is not None for p in model.parameters())


def test_equal_configs_written_differently():
    model = bert()
    eps = attach_l2l(model, L2LConfig(device=DEVICE))
    assert attach_l2l(model, L2LConfig(device=torch.device(DEVICE))) is eps


class Centred(nn.Module):
    """Rows meet in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.training:
            hidden = hidden - hidden.mean(0)
        return self.linear(hidden)


class Writing(Centred):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden.add_(1.0)
        return hidden + self.linear(hidden).tanh()


def stacked_of(block: type[nn.Module]) -> nn.Module:
    model = Stacked()
    model.blocks = nn.ModuleList([block() for _ in range(2)])
    return model.double()


def test_rows_that_meet_in_training_only_are_not_split():
    model, batch = stacked_of(Centred), torch.randn(8, 4, dtype=torch.float64)
    plain = copy.deepcopy(model)
    plain(batch).backward()
    attach_l2l(model, L2LConfig(ubatch_size=2, layer_classes=("Centred",)))
    with pytest.warns(UserWarning, match="its rows give different results in ubatches"):
        model(batch).backward()
    assert relative_error(gradients(model), gradients(plain)) <= FLOAT64


def test_probing_does_not_write_into_the_batch():
    model, batch = stacked_of(Writing), torch.randn(8, 4, dtype=torch.float64)
    expected = copy.deepcopy(model)(batch.clone())
    attach_l2l(model, L2LConfig(ubatch_size=2, layer_classes=("Writing",)))
    with torch.no_grad():
        assert torch.allclose(model(batch.clone()).cpu(), expected, rtol=EXACT)


# ---- what cannot be differentiated


OWN = {
    "grad": lambda model, loss: torch.autograd.grad(loss, list(model.parameters())),
    "unused allowed": lambda model, loss: torch.autograd.grad(loss, list(model.parameters()), allow_unused=True),
    "one of a layer": lambda model, loss: torch.autograd.grad(
        loss, model.bert.encoder.layer[1].output.dense.weight, allow_unused=True
    ),
    "one in no layer": lambda model, loss: torch.autograd.grad(loss, model.classifier.bias, allow_unused=True),
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
            while shared.inner is not None:
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


@pytest.mark.parametrize("how", ["gains", "changes", "replaces", "an attribute"])
def test_a_layer_that_trains_must_not_write_tensors_into_its_arguments(how):
    model = Writers(how)
    attach_l2l(model, L2LConfig(layer_classes=("WritingLayer",)))
    shared = types.SimpleNamespace() if how == "an attribute" else UserDict(given=torch.ones(2))
    with pytest.raises(ValueError, match=r"a WritingLayer wrote to 'shared'\); train this model without L2L"):
        model(torch.ones(3, 4), shared)
    with torch.no_grad():
        model(torch.ones(3, 4), shared)


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


class CallableMapping(UserDict):  # type: ignore[type-arg]
    def __call__(self) -> None:
        raise AssertionError("an argument is not called to see what it holds")


class CallableObject(types.SimpleNamespace):
    def __call__(self) -> None:
        raise AssertionError("an argument is not called to see what it holds")


def chain(length: int) -> types.SimpleNamespace:
    inner = None
    for _ in range(length):
        inner = types.SimpleNamespace(inner=inner)
    return inner


@pytest.mark.parametrize(
    "how, make",
    [
        ("an attribute", OfSlotted),
        ("gains", CallableMapping),
        ("changes", lambda: CallableMapping(given=torch.ones(2))),
        ("an attribute", CallableObject),
        ("the end", lambda: chain(3000)),
    ],
    ids=["slots", "callable mapping gains", "callable mapping changes", "callable object", "long chain"],
)
def test_tensors_that_a_layer_writes_are_found_in_any_object(how, make):
    model = Writers(how)
    attach_l2l(model, L2LConfig(layer_classes=("WritingLayer",)))
    with pytest.raises(ValueError, match=r"a WritingLayer wrote to 'shared'\); train this model without L2L"):
        model(torch.ones(3, 4), make())


def test_what_a_large_object_holds_is_looked_at_in_part():
    looked_at = []

    class Words(UserDict):  # type: ignore[type-arg]
        def values(self) -> Any:
            for word in super().values():
                looked_at.append(word)
                yield word

    words = Words({str(i): str(i) for i in range(20_000)})
    given = types.SimpleNamespace(words=words, given=torch.ones(2), scale=torch.ones(3))
    assert [len(t) for t in tensors_within(given)] == [2, 3]
    assert 0 < len(looked_at) <= OBJECTS_INSPECTED


@pytest.mark.parametrize("argument", [nn.Linear(2, 2), torch.relu, nn.Linear(2, 2).forward, nn.Linear, torch, "word"])
def test_code_and_modules_are_not_looked_into(argument):
    assert not list(tensors_within(types.SimpleNamespace(argument=argument)))


def test_a_layer_may_be_given_objects_that_hold_tensors():
    model = Writers("nothing")
    attach_l2l(model, L2LConfig(layer_classes=("WritingLayer",)))
    model(torch.ones(3, 4), UserDict(given=torch.ones(2))).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("shared", [0, 1])
def test_gemma_3n_trains_only_where_no_layer_reads_keys_of_another(shared):
    config = hf.Gemma3nTextConfig(
        **{**SMALL, "intermediate_size": [24] * 4, "num_hidden_layers": 4},
        num_key_value_heads=1,
        head_dim=8,
        vocab_size_per_layer_input=60,
        hidden_size_per_layer_input=4,
        laurel_rank=4,
        num_kv_shared_layers=2 * shared,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=None,
        pad_token_id=0,
    )
    model = hf.Gemma3nForCausalLM(config)
    batch = batch_for(model)
    stores = any(layer.self_attn.store_full_length_kv for layer in model.model.layers)
    assert stores or not shared  # transformers 5.17 stores them even where no layer reads them
    if stores:
        with pytest.raises(ValueError, match="a Gemma3nTextDecoderLayer wrote to 'shared_kv_states'"):
            train_once(attached(model), batch)
        return
    _, expected = reference(model, batch)
    train_once(attached(model), batch)
    assert relative_error(gradients(model), expected) <= TOLERANCE[torch.float32]
