"""The check for layer-local optimizers finds them, without side effects."""

from __future__ import annotations

import io
import random
import threading
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from hf_l2l.optim.layerwise_check import why_not_layer_local
from hf_l2l.optim.layerwise_step import SplitStep
from optimizer_cases import CASES, parameters_for


def some(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((40, 3), (9,), (3, 3))]


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


# ---- those that are


@pytest.mark.parametrize("case", CASES)
def test_every_optimizer_of_torch_is(case):
    assert why_not_layer_local(CASES[case](parameters_for(case))) is None


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES)
def test_so_it_is_in_the_middle_of_training(case):
    parameters = parameters_for(case)
    optimizer = CASES[case](parameters)
    for p in parameters:
        p.grad = torch.ones_like(p).to_sparse(1) if case == "sparse adam" else torch.ones_like(p)
    optimizer.step()
    before = saved(optimizer.state_dict()), saved(parameters)
    assert why_not_layer_local(optimizer) is None
    assert (saved(optimizer.state_dict()), saved(parameters)) == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_every_dtype(dtype):
    assert why_not_layer_local(torch.optim.AdamW(some(dtype), lr=1e-9)) is None


def test_a_warm_up_from_zero():
    optimizer = torch.optim.AdamW(some(), lr=0.1)
    LambdaLR(optimizer, lambda step: 0.0)
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert why_not_layer_local(optimizer) is None
    assert why_not_layer_local(torch.optim.AdamW(some(), lr=torch.tensor(0.0))) is None
    assert why_not_layer_local(ClipsTogether(some(), lr=0.0)) is not None


def test_one_that_goes_by_names():
    class ByName(Own):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for name, p in zip(group["param_names"], group["params"], strict=True):
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=0.5 if name.endswith("bias") else 0.25)

    assert why_not_layer_local(ByName(torch.nn.Linear(2, 3).named_parameters())) is None


def test_frozen_and_empty_and_named_parameters():
    a, b, c = some()
    a.requires_grad_(False)
    empty = torch.nn.Parameter(torch.empty(0, 2))
    named = [{"params": [("a", a), ("b", b)]}, {"params": [("c", c), ("empty", empty)]}]
    assert why_not_layer_local(torch.optim.AdamW(named)) is None
    assert why_not_layer_local(torch.optim.AdamW([a])) is None


def test_one_that_keeps_a_list_of_its_parameters():
    class Listing(Own):
        def __init__(self, parameters):
            super().__init__(parameters)
            self.mine = parameters

    assert why_not_layer_local(Listing(some())) is None


# ---- those that are not


class Own(torch.optim.Optimizer):
    """SGD, to build others upon."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

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


class ClipsTogether(Own):
    def factor(self):
        norm = torch.stack([p.grad.norm() for p in self.trained()]).norm()
        return (100.0 / norm).clamp(max=1.0)


class Prodigal(Own):
    """One estimate from all parameters, kept in the group."""

    def factor(self):
        group = self.param_groups[0]
        group["d"] = max(group.get("d", 1e-6), sum(p.grad.abs().sum().item() for p in self.trained()))
        return group["d"]


class CountsInGroup(Own):
    def factor(self):
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        return 1 / self.param_groups[0]["k"]


class CountsInGroupTensor(Own):
    def __init__(self, parameters):
        super().__init__(parameters)
        self.param_groups[0]["k"] = torch.tensor(0.0)

    def factor(self):
        return 1 / self.param_groups[0]["k"].add_(1)


class CountsInState(Own):
    def factor(self):
        self.state["step"] = self.state.get("step", 0) + 1
        return 1.0


class CountsInAttribute(Own):
    count = 0

    def factor(self):
        self.count += 1
        return 1.0 if self.count < 1000 else 0.5


class RemembersInAttribute(Own):
    def __init__(self, parameters):
        super().__init__(parameters)
        self.seen: dict[str, list[float]] = {"norms": []}

    def factor(self):
        self.seen["norms"].append(1.0)
        return 1.0


class DrawsFromTorch(Own):
    def factor(self):
        return 1 + torch.rand(())


class DrawsFromPython(Own):
    def factor(self):
        return 1 + random.random()


class DrawsFromItsOwn(Own):
    def __init__(self, parameters):
        super().__init__(parameters)
        self.generator = torch.Generator().manual_seed(0)

    def factor(self):
        return 1 + torch.rand((), generator=self.generator)


class CountsItsParameters(Own):
    """No matter what the gradients are."""

    def factor(self):
        return len(self.trained())


class DecaysAll(Own):
    """Those without a gradient too."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            p.mul_(0.5)


class Wraps(Own):
    """Does the work with another, which has the parameters."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1)

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()


class Idle(Own):
    def step(self, closure=None):
        pass


class Locked(Own):
    def __init__(self, parameters):
        super().__init__(parameters)
        self.lock = threading.Lock()


class Raises(Own):
    def factor(self):
        raise Exception("not in train mode")


ALL_GRADIENTS = "the update of a parameter depends on the gradients of others"
OTHER_BITS = "parts stepped alone end with other bits"
RANDOM = "its step draws random numbers, which would come in another order"
NO_PARAMETER = "it keeps state that belongs to no parameter"
CHANGES_GROUPS, CHANGES_ATTRIBUTES = "its step changes its groups", "its step changes its attributes"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ClipsTogether, ALL_GRADIENTS),
        (Prodigal, CHANGES_GROUPS),
        (CountsInGroup, CHANGES_GROUPS),
        (CountsInGroupTensor, CHANGES_GROUPS),
        (CountsInState, NO_PARAMETER),
        (CountsInAttribute, CHANGES_ATTRIBUTES),
        (RemembersInAttribute, CHANGES_ATTRIBUTES),
        (DrawsFromTorch, RANDOM),
        (DrawsFromPython, RANDOM),
        (DrawsFromItsOwn, CHANGES_ATTRIBUTES),
        (CountsItsParameters, OTHER_BITS),
        (DecaysAll, OTHER_BITS),
        (Wraps, OTHER_BITS),
        (Idle, "its step leaves parameters as they are"),
        (Locked, "it cannot be tried on small tensors (TypeError: cannot pickle '_thread.lock' object)"),
        (Raises, "it cannot be tried on small tensors (Exception: not in train mode)"),
        (torch.optim.LBFGS, "it cannot be tried on small tensors (TypeError: LBFGS.step() missing"),
    ],
)
def test_others_are_not(kind, reason):
    assert why_not_layer_local(Own(some())) is None
    optimizer = kind(some())
    found = why_not_layer_local(optimizer)
    assert found is not None and found.startswith(reason)


def test_parameters_of_another_number_of_dimensions_are_looked_at():
    class ByVectors(Own):
        def factor(self):
            return 1 + sum(p.grad.abs().sum() for p in self.trained() if p.dim() == 1)

    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in ((2, 2), (2, 2), (2,))]
    assert why_not_layer_local(ByVectors(parameters)) == ALL_GRADIENTS


def test_state_that_is_there_already_and_belongs_to_no_parameter():
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
    found = why_not_layer_local(optimizer)
    assert found is not None and "property 'state'" in found


# ---- without side effects


def test_nothing_of_the_user_is_touched():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))

    class Holding(Own):
        def __init__(self):
            super().__init__(model.parameters())
            self.model, self.notes, self.calls = model, [], 0
            self.mine = list(model.parameters())

        def factor(self):
            self.calls += 1
            self.notes.append(self.calls)
            for p in self.mine:
                p.mul_(2.0)
            return torch.rand(()) + random.random()

    optimizer = Holding()
    gradients = {p: torch.randn_like(p) for p in model.parameters()}
    for p, gradient in gradients.items():
        p.grad = gradient
    before = saved(model.state_dict()), [p._version for p in model.parameters()]
    generators = torch.get_rng_state().tolist(), random.getstate()
    attributes = dict(vars(optimizer))
    assert why_not_layer_local(optimizer) is not None
    assert (saved(model.state_dict()), [p._version for p in model.parameters()]) == before
    assert (torch.get_rng_state().tolist(), random.getstate()) == generators
    assert vars(optimizer) == attributes and optimizer.notes == [] and optimizer.calls == 0
    assert all(p.grad is gradients[p] for p in model.parameters()) and len(optimizer.state) == 0


def test_no_hook_runs():
    heard: list[str] = []
    optimizer = torch.optim.AdamW(some())
    optimizer.register_step_pre_hook(lambda *args: heard.append("own"))
    optimizer.register_step_post_hook(lambda *args: heard.append("own"))
    LambdaLR(optimizer, lambda step: 1.0)
    handles = (
        register_optimizer_step_pre_hook(lambda *args: heard.append("of all")),
        register_optimizer_step_post_hook(lambda *args: heard.append("of all")),
    )
    try:
        assert why_not_layer_local(optimizer) is None
        assert heard == []
        SplitStep(optimizer, {p: torch.ones_like(p) for p in optimizer.param_groups[0]["params"]}).run(some())
        assert heard == []
    finally:
        for handle in handles:
            handle.remove()
    assert "step" in vars(optimizer)  # the scheduler's is still there


class Holding(torch.optim.Adam):
    """Knows all that could be large, and itself."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.mine, self.me, self.entries = parameters, self, self.state


def test_nothing_large_is_copied():
    class New(TorchDispatchMode):
        """The size of the largest tensor that is not made of one that was there."""

        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
                self.size = max(self.size, made.numel())
            return made

    parameters = [torch.nn.Parameter(torch.zeros(1000, 100)) for _ in range(3)]
    optimizer = Holding(parameters)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    with New() as new:
        assert why_not_layer_local(optimizer) is None
    assert 0 < new.size <= 25


class MakesStateAtOnce(Own):
    def __init__(self, parameters):
        super().__init__(parameters)
        for p in parameters:
            self.state[p] = {"sum": torch.zeros_like(p), "rate": torch.tensor(0.5)}

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.trained():
            p.sub_(self.state[p]["sum"].add_(p.grad) * self.state[p]["rate"])


def test_state_that_is_there_from_the_start_is_copied():
    parameters = some()
    optimizer = MakesStateAtOnce(parameters)
    assert why_not_layer_local(optimizer) is None
    assert all(not state["sum"].any() and state["sum"].shape == p.shape for p, state in optimizer.state.items())


def test_hooks_need_not_be_copied():
    class Hook:
        def __init__(self):
            self.lock = threading.Lock()

        def __call__(self, *args):
            raise AssertionError("not to be called")

    optimizer = torch.optim.AdamW(some())
    optimizer.register_step_post_hook(Hook())
    optimizer.register_state_dict_pre_hook(Hook())
    assert why_not_layer_local(optimizer) is None
