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
from transformers.optimization import Adafactor as HFAdafactor

from hf_l2l import Lamb
from hf_l2l.optim.layer_optimizers import LayerOptimizers, SplitStep
from hf_l2l.optim.layerwise_check import why_not_layer_local
from new_tensors import NewTensors
from tiers import nightly


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


# ---- the optimizers that are stepped in parts, each with two groups


SHAPES = ((5, 7), (7,), (), (0, 3), (4, 4, 2), (6,), (2, 9))
FROZEN = 5  # the number of the one that is not trained


def optimizer_of(
    kind: Callable[..., torch.optim.Optimizer], **options: Any
) -> Callable[[list], torch.optim.Optimizer]:
    """A maker of this optimizer with two groups."""

    def made(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        own = {**options, "lr": options["lr"].clone()} if isinstance(options.get("lr"), torch.Tensor) else options
        second = {"params": parameters[4:], "weight_decay": 0.25}
        groups = [{"params": parameters[:4]}, second if kind is not torch.optim.SparseAdam else {**second, "eps": 0.1}]
        return kind(groups, **own)

    return made


CASES = {
    "adamw": optimizer_of(torch.optim.AdamW, lr=0.1),
    "adamw foreach": optimizer_of(torch.optim.AdamW, lr=0.1, foreach=True),
    "adamw fused": optimizer_of(torch.optim.AdamW, lr=0.1, fused=True),
    "adamw amsgrad": optimizer_of(torch.optim.AdamW, lr=0.1, amsgrad=True),
    "adamw maximize": optimizer_of(torch.optim.AdamW, lr=0.1, maximize=True),
    "adamw tensor lr": optimizer_of(torch.optim.AdamW, lr=torch.tensor(0.1)),
    "adam": optimizer_of(torch.optim.Adam, lr=0.1),
    "adam foreach": optimizer_of(torch.optim.Adam, lr=0.1, foreach=True, amsgrad=True),
    "adam fused tensor lr": optimizer_of(torch.optim.Adam, lr=torch.tensor(0.1), fused=True),
    "sgd": optimizer_of(torch.optim.SGD, lr=0.1),
    "sgd momentum": optimizer_of(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
    "sgd nesterov": optimizer_of(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd fused": optimizer_of(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adagrad": optimizer_of(torch.optim.Adagrad, lr=0.1, lr_decay=0.1),
    "adagrad fused": optimizer_of(torch.optim.Adagrad, lr=0.1, fused=True),
    "rmsprop": optimizer_of(torch.optim.RMSprop, lr=0.1, momentum=0.9, centered=True),
    "adamax": optimizer_of(torch.optim.Adamax, lr=0.1),
    "adadelta": optimizer_of(torch.optim.Adadelta, lr=0.1),
    "nadam": optimizer_of(torch.optim.NAdam, lr=0.1),
    "radam": optimizer_of(torch.optim.RAdam, lr=0.1),
    "adafactor": optimizer_of(torch.optim.Adafactor, lr=0.1),
    "transformers' adafactor": optimizer_of(HFAdafactor, lr=None),
    "transformers' adafactor with lr": optimizer_of(HFAdafactor, lr=0.1, relative_step=False, beta1=0.9),
    "rprop": optimizer_of(torch.optim.Rprop, lr=0.1),
    "asgd": optimizer_of(torch.optim.ASGD, lr=0.1, t0=2),
    "muon": optimizer_of(torch.optim.Muon, lr=0.1),
    "sparse adam": optimizer_of(torch.optim.SparseAdam, lr=0.1),
    "lamb": optimizer_of(Lamb, lr=0.1),
}
REFUSED = {"adafactor": SHAPES.index((0, 3)), "sparse adam": SHAPES.index(())}
"""Shapes for which whole steps raise."""
ALL_AT_ONCE = "sgd fused"
"""Raises in torch 2.13 where some parameters have their first gradient later than others."""


def parameters_for(case: str) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(max(s, default=2), 3) for s in SHAPES] if case == "muon" else SHAPES
    made = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    if case in REFUSED:
        made[REFUSED[case]] = nn.Parameter(torch.randn(3, generator=generator))
    made[FROZEN].requires_grad_(False)
    return made


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


def test_those_with_parameters_and_names_of_all_kinds():
    class ByName(Own):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            for group in self.param_groups:
                for name, p in zip(group["param_names"], group["params"], strict=True):
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=0.5 if name.endswith("bias") else 0.25)

    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64):
        assert why_not_layer_local(torch.optim.AdamW(some(dtype), lr=1e-9)) is None, dtype
    assert why_not_layer_local(ByName(nn.Linear(2, 3).named_parameters())) is None
    frozen, b, c = some()
    frozen.requires_grad_(False)
    empty = nn.Parameter(torch.empty(0, 2))
    groups = [{"params": [("a", frozen), ("b", b)]}, {"params": [("c", c), ("empty", empty)]}]
    assert why_not_layer_local(torch.optim.AdamW(groups)) is None
    assert why_not_layer_local(torch.optim.AdamW([frozen])) is None


def test_those_that_make_their_state_at_once():
    class MakesStateAtOnce(Own):
        def __init__(self, parameters: list[nn.Parameter]) -> None:
            super().__init__(parameters)
            for p in parameters:
                self.state[p] = {"sum": torch.zeros_like(p), "rate": torch.tensor(0.5)}

        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            for p in self.trained():
                p.sub_(self.state[p]["sum"].add_(p.grad) * self.state[p]["rate"])

    optimizer = MakesStateAtOnce(some())
    assert why_not_layer_local(optimizer) is None
    assert all(not state["sum"].any() and state["sum"].shape == p.shape for p, state in optimizer.state.items())


def test_those_in_a_warm_up_from_zero():
    optimizer = torch.optim.AdamW(some(), lr=0.1)
    LambdaLR(optimizer, lambda step: 0.0)
    assert optimizer.param_groups[0]["lr"] == 0.0 and why_not_layer_local(optimizer) is None
    assert why_not_layer_local(torch.optim.AdamW(some(), lr=torch.tensor(0.0))) is None
    assert why_not_layer_local(with_factor(clips_together)(some(), lr=0.0)) is not None


# ---- those that are not


def clips_together(of: Own) -> Any:
    return (100.0 / torch.stack([p.grad.norm() for p in of.trained()]).norm()).clamp(max=1.0)


def sums(of: Own) -> float:
    """One number from all parameters."""
    return sum(p.grad.abs().sum().item() for p in of.trained())


class DecaysAll(Own):
    """Those without a gradient too."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            p.mul_(0.5)


class Wraps(Own):
    """Does the work with another, which has the parameters."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, inner=torch.optim.SGD(parameters, lr=0.1))

    def step(self, closure: None = None) -> None:
        self.inner.step()


ALL_GRADIENTS = "the update of a parameter depends on the gradients of others"
OTHER_BITS = "parts stepped alone end with other bits"
RANDOM = "its step draws random numbers"
NO_PARAMETER = "it keeps state that belongs to no parameter"
CHANGES_GROUPS, CHANGES_ATTRIBUTES = "its step changes its groups", "its step changes its attributes"
NOT_TRIED = "it cannot be tried on small tensors"


REASONS = [
    (with_factor(clips_together), ALL_GRADIENTS),
    (with_factor(lambda of: 1 + sum(p.grad.abs().sum() for p in of.trained() if p.dim() == 1)), ALL_GRADIENTS),
    (with_factor(lambda of: of.param_groups[0].update(d=sums(of)) or sums(of)), CHANGES_GROUPS),
    (with_factor(lambda of: 1 / of.param_groups[0].setdefault("k", torch.tensor(0.0)).add_(1)), CHANGES_GROUPS),
    (with_factor(lambda of: of.state.update(step=of.state.get("step", 0) + 1) or 1.0), NO_PARAMETER),
    (with_factor(lambda of: vars(of).update(count=vars(of).get("count", 0) + 1) or 1.0), CHANGES_ATTRIBUTES),
    (with_factor(lambda of: vars(of).setdefault("seen", {"n": []})["n"].append(1.0) or 1.0), CHANGES_ATTRIBUTES),
    (with_factor(lambda of: 1 + torch.rand(())), RANDOM),
    (with_factor(lambda of: 1 + random.random()), RANDOM),
    (
        with_factor(lambda of: 1 + torch.rand((), generator=vars(of).setdefault("drawn", torch.Generator()))),
        CHANGES_ATTRIBUTES,
    ),
    (with_factor(lambda of: len(of.trained())), OTHER_BITS),  # no matter what the gradients are
    (DecaysAll, OTHER_BITS),
    (Wraps, OTHER_BITS),
    (with_factor(lambda of: 0.0), "its step leaves parameters as they are"),
    (lambda parameters: Own(parameters, lock=threading.Lock()), NOT_TRIED),  # it cannot be copied
    (with_factor(lambda of: 1 / 0), NOT_TRIED),
    (torch.optim.LBFGS, NOT_TRIED),
]


def test_others_are_not():
    for make, reason in REASONS:
        # The group has parameters of other numbers of dimensions.
        found = why_not_layer_local(make([nn.Parameter(torch.randn(shape)) for shape in ((2, 2), (2, 2), (2,))]))
        assert found is not None and found.startswith(reason), (reason, found)
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

    own = {"model": model, "notes": [], "calls": 0, "mine": list(model.parameters())}
    optimizer: Any = with_factor(changes_all)(model.parameters(), **own)
    optimizer.register_step_pre_hook(Hook())
    optimizer.register_state_dict_pre_hook(Hook())
    LambdaLR(optimizer, lambda step: 1.0)
    gradients = [torch.randn_like(p) for p in model.parameters()]
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        p.grad = gradient

    def all_of_it() -> list[Any]:
        versions = [p._version for p in model.parameters()]
        drawn = torch.get_rng_state().tolist(), random.getstate()
        return [saved(model.state_dict()), versions, drawn, dict(vars(optimizer)), [*optimizer.notes], optimizer.calls]

    adam = torch.optim.AdamW(some())
    before = all_of_it()
    handles = register_optimizer_step_pre_hook(Hook()), register_optimizer_step_post_hook(Hook())
    try:
        assert why_not_layer_local(optimizer) in (RANDOM, CHANGES_ATTRIBUTES, OTHER_BITS), "it was tried"
        assert why_not_layer_local(adam) is None
    finally:
        for handle in handles:
            handle.remove()
    assert all_of_it() == before and len(optimizer.state) == 0
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))


def test_nothing_large_is_copied():
    """Of an optimizer that knows all that could be large, and itself."""
    parameters = [nn.Parameter(torch.zeros(1000, 100)) for _ in range(3)]
    optimizer: Any = torch.optim.Adam(parameters)
    optimizer.mine, optimizer.me, optimizer.entries = parameters, optimizer, optimizer.state
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    with NewTensors() as new:
        assert why_not_layer_local(optimizer) is None
    assert 0 < max(new.sizes) <= 25


# ---- steps in parts


STEPS = 4


def gradient_for(case: str, p: torch.Tensor, number: int) -> torch.Tensor:
    gradient = torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
    return gradient.to_sparse(1) if case == "sparse adam" else gradient


def train(case: str, having: list[set[int]], parts: list[list[list[int]]] | None) -> dict[str, object]:
    """Train by whole steps, or by `parts` of parameters; `having` says which have a gradient in which step."""
    parameters = parameters_for(case)
    optimizer = CASES[case](parameters)
    has_a_schedule = case == "transformers' adafactor"
    advance = (lambda: None) if has_a_schedule else LambdaLR(optimizer, lambda step: 0.75**step).step
    for step, numbers in enumerate(having):
        gradients = {parameters[n]: gradient_for(case, parameters[n], 100 * step + n) for n in sorted(numbers)}
        if parts is None:
            for p in parameters:
                p.grad = gradients.get(p)
            optimizer.step()
            advance()
            continue
        split = SplitStep(LayerOptimizers(optimizer), gradients)
        optimizer.step()  # without gradients: nothing but the scheduler's count of steps
        advance()
        for part in parts[step]:
            split.run([parameters[n] for n in part])
    numbers = {p: number for number, p in enumerate(parameters)}
    return {
        "weights": saved([p.detach() for p in parameters]),  # bytes, so that NaNs are equal to themselves
        "versions": [p._version for p in parameters],
        "order": [(numbers[p], list(state)) for p, state in optimizer.state.items()],
        "state dict": saved(optimizer.state_dict()),
    }


@st.composite
def partitions(draw: st.DrawFn) -> list[list[int]]:
    order = draw(st.permutations(range(len(SHAPES))))
    cuts = sorted(draw(st.sets(st.integers(1, len(SHAPES) - 1))))
    return [order[start:end] for start, end in zip([0, *cuts], [*cuts, len(order)], strict=True)]


@nightly
@settings(max_examples=16, deadline=None)
@given(
    having=st.lists(st.sets(st.integers(0, len(SHAPES) - 1)), min_size=STEPS, max_size=STEPS),
    parts=st.lists(partitions(), min_size=STEPS, max_size=STEPS),
)
def test_parts_leave_the_bits_of_whole_steps(having, parts):
    every = [set(range(len(SHAPES)))] * STEPS
    for case in CASES:
        gradients = every if case == ALL_AT_ONCE else having
        assert train(case, gradients, parts) == train(case, gradients, None), case


def two() -> tuple[list[nn.Parameter], torch.optim.Optimizer, dict[torch.Tensor, torch.Tensor]]:
    parameters = [nn.Parameter(torch.randn(3)) for _ in range(2)]
    return parameters, torch.optim.AdamW(parameters, lr=0.1), {p: torch.randn(3) for p in parameters}


def test_grad_is_neither_read_nor_written():
    parameters, optimizer, gradients = two()
    parameters[0].grad = other = torch.full((3,), torch.nan)
    SplitStep(LayerOptimizers(optimizer), gradients).run(parameters)
    assert parameters[0].grad is other and other.isnan().all() and parameters[1].grad is None
    assert all(p.isfinite().all() for p in parameters)


def test_gradients_are_given_up_with_their_part():
    parameters, optimizer, gradients = two()
    held = [weakref.ref(gradient) for gradient in gradients.values()]
    split = SplitStep(LayerOptimizers(optimizer), gradients)
    gradients.clear()
    gc.disable()  # memory comes back at once, not when a collector comes round
    try:
        assert [ref() is None for ref in held] == [False, False]
        split.run(parameters[1:])
        assert [ref() is None for ref in held] == [False, True]
        split.run(parameters)
        assert [ref() is None for ref in held] == [True, True]
    finally:
        gc.enable()


def test_a_parameter_is_updated_once_and_only_with_a_gradient_and_an_optimizer():
    parameters, optimizer, gradients = two()
    del gradients[parameters[1]]
    before, stranger = parameters[1].detach().clone(), nn.Parameter(torch.ones(2))
    split = SplitStep(LayerOptimizers(optimizer), {**gradients, stranger: torch.ones(2)})
    split.run([parameters[0], parameters[0]])
    split.run(iter([stranger, *parameters]))
    assert torch.equal(parameters[1], before) and stranger.tolist() == [1, 1]
    assert optimizer.state[parameters[0]]["step"].item() == 1 and parameters[1] not in optimizer.state


def test_hooks_of_the_optimizer_do_not_run_and_those_of_all_run_once_per_part():
    parameters, optimizer, gradients = two()
    heard: list[str] = []
    optimizer.register_step_pre_hook(lambda *args: heard.append("own pre"))
    optimizer.register_step_post_hook(lambda *args: heard.append("own post"))
    handles = (
        register_optimizer_step_pre_hook(lambda optimizer, *args: heard.append(f"pre {len(optimizer.state)}")),
        register_optimizer_step_post_hook(lambda optimizer, *args: heard.append(f"post {len(optimizer.state)}")),
    )
    split = SplitStep(LayerOptimizers(optimizer), gradients)
    for part in (parameters[:1], parameters[1:], parameters):
        split.run(part)
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

    a, b, c = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = Watched([{"params": [("a", a), ("b", b)]}, {"params": [("c", c)], "lr": 2.0}], lr=1.0)
    split = SplitStep(LayerOptimizers(optimizer), {p: torch.ones(2) for p in (a, b, c)})
    split.run([b])
    split.run([c, a])
    assert seen == [
        [{"lr": 1.0, "param_names": ["b"]}],
        [{"lr": 1.0, "param_names": ["a"]}, {"lr": 2.0, "param_names": ["c"]}],
    ]
    assert [p.tolist() for p in (a, b, c)] == [[0, 0], [0, 0], [-1, -1]]
    assert optimizer.param_groups[0]["param_names"] == ["a", "b"]


class Tagged(Own):
    """Has an attribute of its own, goes by a tag, asks for entries in the state, and makes a new one every step."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for p in self.trained():
            old = self.state[p]["sum"] if p in self.state else torch.zeros_like(p)
            self.state[p] = {"sum": old + p.grad}
            p.sub_(self.state[p]["sum"], alpha=self.own * getattr(p, "tag", 1.0))


def test_attributes_tags_and_new_states_are_those_of_the_user():
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    parameters[1].tag = 10.0
    optimizer = Tagged(parameters, own=2.0)
    for _ in range(2):
        split = SplitStep(LayerOptimizers(optimizer), {p: torch.ones(2) for p in parameters})
        split.run(parameters[1:])
        split.run(parameters[:1])
    assert [p.tolist() for p in parameters] == [[-6, -6], [-60, -60]]
    assert [optimizer.state[p]["sum"].tolist() for p in parameters] == [[2, 2]] * 2
    assert list(map(id, optimizer.state)) == list(map(id, parameters))


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


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_each_part_has_the_hyper_parameters_of_the_step(lr):
    """Whatever a part writes into them, and the program before the parts run."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    optimizer = Decaying(parameters, lr=lr)
    (group,) = optimizer.param_groups
    group["factors"] = [1.0]
    split = SplitStep(LayerOptimizers(optimizer), {p: torch.ones(2) for p in parameters})
    if isinstance(lr, torch.Tensor):
        lr.fill_(100.0)
    else:
        group["lr"] = 100.0
    for p in parameters:
        split.run([p])
    assert [p.tolist() for p in parameters] == [[0.5, 0.5]] * 4
    assert (group["lr"], group["factors"], group["momentum"]) == (100.0, [1.0], 0)


def test_state_that_is_replaced_is_kept_by_nothing():
    """Layers have optimizers that live longer than a step."""
    p = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adagrad([p])
    layers = LayerOptimizers(optimizer)
    SplitStep(layers, {p: torch.ones(4)}).run([p])
    before = weakref.ref(optimizer.state[p]["sum"])
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    gc.collect()
    assert before() is None
