"""The check for layer-local optimizers finds them, without side effects."""

from __future__ import annotations

import io
import random
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from hf_l2l.optim.layerwise_check import why_not_layer_local
from optimizer_cases import CASES, parameters_for


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


def test_nothing_of_the_user_is_touched():
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


class Hook:
    """It cannot be copied, and must not be called."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, *args: Any) -> None:
        raise AssertionError("not to be called")


def test_no_hook_runs_or_is_copied():
    optimizer = torch.optim.AdamW(some())
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        optimizer.register_state_dict_pre_hook,
    ):
        register(Hook())
    LambdaLR(optimizer, lambda step: 1.0)
    handles = register_optimizer_step_pre_hook(Hook()), register_optimizer_step_post_hook(Hook())
    try:
        assert why_not_layer_local(optimizer) is None
    finally:
        for handle in handles:
            handle.remove()
    assert "step" in vars(optimizer)  # the scheduler's is still there


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
