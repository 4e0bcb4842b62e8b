"""Layers that compute with more than their arguments, weights and torch's generators."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from devices import DEVICE
from hf_l2l import EagerParamServer, L2LConfig, attach_l2l

WIDTH, ROWS = 6, 7


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.factor = 1.0
        self.prepare()

    def prepare(self) -> None:
        """Make what a layer has beside."""

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
    def prepare(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def scale(self, h: torch.Tensor) -> Any:
        return torch.rand((), generator=self.generator).item()


class Counts(Block):
    def scale(self, h: torch.Tensor) -> Any:
        self.factor += 0.5
        return self.factor


class CountsInABuffer(Block):
    def prepare(self) -> None:
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

    def prepare(self) -> None:
        self.register_buffer("mean", torch.ones(WIDTH))

    def scale(self, h: torch.Tensor) -> Any:
        before = self.mean.clone()
        self.mean.lerp_(h.detach().mean((0, 1)), 0.5)
        return 1 + before


class SpectralNorm(Block):
    def prepare(self) -> None:
        self.a = spectral_norm(self.a)


class WeightNorm(Block):
    def prepare(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is the old one
            self.a = weight_norm(self.a)


class Pruned(Block):
    def prepare(self) -> None:
        prune.l1_unstructured(self.a, "weight", 0.5)


class ParametrizedSpectralNorm(Block):
    def prepare(self) -> None:
        self.a = parametrizations.spectral_norm(self.a)


class Drops(Block):
    def scale(self, h: torch.Tensor) -> Any:
        return nn.functional.dropout(torch.ones(WIDTH, device=h.device), 0.5, self.training)


class Net(nn.Module):
    """Some such layers, the same weights each time."""

    def __init__(self, *kinds: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(kind() for kind in kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = self.run(layer, h)
        return self.head(h).square().mean()

    def run(self, layer: nn.Module, h: torch.Tensor) -> Any:
        return layer(h)


DRAWING = (DrawsFromPython, DrawsFromNumpy, HasItsOwnGenerator)
CHANGING = (Counts, CountsInABuffer, ReplacesItsBuffer, Centers, SpectralNorm, ParametrizedSpectralNorm)
COMPUTING_WEIGHTS = (WeightNorm, Pruned)
"""Before each use, in attributes that nobody else reads: nothing is to be said of them."""


def made(kind: Callable[[], nn.Module] = Block) -> Any:
    """A model with three layers of a kind."""
    return Net(kind, kind, kind)


def batch() -> torch.Tensor:
    return torch.randn(ROWS, 5, WIDTH, generator=torch.Generator().manual_seed(1))


def attach(net: nn.Module, **options: Any) -> EagerParamServer:
    return attach_l2l(net, L2LConfig(**{"device": DEVICE, "layer_classes": ("Block",), **options}))


class Trained(NamedTuple):
    losses: list[float]
    weights: dict[str, torch.Tensor]
    """And buffers."""
    drawn: tuple[float, float]
    """What the program draws next."""


def trained(
    net: nn.Module,
    options: dict[str, Any] | None = None,
    *,
    loss_of: Callable[[torch.Tensor], torch.Tensor] | None = None,
    between: Callable[[Any], None] | None = None,
) -> Trained:
    """Two steps in plain torch on the host or, with `options`, layer to layer.

    Args:
        loss_of: makes a loss of what the model returns.
        between: what the program does with the model between the forward and the backward.
    """
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.05)
    if options is not None:
        optimizer = attach(net, **options).wrap(optimizer)
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    x, losses = batch(), []
    for _ in range(2):  # what is found out in the first one is used in the second one
        net.train()
        loss = net(x)
        if loss_of is not None:
            loss = loss_of(loss)
        if between is not None:
            between(net)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = {name: value.detach().to("cpu", copy=True) for name, value in net.state_dict().items()}
    return Trained(losses, weights, (random.random(), numpy.random.rand()))


def assert_trained_alike(found: Trained, expected: Trained) -> None:
    """But for rounding: a device, and micro-batches, sum in another order."""
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    for name, value in expected.weights.items():
        torch.testing.assert_close(found.weights[name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert found.drawn == expected.drawn
