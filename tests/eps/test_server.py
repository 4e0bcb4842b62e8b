"""Masters and gradient sums belong to the EPS; a wrapped optimizer is the user's own."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_l2l import EagerParamServer, L2LConfig, attach_l2l
from hf_l2l.optim.loss_scale import LossScale
from hf_l2l.runtime.stream import HOST
from memory_switches import forced_copies
from models import (
    TOLERANCE,
    assert_same_bits,
    attached,
    batch_for,
    bert,
    gradients,
    reference,
    relative_error,
    train_once,
)


@pytest.fixture(params=["views", "copies"])
def copies(request):
    with forced_copies() if request.param == "copies" else nullcontext():
        yield


def served(module: nn.Module) -> EagerParamServer:
    return EagerParamServer(module, HOST)


# ---- the contract of p.grad


def test_none_starts_a_sum_and_more_is_added(copies):
    module = nn.Linear(2, 2)
    eps = served(module)
    eps.receive([(eps.masters.of(module.bias), torch.tensor([1.0, 2.0]))])
    assert module.bias.grad.tolist() == [1.0, 2.0] and module.weight.grad is None
    held = module.bias.grad
    eps.receive([(eps.masters.of(module.bias), torch.tensor([10.0, 20.0]))])
    assert module.bias.grad is held and held.tolist() == [11.0, 22.0]
    module.zero_grad()
    eps.receive([(eps.masters.of(module.bias), torch.tensor([3.0, 4.0]))])
    assert module.bias.grad.tolist() == [3.0, 4.0]
    assert not module.bias.grad.requires_grad


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_starts_again(set_to_none, copies):
    model = bert().double()
    batch = batch_for(model)
    _, expected = reference(model, batch)
    attached(model, ubatch_size=3)
    train_once(model, batch_for(model, seed=7))
    model.zero_grad(set_to_none=set_to_none)
    assert all((p.grad is None) == set_to_none for p in model.parameters())
    train_once(model, batch)
    assert relative_error(gradients(model), expected) <= TOLERANCE[torch.float64]


def test_a_gradient_changed_by_the_user_is_the_truth(copies):
    model = bert()
    attach_l2l(model)
    batch = batch_for(model)
    train_once(model, batch)
    once = gradients(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    train_once(model, batch)
    assert_same_bits(gradients(model), {name: torch.ones_like(g) + g for name, g in once.items()})


def test_gradients_do_not_share_memory_with_each_other_or_with_masters(copies):
    model = attached(bert())
    train_once(model, batch_for(model))
    memory = [t.untyped_storage().data_ptr() for p in model.parameters() for t in (p, p.grad)]
    assert len(set(memory)) == len(memory)


# ---- loss scale


class Products(TorchDispatchMode):
    """Counts products in place."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mul_, torch.ops.aten._foreach_mul_):
            self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_the_gradients_of_a_call_are_unscaled_by_one_kernel():
    module = nn.Module()
    module.table, module.wide = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3).double()
    module.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    eps = EagerParamServer(module, HOST, loss_scale=LossScale(initial=1000.0))
    optimizer = eps.wrap(torch.optim.SGD(module.parameters(), lr=0.1))
    scaled = {p: 1000 * torch.randn_like(p) for p in module.parameters()}
    scaled[module.table.weight] = scaled[module.table.weight].to_sparse(1)
    expected = {p: gradient * (1 / 1000) for p, gradient in scaled.items()}
    with Products() as products:
        eps.receive([(eps.masters.of(p), gradient.clone()) for p, gradient in scaled.items()])
        eps.receive([])
    assert products.found == ["_foreach_mul_"]
    for p, gradient in expected.items():
        assert p.grad.dtype == p.dtype and p.grad.is_sparse == (p is module.table.weight)
        assert torch.equal(p.grad.to_dense(), gradient.to_dense())
    assert optimizer is not None


# ---- sparse gradients


class Looking(nn.Module):
    """A layer with a table for which gradients are sparse."""

    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(4, 4), nn.Embedding(9, 4, sparse=True)

    def forward(self, x):
        return x + self.linear(x).tanh() + self.table(torch.arange(x.shape[0]) * 2 % 9)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4, sparse=True)
        self.blocks = nn.ModuleList(Looking() for _ in range(3))
        self.both_ways = False

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        loss = x.square().mean()
        return loss + self.embed.weight.square().sum() if self.both_ways else loss


def assert_close(model: nn.Module, plain: nn.Module) -> None:
    """Weights and gradients are the same, and gradients sparse on both sides or on none."""
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7, msg=name)
        assert (found.grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            assert found.grad.layout == expected.grad.layout, name
            torch.testing.assert_close(found.grad.to_dense(), expected.grad.to_dense(), rtol=1e-5, atol=1e-7)


@pytest.fixture
def sparse_pair() -> tuple[nn.Module, nn.Module]:
    """A model under L2L and the same in plain torch."""
    plain = Sparse()
    model = copy.deepcopy(plain)
    attach_l2l(model, L2LConfig(layer_classes=("Looking",)))
    return model, plain


def test_sparse_gradients_are_trained_with_as_in_plain_torch(sparse_pair, copies):
    def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
        sparse = [p for n, p in model.named_parameters() if "table" in n or "embed" in n]
        dense = [p for n, p in model.named_parameters() if "linear" in n]
        return [torch.optim.SparseAdam(sparse, lr=0.1), torch.optim.SGD(dense, lr=0.1)]

    optimizers = [optimizer for model in sparse_pair for optimizer in optimizers_of(model)]
    for step in range(3):
        for model in sparse_pair:
            for i in range(2):
                model(torch.arange(5) + i + step % 3).backward()
        assert sparse_pair[1].embed.weight.grad.is_sparse
        assert_close(*sparse_pair)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_close(*sparse_pair)


@pytest.mark.parametrize("order", [(False, True), (True, False), (False, True, True, False)], ids=str)
def test_sparse_and_dense_gradients_of_one_weight_add_up(order, sparse_pair, copies):
    for model in sparse_pair:
        for model.both_ways in order:
            model(torch.tensor([1, 1, 4])).backward()
    assert_close(*sparse_pair)


# ---- wrap


def test_wrap_returns_the_same_optimizer_and_is_idempotent():
    model = bert()
    eps = attach_l2l(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    assert eps.wrap(optimizer) is optimizer
    hooks = len(optimizer._optimizer_step_post_hooks)
    assert eps.wrap(optimizer) is optimizer
    assert len(optimizer._optimizer_step_post_hooks) == hooks == 1


class Outer:
    """Keeps the optimizer as Accelerate's wrapper does."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer


def test_the_optimizer_inside_a_wrapper_is_wrapped_once():
    model = bert()
    eps = attach_l2l(model)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    outer = Outer(inner)
    assert eps.wrap(outer) is outer
    eps.wrap(inner)
    assert len(inner._optimizer_step_post_hooks) == 1


def test_a_step_clears_the_gradients_it_used():
    model = bert()
    eps = attach_l2l(model)
    used = list(model.bert.parameters())
    optimizer = eps.wrap(torch.optim.AdamW(used, lr=0.1))
    train_once(model, batch_for(model))
    before = model.bert.pooler.dense.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.bert.pooler.dense.weight, before)
    assert all(p.grad is None for p in used)
    assert all(p.grad is not None for p in model.classifier.parameters())  # of another optimizer


def test_wrapping_changes_nothing_but_when_gradients_are_cleared():
    """Groups, state, state dict and scheduler go on as those of an optimizer that is not wrapped."""
    plain = bert()
    ours = copy.deepcopy(plain)
    eps = attach_l2l(ours)
    made = []
    for model in (plain, ours):
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.05}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        made.append((optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)))
    ours_optimizer = made[1][0]
    before = copy.deepcopy(ours_optimizer.state_dict())
    attributes = set(vars(ours_optimizer))
    eps.wrap(ours_optimizer)
    assert ours_optimizer.state_dict() == before
    assert set(vars(ours_optimizer)) == attributes
    for model, (optimizer, scheduler) in zip((plain, ours), made, strict=True):
        for seed in range(3):
            train_once(model, batch_for(model, seed=seed))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    (theirs, their_scheduler), (found, scheduler) = made
    assert scheduler.get_last_lr() == their_scheduler.get_last_lr()
    assert found.state_dict()["param_groups"] == theirs.state_dict()["param_groups"]
    for index, state in theirs.state_dict()["state"].items():
        assert all(torch.equal(found.state_dict()["state"][index][key], value) for key, value in state.items())
    assert_same_bits(dict(ours.named_parameters()), dict(plain.named_parameters()))


def test_state_is_loaded_into_a_wrapped_optimizer():
    model = bert()
    eps = attach_l2l(model)
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=0.1))
    train_once(model, batch_for(model))
    optimizer.step()
    other = eps.wrap(torch.optim.AdamW(model.parameters(), lr=0.2))
    other.load_state_dict(optimizer.state_dict())
    train_once(model, batch_for(model))
    other.step()
    assert other.param_groups[0]["lr"] == 0.1
    assert all(state["step"] == 2 for state in other.state.values())
    assert all(p.grad is None for p in model.parameters())


# ---- what is refused


def test_an_optimizer_with_a_closure_is_refused():
    model = bert()
    with pytest.raises(ValueError) as error:
        served(model).wrap(torch.optim.LBFGS(model.parameters()))
    assert str(error.value) == (
        "the optimizer must step without a closure, which would run the model inside the update (got LBFGS); use one "
        "that takes gradients, such as torch.optim.AdamW"
    )


def test_foreign_parameters_are_refused_with_counts():
    model, other = bert(), nn.Linear(5, 7)
    optimizer = torch.optim.SGD([*other.parameters(), *model.classifier.parameters()], lr=0.1)
    with pytest.raises(ValueError) as error:
        served(model).wrap(optimizer)
    assert str(error.value) == (
        "the optimizer must hold parameters of the model only (got SGD with 2 others of 4, the first of shape [7, 5])"
        "; build it from model.parameters() after the model has its final parameters, and with the model on the host"
    )
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_is_refused(hook):
    model = bert()
    handle = getattr(model.classifier.weight, hook)(lambda tensor: None)
    eps = attach_l2l(model, L2LConfig())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError) as error:
        eps.wrap(optimizer)
    assert str(error.value) == (
        "parameters must carry no gradient hooks, which would never run: gradients are made on copies (got one on "
        "classifier.weight); remove the hook, or use an optimizer that updates in step() and not during backward"
    )
    handle.remove()
    eps.wrap(optimizer)
