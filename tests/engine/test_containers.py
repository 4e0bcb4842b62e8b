"""What layers and models write into lists and dicts that they are given is there afterwards, with its gradient."""

from __future__ import annotations

from collections import UserDict, deque
from typing import Any

import pytest
import torch
from torch import nn

import impure_layers
from impure_layers import Block, assert_trained_alike, attach, batch, trained
from tiers import cpu_suffices, nightly


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


class Leaving(Block):
    """Leaves something in all of them."""

    def forward(self, h: torch.Tensor, listed: Any, queue: Any, numbers: Any, nested: Any) -> torch.Tensor:
        middle = torch.tanh(self.a(h))
        listed.append(middle)
        queue.append(middle.square())
        numbers["n"] = numbers.get("n", 0) + 1
        inner = nested[0]["inner"]
        inner["last"], inner["before"] = middle, inner.pop("last", None)
        return h + self.b(middle) * (1 + 0.1 * float(numbers["n"]))


class Net(impure_layers.Net):
    """Its loss depends on what the layers have left."""

    def __init__(self) -> None:
        super().__init__(Leaving, Leaving, Leaving)

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


def step_of_a_program(net: nn.Module, kind: type = dict) -> torch.Tensor:
    """Looks at what `Writing` has written, and makes a loss of it."""
    given, extra = batch(), {}
    written = kind({"x": given, "unused": given, "extra": extra})
    assert net(written) is written and written["extra"] is extra
    assert written["x"] is given and set(written) == {"x", "features", "extra"}
    layers = torch.stack(extra["layers"]).square().mean()
    return (written["features"].square().mean() + layers).to("cpu")


@cpu_suffices
@pytest.mark.parametrize(
    "options",
    [
        {"ubatch_size": 2, "stash": "host", "eps_update": "eager"},
        {"kept_graphs": 2, "ubatch_size": 3, "eps_update": "deferred"},
    ],
    ids=str,
)
def test_what_layers_leave_in_containers(options):
    assert_trained_alike(trained(Net(), options), trained(Net()))


@nightly
@cpu_suffices
def test_the_dict_of_the_program_is_written_into():
    plain, ours = Writing(), Writing()
    attach(ours, ubatch_size=2, stash="host")
    for _ in range(2):
        losses = [step_of_a_program(net) for net in (plain, ours)]
        for loss in losses:
            loss.backward()
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        step_of_a_program(ours.eval())


def test_what_is_written_by_16_bits_is_fp32_and_mappings_of_other_kinds_are_written_into():
    net = Writing()
    attach(net, cmp="bf16")
    assert step_of_a_program(net).dtype is torch.float32
    step_of_a_program(net, UserDict)
