"""The optimizers of a program: replaced, taken in turns, stepped with closures; and those that are refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l import EngineFailedError, attach_l2l
from models import VOCAB, Toy, batch_for, train_once
from runs import assert_same_tensors, attach, config_for
from tiers import more
from training import tiny_bert


def sgd(parameters: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# ---- several optimizers


def test_a_resized_model_trains_with_a_new_optimizer():
    """Although the old one is still alive."""
    model, eps, old, _ = attach(tiny_bert(layers=2))
    batch = batch_for(model)
    model.resize_token_embeddings(VOCAB + 3)
    with pytest.raises(ValueError, match="make a new optimizer"):
        train_once(model, batch)
    new = eps.wrap(sgd(model.parameters()))
    train_once(model, batch)
    new.step()
    assert eps.updates.optimizers == [new] and not old.state


def test_eager_updates_are_those_of_the_newest_optimizer():
    """Which has fewer parameters than the old one."""
    model, eps, old, batch = attach(Toy(dropout=0.0), lambda ps: sgd(ps, 10.0), eps_update="eager")
    reference = Toy(dropout=0.0)
    attach_l2l(reference, config_for(reference, ubatch_size=3, eps_update="serial"))
    for each in (model, reference):
        each.blocks[0].requires_grad_(False)
    new = eps.wrap(sgd([p for p in model.parameters() if p.requires_grad]))
    plain = sgd([p for p in reference.parameters() if p.requires_grad])
    for each, optimizer in ((model, new), (reference, plain)):
        train_once(each, batch)
        optimizer.step()
    assert_same_tensors(weights_of(model), weights_of(reference))
    train_once(model, batch)
    with pytest.raises(RuntimeError, match=r"eps\.wrap"):
        old.step()


def test_an_optimizer_of_other_masters_stays_though_its_own_are_frozen():
    model = Toy(tied=False)
    eps = attach_l2l(model, config_for(model))
    model.blocks.requires_grad_(False)
    parts = (model.blocks, nn.ModuleList([model.embed, model.head]))
    optimizers = [eps.wrap(sgd(part.parameters())) for part in parts]
    model.blocks.requires_grad_(True)
    assert eps.updates.optimizers == optimizers
    before = weights_of(model)
    train_once(model, batch_for(model, masked=False))
    for optimizer in optimizers:
        optimizer.step()
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("mode", ["deferred", *more("serial")])
def test_optimizers_of_the_same_masters_may_take_turns(mode):
    found = []
    for plain in (True, False):
        model = Toy(dropout=0.0)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=lr) for lr in (1e-2, 1e-3)]
        if not plain:
            eps = attach_l2l(model, config_for(model, eps_update=mode, nonfinite="skip"))
            for optimizer in optimizers:
                eps.wrap(optimizer)
        for turn in range(4):
            train_once(model, batch_for(model, masked=False, seed=turn))
            optimizers[turn % 2].step()
            assert plain or eps.updates.optimizers == [optimizers[turn % 2]]
            model.zero_grad()
        found.append(weights_of(model))
    assert_same_tensors(*found)


# ---- steps as a whole


class Whole(torch.optim.SGD):
    """Divides by the norm of all gradients: it cannot be split."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            p.sub_(p.grad / norm, alpha=0.1)


def test_an_optimizer_that_cannot_be_split_steps_as_a_whole():
    found = []
    for mode in ("serial", "deferred"):
        model = Toy()
        eps = attach_l2l(model, config_for(model, eps_update=mode))
        with pytest.warns(UserWarning, match="Whole cannot update one layer") if mode == "deferred" else nullcontext():
            optimizer = eps.wrap(Whole(model.parameters(), lr=0.1))
        model.eval()
        for _ in range(2):
            model(**batch_for(model, masked=False)).loss.backward()
            optimizer.step()
        found.append(weights_of(model))
    assert_same_tensors(*found)
    for options in ({"eps_update": "eager"}, {"grad_dtype": "16bit"}, {"moment_dtype": "bf16"}):
        model = Toy()
        eps = attach_l2l(model, config_for(model, **options))
        with pytest.raises(ValueError, match="Whole cannot update one layer"):
            eps.wrap(Whole(model.parameters(), lr=0.1))


@pytest.mark.parametrize("mode", ["deferred", *more("serial")])
def test_a_closure_runs_the_model_inside_the_step(mode):
    model, _, optimizer, batch = attach(make=sgd, eps_update=mode)

    def broken() -> torch.Tensor:
        raise KeyError("no loss")

    train_once(model, batch)
    with pytest.raises(KeyError):
        optimizer.step(broken)
    optimizer.zero_grad()
    for _ in range(2):
        before = weights_of(model)
        assert optimizer.step(lambda: train_once(model, batch))
        assert not torch.equal(model.blocks[0].up.weight, before["blocks.0.up.weight"])


def test_a_closure_is_refused_where_gradients_or_state_have_16_bits():
    for option in ({"grad_dtype": "16bit"}, {"moment_dtype": "bf16"}):
        model, _, optimizer, batch = attach(**option)
        train_once(model, batch)
        with pytest.raises(ValueError, match="takes no closure"):
            optimizer.step(lambda: torch.tensor(0.0))


# ---- what eager updates refuse


def test_eager_updates_refuse_what_comes_too_late():
    def begun() -> Any:
        model, eps, optimizer, batch = attach(eps_update="eager")
        train_once(model, batch)
        return model, eps, optimizer, batch

    model, eps, optimizer, batch = begun()
    for read in (
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: model.zero_grad(),
        lambda: model.head.weight.grad,
    ):
        with pytest.raises(RuntimeError, match=r"eps\.grad_norm\(\)"):
            read()
    with pytest.raises(ValueError, match="deferred"):
        eps.clip_grad_norm_(1.0)
    assert eps.grad_norm() > 0
    optimizer.step()
    assert model.head.weight.grad is None

    model, eps, optimizer, batch = begun()
    with pytest.raises(RuntimeError, match=r"eps\.accumulate\(\)"):
        train_once(model, batch)  # a second backward that was not announced

    model, eps, optimizer, batch = begun()
    optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(RuntimeError, match="hyper-parameters"):
        optimizer.step()

    model, eps, optimizer, batch = begun()
    new = eps.wrap(sgd(model.parameters(), 1e-9))
    with pytest.raises(RuntimeError, match=r"eps\.wrap"):
        new.step()

    model, eps, optimizer, batch = attach(eps_update="eager")
    optimizer.register_step_pre_hook(lambda *args: None)
    train_once(model, batch)
    with pytest.raises(RuntimeError, match="hook"):
        optimizer.step()

    model, eps, optimizer, batch = begun()
    next(model.blocks[0].parameters()).sum().backward()  # around the EPS
    with pytest.raises(RuntimeError, match=r"has updated blocks\.0\.norm\.weight"):
        optimizer.step()
    with pytest.raises(EngineFailedError):
        model(**batch)

    model = Toy()
    attach_l2l(model, config_for(model, eps_update="eager"))
    with pytest.raises(RuntimeError, match=r"eps\.wrap"):
        train_once(model, batch)


# ---- what is refused in all modes


def test_optimizers_with_closures_and_of_other_parameters_are_refused():
    model, other = Toy(), nn.Linear(5, 7)
    eps = attach_l2l(model, config_for(model))
    with pytest.raises(ValueError, match="LBFGS"):
        eps.wrap(torch.optim.LBFGS(model.parameters()))
    foreign = sgd([*other.parameters(), *model.head.parameters()])
    with pytest.raises(ValueError, match=r"2 others of 4, the first of shape \[7, 5\]"):
        eps.wrap(foreign)
    assert not foreign._optimizer_step_post_hooks


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_is_refused(hook):
    """As LOMO has it, and optimizers that step in backward: it would never run."""
    model = Toy()
    batch = batch_for(model, masked=False)
    handle = getattr(model.head.bias, hook)(lambda *_: None)
    eps = attach_l2l(model, config_for(model))
    for use in (lambda: model(**batch), lambda: eps.wrap(sgd(model.parameters()))):
        with pytest.raises(ValueError, match=r"head\.bias"):
            use()
    handle.remove()
    optimizer = eps.wrap(sgd(model.parameters()))
    getattr(model.head.bias, hook)(lambda *_: None)
    with pytest.raises(ValueError, match=r"head\.bias"):
        model(**batch)
    assert optimizer.param_groups  # an EPS keeps no optimizer alive


def test_parameters_that_changed_shape_are_refused():
    model, eps, optimizer, batch = attach()
    was = model.head.bias.detach().clone()
    train_once(model, batch)
    model.head.bias.data = torch.zeros(5)
    with pytest.raises(ValueError, match=r"must keep its shape.*head\.bias"):
        optimizer.step()
    model.head.bias.data = was
    optimizer.step()
    eps.synchronize()
    with torch.no_grad():
        model.head.bias.set_(torch.zeros(5))
    with pytest.raises(ValueError, match=r"must keep its shape.*head\.bias"):
        model(**batch)
    del optimizer
    model.head.bias = nn.Parameter(was)
    model(**batch)  # with no optimizer that would be wrong
