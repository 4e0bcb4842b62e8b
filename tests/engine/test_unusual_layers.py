"""Layers that are recurrent, compiled, need all rows at once, or have something of the model that is no argument."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from devices import DEVICE
from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from models import EXACT, TOLERANCE, assert_same_bits, attached, gradients, relative_error
from tiers import more, on_the_host

WIDTH, ROWS = 6, 7


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.last: Any = None

    def forward(self, h: torch.Tensor, *given: Any) -> torch.Tensor:
        return h + torch.tanh(self.a(h))


class Stack(nn.Module):
    """Layers between two linear modules, in float64."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = self.through(layer, h)
        return self.head(h).square().mean()

    def through(self, layer: nn.Module, h: torch.Tensor) -> torch.Tensor:
        return layer(h)


def batches(count: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, 5, WIDTH, generator=generator, dtype=torch.float64) for _ in range(count)]


def trained(model: Stack) -> list[torch.Tensor]:
    """The losses of two steps."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for x in batches():
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().cpu())
    return found


def check(ubatch_size: int | None, kind: Callable[..., Stack], *args: Any) -> list[str]:
    """Training is that of plain torch; returns the warnings."""
    plain, model = kind(*args), kind(*args)
    expected = trained(plain)
    name = type(model.layers[0]).__name__
    attach_l2l(model, L2LConfig(device=DEVICE, ubatch_size=ubatch_size, layer_classes=(name,)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = trained(model)
    detach_l2l(model)
    assert torch.allclose(torch.stack(found), torch.stack(expected), rtol=EXACT)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=EXACT, atol=EXACT)
    return [str(each.message) for each in told]


class Recurs(nn.Module):
    kind: type[nn.RNNBase] = nn.LSTM

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = self.kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.recurrent(h)[0]


@pytest.mark.parametrize(
    ("kind", "ubatch_size"), [(nn.LSTM, 3), (nn.GRU, None), (nn.RNN, 3), *more((nn.LSTM, None), (nn.GRU, 3))]
)
def test_recurrent_modules_train_in_layers(kind, ubatch_size):
    assert check(ubatch_size, Stack, type("Recurs", (Recurs,), {"kind": kind})) == []


# Torch says what it cannot trace, of which there is much in a hooked module.
@on_the_host  # torch.compile does not know the simulated accelerator, and other devices may lack a compiler
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["first", *more("head", "layers.1")])
def test_a_compiled_module_trains(name):
    plain = Stack().float()
    model = copy.deepcopy(plain)
    torch._dynamo.reset()
    model.get_submodule(name).compile(backend="eager")
    attached(model, device=DEVICE, layer_classes=("Block",))
    for x in batches(3):
        for each in (model, plain):
            each.zero_grad()
            each(x.float()).backward()
        assert_same_bits(gradients(model), gradients(plain))


# ---- rows that are no argument


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
def test_a_layer_that_does_not_run_with_some_of_its_rows_runs_with_all(kind, block):
    assert check(None, kind, block) == []
    (text,) = check(3, kind, block)
    assert f"ubatch_size=3 has no effect on calls of {block.__name__}: it does not run with some of its rows" in text


# ---- tensors and modules of the model in attributes


class Conditioned(Block):
    condition: Any = None

    def forward(self, h: torch.Tensor, *given: Any) -> torch.Tensor:
        return super().forward(h) * self.condition


class SetsConditions(Stack):
    """Gives its layers a condition by their attributes."""

    shares = detaches = False

    def __init__(self) -> None:
        super().__init__(Conditioned)
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


@pytest.mark.parametrize(
    ("kind", "ubatch_size"),
    [(SetsConditions, None), (SharesConditions, 3), *more((SetsConditions, 3), (SharesConditions, None))],
)
def test_a_tensor_with_a_graph_in_an_attribute_is_refused(kind, ubatch_size):
    model = attached(kind(), device=DEVICE, ubatch_size=ubatch_size, layer_classes=("Conditioned",))
    with pytest.raises(ValueError, match=r"has tensors of another graph in Conditioned\.condition"):
        trained(model)
    for layer in model.layers:
        del layer.condition  # whose graph has the weights of the model, and so the model


def test_a_tensor_without_a_graph_in_an_attribute_is_that_of_its_own_batch():
    """And not of the trial that finds out how calls are split."""
    assert check(3, SetsDetached) == []


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


@pytest.mark.parametrize("options", [{"eps_update": "eager"}, {"ubatch_size": 3}], ids=str)
def test_a_layer_that_calls_a_module_outside_of_it_is_refused(options):
    model = SharesAModule()
    eps = attach_l2l(model, L2LConfig(device=DEVICE, layer_classes=("Hides",), **options))
    eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"got a call of a Linear in layers\.2"):
        trained(model)
    detach_l2l(model)


def test_models_that_share_modules_are_refused_and_stay_attached():
    model, other = Stack(), Stack()
    other.layers = model.layers
    config = L2LConfig(device=DEVICE, layer_classes=("Block",))
    attach_l2l(model, config)
    with pytest.raises(ValueError, match=r"share modules with another one that is attached \(got 'layers\.0'"):
        attach_l2l(other, config)
    trained(model)
    detach_l2l(model)
    attach_l2l(other, config)
    trained(other)


# ---- tensors that layers keep in themselves between calls


class Reading(Block):
    """Adds what its last call returned."""

    def forward(self, h: torch.Tensor, *given: Any) -> torch.Tensor:
        found = super().forward(h)
        result = found if self.last is None else found + self.last.sum()
        self.last = found.detach()
        return result


class InAnObject(Block):
    """Reads what its last call left in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = SimpleNamespace(inner=[None])

    def forward(self, h: torch.Tensor, *given: Any) -> torch.Tensor:
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

    def forward(self, h: torch.Tensor, *given: Any) -> torch.Tensor:
        found = super().forward(h) + self.kept.get("x", 0)
        self.kept["x"] = found
        return found


@pytest.mark.parametrize(
    ("kind", "name", "ubatch_size"),
    [
        (Reading, "Reading.last", 2),
        (Sharing, "Sharing.kept", None),
        (InAnObject, "InAnObject.memory", 2),
        *more((Reading, "Reading.last", None), (Sharing, "Sharing.kept", 2), (InAnObject, "InAnObject.memory", None)),
    ],
)
@pytest.mark.filterwarnings("ignore:ubatch_size=2 has no effect")
def test_tensors_that_are_read_later_are_refused(kind, name, ubatch_size):
    model = attached(Stack(kind), device=DEVICE, layer_classes=("Block",), ubatch_size=ubatch_size)
    with pytest.raises(ValueError, match=rf"must not keep tensors for a later call.*{name}\)"):
        model(batches()[0])
    Sharing.shared.clear()


class Writing(Block):
    """Stores its result for someone to look at; its first row is no number."""

    later: Any = 0.0

    def forward(self, h: torch.Tensor, *given: Any) -> torch.Tensor:
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
        del self.a

    def forward(self, h: torch.Tensor, *given: Any) -> torch.Tensor:
        return self.unit(h)


@pytest.mark.parametrize(
    ("kind", "ubatch_size"), [(Writing, None), (Writing, 2), (Resetting, 3), *more((Resetting, None))]
)
def test_tensors_that_are_not_read(kind, ubatch_size):
    model = Stack(kind)
    ours = attached(copy.deepcopy(model), device=DEVICE, layer_classes=("Block",), ubatch_size=ubatch_size)
    for batch in (*batches(), batches()[0][:5]):
        plain = copy.deepcopy(model)
        plain(batch).backward()
        ours.zero_grad()
        ours(batch).backward()
        assert relative_error(gradients(ours), gradients(plain)) < TOLERANCE[torch.float64]
        if kind is Writing:  # it is left for the program to look at
            assert all(block.later is block.last is not None for block in ours.layers)
        else:
            assert all(block.unit.recurrent_states is None for block in ours.layers)


class Auxiliary(Block):
    """Keeps a loss of its own, which the model adds to its loss."""

    def forward(self, h: torch.Tensor, *given: Any) -> torch.Tensor:
        found = super().forward(h)
        self.last = found.square().mean()
        return found


@pytest.mark.parametrize("kept_graphs", [0, 2])
def test_a_loss_that_a_layer_keeps_is_told_of(kept_graphs):
    """The forward finds its value, but no gradient would flow from it."""
    model, x = Stack(Auxiliary), batches()[0]
    plain = copy.deepcopy(model)
    attached(model, device=DEVICE, layer_classes=("Block",), kept_graphs=kept_graphs)
    expected, found = (each(x) + sum(block.last for block in each.layers) for each in (plain, model))
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    with pytest.raises(RuntimeError, match="a backward must go through the outputs of a layer"):
        found.backward()
    model(x).backward()


def test_evaluation_keeps_what_a_layer_keeps():
    """As for generation; of all rows, so the batch is not split."""
    model, x = Stack(Reading), batches()[0]
    plain = copy.deepcopy(model)
    attached(model, device=DEVICE, layer_classes=("Block",), ubatch_size=2)
    with torch.no_grad(), pytest.warns(UserWarning, match=r"it keeps tensors of all rows .*\(Reading.last\)"):
        for _ in range(3):
            torch.testing.assert_close(model(x).cpu(), plain(x))
    torch.testing.assert_close(model.layers[0].last.cpu(), plain.layers[0].last)
