"""Moments in 16 bits: rounding that is right on average, the same bits in every mode, and in checkpoints."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bf16_moments import OPTIMIZERS, trained
from cmp_cases import batch, made
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.optim.bf16_state import GROUP_KEY, Rounding, stochastically_rounded, widened

MODES = ("serial", "deferred", "eager")


def neighbours(value: float) -> tuple[float, float]:
    """The two numbers of bfloat16 that `value`, which is none itself, lies between."""
    down = (torch.tensor(value).view(torch.int32) & -(2**16)).view(torch.float32)
    up = (down.view(torch.int32) + 2**16).view(torch.float32)
    return sorted((down.item(), up.item()))


@pytest.mark.parametrize("value", [1.001, -0.3333, 7.7e-12, 3.0e-39, 12345.678])
def test_rounding_is_unbiased_over_ten_thousand_draws(value):
    exact = torch.tensor(value).item()
    below, above = neighbours(exact)
    rounded = stochastically_rounded(torch.full((10_000,), exact), seed=3).double()
    assert set(rounded.tolist()) == {below, above}
    share = (exact - below) / (above - below)
    deviation = (share * (1 - share) / 10_000) ** 0.5
    assert abs((rounded == above).double().mean().item() - share) < 4 * deviation


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=9), st.integers(0, 2**64 - 1))
def test_every_number_becomes_one_of_its_neighbours_or_stays(values, seed):
    exact = torch.tensor(values, dtype=torch.float32)
    rounded = stochastically_rounded(exact.clone(), seed)
    for value, found in zip(exact.tolist(), rounded.float().tolist(), strict=True):
        if torch.tensor(value).bfloat16().item() == value:
            assert found == value
        else:
            assert found in neighbours(value)


def test_what_is_not_finite_stays_so():
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000, 0x7F800001], dtype=torch.int32)
    for seed in range(8):
        rounded = stochastically_rounded(bits.clone().view(torch.float32), seed)
        assert rounded[:3].isnan().all() and not rounded.isfinite().any()


def test_the_seed_alone_decides_and_strides_are_kept():
    values = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    first = stochastically_rounded(values.clone(), 7)
    torch.manual_seed(2)
    assert torch.equal(stochastically_rounded(values.clone(), 7), first)
    assert not torch.equal(stochastically_rounded(values.clone(), 8), first)
    assert stochastically_rounded(values.t().clone(memory_format=torch.preserve_format), 7).stride() == (1, 5)


def by_hand(name: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The optimizer steps as a whole, in fp32; what it keeps is rounded between steps."""
    model = made()
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(steps):
        model(**batch(step)).loss.backward()
        for p in model.parameters():
            if p in optimizer.state:
                optimizer.state[p].update(widened(optimizer.state[p]))
        optimizer.step()
        optimizer.zero_grad()
        for index, p in enumerate(model.parameters()):
            optimizer.state[p].update(Rounding(11, step).narrowed(optimizer.state[p], (0, index)))
    return model, optimizer


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES)
def test_bits_are_those_of_a_whole_step_in_fp32_that_is_rounded(mode, name):
    expected, reference = by_hand(name, 4)
    model, optimizer = trained(mode, name)
    torch.testing.assert_close(dict(model.named_parameters()), dict(expected.named_parameters()), rtol=0, atol=0)
    states = optimizer.state_dict()["state"]
    torch.testing.assert_close(states, reference.state_dict()["state"], rtol=0, atol=0)
    kept = [t for state in states.values() for t in state.values() if torch.is_tensor(t) and t.dim()]
    assert {t.dtype for t in kept} == {torch.bfloat16}


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_goes_on_bit_for_bit(mode):
    whole, _ = trained(mode, steps=4)
    half, optimizer = trained(mode, steps=2)
    file = io.BytesIO()
    torch.save({"model": half.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model = made()
    torch.manual_seed(99)  # the seed of the rounding is in the checkpoint
    model.load_state_dict(saved["model"])
    config = L2LConfig(device="cpu", eps_update=mode, layer_classes=("Block",), moment_dtype="bf16")
    eps = attach_l2l(model, config)
    optimizer = eps.wrap(OPTIMIZERS["adamw"](model.parameters()))
    optimizer.load_state_dict(saved["optimizer"])
    assert optimizer.param_groups[0][GROUP_KEY] == (11, 2)
    assert {s["exp_avg"].dtype for s in optimizer.state.values()} == {torch.bfloat16}
    for step in (2, 3):
        model(**batch(step)).loss.backward()
        optimizer.step()
    eps.synchronize()
    torch.testing.assert_close(dict(model.named_parameters()), dict(whole.named_parameters()), rtol=0, atol=0)


def test_loading_takes_no_fp32_copy_and_leaves_other_optimizers_alone():
    _, optimizer = trained("serial", steps=1)
    saved = optimizer.state_dict()
    plain = OPTIMIZERS["adamw"](made().parameters())
    plain.load_state_dict(copy.deepcopy(saved))  # torch's own way: like the parameters
    assert {s["exp_avg"].dtype for s in plain.state.values()} == {torch.float32}
    wide = copy.deepcopy(plain.state_dict())
    optimizer.load_state_dict(wide)  # one of an fp32 run is taken as it is, and rounded by the next step
    assert {s["exp_avg"].dtype for s in optimizer.state.values()} == {torch.float32}


def test_a_hook_that_comes_later_sees_fp32_gradients_and_the_bits_are_the_same():
    expected, _ = trained("serial", steps=3)
    model = made()
    torch.manual_seed(11)
    config = L2LConfig(device="cpu", layer_classes=("Block",), moment_dtype="bf16", eps_update="deferred")
    eps = attach_l2l(model, config)
    optimizer = eps.wrap(OPTIMIZERS["adamw"](model.parameters()))
    seen = []
    for step in range(3):
        if step == 1:
            optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["params"][0].grad.dtype))
        model(**batch(step)).loss.backward()
        optimizer.step()
    eps.synchronize()
    assert seen == [torch.float32, torch.float32]
    torch.testing.assert_close(dict(model.named_parameters()), dict(expected.named_parameters()), rtol=0, atol=0)


class WholeOnly(torch.optim.AdamW):
    """Its learning rate depends on all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if gradients:
            self.param_groups[0]["lr"] = 1e-3 / (1 + sum(g.abs().sum().item() for g in gradients))
        super().step()


@pytest.mark.parametrize("option", [{"grad_dtype": "16bit"}, {"moment_dtype": "bf16"}])
def test_an_optimizer_that_cannot_go_layer_by_layer_is_refused(option):
    model = made()
    eps = attach_l2l(model, L2LConfig(device="cpu", layer_classes=("Block",), **option))
    with pytest.raises(ValueError, match="a layer at a time"):
        eps.wrap(WholeOnly(model.parameters()))


@pytest.mark.parametrize("option", [{"grad_dtype": "16bit"}, {"moment_dtype": "bf16"}])
def test_a_closure_is_refused(option):
    model = made()
    eps = attach_l2l(model, L2LConfig(device="cpu", layer_classes=("Block",), **option))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
    model(**batch(0)).loss.backward()
    with pytest.raises(ValueError, match="takes no closure"):
        optimizer.step(lambda: torch.tensor(0.0))
