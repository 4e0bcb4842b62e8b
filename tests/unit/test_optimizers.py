"""The optimizers of a program: replaced, taken in turns, stepped with closures; and those that are refused."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_l2l import EngineFailedError, Lamb, attach_l2l
from hf_l2l.optim.layerwise_check import why_not_layer_local
from models import VOCAB, Toy, batch_for, train_once
from new_tensors import NewTensors
from runs import assert_same_tensors, attach, config_for
from tiers import more, times
from training import tiny_bert


def sgd(parameters: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


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


@pytest.mark.parametrize("mode", ["deferred", *more("serial")])
def test_a_closure_runs_the_model_inside_the_step(mode):
    model, _, optimizer, batch = attach(make=sgd, eps_update=mode)
    train_once(model, batch)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    optimizer.zero_grad()
    for _ in range(2):
        before = weights_of(model)
        assert optimizer.step(lambda: train_once(model, batch))
        assert not torch.equal(model.blocks[0].up.weight, before["blocks.0.up.weight"])


TOO_LATE: dict[str, tuple[Callable[..., Any], str]] = {
    "torch's clipping": (lambda m, *_: nn.utils.clip_grad_norm_(m.parameters(), 1.0), r"eps\.grad_norm\(\)"),
    "gradients that are dropped": (lambda m, *_: m.zero_grad(), r"eps\.grad_norm\(\)"),
    "a gradient that is read": (lambda m, *_: m.head.weight.grad, r"eps\.grad_norm\(\)"),
    "a backward that was not announced": (lambda m, e, o, b: train_once(m, b), r"eps\.accumulate\(\)"),
    "a new optimizer": (lambda m, eps, *_: eps.wrap(sgd(m.parameters(), 1e-9)).step(), r"eps\.wrap"),
}


def test_eager_updates_refuse_what_comes_too_late():
    for what, (use, says) in TOO_LATE.items():
        model, eps, optimizer, batch = attach(eps_update="eager")
        train_once(model, batch)
        with pytest.raises(RuntimeError, match=says):
            use(model, eps, optimizer, batch)
        if what == "a gradient that is read":
            assert eps.grad_norm() > 0
            optimizer.step()
            assert model.head.weight.grad is None


def test_a_step_of_eager_updates_is_refused_that_would_not_be_what_was_done():
    """With hyper-parameters that have changed, with a hook, or with gradients that came around the EPS."""
    for change, says in (
        (lambda m, optimizer: optimizer.param_groups[0].update(lr=1.0), "hyper-parameters"),
        (lambda m, optimizer: optimizer.register_step_pre_hook(lambda *args: None), "hook"),
        (lambda m, optimizer: m.blocks[0].norm.weight.sum().backward(), r"has updated blocks\.0\.norm\.weight"),
    ):
        model, _, optimizer, batch = attach(eps_update="eager")
        train_once(model, batch)
        change(model, optimizer)
        with pytest.raises(RuntimeError, match=says):
            optimizer.step()
    with pytest.raises(EngineFailedError):
        model(**batch)
    model = Toy()
    attach_l2l(model, config_for(model, eps_update="eager"))
    with pytest.raises(RuntimeError, match=r"eps\.wrap"):
        train_once(model, batch)


def test_an_optimizer_that_has_parameters_of_another_model_too_is_refused():
    model, other = Toy(), nn.Linear(5, 7)
    foreign = sgd([*other.parameters(), *model.head.parameters()])
    with pytest.raises(ValueError, match=r"2 others of 4, the first of shape \[7, 5\]"):
        attach_l2l(model, config_for(model)).wrap(foreign)
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


# ---- LAMB is algorithm 2 of arXiv:1904.00962, and an optimizer like torch's own


def steps(p: torch.nn.Parameter, optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> None:
    for gradient in gradients:
        p.grad = gradient.clone()
        optimizer.step()
        assert torch.equal(p.grad, gradient)


@settings(deadline=None, max_examples=times(40, 200))
@given(
    shape=st.lists(st.integers(1, 5), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    lr=st.sampled_from([1e-3, 0.1, torch.tensor(0.05)]),
    betas=st.sampled_from([(0.9, 0.999), (0.0, 0.5), (0.5, 0.0)]),
    eps=st.sampled_from([1e-6, 0.1]),
    decay=st.sampled_from([0.0, 0.01, 1.0]),
    zero=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_weights_are_those_of_the_paper(shape, dtype, lr, betas, eps, decay, zero, seed):
    generator = torch.Generator().manual_seed(seed)
    p = torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype) * (0.0 if zero else 3.0))
    gradients = [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(6)]
    w, m, v = p.detach().double(), torch.zeros(shape).double(), torch.zeros(shape).double()
    for t, g in enumerate((gradient.double() for gradient in gradients), start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        update = (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps) + decay * w
        phi, norm = (w**2).sum().sqrt(), (update**2).sum().sqrt()
        w = w - float(lr) * (phi / norm if phi > 0 and norm > 0 else 1.0) * update
    steps(p, Lamb([p], lr=lr, betas=betas, eps=eps, weight_decay=decay), gradients)
    error = (p.detach().double() - w).norm() / w.norm()
    assert error <= (1e-5 if dtype == torch.float32 else 1e-12)


def test_weights_are_those_of_timm():
    """Without the clipping that is a part of it, and with ratios for all parameters, as the paper has them. Of its
    module, which needs torch only; the package itself asks for torchvision when it is imported."""
    found = importlib.util.find_spec("timm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs timm")
    package: Any = types.ModuleType("timm_optim")
    package.__path__ = [str(Path(found.submodule_search_locations[0]) / "optim")]
    with mock.patch.dict(sys.modules, {"timm_optim": package}):
        theirs_of = importlib.import_module("timm_optim.lamb").Lamb
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((7, 5), (5,), (3, 1, 2))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    same: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 1.0}
    their_lamb = theirs_of(theirs, **same, max_grad_norm=None, always_adapt=True, foreach=True)
    optimizers = (Lamb(ours, **same), their_lamb)
    for _ in range(20):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=0)
    assert why_not_layer_local(their_lamb) == "its step changes its groups"


def test_norms_of_16_bit_weights_are_taken_in_float32():
    p = torch.nn.Parameter(torch.full((2**20,), 100.0, dtype=torch.float16))  # of a norm too large for 16 bits
    steps(p, Lamb([p], lr=0.5, weight_decay=0.0, eps=1e-4), [torch.ones(2**20, dtype=torch.float16)])
    assert p.dtype == torch.float16 and (p.detach() - 50).abs().max() <= 0.1


def test_the_state_is_like_that_of_torchs_adam():
    p = torch.nn.Parameter(torch.randn(3, 2))
    states = []
    for optimizer in (Lamb([p], lr=0.1), torch.optim.Adam([p])):
        steps(p, optimizer, [torch.ones(3, 2)])
        [state] = optimizer.state_dict()["state"].values()
        states.append([(name, value.shape, value.dtype) for name, value in state.items()])
    assert states[0] == states[1]


def test_a_closure_is_called_with_gradients():
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = Lamb([p], lr=0.5, weight_decay=0.0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        p.sum().backward()
        return p.sum()

    assert optimizer.step(closure).item() == 2
    torch.testing.assert_close(p.detach(), torch.full((2,), 0.5))
    assert optimizer.step() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_temporary_tensor_at_a_time(dtype):
    """On the host, in fp32, it is a chunk."""
    p = torch.nn.Parameter(torch.ones(2**21, dtype=dtype))
    p.grad = torch.ones_like(p)
    optimizer = Lamb([p], lr=0.1, weight_decay=0.0)
    optimizer.step()
    with NewTensors() as new:
        optimizer.step()
    assert sum(size == 2**21 for size in new.sizes) == (dtype != torch.float32)


def test_what_is_out_of_range_is_refused():
    for options in ({"lr": math.nan}, {"eps": -1e-8}, {"weight_decay": math.inf}, {"betas": (0.9,)}):
        [name], p = options, torch.nn.Parameter(torch.ones(2))
        with pytest.raises(ValueError, match=name):
            Lamb([torch.nn.Parameter(torch.ones(2))]).add_param_group({"params": [p], **options})


def test_gradients_that_are_not_dense_and_real_are_refused():
    for gradient in (torch.ones(2, 2).to_sparse(1), torch.ones(2, 2, dtype=torch.complex64)):
        p = torch.nn.Parameter(torch.ones(2, 2, dtype=gradient.dtype))
        p.grad = gradient
        with pytest.raises(RuntimeError, match="dense, real"):
            Lamb([p]).step()
