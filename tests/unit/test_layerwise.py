"""Which optimizers are layer-local, and that steps made in parts leave the bits that whole steps leave."""

from __future__ import annotations

import gc
import io
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from hf_l2l.optim.layerwise_check import why_not_layer_local
from hf_l2l.optim.layerwise_step import SplitStep
from optimizer_cases import ALL_AT_ONCE, CASES, SHAPES, parameters_for
from tiers import nightly, times


def some(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((40, 3), (9,), (3, 3))]


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


class Own(torch.optim.Optimizer):
    """SGD, with a factor for all gradients, which others compute in ways of their own."""

    def __init__(self, parameters: Any, lr: float = 0.1, **attributes: Any) -> None:
        super().__init__(parameters, {"lr": lr})
        vars(self).update(attributes)

    def trained(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    def factor(self) -> Any:
        return 1.0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        factor = self.factor()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] * factor))


def with_factor(factor: Callable[[Any], Any]) -> type[Own]:
    return type("WithFactor", (Own,), {"factor": factor})


# ---- those that are


def test_every_optimizer_of_torch_is_at_the_start_and_in_the_middle_of_training():
    for case, make in CASES.items():
        parameters = parameters_for(case)
        optimizer = make(parameters)
        assert why_not_layer_local(optimizer) is None, case
        for p in parameters:
            p.grad = torch.ones_like(p).to_sparse(1) if case == "sparse adam" else torch.ones_like(p)
        optimizer.step()
        before = saved(optimizer.state_dict()), saved(parameters)
        assert why_not_layer_local(optimizer) is None, case
        assert (saved(optimizer.state_dict()), saved(parameters)) == before, case


class ByName(Own):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.5 if name.endswith("bias") else 0.25)


class MakesStateAtOnce(Own):
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters)
        for p in parameters:
            self.state[p] = {"sum": torch.zeros_like(p), "rate": torch.tensor(0.5)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for p in self.trained():
            p.sub_(self.state[p]["sum"].add_(p.grad) * self.state[p]["rate"])


def test_those_with_parameters_names_and_state_of_all_kinds():
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64):
        assert why_not_layer_local(torch.optim.AdamW(some(dtype), lr=1e-9)) is None, dtype
    assert why_not_layer_local(ByName(nn.Linear(2, 3).named_parameters())) is None
    frozen, b, c = some()
    frozen.requires_grad_(False)
    empty = nn.Parameter(torch.empty(0, 2))
    groups = [{"params": [("a", frozen), ("b", b)]}, {"params": [("c", c), ("empty", empty)]}]
    assert why_not_layer_local(torch.optim.AdamW(groups)) is None
    assert why_not_layer_local(torch.optim.AdamW([frozen])) is None
    optimizer = MakesStateAtOnce(some())
    assert why_not_layer_local(optimizer) is None
    assert all(not state["sum"].any() and state["sum"].shape == p.shape for p, state in optimizer.state.items())


def test_those_in_a_warm_up_from_zero():
    optimizer = torch.optim.AdamW(some(), lr=0.1)
    LambdaLR(optimizer, lambda step: 0.0)
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert why_not_layer_local(optimizer) is None
    assert why_not_layer_local(torch.optim.AdamW(some(), lr=torch.tensor(0.0))) is None
    assert why_not_layer_local(with_factor(clips_together)(some(), lr=0.0)) is not None


# ---- those that are not


def clips_together(of: Own) -> Any:
    return (100.0 / torch.stack([p.grad.norm() for p in of.trained()]).norm()).clamp(max=1.0)


def estimates(of: Own) -> Any:
    """One number from all parameters, kept in the group."""
    group = of.param_groups[0]
    group["d"] = max(group.get("d", 1e-6), sum(p.grad.abs().sum().item() for p in of.trained()))
    return group["d"]


def counts_in_group_tensor(of: Own) -> Any:
    return 1 / of.param_groups[0].setdefault("k", torch.tensor(0.0)).add_(1)


def counts_in_state(of: Own) -> Any:
    of.state["step"] = of.state.get("step", 0) + 1
    return 1.0


def counts_in_attribute(of: Any) -> Any:
    of.count = vars(of).get("count", 0) + 1
    return 1.0 if of.count < 1000 else 0.5


def remembers_in_attribute(of: Any) -> Any:
    of.seen = vars(of).get("seen", {"norms": []})
    of.seen["norms"].append(1.0)
    return 1.0


def draws_from_its_own(of: Any) -> Any:
    of.generator = vars(of).get("generator") or torch.Generator().manual_seed(0)
    return 1 + torch.rand((), generator=of.generator)


def by_vectors(of: Own) -> Any:
    return 1 + sum(p.grad.abs().sum() for p in of.trained() if p.dim() == 1)


def raises(of: Own) -> Any:
    raise Exception("not in train mode")


class DecaysAll(Own):
    """Those without a gradient too."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            p.mul_(0.5)


class Wraps(Own):
    """Does the work with another, which has the parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.inner.step()


class Idle(Own):
    def step(self, closure: None = None) -> None:
        pass


class Locked(Own):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lock=threading.Lock())


ALL_GRADIENTS = "the update of a parameter depends on the gradients of others"
OTHER_BITS = "parts stepped alone end with other bits"
RANDOM = "its step draws random numbers"
NO_PARAMETER = "it keeps state that belongs to no parameter"
CHANGES_GROUPS, CHANGES_ATTRIBUTES = "its step changes its groups", "its step changes its attributes"
NOT_TRIED = "it cannot be tried on small tensors"


REASONS = [
    (clips_together, ALL_GRADIENTS),
    (by_vectors, ALL_GRADIENTS),
    (estimates, CHANGES_GROUPS),
    (counts_in_group_tensor, CHANGES_GROUPS),
    (counts_in_state, NO_PARAMETER),
    (counts_in_attribute, CHANGES_ATTRIBUTES),
    (remembers_in_attribute, CHANGES_ATTRIBUTES),
    (lambda of: 1 + torch.rand(()), RANDOM),
    (lambda of: 1 + random.random(), RANDOM),
    (draws_from_its_own, CHANGES_ATTRIBUTES),
    (lambda of: len(of.trained()), OTHER_BITS),  # no matter what the gradients are
    (DecaysAll, OTHER_BITS),
    (Wraps, OTHER_BITS),
    (Idle, "its step leaves parameters as they are"),
    (Locked, NOT_TRIED),
    (raises, NOT_TRIED),
    (torch.optim.LBFGS, NOT_TRIED),
]


def test_others_are_not():
    for kind, reason in REASONS:
        made = kind if isinstance(kind, type) else with_factor(kind)
        # The group has parameters of other numbers of dimensions.
        found = why_not_layer_local(made([nn.Parameter(torch.randn(shape)) for shape in ((2, 2), (2, 2), (2,))]))
        assert found is not None and found.startswith(reason), (kind, found)
    optimizer = Own(some())
    optimizer.state["step"] = 3
    assert why_not_layer_local(optimizer) == NO_PARAMETER


def test_one_whose_parameters_cannot_be_exchanged():
    class Held(Own):
        @property
        def state(self):
            return self.held

    optimizer = Held.__new__(Held)
    optimizer.held = {}
    optimizer.param_groups = [{"params": some(), "lr": 0.1}]
    assert "property 'state'" in (why_not_layer_local(optimizer) or "")


# ---- without side effects


class Hook:
    """It cannot be copied, and must not be called."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, *args: Any) -> None:
        raise AssertionError("not to be called")


def test_nothing_of_the_user_is_touched_and_no_hook_runs_or_is_copied():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    def changes_all(of: Any) -> Any:
        of.calls += 1
        of.notes.append(of.calls)
        for p in of.mine:
            p.mul_(2.0)
        return torch.rand(()) + random.random()

    optimizer: Any = with_factor(changes_all)(
        model.parameters(), model=model, notes=[], calls=0, mine=list(model.parameters())
    )
    optimizer.register_step_pre_hook(Hook())
    optimizer.register_state_dict_pre_hook(Hook())
    LambdaLR(optimizer, lambda step: 1.0)
    handles = register_optimizer_step_pre_hook(Hook()), register_optimizer_step_post_hook(Hook())
    adam = torch.optim.AdamW(some())
    gradients = {p: torch.randn_like(p) for p in model.parameters()}
    for p, gradient in gradients.items():
        p.grad = gradient
    before = saved(model.state_dict()), [p._version for p in model.parameters()]
    generators = torch.get_rng_state().tolist(), random.getstate()
    attributes = dict(vars(optimizer))
    try:
        assert why_not_layer_local(optimizer) in (RANDOM, CHANGES_ATTRIBUTES, OTHER_BITS), "it was tried"
        assert why_not_layer_local(adam) is None
    finally:
        for handle in handles:
            handle.remove()
    assert (saved(model.state_dict()), [p._version for p in model.parameters()]) == before
    assert (torch.get_rng_state().tolist(), random.getstate()) == generators
    assert vars(optimizer) == attributes and optimizer.notes == [] and optimizer.calls == 0
    assert all(p.grad is gradients[p] for p in model.parameters()) and len(optimizer.state) == 0


class Largest(TorchDispatchMode):
    """The size of the largest tensor that is not made of one that was there."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
            self.size = max(self.size, made.numel())
        return made


def test_nothing_large_is_copied():
    """Of an optimizer that knows all that could be large, and itself."""
    parameters = [nn.Parameter(torch.zeros(1000, 100)) for _ in range(3)]
    optimizer: Any = torch.optim.Adam(parameters)
    optimizer.mine, optimizer.me, optimizer.entries = parameters, optimizer, optimizer.state
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    with Largest() as largest:
        assert why_not_layer_local(optimizer) is None
    assert 0 < largest.size <= 25


# ---- steps in parts


STEPS = 4


def gradient_for(case: str, p: torch.Tensor, number: int) -> torch.Tensor:
    gradient = torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
    return gradient.to_sparse(1) if case == "sparse adam" else gradient


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


@nightly
@settings(max_examples=times(4, 16), deadline=None)
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


class Tagged(torch.optim.Optimizer):
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
    optimizer = Tagged(parameters)
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
