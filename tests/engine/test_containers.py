"""What layers and models write into lists and dicts that they are given is there afterwards, with its gradient."""

from __future__ import annotations

import copy
from collections import UserDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from devices import DEVICE
from hf_l2l import L2LConfig, attach_l2l
from tiers import cpu_suffices, more

WIDTH, ROWS = 6, 7


class Left:
    """The containers that layers are given."""

    def __init__(self) -> None:
        self.all: list[Any] = [[], deque(), {}, ({"inner": {}},)]

    def use(self) -> torch.Tensor | float:
        """What a loss is made of: their features, numbers, and what is deep inside."""
        listed, queue, numbers, nested = self.all
        inner = nested[0]["inner"]
        assert len(listed) == len(queue) == numbers["n"] == 3
        features = [*listed, *(2 * each for each in queue), inner["last"] * inner["before"]]
        return float(numbers["n"]) + sum(each.mean(-1, keepdim=True) for each in features)


class Block(nn.Module):
    """Leaves something in all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor, listed: Any, queue: Any, numbers: Any, nested: Any) -> torch.Tensor:
        middle = torch.tanh(self.a(h))
        listed.append(middle)
        queue.append(middle.square())
        numbers["n"] = numbers.get("n", 0) + 1
        inner = nested[0]["inner"]
        inner["last"], inner["before"] = middle, inner.pop("last", None)
        return h + self.b(middle) * (1 + 0.1 * float(numbers["n"]))


class Net(nn.Module):
    """Its loss depends on what the layers have left."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        h, left = self.embed(x), Left()
        for layer in self.layers:
            h = layer(h, *left.all)
        return (self.head(h) + left.use()).square().mean()


class Writing(Net):
    """Writes into the dict of the program, and returns it."""

    def forward(self, batch: Any) -> Any:
        h, left = self.embed(batch["x"]), Left()
        for layer in self.layers:
            h = layer(h, *left.all)
        batch["features"], batch["extra"]["layers"] = h.mean(1), left.all[0]
        del batch["unused"]
        return batch


def x() -> torch.Tensor:
    return torch.randn(ROWS, 5, WIDTH, generator=torch.Generator().manual_seed(1))


def step_of_a_program(net: nn.Module, kind: type = dict) -> torch.Tensor:
    """Looks at what `Writing` has written, and makes a loss of it."""
    given, extra = x(), {}
    batch = kind({"x": given, "unused": given, "extra": extra})
    assert net(batch) is batch and batch["extra"] is extra
    assert batch["x"] is given and set(batch) == {"x", "features", "extra"}
    layers = torch.stack(extra["layers"]).square().mean()
    return (batch["features"].square().mean() + layers).to("cpu")


def assert_trains_as_plain(net: nn.Module, step: Callable[[nn.Module], torch.Tensor], **options: Any) -> None:
    plain = copy.deepcopy(net)
    eps = attach_l2l(net, L2LConfig(device=DEVICE, **options))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (net, plain)]
    eps.wrap(optimizers[0])
    for _ in range(2):
        found, expected = (step(each) for each in (net, plain))
        for loss, optimizer in zip((found, expected), optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), msg=name, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [
        {"ubatch_size": 2, "stash": "host"},
        {"eps_update": "deferred", "ubatch_size": 3},
        {"eps_update": "eager"},
        {"kept_graphs": 2, "ubatch_size": 2},
        *more({}, {"ubatch_size": 2}),
    ],
    ids=str,
)
def test_what_layers_leave_in_containers(options):
    assert_trains_as_plain(Net(), lambda net: net(x()), **options)


@cpu_suffices
@pytest.mark.parametrize("options", [{}, {"ubatch_size": 2, "stash": "host"}, *more({"ubatch_size": 2})], ids=str)
def test_the_dict_of_the_program_is_written_into(options):
    net = Writing()
    assert_trains_as_plain(net, step_of_a_program, **options)
    with torch.no_grad():
        step_of_a_program(net.eval())


def test_what_is_written_by_16_bits_is_fp32_and_mappings_of_other_kinds_are_written_into():
    net = Writing()
    attach_l2l(net, L2LConfig(device=DEVICE, cmp="bf16"))
    assert step_of_a_program(net).dtype is torch.float32
    step_of_a_program(net, UserDict)
