"""Layers with recurrent modules, with rows in numbers, or with something of the model that is no argument."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l import L2LConfig, attach_l2l, detach_l2l

WIDTH, ROWS = 6, 7
pytestmark = pytest.mark.parametrize("device", ["cpu", "sim"])


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor, *given: Any) -> torch.Tensor:
        return h + torch.tanh(self.a(h))


class Stack(nn.Module):
    """Layers between two linear modules, in float64."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = self.through(layer, h)
        return self.head(h)

    def through(self, layer: nn.Module, h: torch.Tensor) -> torch.Tensor:
        return layer(h)


def made(kind: Callable[..., Stack], *args: Any) -> Stack:
    torch.manual_seed(0)
    return kind(*args)


def trained(model: Stack, steps: int = 2) -> list[torch.Tensor]:
    """Losses, and the weights after steps of SGD."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        loss = model(torch.randn(ROWS, 5, WIDTH, generator=generator, dtype=torch.float64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().cpu())
    return found


def check(device: str, ubatch_size: int | None, kind: Callable[..., Stack], *args: Any) -> list[str]:
    """Training is that of plain torch; returns the warnings."""
    plain, model = made(kind, *args), made(kind, *args)
    expected = trained(plain)
    attach_l2l(
        model, L2LConfig(device=device, ubatch_size=ubatch_size, layer_classes=(type(model.layers[0]).__name__,))
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = trained(model)
    detach_l2l(model)
    assert torch.allclose(torch.stack(found), torch.stack(expected), rtol=1e-10)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-12)
    return [str(each.message) for each in told]


class Recurs(nn.Module):
    kind: type[nn.RNNBase] = nn.LSTM

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = self.kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.recurrent(h)[0]


@pytest.mark.parametrize("ubatch_size", [None, 3])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_train_in_layers(device, kind, ubatch_size):
    assert check(device, ubatch_size, Stack, type("Recurs", (Recurs,), {"kind": kind})) == []


class Flat(Block):
    """Is given the number of rows."""

    def forward(self, h: torch.Tensor, *given: Any) -> torch.Tensor:
        rows = given[0]
        return super().forward(h.view(rows, -1, WIDTH)).flatten(0, 1)


class GivesTheNumberOfRows(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows = x.shape[0]
        return super().forward(x)

    def through(self, layer: nn.Module, h: torch.Tensor) -> torch.Tensor:
        return layer(h.flatten(0, 1), self.rows).view_as(h)


class Splits(Block):
    """Is given sizes of parts of the batch, which are a tensor of any length."""

    def forward(self, h: torch.Tensor, *given: Any) -> torch.Tensor:
        return torch.cat([super(Splits, self).forward(part) for part in h.split(given[0].tolist())])


class GivesSizes(Stack):
    def through(self, layer: nn.Module, h: torch.Tensor) -> torch.Tensor:
        return layer(h, torch.tensor([3, 2, 2] if h.shape[0] == ROWS else [7, 4, 3]))


@pytest.mark.parametrize(("kind", "block"), [(GivesTheNumberOfRows, Flat), (GivesSizes, Splits)])
def test_a_layer_that_does_not_run_with_some_of_its_rows_runs_with_all(device, kind, block):
    assert check(device, None, kind, block) == []
    (text,) = check(device, 3, kind, block)
    assert f"ubatch_size=3 has no effect on calls of {block.__name__}: it does not run with some of its rows" in text


class Conditioned(Block):
    condition: Any = None

    def forward(self, h: torch.Tensor, *given: Any) -> torch.Tensor:
        return super().forward(h) * self.condition


class SetsConditions(Stack):
    """Gives its layers a condition by their attributes."""

    shares = detaches = False

    def __init__(self, block: Callable[[], nn.Module] = Conditioned) -> None:
        super().__init__(block)
        self.condition = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.condition(x.mean((0, 1)))
        for layer in self.layers:
            layer.condition = made if self.shares else self.condition(x.mean((0, 1)))
            if self.detaches:
                layer.condition = layer.condition.detach()
        return super().forward(x)


class SharesConditions(SetsConditions):
    shares = True


class SetsDetached(SetsConditions):
    detaches = True


@pytest.mark.parametrize("ubatch_size", [None, 3])
@pytest.mark.parametrize("kind", [SetsConditions, SharesConditions])
def test_a_tensor_with_a_graph_in_an_attribute_is_refused(device, kind, ubatch_size):
    model = made(kind)
    attach_l2l(model, L2LConfig(device=device, ubatch_size=ubatch_size, layer_classes=("Conditioned",)))
    with pytest.raises(
        ValueError, match=r"has tensors of another graph in Conditioned\.condition.*pass them to the layer"
    ):
        trained(model)
    for layer in model.layers:
        del layer.condition  # whose graph has the weights of the model, and so the model


def test_a_tensor_without_a_graph_in_an_attribute_is_that_of_its_own_batch(device):
    """And not of the trial that finds out how calls are split."""
    assert check(device, 3, SetsDetached) == []


class Hides(Block):
    hidden: Any = ()

    def forward(self, h: torch.Tensor, *given: Any) -> torch.Tensor:
        return super().forward(h) + self.hidden[0](h)


class SharesAModule(Stack):
    def __init__(self) -> None:
        super().__init__(Hides)
        self.shared = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        for layer in self.layers:
            layer.hidden = (self.shared,)


@pytest.mark.parametrize("options", [{}, {"eps_update": "eager"}, {"ubatch_size": 3}])
def test_a_layer_that_calls_a_module_outside_of_it_is_refused(device, options):
    model = made(SharesAModule)
    eps = attach_l2l(model, L2LConfig(device=device, layer_classes=("Hides",), **options))
    eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"got a call of a Linear in layers\.2.*an attribute of its own"):
        trained(model)
    detach_l2l(model)


def test_models_that_share_modules_are_refused_and_stay_attached(device):
    model, other = made(Stack), made(Stack)
    other.layers = model.layers
    config = L2LConfig(device=device, layer_classes=("Block",))
    attach_l2l(model, config)
    with pytest.raises(ValueError, match=r"share modules with another one that is attached \(got 'layers\.0'"):
        attach_l2l(other, config)
    trained(model)
    detach_l2l(model)
    attach_l2l(other, config)
    trained(other)
