"""Moments in 16 bits: rounding that is right on average, the same bits in every mode, and in checkpoints."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from devices import DEVICE
from hf_l2l import attach_l2l
from hf_l2l.optim.bf16_state import GROUP_KEY, Rounding, stochastically_rounded, widened
from models import Toy, batch_for, train_once
from runs import OPTIMIZERS, Run, assert_same_run, attach, config_for, run_of, seed_all
from tiers import combinations, cpu_suffices

MODES = ("serial", "deferred", "eager")
SEED = 11
"""The one that `attach` sets."""


# ---- rounding


@cpu_suffices
def test_rounding_is_unbiased_over_ten_thousand_draws():
    """To the two numbers of bfloat16 around a value; one of bfloat16 stays."""
    for value in (1.001, -0.3333, 7.7e-12, 3.0e-39, 12345.678):
        exact = torch.tensor(value)
        down = (exact.view(torch.int32) & -(2**16)).view(torch.float32)
        up = (down.view(torch.int32) + 2**16).view(torch.float32)
        rounded = stochastically_rounded(exact.repeat(10_000), seed=3).double()
        assert set(rounded.tolist()) == {down.item(), up.item()}
        share = ((exact.double() - down.double()) / (up.double() - down.double())).item()
        deviation = (share * (1 - share) / 10_000) ** 0.5
        assert abs((rounded == up).double().mean().item() - share) < 4 * deviation
    assert set(stochastically_rounded(torch.full((100,), -1.5), seed=3).tolist()) == {-1.5}


@cpu_suffices
def test_the_seed_alone_decides_and_what_is_not_finite_stays_so():
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000, 0x7F800001], dtype=torch.int32)
    for seed in range(8):
        rounded = stochastically_rounded(bits.clone().view(torch.float32), seed)
        assert rounded[:3].isnan().all() and not rounded.isfinite().any()
    values = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    first = stochastically_rounded(values.clone(), 7)
    torch.manual_seed(2)
    assert torch.equal(stochastically_rounded(values.clone(), 7), first)
    assert not torch.equal(stochastically_rounded(values.clone(), 8), first)
    transposed = values.t().clone(memory_format=torch.preserve_format)
    assert stochastically_rounded(transposed.clone(memory_format=torch.preserve_format), 7).stride() == (1, 5)
    assert torch.equal(stochastically_rounded(values[:, ::2], 7).float() - values[:, ::2] < 1, torch.ones(6, 3) > 0)


# ---- training


def trained(mode: str, name: str = "AdamW", steps: int = 3) -> Run:
    model, eps, optimizer, _ = attach(
        Toy(2, dropout=0.0),
        lambda ps: OPTIMIZERS[name](list(ps)),
        eps_update=mode,
        moment_dtype="bf16",
        ubatch_size=None,
    )
    for step in range(steps):
        train_once(model, batch_for(model, masked=False, seed=step))
        optimizer.step()
    eps.synchronize()
    return run_of(model, optimizer, [])


def by_hand(name: str, steps: int = 3) -> Run:
    """The optimizer steps as a whole, in fp32; what it keeps is rounded between steps."""
    model = Toy(2, dropout=0.0)
    eps = attach_l2l(model, config_for(model, device=DEVICE, eps_update="serial"))
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    eps.wrap(optimizer)
    seed_all()
    for step in range(steps):
        train_once(model, batch_for(model, masked=False, seed=step))
        for p in model.parameters():
            if p in optimizer.state:
                optimizer.state[p].update(widened(optimizer.state[p]))
        optimizer.step()
        for index, p in enumerate(model.parameters()):
            optimizer.state[p].update(Rounding(SEED, step).narrowed(optimizer.state[p], (0, index)))
    return run_of(model, optimizer, [])


@cpu_suffices
@pytest.mark.parametrize(("mode", "name"), combinations(MODES, OPTIMIZERS, together=1))
def test_bits_are_those_of_a_whole_step_in_fp32_that_is_rounded(mode, name):
    found, expected = trained(mode, name), by_hand(name)
    assert found.state["param_groups"][0].pop(GROUP_KEY) == (SEED, 3)
    assert_same_run(found, expected)
    kept = [t for state in found.state["state"].values() for t in state.values() if torch.is_tensor(t) and t.dim()]
    assert {t.dtype for t in kept} == {torch.bfloat16}


@cpu_suffices
@pytest.mark.parametrize("mode", ["deferred", "eager"])
def test_a_checkpoint_goes_on_bit_for_bit(mode):
    whole, half = trained(mode), trained(mode, steps=2)
    file = io.BytesIO()
    torch.save(half._asdict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model, eps, optimizer, _ = attach(Toy(2, dropout=0.0), eps_update=mode, moment_dtype="bf16", ubatch_size=None)
    torch.manual_seed(99)  # the seed of the rounding is in the checkpoint
    model.load_state_dict(saved["weights"])
    optimizer.load_state_dict(saved["state"])
    assert optimizer.param_groups[0][GROUP_KEY] == (SEED, 2)
    assert {s["exp_avg"].dtype for s in optimizer.state.values()} == {torch.bfloat16}
    train_once(model, batch_for(model, masked=False, seed=2))
    optimizer.step()
    eps.synchronize()
    assert_same_run(run_of(model, optimizer, []), whole)


def test_loading_takes_no_fp32_copy_and_leaves_other_optimizers_alone():
    model, _, optimizer, batch = attach(eps_update="serial", moment_dtype="bf16")
    train_once(model, batch)
    optimizer.step()
    plain = torch.optim.AdamW(Toy().parameters())
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch's own way: like the parameters
    assert {s["exp_avg"].dtype for s in plain.state.values()} == {torch.float32}
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))  # one of an fp32 run is rounded by the next step
    assert {s["exp_avg"].dtype for s in optimizer.state.values()} == {torch.float32}


def test_a_hook_that_comes_later_sees_fp32_gradients_and_the_bits_are_the_same():
    expected = trained("serial")
    model, _, optimizer, _ = attach(Toy(2, dropout=0.0), eps_update="deferred", moment_dtype="bf16", ubatch_size=None)
    seen = []
    for step in range(3):
        if step == 1:
            optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["params"][0].grad.dtype))
        train_once(model, batch_for(model, masked=False, seed=step))
        optimizer.step()
    assert seen == [torch.float32, torch.float32]
    assert_same_run(run_of(model, optimizer, []), expected)


@cpu_suffices
def test_16_bit_gradients_have_the_same_bits_in_all_modes():
    runs = []
    for mode in MODES:
        model, eps, optimizer, batch = attach(Toy(2, dropout=0.0), eps_update=mode, grad_dtype="16bit")
        for _ in range(2):
            train_once(model, batch)
            assert mode == "eager" or {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
            optimizer.step()
        eps.synchronize()
        runs.append(run_of(model, optimizer, []))
    for found in runs[1:]:
        assert_same_run(found, runs[0])
