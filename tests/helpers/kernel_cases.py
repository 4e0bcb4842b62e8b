"""Layers whose dropout is drawn by one kernel or another, chosen as torch chooses that of attention."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 8


def dropped(x: torch.Tensor, p: float) -> torch.Tensor:
    """Dropout by one of two kernels, which make other masks of the same state of the generator.

    Like `scaled_dot_product_attention` on some devices, it asks whether a gradient is needed.
    """
    if p == 0:
        return x
    mask = F.dropout(torch.ones_like(x), p)
    return x * (mask if torch.is_grad_enabled() and x.requires_grad else mask.flip(-1))


class Attentive(nn.Module):
    """A layer with dropout inside, and a buffer that counts its calls."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.grad_modes: list[bool] = []
        """Per call and recompute, whether it ran in grad mode."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.grad_modes.append(torch.is_grad_enabled())
        self.calls += 1
        return hidden + self.outer(dropped(self.inner(hidden), self.p if self.training else 0.0).tanh())


class Stack(nn.Module):
    """Layers, and nothing else that draws random numbers."""

    def __init__(self, layer: type[nn.Module] = Attentive, depth: int = 3, **options: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer(**options) for _ in range(depth)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.pow(2).mean()
