"""LAMB is algorithm 2 of arXiv:1904.00962, and an optimizer like torch's own."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hf_l2l import Lamb
from hf_l2l.optim.layerwise_check import why_not_layer_local
from tiers import times


def by_the_paper(
    w: torch.Tensor,
    gradients: list[torch.Tensor],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> torch.Tensor:
    """The formulas of algorithm 2, in float64."""
    w, m, v = w.double(), torch.zeros_like(w.double()), torch.zeros_like(w.double())
    for t, g in enumerate((gradient.double() for gradient in gradients), start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        r = (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
        update = r + decay * w
        phi, norm = (w**2).sum().sqrt(), (update**2).sum().sqrt()
        w = w - lr * (phi / norm if phi > 0 and norm > 0 else 1.0) * update
    return w


def steps(p: torch.nn.Parameter, optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> None:
    for gradient in gradients:
        p.grad = gradient.clone()
        optimizer.step()
        assert torch.equal(p.grad, gradient)


# ---- the algorithm


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
    expected = by_the_paper(p.detach(), gradients, float(lr), betas, eps, decay)
    steps(p, Lamb([p], lr=lr, betas=betas, eps=eps, weight_decay=decay), gradients)
    error = (p.detach().double() - expected).norm() / expected.norm()
    assert error <= (1e-5 if dtype == torch.float32 else 1e-12)


def timm_lamb() -> Any:
    """The class, of a module that needs torch only; the package itself asks for torchvision when it is imported."""
    found = importlib.util.find_spec("timm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs timm")
    package: Any = types.ModuleType("timm_optim")
    package.__path__ = [str(Path(found.submodule_search_locations[0]) / "optim")]
    with mock.patch.dict(sys.modules, {"timm_optim": package}):
        return importlib.import_module("timm_optim.lamb").Lamb


def test_weights_are_those_of_timm():
    """Without the clipping that is a part of it, and with ratios for all parameters, as the paper has them."""
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((7, 5), (5,), (3, 1, 2))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    same: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 1.0}
    their_lamb = timm_lamb()(theirs, **same, max_grad_norm=None, always_adapt=True, foreach=True)
    optimizers = (Lamb(ours, **same), their_lamb)
    for _ in range(20):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-11, atol=0)
    assert why_not_layer_local(their_lamb) == "its step changes its groups"


def test_norms_of_16_bit_weights_are_taken_in_float32():
    p = torch.nn.Parameter(torch.full((2**20,), 100.0, dtype=torch.float16))  # of a norm too large for 16 bits
    steps(p, Lamb([p], lr=0.5, weight_decay=0.0, eps=1e-4), [torch.ones(2**20, dtype=torch.float16)])
    assert p.dtype == torch.float16 and (p.detach() - 50).abs().max() <= 0.1


# ---- an optimizer like torch's own


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
        loss = p.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2
    torch.testing.assert_close(p.detach(), torch.full((2,), 0.5))
    assert optimizer.step() is None


def test_one_temporary_tensor_at_a_time():
    class New(TorchDispatchMode):
        """Counts the tensors of a size that are not there yet when an operation begins."""

        size, count = 2**10, 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            given = {t.data_ptr() for t in (*args, *(kwargs or {}).values()) if isinstance(t, torch.Tensor)}
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.numel() == self.size:
                self.count += made.data_ptr() not in given
            return made

    p = torch.nn.Parameter(torch.ones(New.size))
    p.grad = torch.ones_like(p)
    optimizer = Lamb([p], lr=0.1)
    optimizer.step()
    with New() as new:
        optimizer.step()
    assert new.count == 1


def test_what_is_out_of_range_is_refused():
    for options in (
        {"lr": -1.0},
        {"lr": math.nan},
        {"lr": torch.ones(2)},
        {"eps": -1e-8},
        {"weight_decay": math.inf},
        {"betas": (0.9, 1.0)},
        {"betas": (-0.1, 0.9)},
        {"betas": (0.9,)},
    ):
        [name], p = options, torch.nn.Parameter(torch.ones(2))
        with pytest.raises(ValueError, match=name):
            Lamb([p], **options)
        with pytest.raises(ValueError, match=name):
            Lamb([torch.nn.Parameter(torch.ones(2))]).add_param_group({"params": [p], **options})


def test_gradients_that_are_not_dense_and_real_are_refused():
    for gradient in (torch.ones(2, 2).to_sparse(1), torch.ones(2, 2, dtype=torch.complex64)):
        p = torch.nn.Parameter(torch.ones(2, 2, dtype=gradient.dtype))
        p.grad = gradient
        with pytest.raises(RuntimeError, match="dense, real"):
            Lamb([p]).step()
