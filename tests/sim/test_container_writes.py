"""What layers and models write into lists and dicts that they are given is there afterwards, with its gradient."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.model.container_writes import Containers, containers_of, write

WIDTH, ROWS = 6, 7


class Block(nn.Module):
    """A layer that is given containers, and leaves something in them."""

    def __init__(self, leave: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), leave

    def forward(self, h: torch.Tensor, left: Any) -> torch.Tensor:
        middle = torch.tanh(self.a(h))
        factor = self.leave(left, middle)
        return h + self.b(middle) * (1.0 if factor is None else factor)


class Net(nn.Module):
    """Its loss depends on what the layers have left."""

    def __init__(self, made: Callable[[], Any], leave: Callable[..., Any], use: Callable[..., Any]) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(Block(leave) for _ in range(3))
        self.made, self.use = made, use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, left = self.embed(x), self.made()
        for layer in self.layers:
            h = layer(h, left)
        return (self.head(h) + self.use(left)).square().mean()


def append(left: Any, middle: torch.Tensor) -> None:
    left.append(middle)


def count(left: Any, middle: torch.Tensor) -> float:
    left["n"] = left.get("n", 0) + 1
    return 1 + 0.1 * float(left["n"])


def replace(left: Any, middle: torch.Tensor) -> None:
    inner = left[0]["inner"]
    inner["last"], inner["before"] = middle, inner.pop("last", None)


KINDS: dict[str, tuple[Callable[[], Any], Callable[..., Any], Callable[..., Any]]] = {
    "list": (list, append, lambda left: sum(t.mean(-1, keepdim=True) for t in left)),
    "deque": (deque, append, lambda left: sum(t.mean(-1, keepdim=True) for t in left)),
    "numbers": (dict, count, lambda left: float(left["n"])),
    "nested": (
        lambda: ({"inner": {}},),
        replace,
        lambda left: (left[0]["inner"]["last"] * left[0]["inner"]["before"]).mean(-1, keepdim=True),
    ),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"ubatch_size": 2},
    {"ubatch_size": 2, "stash": "host"},
    {"eps_update": "deferred", "ubatch_size": 3},
    {"eps_update": "eager"},
    {"kept_graphs": 2, "ubatch_size": 2},
]


def weights_after(net: nn.Module, step: Callable[[nn.Module], torch.Tensor], optimizer: Any) -> list[float]:
    """The losses of three steps."""
    losses = []
    for _ in range(3):
        loss = step(net)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_trains_as_plain(
    net: nn.Module, step: Callable[[nn.Module], torch.Tensor], device: str, options: dict[str, Any]
) -> None:
    plain = copy.deepcopy(net)
    eps = attach_l2l(net, L2LConfig(device=device, **options))
    expected = weights_after(plain, step, torch.optim.SGD(plain.parameters(), lr=0.05))
    found = weights_after(net, step, eps.wrap(torch.optim.SGD(net.parameters(), lr=0.05)))
    assert found == pytest.approx(expected, rel=1e-6)
    for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), msg=name, rtol=1e-5, atol=1e-7)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(ROWS, 5, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_layers_leave_in_containers(kind, options, device, x):
    assert_trains_as_plain(Net(*KINDS[kind]), lambda net: net(x), device, options)


class Writing(Net):
    """Writes into the dict of the program, and returns it."""

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        h, left = self.embed(batch["x"]), []
        for layer in self.layers:
            h = layer(h, left)
        batch["features"], batch["extra"]["layers"] = h.mean(1), left
        del batch["unused"]
        return batch


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("options", [*OPTIONS[:3], {"cmp": "bf16"}], ids=str)
def test_the_dict_of_the_program_is_written_into(options, device, x):
    def step(net: nn.Module) -> torch.Tensor:
        batch: dict[str, Any] = {"x": x, "unused": x, "extra": {}}
        extra = batch["extra"]
        assert net(batch) is batch and batch["extra"] is extra
        assert batch["x"] is x and set(batch) == {"x", "features", "extra"}
        layers = torch.stack(extra["layers"]).square().mean()
        return (batch["features"].square().mean() + layers).to("cpu")

    net = Writing(*KINDS["list"])
    if "cmp" in options:
        attach_l2l(net, L2LConfig(device=device, **options))
        assert step(net).dtype is torch.float32
    else:
        assert_trains_as_plain(net, step, device, options)
    with torch.no_grad():
        step(net.eval())


def test_a_mapping_of_another_kind_is_written_into(x):
    from collections import UserDict

    net = Writing(*KINDS["list"])
    attach_l2l(net, L2LConfig(device="sim"))
    batch = UserDict({"x": x, "unused": x, "extra": {}})
    assert net(batch) is batch and "features" in batch and len(batch["extra"]["layers"]) == 3


def test_only_what_has_changed_is_written():
    """What was there before keeps its place, and its identity."""
    first, second, new = torch.zeros(1), torch.ones(1), torch.ones(2)
    seen = {"a": first, "items": [first, second]}
    containers = Containers(([seen], {}))
    assert containers.written() == []
    seen["b"] = seen.pop("a")
    seen["items"].insert(0, new)
    theirs = {"a": "first", "items": ["first", "second"]}
    items = theirs["items"]
    write(containers.written(), containers_of(([theirs], {})))
    assert theirs == {"items": [new, "first", "second"], "b": first} and theirs["items"] is items
