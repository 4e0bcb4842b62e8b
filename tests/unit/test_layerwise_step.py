"""Steps made in parts leave the bits that whole steps leave, and take no more than they were given."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hf_l2l.optim.layerwise_step import SplitStep
from optimizer_cases import ALL_AT_ONCE, CASES, SHAPES, parameters_for
from tiers import times

STEPS = 4


def gradient_for(case: str, p: torch.Tensor, number: int) -> torch.Tensor:
    gradient = torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
    return gradient.to_sparse(1) if case == "sparse adam" else gradient


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def outcome(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """All that a step leaves; bytes, so that NaNs are equal to themselves."""
    numbers = {p: number for number, p in enumerate(parameters)}
    return {
        "weights": saved([p.detach() for p in parameters]),
        "versions": [p._version for p in parameters],
        "order": [(numbers[p], list(state)) for p, state in optimizer.state.items()],
        "state dict": saved(optimizer.state_dict()),
    }


def schedule(optimizer: torch.optim.Optimizer, case: str) -> Callable[[], None]:
    if case == "transformers' adafactor":
        return lambda: None  # has its own
    return LambdaLR(optimizer, lambda step: 0.75**step).step


def train(case: str, having: list[set[int]], parts: list[list[list[int]]] | None) -> dict[str, object]:
    """Train by whole steps, or by `parts` of parameters; `having` says which have a gradient in which step."""
    parameters = parameters_for(case)
    optimizer = CASES[case](parameters)
    advance = schedule(optimizer, case)
    for step, numbers in enumerate(having):
        gradients = {parameters[n]: gradient_for(case, parameters[n], 100 * step + n) for n in sorted(numbers)}
        if parts is None:
            for p in parameters:
                p.grad = gradients.get(p)
            optimizer.step()
            advance()
            continue
        split = SplitStep(optimizer, gradients)
        optimizer.step()  # without gradients: nothing but the scheduler's count of steps
        advance()
        for part in parts[step]:
            split.run([parameters[n] for n in part])
    return outcome(parameters, optimizer)


@st.composite
def partitions(draw: st.DrawFn) -> list[list[int]]:
    order = draw(st.permutations(range(len(SHAPES))))
    cuts = sorted(draw(st.sets(st.integers(1, len(SHAPES) - 1))))
    return [order[start:end] for start, end in zip([0, *cuts], [*cuts, len(order)], strict=True)]


@settings(max_examples=times(2, 12), deadline=None)
@given(
    having=st.lists(st.sets(st.integers(0, len(SHAPES) - 1)), min_size=STEPS, max_size=STEPS),
    parts=st.lists(partitions(), min_size=STEPS, max_size=STEPS),
)
def test_parts_leave_the_bits_of_whole_steps(having, parts):
    every = [set(range(len(SHAPES)))] * STEPS
    for case in CASES:
        gradients = every if case == ALL_AT_ONCE else having
        assert train(case, gradients, parts) == train(case, gradients, None), case


def two(**options: Any) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer, dict[torch.Tensor, torch.Tensor]]:
    parameters = [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]
    return parameters, torch.optim.AdamW(parameters, **options), {p: torch.randn(3) for p in parameters}


def test_grad_is_neither_read_nor_written():
    parameters, optimizer, gradients = two(lr=0.1)
    other = torch.full((3,), torch.nan)
    parameters[0].grad = other
    SplitStep(optimizer, gradients).run(parameters)
    assert parameters[0].grad is other and other.isnan().all() and parameters[1].grad is None
    assert all(p.isfinite().all() for p in parameters)


def test_gradients_are_given_up_with_their_part():
    parameters, optimizer, gradients = two(lr=0.1)
    held = [weakref.ref(gradient) for gradient in gradients.values()]
    split = SplitStep(optimizer, gradients)
    gradients.clear()
    gc.disable()  # memory comes back at once, not when a collector comes round
    try:
        assert [ref() is None for ref in held] == [False, False]
        split.run(parameters[1:])
        assert [ref() is None for ref in held] == [False, True]
        split.run(parameters)
        assert [ref() is None for ref in held] == [True, True]
        assert all(p.shape == (3,) and p in optimizer.state for p in parameters)
    finally:
        gc.enable()


def test_a_parameter_is_updated_once_and_only_with_a_gradient_and_an_optimizer():
    parameters, optimizer, gradients = two(lr=0.1)
    del gradients[parameters[1]]
    before, stranger = parameters[1].detach().clone(), torch.nn.Parameter(torch.ones(2))
    split = SplitStep(optimizer, {**gradients, stranger: torch.ones(2)})
    split.run([parameters[0], parameters[0]])
    split.run(iter([stranger, *parameters]))
    assert torch.equal(parameters[1], before) and stranger.tolist() == [1, 1]
    assert optimizer.state[parameters[0]]["step"].item() == 1 and parameters[1] not in optimizer.state


def test_hooks_of_the_optimizer_do_not_run_and_those_of_all_run_once_per_part():
    parameters, optimizer, gradients = two(lr=0.1)
    heard: list[str] = []
    optimizer.register_step_pre_hook(lambda *args: heard.append("own pre"))
    optimizer.register_step_post_hook(lambda *args: heard.append("own post"))
    handles = (
        register_optimizer_step_pre_hook(lambda optimizer, *args: heard.append(f"pre {len(optimizer.state)}")),
        register_optimizer_step_post_hook(lambda optimizer, *args: heard.append(f"post {len(optimizer.state)}")),
    )
    try:
        split = SplitStep(optimizer, gradients)
        split.run(parameters[:1])
        split.run(parameters[1:])
        split.run(parameters)
    finally:
        for handle in handles:
            handle.remove()
    assert heard == ["pre 0", "post 1"] * 2
    optimizer.step()
    assert heard[4:] == ["own pre", "own post"]


def test_only_groups_with_something_in_the_part_are_stepped():
    seen: list[list[dict]] = []

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            seen.append([{key: group.get(key) for key in ("lr", "param_names")} for group in self.param_groups])
            return super().step(closure)

    a, b, c = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = Watched([{"params": [("a", a), ("b", b)]}, {"params": [("c", c)], "lr": 2.0}], lr=1.0)
    split = SplitStep(optimizer, {p: torch.ones(2) for p in (a, b, c)})
    split.run([b])
    split.run([c, a])
    assert seen == [
        [{"lr": 1.0, "param_names": ["b"]}],
        [{"lr": 1.0, "param_names": ["a"]}, {"lr": 2.0, "param_names": ["c"]}],
    ]
    assert [p.tolist() for p in (a, b, c)] == [[0, 0], [0, 0], [-1, -1]]
    assert optimizer.param_groups[0]["param_names"] == ["a", "b"]


class Own(torch.optim.Optimizer):
    """Has an attribute of its own, goes by a tag, asks for entries in the state, and makes a new one every step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.factor = 2.0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                old = self.state[p]["sum"] if p in self.state else torch.zeros_like(p)
                self.state[p] = {"sum": old + p.grad}
                p.sub_(self.state[p]["sum"], alpha=self.factor * getattr(p, "tag", 1.0))


def test_attributes_tags_and_new_states_are_those_of_the_user():
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    parameters[1].tag = 10.0
    optimizer = Own(parameters)
    for _ in range(2):
        split = SplitStep(optimizer, {p: torch.ones(2) for p in parameters})
        split.run(parameters[1:])
        split.run(parameters[:1])
    assert [p.tolist() for p in parameters] == [[-6, -6], [-60, -60]]
    assert [(id(p), state["sum"].tolist()) for p, state in optimizer.state.items()] == [
        (id(p), [2, 2]) for p in parameters
    ]


class Decaying(torch.optim.SGD):
    """Writes into the hyper-parameters of its groups."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * group["factors"][0] * p.grad
            group["lr"] *= 0.5
            group["factors"][0] *= 0.5
            group["momentum"] = 9.0


@pytest.mark.parametrize("of_tensors", [False, True])
def test_each_part_has_the_hyper_parameters_of_the_step(of_tensors):
    """Whatever a part writes into them, and the program before the parts run."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(4)]
    lr = torch.tensor(0.5) if of_tensors else 0.5
    optimizer = Decaying(parameters, lr=lr)
    (group,) = optimizer.param_groups
    group["factors"] = [1.0]
    split = SplitStep(optimizer, {p: torch.ones(2) for p in parameters})
    if of_tensors:
        lr.fill_(100.0)
    else:
        group["lr"] = 100.0
    for p in parameters:
        split.run([p])
    assert [p.tolist() for p in parameters] == [[0.5, 0.5]] * 4
    assert (group["lr"], group["factors"], group["momentum"]) == (100.0, [1.0], 0)
