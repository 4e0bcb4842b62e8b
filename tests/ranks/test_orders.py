"""Ranks that do things in other orders: other layers, an optimizer with other parameters first, calls of one alone."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import pytest
import torch
from torch import distributed, nn

from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.eps.masters import Master
from hf_l2l.optim.lamb import Lamb
from hf_l2l.ranks.peers import OtherCallsError, RankFailedError
from hf_l2l.shared_eps.remote import RemoteTask
from host_cases import on_hosts
from rank_pool import RankPool, digest


class Wide(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.linear(rows).tanh()


class LargeHead(nn.Module):
    """Calls the first layers, and a head of more than `masters.LARGE` elements."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wide() for _ in range(layers))
        self.head = nn.Linear(256, 4200, bias=False)

    def forward(self, rows: torch.Tensor, count: int) -> Any:
        for layer in self.layers[:count]:
            rows = layer(rows)
        return (self.head(rows).square().mean(),)


OPTIMIZERS: dict[str, Any] = {"adamw": torch.optim.AdamW, "lamb": Lamb}


def other_orders(kind: str, change: str) -> tuple[str, str]:
    """Steps in which the second rank calls half of the layers: digests of weights and state.

    Args:
        kind: of the optimizer.
        change: "unfrozen" is for half of the layers and the head trained later, and "reversed" for parameters that the
            second rank gives the optimizer in another order; else "".
    """
    is_rank = distributed.is_initialized()
    numbers = [distributed.get_rank()] if is_rank else [0, 1]
    torch.manual_seed(0)
    model = LargeHead()
    late = [*model.layers[4:], model.head]
    eps = attach_l2l(model, L2LConfig(layer_classes=("Wide",), eps_update="deferred"))
    parameters = list(model.parameters())
    parameters = parameters[::-1] if change == "reversed" and numbers == [1] else parameters
    optimizer = eps.wrap(OPTIMIZERS[kind](parameters, lr=1e-2))
    for step in range(5):
        for module in late:
            module.requires_grad_(change != "unfrozen" or step > 1)
        for number in numbers:
            rows = torch.randn(4, 256, generator=torch.Generator().manual_seed(10 * step + number))
            (model(rows, (8, 4)[number])[0] / (1 if is_rank else 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.state_dict()
    state = [optimizer.state[p] for p in model.parameters()]
    found = digest(*(torch.as_tensor(each[key]) for each in state for key in sorted(each)))
    detach_l2l(model)
    return digest(*model.parameters()), found


@pytest.mark.parametrize(
    ("kind", "change", "sim"),
    [
        ("adamw", "", True),
        ("lamb", "unfrozen", False),
        ("lamb", "reversed", False),
        *(
            pytest.param(kind, change, sim, marks=pytest.mark.slow)
            for kind, change, sim in [
                ("lamb", "", True),
                ("adamw", "unfrozen", True),
                ("adamw", "reversed", True),
                ("adamw", "", False),
                ("adamw", "unfrozen", False),
            ]
        ),
    ],
)
def test_updates_are_those_of_one_process(pool, kind, change, sim):
    alone = pool(1, sim=sim).run(other_orders, kind, change)[0]
    assert pool(2, sim=sim).run(other_orders, kind, change) == [alone, alone]


def rows_at_last() -> list[str]:
    """What a step begins, in order."""
    torch.manual_seed(0)
    model = LargeHead(2)
    eps = attach_l2l(model, L2LConfig(layer_classes=("Wide",), eps_update="deferred"))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for _ in range(2):
        eps.synchronize()
        model(torch.randn(4, 256), 2)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    begun = [task.what for task in eps.updates._begun]
    detach_l2l(model)
    return begun


def test_rows_of_a_head_are_updated_after_the_layers(pool):
    """Which the next forward needs first."""
    for rank, begun in enumerate(pool(2).run(rows_at_last)):
        assert f"the update of layers.{rank}" in begun
        assert begun[-2:] == ["the update of rows of head.weight", "the update of head.weight"]


def updates_that_end() -> int:
    """How many of the updates of other ranks have ended before their masters were ordinary parameters again."""
    ends: list[bool] = []
    end = Master.end_update

    def noted(masters: Any) -> None:
        ends.extend(
            m.update.task.done for m in masters if m.update is not None and isinstance(m.update.task, RemoteTask)
        )
        end(masters)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Master, "end_update", staticmethod(noted))
        rows_at_last()
    assert ends
    return sum(ends)


def test_an_update_of_another_rank_is_over_when_its_masters_are_ordinary_again(pool):
    """Else the next update of them could begin before, and be taken for the one that has ended."""
    assert pool(2).run(updates_that_end) == [0, 0]


def does_something_else(what: str) -> str:
    """Of two ranks, one alone loads the optimizer's state, or loads that of other parameters, or has them in another
    order; or has no gradient of one that the other has, or an optimizer without it."""
    torch.manual_seed(0)
    model, rank = LargeHead(2), distributed.get_rank()
    eps = attach_l2l(model, L2LConfig(layer_classes=("Wide",), eps_update="deferred", rank_timeout=4))
    parameters = list(model.parameters())
    parameters = parameters[::-1] if what == "order" and rank else parameters
    given = [p for p in parameters if not (what == "optimizers" and rank and p is model.layers[0].linear.bias)]
    optimizer = eps.wrap(torch.optim.AdamW(given, lr=1e-2))
    try:
        for step in range(4):
            model(torch.randn(4, 256), 2)[0].backward()
            if what == "gradients" and step == 2 and rank == 1:
                model.head.weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 and (what in ("some", "order") or what == "alone" and rank == 0):
                state = copy.deepcopy(optimizer.state_dict())
                for number in range(rank if what == "some" else 0):
                    del state["state"][number]
                optimizer.load_state_dict(state)
    except (OtherCallsError, RankFailedError) as error:
        return str(error)
    finally:
        detach_l2l(model)
    return "nothing"


OTHERS = {
    "alone": "all ranks must run the same forwards",
    "some": "have loaded state of other parameters",
    "order": "or in another order",
    "gradients": "head.weight has a gradient on rank 0 and has no gradient on rank 1",
    "optimizers": "layers.0.linear.bias has a gradient on rank 0 and is in no such optimizer on rank 1",
}


@pytest.mark.parametrize(
    ("what", "hosts"),
    [
        *(("alone", 1), ("order", 1), ("gradients", 2)),
        *(
            pytest.param(what, hosts, marks=pytest.mark.slow)
            for what, hosts in [("some", 1), ("optimizers", 1), ("gradients", 1), ("alone", 2), ("optimizers", 2)]
        ),
    ],
)
def test_ranks_that_do_something_else_are_refused(what, hosts):
    """Instead of other moments, or of a wait without an end."""
    pool = RankPool(2, within_s=60)
    for text in pool.run(on_hosts, hosts, does_something_else, what):
        assert OTHERS[what] in text
    pool.close()


class Adapted(LargeHead):
    """With further modules before the head."""

    def __init__(self) -> None:
        super().__init__(4)
        self.adapters = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(4))

    def forward(self, rows: torch.Tensor, count: int) -> Any:
        for layer in self.layers[:count]:
            rows = layer(rows)
        for adapter in self.adapters:
            rows = adapter(rows)
        return (self.head(rows).square().mean(),)


def owners_of_adapters() -> list[int]:
    """Of those that are there when the model is attached, over a frozen model, and of those that come later."""
    torch.manual_seed(0)
    model = Adapted()
    for module in (model.layers, model.head):
        module.requires_grad_(False)
    eps = attach_l2l(model, L2LConfig(layer_classes=("Wide",)))
    optimizer = eps.wrap(torch.optim.AdamW(model.adapters.parameters(), lr=1e-2))
    for step in range(2):
        if step == 1:
            model.adapters.extend(nn.Linear(256, 256, bias=False) for _ in range(4))
            optimizer.add_param_group({"params": list(model.adapters[4:].parameters())})
        model(torch.randn(4, 256), 4)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [eps.masters.of(p).owner for p in model.adapters.parameters()]
    detach_l2l(model)
    return found


def test_work_is_shared_among_what_is_trained(pool):
    """Frozen parameters, which have owners, too, are no work."""
    for owners in pool(2).run(owners_of_adapters):
        assert sorted(owners[:4]) == sorted(owners[4:]) == [0, 0, 1, 1]


class Failing(torch.optim.AdamW):
    """Raises in the second rank, once it is told to: in an update, not in the program's own call of `step`."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        is_update = threading.current_thread() is not threading.main_thread()
        if self.fails and is_update and distributed.get_rank() == 1:
            raise ValueError("no such step")
        return super().step(closure)


def goes_on_after_a_failed_update() -> tuple[str, str]:
    """The error that the program gets, and how long it has lived since."""
    torch.manual_seed(0)
    model = LargeHead(2)
    eps = attach_l2l(model, L2LConfig(layer_classes=("Wide",), eps_update="deferred", rank_timeout=6))
    optimizer = eps.wrap(Failing(model.parameters(), lr=1e-2))
    with pytest.raises((ValueError, RankFailedError)) as caught:
        for step in range(4):
            Failing.fails = step >= 2
            model(torch.randn(4, 256), 2)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
    time.sleep(4)  # as a program that saves what it has; ranks that wait for another one are ended earlier
    kind = type(caught.value).__name__
    del caught
    detach_l2l(model)
    return kind, "is alive"


@pytest.mark.filterwarnings("ignore:an update failed")
def test_a_rank_whose_update_has_failed_handles_the_error(pool):
    """It is not ended as one that waits for another rank."""
    pool = RankPool(2, within_s=60)
    assert pool.run(goes_on_after_a_failed_update) == [("RankFailedError", "is alive"), ("ValueError", "is alive")]
    pool.close()
