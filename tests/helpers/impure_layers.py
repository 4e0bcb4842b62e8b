"""Layers that compute with more than their arguments, weights and torch's generators."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

WIDTH, ROWS = 6, 7


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.factor = 1.0

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.scale(h) * self.b(torch.tanh(self.a(h)))

    def scale(self, h: torch.Tensor) -> Any:
        return self.factor


class DrawsFromPython(Block):
    def scale(self, h: torch.Tensor) -> Any:
        return random.random()


class DrawsFromNumpy(Block):
    def scale(self, h: torch.Tensor) -> Any:
        return numpy.random.rand()


class HasItsOwnGenerator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def scale(self, h: torch.Tensor) -> Any:
        return torch.rand((), generator=self.generator).item()


class Counts(Block):
    def scale(self, h: torch.Tensor) -> Any:
        self.factor += 0.5
        return self.factor


class CountsInABuffer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def scale(self, h: torch.Tensor) -> Any:
        self.count += 0.5
        return self.count.clone()


class ReplacesItsBuffer(CountsInABuffer):
    def scale(self, h: torch.Tensor) -> Any:
        self.count = self.count + 0.5
        return self.count


class Centers(Block):
    """Reads a mean of what it was given before, and then updates it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))

    def scale(self, h: torch.Tensor) -> Any:
        before = self.mean.clone()
        self.mean.lerp_(h.detach().mean((0, 1)), 0.5)
        return 1 + before


class SpectralNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        self.a = spectral_norm(self.a)


class WeightNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is the old one
            self.a = weight_norm(self.a)


class Pruned(Block):
    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.a, "weight", 0.5)


class ParametrizedSpectralNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        self.a = parametrizations.spectral_norm(self.a)


class Drops(Block):
    def scale(self, h: torch.Tensor) -> Any:
        return nn.functional.dropout(torch.ones(WIDTH, device=h.device), 0.5, self.training)


class Net(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h).square().mean()


DRAWING = (DrawsFromPython, DrawsFromNumpy, HasItsOwnGenerator)
CHANGING = (Counts, CountsInABuffer, ReplacesItsBuffer, Centers, SpectralNorm, ParametrizedSpectralNorm)
COMPUTING_WEIGHTS = (WeightNorm, Pruned)
"""Before each use, in attributes that nobody else reads: nothing is to be said of them."""


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    """A model with three such layers, the same each time."""
    torch.manual_seed(0)
    return Net(kind)
