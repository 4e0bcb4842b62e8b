"""Layers that are recurrent, compiled, need all rows at once, or have something of the model that is no argument."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l import detach_l2l
from impure_layers import ROWS, WIDTH, Block, Net, assert_trained_alike, attach, batch, made, trained
from models import TOLERANCE, assert_same_bits, gradients, relative_error
from tiers import cpu_suffices, on_the_host


class Recurs(Block):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.recurrent(h)[0]


@pytest.mark.parametrize(("kind", "ubatch_size"), [(nn.LSTM, 3), (nn.GRU, None)])
def test_recurrent_modules_train_in_layers(kind, ubatch_size):
    found, expected = (
        trained(made(lambda: Recurs(kind)), options) for options in ({"ubatch_size": ubatch_size}, None)
    )
    assert_trained_alike(found, expected)


# Torch says what it cannot trace, of which there is much in a hooked module.
@on_the_host  # torch.compile does not know the simulated accelerator, and other devices may lack a compiler
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_module_trains():
    plain = made()
    model = copy.deepcopy(plain)
    torch._dynamo.reset()
    model.embed.compile(backend="eager")
    attach(model)
    for _ in range(3):
        for each in (model, plain):
            each.zero_grad()
            each(batch()).backward()
        assert_same_bits(gradients(model), gradients(plain))


# ---- rows that are no argument


class Flat(Block):
    """Is given the number of rows."""

    def forward(self, h: torch.Tensor, rows: int) -> torch.Tensor:
        return super().forward(h.view(rows, -1, WIDTH)).flatten(0, 1)


class Splits(Block):
    """Is given sizes of parts of the batch, which are a tensor of any length."""

    def forward(self, h: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return torch.cat([super(Splits, self).forward(part) for part in h.split(sizes.tolist())])


class Giving(Net):
    def __init__(self, kind: type[Block], through: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(kind, kind)
        self.through = through

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = self.through(layer, h)
        return self.head(h).square().mean()


@cpu_suffices
@pytest.mark.parametrize(
    ("kind", "through"),
    [
        (Flat, lambda layer, h: layer(h.flatten(0, 1), len(h)).view_as(h)),
        (Splits, lambda layer, h: layer(h, torch.tensor([3, 2, 2] if len(h) == ROWS else [7, 4, 3]))),
    ],
)
def test_a_layer_that_does_not_run_with_some_of_its_rows_runs_with_all(kind, through):
    expected = trained(Giving(kind, through))
    assert_trained_alike(trained(Giving(kind, through), {}), expected)
    with pytest.warns(UserWarning) as told:
        assert_trained_alike(trained(Giving(kind, through), {"ubatch_size": 3}), expected)
    reason = f"ubatch_size=3 has no effect on calls of {kind.__name__}: it does not run with some of its rows"
    assert len(told) == 1 and reason in str(told[0].message)


# ---- tensors and modules of the model in attributes


class Conditioned(Block):
    condition: Any = None

    def scale(self, h: torch.Tensor) -> Any:
        return self.condition


class SetsConditions(Net):
    """Gives its layers a condition by their attributes, of one graph or of several."""

    def __init__(self, *, shares: bool = False, detaches: bool = False) -> None:
        super().__init__(Conditioned, Conditioned)
        self.condition = nn.Linear(WIDTH, WIDTH)
        self.shares, self.detaches = shares, detaches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.condition(x.mean((0, 1)))
        for layer in self.layers:
            layer.condition = made if self.shares else self.condition(x.mean((0, 1)))
            if self.detaches:
                layer.condition = layer.condition.detach()
        return super().forward(x)


@pytest.mark.parametrize(("shares", "ubatch_size"), [(False, None), (True, 3)])
def test_a_tensor_with_a_graph_in_an_attribute_is_refused(shares, ubatch_size):
    model = SetsConditions(shares=shares)
    with pytest.raises(ValueError, match=r"has tensors of another graph in Conditioned\.condition"):
        trained(model, {"ubatch_size": ubatch_size})
    for layer in model.layers:
        del layer.condition  # whose graph has the weights of the model, and so the model


def test_a_tensor_without_a_graph_in_an_attribute_is_that_of_its_own_batch():
    """And not of the trial that finds out how calls are split."""
    found, expected = (trained(SetsConditions(detaches=True), options) for options in ({"ubatch_size": 3}, None))
    assert_trained_alike(found, expected)


class Hides(Block):
    hidden: Any = ()

    def scale(self, h: torch.Tensor) -> Any:
        return self.hidden[0](h)


@pytest.mark.parametrize("options", [{"eps_update": "eager"}, {"ubatch_size": 3}], ids=str)
def test_a_layer_that_calls_a_module_outside_of_it_is_refused(options):
    model = made(Hides)
    model.shared = nn.Linear(WIDTH, WIDTH)
    for layer in model.layers:
        layer.hidden = (model.shared,)
    with pytest.raises(ValueError, match=r"got a call of a Linear in layers\.2"):
        trained(model, options)


def test_models_that_share_modules_are_refused_and_stay_attached():
    model, other = made(), made()
    other.layers = model.layers
    attach(model)
    with pytest.raises(ValueError, match=r"share modules with another one that is attached \(got 'layers\.0'"):
        attach(other)
    model(batch()).backward()
    detach_l2l(model)
    attach(other)
    other(batch()).backward()


# ---- tensors that layers keep in themselves between calls


class Reading(Block):
    """Adds what its last call returned."""

    last: Any = None

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        found = super().forward(h)
        result = found if self.last is None else found + self.last.sum()
        self.last = found.detach()
        return result


class InAnObject(Block):
    """Reads what its last call left in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = SimpleNamespace(inner=[None])

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        found = super().forward(h)
        result = found if self.memory.inner[0] is None else found + self.memory.inner[0].sum()
        self.memory.inner[0] = found.detach()
        return result


class Sharing(Block):
    """Passes a tensor to the next layer through a container of both."""

    shared: dict[str, torch.Tensor] = {}

    def __init__(self) -> None:
        super().__init__()
        self.kept = self.shared

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        found = super().forward(h) + self.kept.get("x", 0)
        self.kept["x"] = found
        return found


@pytest.mark.parametrize(
    ("kind", "name", "ubatch_size"),
    [(Reading, "Reading.last", 2), (Sharing, "Sharing.kept", None), (InAnObject, "InAnObject.memory", 2)],
)
@pytest.mark.filterwarnings("ignore:ubatch_size=2 has no effect")
def test_tensors_that_are_read_later_are_refused(kind, name, ubatch_size):
    with pytest.raises(ValueError, match=rf"must not keep tensors for a later call.*{name}\)"):
        trained(made(kind), {"ubatch_size": ubatch_size})
    Sharing.shared.clear()


class Writing(Block):
    """Stores its result for someone to look at; its first row is no number."""

    last: Any = None
    later: Any = 0.0

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        found = super().forward(h)
        first = torch.arange(len(h), device=h.device)[:, None, None] == 0
        self.last = self.later = found.detach().masked_fill(first, torch.nan)
        return found


class RecurrentGemmaRglru(nn.Module):
    """Reads what it kept, and multiplies it by zero where a sequence begins."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.recurrent_states: Any = None

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        found = self.linear(h).tanh()
        result = found if self.recurrent_states is None else found + 0 * self.recurrent_states
        self.recurrent_states = found
        return result


class Resetting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.unit = RecurrentGemmaRglru()

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.unit(h)


@cpu_suffices
@pytest.mark.parametrize(("kind", "ubatch_size"), [(Writing, None), (Writing, 2), (Resetting, 3)])
def test_tensors_that_are_not_read(kind, ubatch_size):
    model = made(kind)
    ours = copy.deepcopy(model)
    attach(ours, ubatch_size=ubatch_size)
    for x in (batch(), batch(), batch()[:5]):
        plain = copy.deepcopy(model)
        plain(x).backward()
        ours.zero_grad()
        ours(x).backward()
        assert relative_error(gradients(ours), gradients(plain)) < TOLERANCE[torch.float32]
        if kind is Writing:  # it is left for the program to look at
            assert all(block.later is block.last is not None for block in ours.layers)
        else:
            assert all(block.unit.recurrent_states is None for block in ours.layers)


class Auxiliary(Block):
    """Keeps a loss of its own, which the model adds to its loss."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        found = super().forward(h)
        self.last = found.square().mean()
        return found


@pytest.mark.parametrize("kept_graphs", [0, 2])
def test_a_loss_that_a_layer_keeps_is_told_of(kept_graphs):
    """The forward finds its value, but no gradient would flow from it."""
    model = made(Auxiliary)
    plain = copy.deepcopy(model)
    attach(model, kept_graphs=kept_graphs)
    expected, found = (each(batch()) + sum(block.last for block in each.layers) for each in (plain, model))
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    with pytest.raises(RuntimeError, match="a backward must go through the outputs of a layer"):
        found.backward()
    model(batch()).backward()


def test_evaluation_keeps_what_a_layer_keeps():
    """As for generation; of all rows, so the batch is not split."""
    model = made(Reading)
    plain = copy.deepcopy(model)
    attach(model, ubatch_size=2)
    with torch.no_grad(), pytest.warns(UserWarning, match=r"it keeps tensors of all rows .*\(Reading.last\)"):
        for _ in range(3):
            torch.testing.assert_close(model(batch()).cpu(), plain(batch()))
    torch.testing.assert_close(model.layers[0].last.cpu(), plain.layers[0].last)
