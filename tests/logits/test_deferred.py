"""Deferred logits: losses in chunks and everything else have the values and gradients of ordinary logits."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from deferred_cases import HIDDEN, IN_CHUNKS, ROWS, TOKENS, VOCAB, WHOLE, Squared, Weights
from hf_l2l.logits import chunks, deferred


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "FEWEST_ROWS", 3)
    deferred._tell_once.cache_clear()


def results(function, dtype, *, defer):
    weights = Weights(dtype)
    logits = weights.deferred() if defer else weights.logits()
    found = function(logits, weights.labels)
    found.backward()
    return [found.detach(), *weights.gradients()], logits


def assert_as_plain(function, dtype=torch.float64, **tolerance):
    expected, _ = results(function, dtype, defer=False)
    found, logits = results(function, dtype, defer=True)
    torch.testing.assert_close(found, expected, equal_nan=True, **tolerance)
    return logits.deferred


@pytest.mark.parametrize("name", IN_CHUNKS)
def test_computed_in_chunks(name, caplog):
    # transformers makes fp32 of logits, whatever they were.
    in_fp32 = name in ("float", "smoothed by transformers")
    found = assert_as_plain(
        IN_CHUNKS[name], **({"rtol": 1e-5, "atol": 1e-6} if in_fp32 else {"rtol": 1e-10, "atol": 1e-12})
    )
    assert not found.is_there and caplog.text == ""


@pytest.mark.parametrize("name", IN_CHUNKS)
def test_chunks_in_16_bits(name):
    assert_as_plain(IN_CHUNKS[name], torch.bfloat16, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("name", WHOLE)
def test_everything_else_has_the_bits_of_plain_torch(name, caplog):
    found = assert_as_plain(WHOLE[name], rtol=0, atol=0)
    assert found.is_there
    assert "needs the logits of all tokens at once, which take" in caplog.text


def test_it_says_once_per_function_what_made_the_logits(caplog):
    for _ in range(2):
        weights = Weights()
        weights.deferred()[..., 0]
        weights.deferred().cumsum(0)
    size = ROWS * TOKENS * VOCAB * 8
    assert [r.getMessage() for r in caplog.records] == [
        f"{name} needs the logits of all tokens at once, which take {size} bytes on the device"
        for name in ("__getitem__", "cumsum")
    ]


STEPS = {
    "half": lambda x: x / 2,
    "tanh": lambda x: x.tanh(),
    "plus": lambda x: 1 + x,
    "minus": lambda x: -x,
    "twice": lambda x: x.add(1).mul(2),
    "log-softmax": lambda x: functional.log_softmax(x, dim=-1),
    "flat": lambda x: x.reshape(-1, VOCAB),
    "first": lambda x: x[:3],
    "later": lambda x: x[1:],
    "every other": lambda x: x[::2],
    "reversed": lambda x: x[torch.arange(len(x) - 1, -1, -1)],
    "with one more": lambda x: x.unsqueeze(0),
    "alike": lambda x: x.contiguous().view_as(x),
    "parted": lambda x: x.split(2)[-1],
    "left": lambda x: x.narrow(0, 0, min(1, len(x))),
    "double": lambda x: x.double(),
    "turned": lambda x: x.transpose(0, -2),
}
ENDS = {
    "logsumexp": lambda x: x.logsumexp(-1).sum(),
    "sum": lambda x: x.square().sum() if x.requires_grad else x.sum(),
    "gather": lambda x: x.gather(-1, torch.full((*x.shape[:-1], 2), 3)).sum(),
    "loss": lambda x: functional.cross_entropy(x.reshape(-1, VOCAB), torch.arange(x.shape[:-1].numel()) % VOCAB),
    "whole": lambda x: x.cos().sum(),
}


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=6), st.sampled_from(sorted(ENDS)))
def test_any_chain_of_functions(names, end):
    def function(x, labels):
        for name in names:
            x = STEPS[name](x)
        return ENDS[end](x)

    assert_as_plain(function, rtol=1e-9, atol=1e-10)


def _write(x):
    with torch.no_grad():
        x[:, 0] = 0


COPIES = {
    "step": lambda x: x * 2,
    "clone": lambda x: x.clone(),
    "log-softmax": lambda x: x.log_softmax(-1),
    "mask": lambda x: x[torch.tensor([True, False])],
    "rows": lambda x: x.index_select(0, torch.tensor([1, 0])),
    "contiguous": lambda x: x[:, 1:].contiguous(),
    "turned and joined": lambda x: x.transpose(0, 1).reshape(-1, VOCAB),
}
VIEWS = {
    "view": lambda x: x.view(-1, VOCAB),
    "slice": lambda x: x[:, 1:],
    "turned": lambda x: x.transpose(0, 1),
    "one": lambda x: x.select(0, 1),
    "detached": lambda x: x.detach(),
    "same dtype": lambda x: x.double(),
    "contiguous": lambda x: x.contiguous(),
}


@pytest.mark.parametrize("write", [lambda x: x.mul_(3), _write], ids=["mul_", "setitem"])
@pytest.mark.parametrize("end", [lambda y: y.square().sum(), lambda y: y.logsumexp(-1).sum()], ids=["whole", "chunks"])
@pytest.mark.parametrize("derive", [*COPIES.values(), *VIEWS.values()], ids=[*COPIES, *(f"view {n}" for n in VIEWS)])
def test_views_see_what_is_written_and_copies_do_not(derive, end, write):
    def function(x, labels):
        y = derive(x)
        write(x)
        return end(y) + x.mean()

    assert_as_plain(function, rtol=1e-9, atol=1e-10)


def test_a_change_in_place_before_a_backward_of_its_own_is_refused():
    weights = Weights()
    logits = weights.deferred()
    logits.mul_(2)
    loss = Squared.apply(logits)
    with pytest.raises(RuntimeError, match=r"changed in place must not be given to a function .*chunked_loss='off'"):
        loss.backward()


def test_a_row_that_has_changed_since_is_an_error():
    weights, row = Weights(), torch.ones(VOCAB, dtype=torch.float64)
    added = weights.deferred() + row
    row.mul_(5)
    with pytest.raises(RuntimeError, match="changed in place before their backward"):
        added.logsumexp(-1)


@pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("read", [lambda x: x.cos(), lambda x: x.argmax(-1)], ids=["whole", "chunks"])
def test_logits_of_weights_that_have_changed_since_are_an_error(name, read):
    weights = Weights()
    logits = weights.deferred()
    with torch.no_grad():
        getattr(weights, name).mul_(2)
    with pytest.raises(RuntimeError, match=r"read logits before that, or use chunked_loss='off' .l2l_chunked_loss."):
        read(logits)


def test_class_weights_and_an_ignored_index_beyond_the_vocabulary():
    weights = torch.linspace(0.1, 2.0, VOCAB, dtype=torch.float64)
    assert_as_plain(
        lambda x, labels: functional.cross_entropy(
            x.view(-1, VOCAB),
            labels.masked_fill(labels < 0, VOCAB + 5).view(-1),
            weight=weights,
            ignore_index=VOCAB + 5,
        )
    )


def test_what_it_knows_of_itself_makes_nothing():
    logits, plain = Weights().deferred(), Weights().logits()
    assert isinstance(logits, torch.Tensor) and torch.is_tensor(logits)
    assert logits.shape == plain.shape == logits.size() and len(logits) == ROWS and logits.ndim == 3
    assert (logits.dtype, logits.device, logits.requires_grad) == (plain.dtype, plain.device, True)
    assert logits.numel() == plain.numel() and logits.is_floating_point() and logits.size(-1) == VOCAB
    assert logits.detach().requires_grad is False and logits.float().dtype == torch.float32
    assert logits.to(torch.float64) is logits and logits.to("cpu") is logits
    assert not logits.deferred.is_there


def test_values_without_a_graph_do_not_cost_the_graph():
    """A metric under no_grad, and then the loss."""
    weights, plain = Weights(), Weights()
    logits = weights.deferred()
    with torch.no_grad():
        assert not logits.cumsum(-1).requires_grad
        assert torch.equal(logits.argmax(-1), plain.logits().argmax(-1))
    logits.sin().sum().backward()
    plain.logits().sin().sum().backward()
    torch.testing.assert_close(weights.gradients(), plain.gradients(), rtol=0, atol=0)


def test_what_is_recorded_without_a_graph_has_none():
    logits = Weights().deferred()
    with torch.no_grad():
        scaled = logits / 2
    assert not scaled.requires_grad and not scaled.logsumexp(-1).requires_grad


def test_numbers_are_read_in_chunks():
    weights = Weights()
    logits = weights.deferred()
    assert torch.equal(logits.argmax(dim=-1), weights.logits().argmax(dim=-1))
    assert not logits.deferred.is_there and not logits.deferred.in_chunks


def test_a_second_backward():
    weights = Weights()
    loss = IN_CHUNKS["mean"](weights.deferred(), weights.labels)
    loss.backward(retain_graph=True)
    once = [g.clone() for g in weights.gradients()]
    loss.backward()
    torch.testing.assert_close(weights.gradients(), [2 * g for g in once])


def test_a_frozen_head_and_a_frozen_body():
    for frozen in ("weight", "bias", "hidden"):
        ours, plain = Weights(), Weights()
        for each in (ours, plain):
            getattr(each, frozen).requires_grad_(False)
        IN_CHUNKS["mean"](ours.deferred(), ours.labels).backward()
        IN_CHUNKS["mean"](plain.logits(), plain.labels).backward()
        for name in ("hidden", "weight", "bias"):
            found, expected = getattr(ours, name).grad, getattr(plain, name).grad
            assert (found is None) == (expected is None) == (name == frozen)
            if found is not None:
                torch.testing.assert_close(found, expected)


def test_no_token_counts():
    weights = Weights()
    weights.labels.fill_(-100)
    assert IN_CHUNKS["mean"](weights.deferred(), weights.labels).isnan()
    assert IN_CHUNKS["sum"](weights.deferred(), weights.labels) == 0


def test_a_label_out_of_range_raises_as_in_plain_torch():
    weights = Weights()
    weights.labels[0, 0] = VOCAB
    with pytest.raises(IndexError, match="out of bounds"):
        IN_CHUNKS["mean"](weights.deferred(), weights.labels)


@pytest.mark.parametrize(
    "ask",
    [
        lambda logits, loss: logits.retain_grad(),
        lambda logits, loss: logits.grad,
        lambda logits, loss: logits.register_hook(print),
        lambda logits, loss: torch.autograd.grad(loss, logits, allow_unused=True),
    ],
)
def test_the_gradient_of_logits_that_were_not_there(ask):
    weights = Weights()
    logits = weights.deferred()
    loss = IN_CHUNKS["mean"](logits, weights.labels)
    with pytest.raises(RuntimeError, match=r"no gradient of their own once a loss was computed .*chunked_loss='off'"):
        ask(logits, loss)


def test_the_gradient_of_logits_asked_for_in_time():
    weights, plain = Weights(), Weights()
    logits, expected = weights.deferred(), plain.logits()
    for each in (logits, expected):
        each.retain_grad()
        IN_CHUNKS["mean"](each, weights.labels).backward()
    assert torch.equal(logits.grad, expected.grad)


def test_autocast_is_that_of_the_forward():
    found = []
    for defer in (False, True):
        weights = Weights(torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            logits = weights.deferred() if defer else weights.logits()
            assert logits.dtype == torch.bfloat16
            loss = IN_CHUNKS["mean"](logits, weights.labels)
        loss.backward()
        found.append([loss.detach(), *weights.gradients()])
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=1e-2)


def test_sums_of_gradients_are_fp32():
    """1,000 tokens that each give the weight a gradient that 16 bits would round away from the sum."""
    hidden = torch.ones(1, 1000, 4, dtype=torch.bfloat16)
    weight = torch.zeros(8, 4, dtype=torch.bfloat16, requires_grad=True)
    chunks_of = chunks.Head(weight, None, deferred.AutocastState.current(hidden.device))
    found = chunks.in_chunks(chunks_of, hidden[0], lambda logits: logits.sum(-1, keepdim=True) / 1000)
    found.sum().backward()
    torch.testing.assert_close(weight.grad, torch.ones_like(weight), rtol=1e-2, atol=0)


def test_copies_have_the_values():
    logits, plain = Weights().deferred(), Weights().logits()
    assert torch.equal(copy.deepcopy(logits.detach()), plain) and logits.detach().numpy().shape == plain.shape
    assert logits.tolist() == plain.tolist()


def test_a_deferred_tensor_logs_nothing_if_it_is_one_chunk(caplog, monkeypatch):
    monkeypatch.setattr(chunks, "FEWEST_ROWS", 128)
    with caplog.at_level(logging.INFO):
        Weights().deferred().cumsum(0)
    assert caplog.text == "" and HIDDEN < 128


class Own(torch.Tensor):
    """A tensor of a device whose tensors have a class of their own."""


@pytest.mark.parametrize("name", ["cross entropy", "gather"])
def test_labels_of_a_class_of_their_own(name, caplog):
    def function(logits, labels):
        labels = labels.as_subclass(Own)
        if name == "gather":
            return logits.gather(-1, labels.clamp(min=0)[..., None]).sum()
        return functional.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1))

    found = assert_as_plain(function, rtol=1e-10, atol=1e-12)
    assert not found.is_there and caplog.text == ""
