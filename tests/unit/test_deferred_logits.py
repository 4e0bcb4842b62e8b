"""Deferred logits: losses in chunks and everything else have the values and gradients of ordinary logits."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from hf_l2l.logits import recorded  # noqa: F401  # it registers what can be done with deferred logits
from hf_l2l.logits.chunks import FEWEST_ROWS, Head, in_chunks, rows_per_chunk
from hf_l2l.logits.deferred import Deferred, DeferredLogits
from hf_l2l.runtime.compute_state import AutocastState
from tiers import times

ROWS, TOKENS, HIDDEN, VOCAB = 2, 160, 6, 11
"""The tokens make three chunks."""
Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Weights:
    """A hidden state (ROWS, TOKENS, HIDDEN), and the weight and bias of a head; the same numbers for one dtype."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = (ROWS, TOKENS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,)
        made = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
        self.hidden, self.weight, self.bias = made
        self.labels = torch.randint(0, VOCAB, (ROWS, TOKENS), generator=generator)
        self.labels[0, 1] = -100

    def logits(self) -> torch.Tensor:
        return functional.linear(self.hidden, self.weight, self.bias)

    def deferred(self) -> DeferredLogits:
        head = Head(self.weight, self.bias, AutocastState.current(self.hidden.device), FEWEST_ROWS)
        return DeferredLogits.of(Deferred(head, self.hidden, head.of_none(self.hidden), self.logits))

    def gradients(self) -> list[Any]:
        return [t.grad for t in (self.hidden, self.weight, self.bias)]


class Squared(torch.autograd.Function):
    """Squares, as a loss with a kernel of its own: autograd alone connects it to the logits."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x * x).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        [x] = ctx.saved_tensors
        return 2 * x * gradient


def entropy(x: torch.Tensor) -> torch.Tensor:
    """As TRL computes it."""
    parts = [functional.log_softmax(part, dim=-1) for part in x.reshape(-1, VOCAB).split(140, dim=0)]
    return torch.cat([-(torch.exp(p) * p).sum(-1) for p in parts])


def smoothed(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As the `LabelSmoother` of transformers computes it."""
    x, labels = x[..., :-1, :].contiguous(), labels[..., 1:].contiguous().unsqueeze(-1)
    log_probs, ignored = -functional.log_softmax(x, dim=-1), labels.eq(-100)
    losses = log_probs.gather(dim=-1, index=labels.clamp(min=0)).masked_fill(ignored, 0.0)
    smooth = log_probs.sum(dim=-1, keepdim=True, dtype=torch.float32).masked_fill(ignored, 0.0)
    count = ignored.numel() - ignored.long().sum()
    return 0.9 * losses.sum() / count + 0.1 * smooth.sum() / (count * VOCAB)


def chosen(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the labels, as TRL computes them in fp32."""
    picked = torch.gather(x, dim=-1, index=labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return picked - torch.stack([torch.logsumexp(row, dim=-1) for row in x])


def _loss(**options: Any) -> Function:
    return lambda x, labels: functional.cross_entropy(x.view(-1, VOCAB), labels.view(-1), **options)


def _class_weights(x: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.1, 2.0, VOCAB, dtype=x.dtype, device=x.device)


IN_CHUNKS: dict[str, Function] = {
    "mean": _loss(),
    "sum": lambda x, labels: _loss(reduction="sum")(x, labels) / 7,
    "no reduction": lambda x, labels: _loss(reduction="none")(x, labels).square().sum(),
    "module": lambda x, labels: nn.CrossEntropyLoss()(x.reshape(-1, VOCAB), labels.view(-1)),
    "label smoothing": _loss(label_smoothing=0.1),
    "class weights": lambda x, labels: _loss(weight=_class_weights(x), label_smoothing=0.1)(x, labels),
    "float": lambda x, labels: _loss()(x.float(), labels),
    "soft-cap": lambda x, labels: _loss()(torch.tanh(x / 2.0) * 2.0, labels),
    "scaled in place of an operator": lambda x, labels: _loss()(torch.div(x, 3), labels),
    "bias of logits": lambda x, labels: _loss()(x + _class_weights(x).view(1, -1), labels),
    "shifted": lambda x, labels: _loss()(x[..., :-1, :].contiguous(), labels[..., 1:].contiguous()),
    "last tokens": lambda x, labels: _loss()(x[:, -90:].contiguous(), labels[:, -90:].contiguous()),
    "no labels": lambda x, labels: _loss()(x, torch.full_like(labels, -100)),
    "masked rows": lambda x, labels: _loss()(x[labels >= 0], labels[labels >= 0]),
    "one token": lambda x, labels: x[:, -1].logsumexp(-1).sum(),
    "smoothed by transformers": smoothed,
    "of probabilities": lambda x, labels: chosen(x, labels).square().sum(),
    "log-softmax": lambda x, labels: x.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).square().sum(),
    "largest": lambda x, labels: x.amax(-1).sum(),
    "mean of a row": lambda x, labels: x.softmax(dim=-1).mean(-1, keepdim=True).square().sum(),
    "rows of others": lambda x, labels: sum(each.logsumexp(dim=1).sum() for each in x.transpose(0, 1).unbind(1)),
}
"""What never makes the logits of all tokens."""

WHOLE: dict[str, Function] = {
    "kernel of its own": lambda x, labels: Squared.apply(x),
    "classes in the middle": lambda x, labels: functional.cross_entropy(x.transpose(1, 2), labels),
    "probabilities as targets": lambda x, labels: functional.cross_entropy(x[0], torch.ones_like(x[0]) / VOCAB),
    "one class": lambda x, labels: x[..., 3].square().sum(),
    "some classes": lambda x, labels: _loss()(torch.nn.functional.pad(x[..., :-1], (0, 1)), labels),
    "in place": lambda x, labels: _loss()(x.view(-1, VOCAB).mul_(2), labels),
    "written to": lambda x, labels: (x.__setitem__((slice(None), 0), 0.0), x.square().sum())[1],
    "turned afterwards": lambda x, labels: (x.mul_(2), x.transpose(0, 1).square().sum())[1],
    "two of them": lambda x, labels: (x * x.softmax(-1)).sum(),
    "joined": lambda x, labels: _loss()(torch.cat([x, x]), torch.cat([labels, labels])),
    "checkpointed": lambda x, labels: torch.utils.checkpoint.checkpoint(
        lambda t: t.sin().sum(), x, use_reentrant=False
    ),
    "entropy": lambda x, labels: entropy(x).square().sum(),
}
"""What makes the logits of all tokens, or of some of them."""


def results(function, dtype, *, defer):
    weights = Weights(dtype)
    logits = weights.deferred() if defer else weights.logits()
    found = function(logits, weights.labels)
    found.backward()
    return [found.detach(), *weights.gradients()], logits


def assert_as_plain(function, dtype=torch.float64, *, name="", **tolerance):
    expected, _ = results(function, dtype, defer=False)
    found, logits = results(function, dtype, defer=True)
    torch.testing.assert_close(found, expected, equal_nan=True, msg=lambda said: f"{name}: {said}", **tolerance)
    return logits.deferred


def test_computed_in_chunks(caplog):
    for name, function in IN_CHUNKS.items():
        # transformers makes fp32 of logits, whatever they were.
        in_fp32 = name in ("float", "smoothed by transformers")
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if in_fp32 else {"rtol": 1e-10, "atol": 1e-12}
        assert not assert_as_plain(function, name=name, **tolerance).is_there and caplog.text == "", name
        assert_as_plain(function, torch.bfloat16, name=name, rtol=2e-2, atol=5e-2)


def test_everything_else_has_the_bits_of_plain_torch():
    for name, function in WHOLE.items():
        assert assert_as_plain(function, name=name, rtol=0, atol=0).is_there, name


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


@settings(max_examples=times(60, 500), deadline=None)
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


OTHERS = {
    "clone": lambda x: x.clone(),
    "mask": lambda x: x[torch.tensor([True, False])],
    "rows": lambda x: x.index_select(0, torch.tensor([1, 0])),
    "contiguous part": lambda x: x[:, 1:].contiguous(),
    "slice": lambda x: x[:, 1:],
    "turned and joined": lambda x: x.transpose(0, 1).reshape(-1, VOCAB),
    "one": lambda x: x.select(0, 1),
    "detached": lambda x: x.detach(),
}
"""Copies and views."""


def test_views_see_what_is_written_and_copies_do_not():
    for name, derive in {**STEPS, **OTHERS, "parted": lambda x: x.split(1)[-1].clone()}.items():
        for write in (lambda x: x.mul_(3), _write):
            for end in (lambda y: y.square().sum(), lambda y: y.logsumexp(-1).sum()):

                def function(x, labels, derive=derive, write=write, end=end):
                    y = derive(x)
                    write(x)
                    return end(y) + x.mean()

                assert_as_plain(function, name=name, rtol=1e-9, atol=1e-10)


def test_what_has_changed_since_is_an_error():
    row = torch.ones(VOCAB, dtype=torch.float64)
    added = Weights().deferred() + row
    row.mul_(5)
    with pytest.raises(RuntimeError, match="changed in place before their backward"):
        added.logsumexp(-1)
    logits = Weights().deferred()
    logits.mul_(2)  # before a backward of its own
    with pytest.raises(RuntimeError, match="chunked_loss='off'"):
        Squared.apply(logits).backward()
    for name in ("hidden", "weight", "bias"):
        for read in (torch.cos, lambda x: x.argmax(-1)):
            weights = Weights()
            logits = weights.deferred()
            with torch.no_grad():
                getattr(weights, name).mul_(2)
            with pytest.raises(RuntimeError, match="chunked_loss='off'"):
                read(logits)


def test_what_it_knows_of_itself_makes_nothing():
    logits, plain = Weights().deferred(), Weights().logits()
    assert isinstance(logits, torch.Tensor) and torch.is_tensor(logits)
    assert logits.shape == plain.shape == logits.size() and len(logits) == ROWS and logits.ndim == 3
    assert (logits.dtype, logits.device, logits.requires_grad) == (plain.dtype, plain.device, True)
    assert logits.detach().requires_grad is False and logits.float().dtype == torch.float32
    assert logits.to(torch.float64) is logits and logits.to("cpu") is logits
    assert torch.equal(logits.argmax(dim=-1), plain.argmax(dim=-1)), "which is read in chunks"
    assert not logits.deferred.is_there and not logits.deferred.in_chunks
    assert torch.equal(copy.deepcopy(logits.detach()), plain) and logits.tolist() == plain.tolist()


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
    with torch.no_grad():
        scaled = Weights().deferred() / 2
    assert not scaled.requires_grad and not scaled.logsumexp(-1).requires_grad


def test_a_frozen_head_and_a_frozen_body():
    for frozen, loss in product(("weight", "bias", "hidden"), ("mean", "no reduction")):
        ours, plain = Weights(), Weights()
        for each in (ours, plain):
            getattr(each, frozen).requires_grad_(False)
        IN_CHUNKS[loss](ours.deferred(), ours.labels).backward()
        IN_CHUNKS[loss](plain.logits(), plain.labels).backward()
        assert getattr(ours, frozen).grad is None
        for name in {"hidden", "weight", "bias"} - {frozen}:
            torch.testing.assert_close(getattr(ours, name).grad, getattr(plain, name).grad)


class Counted(TorchDispatchMode):
    """Counts chunks of logits that are computed, or gradients of hidden states, and casts of the whole weight."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.gradients, self.casts = 0, 0, 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = op(*args, **(kwargs or {}))
        name = op.overloadpacket.__name__
        self.products += name in ("mm", "addmm", "linear") and len(found) > VOCAB and found.shape[1] == VOCAB
        self.gradients += name == "mm" and len(found) > VOCAB and found.shape[1] == HIDDEN
        dtypes = [getattr(each, "dtype", None) for each in (args[0], found)]
        self.casts += dtypes == [torch.float32, torch.bfloat16] and found.shape == (VOCAB, HIDDEN)
        return found


CHUNKS = 3


@pytest.mark.parametrize(
    ("loss", "dtype", "forward", "backward"),
    [
        ("mean", torch.bfloat16, CHUNKS, 0),
        ("sum", torch.bfloat16, CHUNKS, 0),
        ("mean", torch.float16, CHUNKS, CHUNKS),  # the loss scale is not known in the forward
        ("no reduction", torch.bfloat16, CHUNKS, CHUNKS),
        ("of probabilities", torch.bfloat16, 2 * CHUNKS + 1, 2 * CHUNKS + 1),
    ],
)
def test_logits_of_a_loss_are_computed_once_and_the_weight_is_cast_once(loss, dtype, forward, backward):
    weights = Weights(torch.float32)
    with torch.autocast("cpu", dtype):
        logits = weights.deferred()
        with Counted() as found:
            result = IN_CHUNKS[loss](logits, weights.labels)
        assert (found.products, found.gradients) == (forward, 0 if backward else forward)
        calls = 1 + (forward > CHUNKS) * 2
        assert found.casts == (calls if dtype == torch.bfloat16 else 0)
    with Counted() as found:
        result.backward()
    assert (found.products, found.casts) == (backward, 0)


def test_without_gradients_none_are_computed():
    for region in (torch.no_grad, torch.inference_mode):
        weights = Weights()
        logits = weights.deferred().view(-1, VOCAB)
        with region(), Counted() as found:
            result = functional.cross_entropy(logits, weights.labels.view(-1))
        assert (found.products, found.gradients) == (CHUNKS, 0) and not result.requires_grad
        assert result.item() == pytest.approx(IN_CHUNKS["mean"](weights.logits(), weights.labels).item(), rel=1e-12)


def test_backwards_of_all_kinds():
    """Several forwards before a backward, several backwards of one forward with factors of their own, parts of the
    gradients, and none of gradients."""
    loss = IN_CHUNKS["class weights"]

    def found(of: Weights, logits: Callable[[], torch.Tensor]) -> list[Any]:
        given = of.hidden, of.weight, of.bias
        one, other = loss(logits(), of.labels), loss(logits() / 2, of.labels)
        parts = [*torch.autograd.grad(3 * one, of.weight, retain_graph=True)]
        parts += torch.autograd.grad(other, (of.bias, of.hidden), torch.tensor(0.3), retain_graph=True)
        (one * 0.7).backward(retain_graph=True)
        (one * other).backward()
        return [*parts, *(t.grad for t in given)]

    ours, plain = Weights(), Weights()
    torch.testing.assert_close(found(ours, ours.deferred), found(plain, plain.logits), rtol=1e-10, atol=1e-12)
    [gradient] = torch.autograd.grad(loss(ours.deferred(), ours.labels).square(), ours.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_what_a_backward_needs_is_free_with_the_graph():
    weights = Weights()
    loss = IN_CHUNKS["mean"](weights.deferred(), weights.labels)
    [node] = [each for each in _nodes(loss.grad_fn) if "InChunks" in each.name()]
    kept = [weakref.ref(t) for t in node.saved_tensors]
    assert [each().shape for each in kept] == [(ROWS * TOKENS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,)]
    at = [t.data_ptr() for t in node.saved_tensors]
    loss.backward()
    assert [each() for each in kept] == [None] * 3
    assert [weights.weight.grad.data_ptr(), weights.bias.grad.data_ptr()] == at[1:], "they are multiplied in place"


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for each, _ in node.next_functions:
        yield from () if each is None else _nodes(each)


def test_a_label_out_of_range_raises_as_in_plain_torch():
    weights = Weights()
    weights.labels[0, 0] = VOCAB
    with pytest.raises(IndexError, match="out of bounds"):
        IN_CHUNKS["mean"](weights.deferred(), weights.labels)


def test_the_gradient_of_logits_is_there_if_it_is_asked_for_in_time():
    weights, plain = Weights(), Weights()
    logits, expected = weights.deferred(), plain.logits()
    for each in (logits, expected):
        each.retain_grad()
        IN_CHUNKS["mean"](each, weights.labels).backward()
    assert torch.equal(logits.grad, expected.grad)
    for ask in (
        lambda logits, loss: logits.retain_grad(),
        lambda logits, loss: logits.grad,
        lambda logits, loss: logits.register_hook(print),
        lambda logits, loss: torch.autograd.grad(loss, logits, allow_unused=True),
    ):
        logits = weights.deferred()
        loss = IN_CHUNKS["mean"](logits, weights.labels)
        with pytest.raises(RuntimeError, match="chunked_loss='off'"):
            ask(logits, loss)


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


def test_a_loss_shows_hooks_of_saved_tensors_no_logits():
    """Activation checkpointing around the loss would compute its region again for each chunk."""
    weights, packed = Weights(), []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = IN_CHUNKS["mean"](weights.deferred(), weights.labels)
    assert packed and (FEWEST_ROWS, VOCAB) not in packed
    loss.backward()
    assert all(gradient is not None for gradient in weights.gradients())


@pytest.mark.parametrize(
    ("hidden", "vocabulary", "gigabytes", "rows"),
    [
        (4096, 128_000, 80, 2304),
        (4096, 128_000, 85, 2560),
        (3584, 151_936, 80, 2048),
        (4096, 128_000, 24, 1024),  # a quarter of the hidden size, at least
        (2048, 128_000, 24, 512),
        (2048, 32_000, 24, 2816),
        (64, 128_000, 1e-6, 128),
        (4096, 1000, 80, 8192),
        (4096, 128_000, None, 1024),
        (64, 1000, 1e10, 128),  # a simulated device without a limit
    ],
)
def test_rows_of_a_chunk(hidden, vocabulary, gigabytes, rows):
    memory = None if gigabytes is None else int(gigabytes * 10**9)
    assert rows_per_chunk(hidden, vocabulary, memory) == rows


def test_sums_of_gradients_are_fp32():
    """1,000 tokens that each give the weight a gradient that 16 bits would round away from the sum."""
    hidden = torch.ones(1, 1000, 4, dtype=torch.bfloat16)
    weight = torch.zeros(8, 4, dtype=torch.bfloat16, requires_grad=True)
    head = Head(weight, None, AutocastState.current(hidden.device), FEWEST_ROWS)
    found = in_chunks(head, hidden[0], lambda logits: logits.sum(-1, keepdim=True) / 1000)
    found.sum().backward()
    torch.testing.assert_close(weight.grad, torch.ones_like(weight), rtol=1e-2, atol=0)
