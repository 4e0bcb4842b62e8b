"""Steps made in parts leave the bits that whole steps leave, and take no more than they were given."""

from __future__ import annotations

import gc
import io
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hf_l2l.optim.layerwise_check import why_not_layer_local
from hf_l2l.optim.layerwise_step import SplitStep
from optimizer_cases import ALL_AT_ONCE, CASES, SHAPES, STATELESS, parameters_for
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


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=times(2, 12), deadline=None)
@given(
    having=st.lists(st.sets(st.integers(0, len(SHAPES) - 1)), min_size=STEPS, max_size=STEPS),
    parts=st.lists(partitions(), min_size=STEPS, max_size=STEPS),
)
def test_parts_leave_the_bits_of_whole_steps(case, having, parts):
    if case == ALL_AT_ONCE:
        having = [set(range(len(SHAPES)))] * STEPS
    assert train(case, having, parts) == train(case, having, None)


def test_whole_steps_change_something():
    every = set(range(len(SHAPES)))
    for case in CASES:
        once = train(case, [every], None)
        assert train(case, [every] * 2, None)["weights"] != once["weights"], case
        assert bool(once["order"]) == (case != STATELESS), case


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
    split = SplitStep(optimizer, gradients)
    split.run([parameters[0], parameters[0]])
    split.run(parameters)
    split.run(iter(parameters))
    assert [optimizer.state[p]["step"].item() for p in parameters] == [1, 1]
    parameters, optimizer, gradients = two(lr=0.1)
    del gradients[parameters[1]]
    before, stranger = parameters[1].detach().clone(), torch.nn.Parameter(torch.ones(2))
    SplitStep(optimizer, {**gradients, stranger: torch.ones(2)}).run([stranger, *parameters])
    assert torch.equal(parameters[1], before) and stranger.tolist() == [1, 1]
    assert [p in optimizer.state for p in parameters] == [True, False]


def test_hyper_parameters_are_those_of_the_time_it_was_made():
    for betas in ((0.9, 0.99), (torch.tensor(0.9), torch.tensor(0.99))):
        results = []
        for late in (False, True):
            torch.manual_seed(0)
            parameters, optimizer, gradients = two(lr=torch.tensor(0.1), betas=betas, foreach=False)
            SplitStep(optimizer, {p: torch.ones(3) for p in parameters}).run(parameters)
            split = SplitStep(optimizer, gradients)
            if late:
                [group] = optimizer.param_groups
                group["lr"].fill_(100.0)
                group["weight_decay"] = 100.0
                if isinstance(betas[0], torch.Tensor):
                    betas[0].fill_(0.5)
            split.run(parameters)
            results.append([p.tolist() for p in parameters])
        assert results[0] == results[1]


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


def test_an_error_of_the_optimizer_is_raised_by_the_part():
    parameters = [torch.nn.Parameter(torch.ones(4, 2)) for _ in range(2)]
    optimizer = torch.optim.SparseAdam(parameters)
    split = SplitStep(optimizer, {parameters[0]: torch.ones(4, 2), parameters[1]: torch.ones(4, 2).to_sparse(1)})
    with pytest.raises(RuntimeError, match="does not support dense gradients"):
        split.run(parameters[:1])
    split.run(parameters)
    assert (parameters[0] == 1).all() and (parameters[1] != 1).all()


class Collecting(torch.optim.SGD):
    """Collects what it then empties, in lists and in tensors of its own; refers to itself and to its parameters."""

    found: ClassVar[set[int]] = set()

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.todo: list[tuple[Any, torch.Tensor]] = []
        self.scale = torch.zeros(())
        self.itself, self.first = self, [self.param_groups[0]["params"][0]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.itself is self
        self.found.add(self.first[0].data_ptr())
        for group in self.param_groups:
            self.scale.fill_(-group["lr"])
            time.sleep(0.002)
            self.todo += [(p, p.grad * self.scale) for p in group["params"] if p.grad is not None]
        for p, change in self.todo:
            p += change
        self.todo.clear()
        self.scale.zero_()


def test_parts_that_run_at_once_share_nothing_that_a_step_writes_to():
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(8)]
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.5}]
    optimizer = Collecting(groups)
    assert why_not_layer_local(optimizer) is None
    Collecting.found.clear()
    split = SplitStep(optimizer, {p: torch.ones(2) for p in parameters})
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(split.run, parameters[i : i + 2]) for i in range(0, 8, 2)]:
            done.result()
    assert [p[0].item() for p in parameters] == pytest.approx([0.9, 0.5] * 4)
    assert optimizer.todo == [] and Collecting.found == {parameters[0].data_ptr()}


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
def test_what_a_part_writes_into_hyper_parameters_is_not_seen_by_the_next(of_tensors):
    """Each part has those of the step."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(4)]
    lr = torch.tensor(0.5) if of_tensors else 0.5
    optimizer = Decaying(parameters, lr=lr)
    optimizer.param_groups[0]["factors"] = [1.0]
    split = SplitStep(optimizer, {p: torch.ones(2) for p in parameters})
    for p in parameters:
        split.run([p])
    assert [p.tolist() for p in parameters] == [[0.5, 0.5]] * 4
    (group,) = optimizer.param_groups
    assert (group["lr"], group["factors"], group["momentum"]) == (0.5, [1.0], 0)
