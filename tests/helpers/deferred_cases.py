"""Functions of logits, as losses and metrics compute them, and logits of a small head to compute them of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hf_l2l.logits.chunks import Head
from hf_l2l.logits.deferred import Deferred, DeferredLogits
from hf_l2l.runtime.compute_state import AutocastState

ROWS, TOKENS, HIDDEN, VOCAB = 2, 5, 6, 11
Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Weights:
    """A hidden state (ROWS, TOKENS, HIDDEN), and the weight and bias of a head; the same numbers for one dtype."""

    def __init__(self, dtype: torch.dtype = torch.float64, device: str = "cpu", *, bias: bool = True) -> None:
        generator = torch.Generator().manual_seed(0)

        def made(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

        self.hidden, self.weight = made(ROWS, TOKENS, HIDDEN), made(VOCAB, HIDDEN)
        self.bias = made(VOCAB) if bias else None
        self.labels = torch.randint(0, VOCAB, (ROWS, TOKENS), generator=generator)
        self.labels[0, 1] = -100
        self.labels = self.labels.to(device)

    def logits(self) -> torch.Tensor:
        return functional.linear(self.hidden, self.weight, self.bias)

    def deferred(self) -> DeferredLogits:
        head = Head(self.weight, self.bias, AutocastState.current(self.hidden.device))
        with torch.no_grad():
            sample = head.linear(self.hidden.new_empty(0, HIDDEN))
        return DeferredLogits.of(Deferred(head, self.hidden, sample, self.logits))

    def gradients(self) -> list[torch.Tensor]:
        grads = [t.grad for t in (self.hidden, self.weight, self.bias) if t is not None]
        assert all(g is not None for g in grads)
        return grads  # type: ignore[return-value]


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
    parts = [functional.log_softmax(part, dim=-1) for part in x.reshape(-1, VOCAB).split(4, dim=0)]
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
    "last tokens": lambda x, labels: _loss()(x[:, -3:].contiguous(), labels[:, -3:].contiguous()),
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
    "two of them": lambda x, labels: (x * x.softmax(-1)).sum(),
    "joined": lambda x, labels: _loss()(torch.cat([x, x]), torch.cat([labels, labels])),
    "checkpointed": lambda x, labels: torch.utils.checkpoint.checkpoint(
        lambda t: t.sin().sum(), x, use_reentrant=False
    ),
    "entropy": lambda x, labels: entropy(x).square().sum(),
}
"""What makes the logits of all tokens, or of some of them."""
