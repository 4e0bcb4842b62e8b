"""The update in one pass over memory: torch's bits, whatever the tensors are, and what happens without a compiler."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hf_l2l import Lamb
from hf_l2l.optim import one_pass
from hf_l2l.optim.layer_optimizers import LayerOptimizers, Part, SplitStep
from hf_l2l.optim.one_pass import OnePass
from hf_l2l.optim.rounded_state import Rounding, from_blocks, in_blocks, random_place, random_table
from hf_l2l.runtime.worker import Task, Worker
from tiers import nightly, times

Made = Callable[..., torch.optim.Optimizer]

FUSED: dict[str, Made] = {
    "AdamW": lambda ps, **options: torch.optim.AdamW(ps, **{"weight_decay": 0.1, **options}, fused=True),
    "Adam": lambda ps, **options: torch.optim.Adam(ps, **{"weight_decay": 0.1, **options}, fused=True),
    "SGD": lambda ps, **options: torch.optim.SGD(ps, **{"weight_decay": 0.1, **options}, fused=True),
    "momentum": lambda ps, **options: torch.optim.SGD(
        ps, **{"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, **options}, fused=True
    ),
    "Nesterov": lambda ps, **options: torch.optim.SGD(
        ps, **{"momentum": 0.9, "nesterov": True, **options}, fused=True
    ),
}
SIZES = (255, 256, 257, 2**17 - 1, 2**17 + 9)
"""At the ends of blocks and slices."""
EXTREME = (0.0, -0.0, 1e-45, -1e-40, 1.17549435e-38, 3e38, -3e38, math.inf, -math.inf, 1e-20, 1e19)


def values(size: int, seed: int, *, extreme: bool) -> torch.Tensor:
    """Random numbers; some of them are at the ends of the range, if that is `extreme`."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(size, generator=generator)
    if extreme:
        places = torch.randint(0, size, (size // 3 + 1,), generator=generator)
        found[places] = torch.tensor(EXTREME)[torch.randint(0, len(EXTREME), (len(places),), generator=generator)]
    return found


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal, with NaN in the same places, whatever their bits."""
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, equal_nan=True)


def on_threads(count: int, work: Callable[[], Any]) -> None:
    """Run `work` as a task of a worker with so many threads."""
    worker, task = Worker(count), Task("the test")
    worker.submit(task, work)
    task.wait("it has ended")
    worker.close()


def run_part(part: Part, factors: Any, copies: Any, written: list[set[torch.Tensor]]) -> None:
    written.append(part.run(factors, copies=copies))


@settings(max_examples=times(40, 600))
@given(
    made=st.sampled_from(sorted(FUSED)),
    sizes=st.lists(
        st.integers(1, 80) | st.sampled_from([255, 256, 257, 2**17 - 1, 2**17 + 9]), min_size=1, max_size=4
    ),
    gradient=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    copy=st.sampled_from([None, torch.bfloat16, torch.float16]),
    factor=st.sampled_from([None, 1.0, 0.25, 0.3, 1e-30]),
    lr=st.sampled_from([0.0, 1e-3, 0.7]),
    maximize=st.booleans(),
    extreme=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**20),
)
def test_bits_are_those_of_fused_steps(made, sizes, gradient, copy, factor, lr, maximize, extreme, threads, seed):
    plain, ours = ([nn.Parameter(values(n, seed + i, extreme=extreme)) for i, n in enumerate(sizes)] for _ in "ab")
    options = {"lr": lr, "maximize": maximize}
    expected, optimizer = (
        FUSED[made]([{"params": ps[::2]}, {"params": ps[1::2], "weight_decay": 0.0, "lr": 0.01}][: len(ps)], **options)
        for ps in (plain, ours)
    )
    copies = {} if copy is None else {p: torch.zeros(p.shape, dtype=copy) for p in ours}
    layers = LayerOptimizers(optimizer, OnePass.of(optimizer))
    for step in range(3):
        gradients = [values(n, seed + 100 * step + i, extreme=extreme).to(gradient) for i, n in enumerate(sizes)]
        for p, each in zip(plain, gradients, strict=True):
            p.grad = each.float() if factor is None else each.float() * torch.tensor(factor)
        expected.step()
        part = SplitStep(layers, dict(zip(ours, gradients, strict=True))).part(ours)
        factors = {} if factor is None else dict.fromkeys(ours, torch.tensor(factor))
        written: list[set[torch.Tensor]] = []
        versions = [p._version for p in ours]
        on_threads(threads, partial(run_part, part, factors, copies, written))
        assert written == [set(copies)], "all have taken one pass"
        assert all(now > before for now, before in zip([p._version for p in ours], versions, strict=True))
        for p, q in zip(ours, plain, strict=True):
            assert_same(p, q)
            assert optimizer.state[p].keys() == expected.state[q].keys()
            for key, value in expected.state[q].items():
                assert_same(optimizer.state[p][key], value)
            if p in copies:
                assert_same(copies[p], p.detach().to(copy))


def stepped(name: str, moments: Any, *, threads: int = 1, divided: bool = False) -> list[torch.Tensor]:
    """Masters and moments after three steps of two parameters, each in a part of its own if `divided`."""
    ps = [nn.Parameter(values(n, n, extreme=False)) for n in (300, 2**17 + 70_001)]
    makers: dict[str, Made] = {**FUSED, "LAMB": lambda ps, **options: Lamb(ps, **options)}
    optimizer = makers[name](ps, lr=1e-2)
    layers = LayerOptimizers(optimizer, OnePass.of(optimizer, moments))
    for step in range(3):
        gradients = {p: values(p.numel(), step, extreme=False).bfloat16() for p in ps}
        split = SplitStep(layers, gradients, None if moments == "fp32" else Rounding(3, step, moments))
        for part in [split.part([p]) for p in ps] if divided else [split.part(ps)]:
            on_threads(threads, partial(part.run, {ps[0]: torch.tensor(0.3)}))
    return [p.detach() for p in ps] + [v for p in ps for v in optimizer.state[p].values() if v.dim()]


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("name", ["AdamW", "momentum", "LAMB"])
def test_bits_depend_on_neither_threads_nor_parts_nor_the_compiler(name, moments, monkeypatch):
    expected = stepped(name, moments)
    for other in (stepped(name, moments, threads=3), stepped(name, moments, divided=True)):
        assert all(map(torch.equal, other, expected))
    monkeypatch.setattr(one_pass, "imported_kernel", without_numba)
    monkeypatch.setattr(one_pass, "ENGINES", one_pass.Engines())
    with pytest.warns(UserWarning, match="is not compiled.*install numba") as told:
        assert all(map(torch.equal, stepped(name, moments), expected))
    assert len(told) == 1


@pytest.mark.parametrize("is_compiled", [True, False])
def test_what_is_not_finite_is_so_in_16_bits(is_compiled, monkeypatch):
    """Of whatever bits a NaN is, as those of a GPU."""
    if not is_compiled:
        monkeypatch.setattr(one_pass.ENGINES, "compiles", lambda form, kind: False)
    strange = [0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000]  # the last one is infinite
    parameter = nn.Parameter(torch.zeros(300))
    gradient = torch.ones(300)
    gradient.view(torch.int32)[:4] = torch.tensor(strange, dtype=torch.int32)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    layers = LayerOptimizers(optimizer, OnePass.of(optimizer, "bf16"))
    SplitStep(layers, {parameter: gradient}, Rounding(0, 0, "bf16")).run([parameter])
    moments = [optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")]
    for moment in moments:
        assert moment[:3].view(torch.int16).tolist() == [0x7FC0] * 3 and moment[4:].isfinite().all()
    assert moments[1][3] == math.inf and not moments[0][3].isfinite()


def without_numba() -> Any:
    raise ImportError("No module named 'numba'")


def test_moments_in_16_bits_are_rounded_without_bias():
    """A second moment that changes by less than half of what bfloat16 can show goes on all the same."""
    p = nn.Parameter(torch.zeros(2**16))
    optimizer = torch.optim.AdamW([p], lr=0.0, betas=(0.9, 0.999))
    layers = LayerOptimizers(optimizer, OnePass.of(optimizer, "bf16"))
    for step in range(200):
        SplitStep(layers, {p: torch.ones(2**16)}, Rounding(0, step)).run([p])
    state = optimizer.state[p]
    assert state["exp_avg_sq"].dtype == torch.bfloat16 and len(state["exp_avg_sq"].unique()) > 5
    assert state["exp_avg_sq"].double().mean().item() == pytest.approx(1 - 0.999**200, rel=1e-3)
    assert state["exp_avg"].double().mean().item() == pytest.approx(1.0, rel=1e-3)


def test_random_bits_of_an_element_are_equally_likely_and_differ_from_step_to_step():
    table = torch.from_numpy(random_table().astype("int64"))
    for half in (table & 0xFFFF, table >> 16):
        assert torch.equal(half[: 2**16].sort().values, torch.arange(2**16)) and torch.equal(*half.chunk(2))
    keys = [(n, Rounding(1, n).keys((0, m))) for n in range(100) for m in range(100)]
    places = torch.tensor([random_place(2**16 * n, of_step) for n, of_step in keys])
    assert len(places.unique()) > 9000, "of 65,536"
    assert places.float().mean().item() == pytest.approx(2**15, rel=0.03)
    assert random_place(2**16, (5, 6)) != random_place(2**17, (5, 6))


OWN: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "not fused": lambda ps: torch.optim.AdamW(ps),
    "amsgrad": lambda ps: torch.optim.AdamW(ps, fused=True, amsgrad=True),
    "a rate that is a tensor": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(1e-3), fused=True),
    "a small beta": lambda ps: torch.optim.AdamW(ps, betas=(0.4, 0.9), fused=True),
    "another optimizer": lambda ps: torch.optim.RMSprop(ps),
}


@pytest.mark.parametrize("name", OWN)
def test_other_steps_are_the_optimizers_own(name):
    plain, ours = (nn.Parameter(values(70, 1, extreme=False)) for _ in "ab")
    expected, optimizer = OWN[name]([plain]), OWN[name]([ours])
    layers = LayerOptimizers(optimizer, OnePass.of(optimizer))
    for step in range(3):
        plain.grad = values(70, step, extreme=False)
        expected.step()
        copies = {ours: torch.zeros(70, dtype=torch.bfloat16)}
        assert not SplitStep(layers, {ours: plain.grad.clone()}).part([ours]).run(copies=copies)
    assert torch.equal(plain, ours)


def test_tensors_that_are_not_in_order_take_their_own_step():
    ps = [nn.Parameter(torch.randn(6, 5).t()), nn.Parameter(torch.randn(3, dtype=torch.float64))]
    twins = [nn.Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in ps]
    ours, plain = (torch.optim.AdamW(each, fused=True) for each in (ps, twins))
    gradients = [torch.ones_like(p.detach()) for p in ps]
    for q, gradient in zip(twins, gradients, strict=True):
        q.grad = gradient.clone(memory_format=torch.preserve_format)
    plain.step()
    SplitStep(LayerOptimizers(ours, OnePass.of(ours)), dict(zip(ps, gradients, strict=True))).run(ps)
    assert all(map(torch.equal, ps, twins))


def test_torchs_hooks_for_all_optimizers_see_and_may_change_the_gradients():
    p, seen = nn.Parameter(torch.zeros(20)), []

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        gradient = optimizer.param_groups[0]["params"][0].grad
        seen.append((gradient.dtype, gradient[0].item()))
        gradient.mul_(2.0)

    optimizer = torch.optim.SGD([p], lr=1.0, fused=True)
    handles = [register_optimizer_step_pre_hook(before)]
    handles.append(register_optimizer_step_post_hook(lambda *_: seen.append(p[0].item())))
    layers = LayerOptimizers(optimizer, OnePass.of(optimizer))
    gradient = torch.ones(20, dtype=torch.bfloat16)
    SplitStep(layers, {p: gradient}).part([p]).run({p: torch.tensor(0.25)})
    for handle in handles:
        handle.remove()
    assert seen == [(torch.float32, 0.25), -0.5]
    assert not optimizer.state, "as after a step of SGD without momentum"


# ---- in other processes


PROGRAM = """
import logging, sys, warnings
import torch
from torch import nn
from hf_l2l.optim.layer_optimizers import LayerOptimizers, SplitStep
from hf_l2l.optim.one_pass import OnePass

logging.getLogger("hf_l2l").addHandler(logging.StreamHandler(sys.stdout))
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    ps = [[nn.Parameter(torch.linspace(-1, 1, 1003))] for _ in "ab"]
    ours, plain = (torch.optim.AdamW(each, fused=True) for each in ps)
    layers = LayerOptimizers(ours, OnePass.of(ours))
    for step in range(3):
        ps[1][0].grad = torch.linspace(1, 2, 1003)
        plain.step()
        SplitStep(layers, {ps[0][0]: torch.linspace(1, 2, 1003)}).run(ps[0])
print("equal", torch.equal(ps[0][0], ps[1][0]))
print("numba", "numba" in sys.modules, "omp", torch.get_num_threads())
print("told", [str(each.message) for each in told])
"""


def run_program(before: str = "", **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", before + PROGRAM],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "equal True" in done.stdout, done.stdout
    return done.stdout


def test_other_bits_than_torchs_are_told_and_torch_computes_instead():
    """As with the vectors of a processor that has no fused multiply-add."""
    said = run_program(ATEN_CPU_CAPABILITY="default")
    assert "compiled ones have other bits on this machine" in said and "told []" in said


@nightly
def test_without_numba_there_is_one_warning():
    said = run_program("import sys; sys.modules['numba'] = None\n")
    assert said.count("is not compiled") == 1


@nightly
def test_numbas_cache_may_be_broken_or_have_no_place(tmp_path):
    (tmp_path / "cache").mkdir()
    run_program(NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    files = [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[:100])
    assert "told []" in run_program(NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    assert any(file.stat().st_size > 100 for file in files), "it has been made anew"


@nightly
def test_two_processes_may_compile_at_once(tmp_path):
    said: list[str] = []
    threads = [
        threading.Thread(target=lambda: said.append(run_program(NUMBA_CACHE_DIR=str(tmp_path)))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 2 and all("told []" in each for each in said)


def test_the_package_imports_without_numba_and_does_not_import_it_at_once():
    program = "import sys, hf_l2l, hf_l2l.hf.trainer, hf_l2l.optim.one_pass; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# ---- moments in 8 bits


@settings(max_examples=times(60, 600))
@given(
    count=st.integers(1, 700),
    scale=st.sampled_from([1.0, 1e-8, 1e-38, 1e-44, 1e30, 3e38]),
    spread=st.sampled_from([0.0, 1.0, 12.0]),
    signed=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_what_8_bits_can_show_stays_when_it_is_rounded_again(count, scale, spread, signed, seed):
    """Whatever the random bits are, since a checkpoint has fp32 tensors of it."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator) * torch.exp(spread * torch.randn(count, generator=generator)) * scale
    x = x.nan_to_num()
    x[::7] = 0.0
    x = x if signed else x.abs()
    first = from_blocks(*in_blocks(x, (seed, 1), signed=signed), signed=signed)
    again = from_blocks(*in_blocks(first, (seed, 2), signed=signed), signed=signed)
    assert torch.equal(first, again) and first.isfinite().all()
    large = x.abs() > torch.stack([block.abs().max() for block in x.split(256)]).repeat_interleave(256)[:count] * 2e-4
    normal = large & (x.abs() > 1e-37) & (x.abs() < 3e38)
    torch.testing.assert_close(first[normal], x[normal], rtol=0.126, atol=0.0)
    assert (first[x == 0] == 0).all() and (signed or (first[x != 0] != 0).all())


def test_8_bits_are_unbiased_and_a_block_with_nan_is_nan():
    x = torch.linspace(1.0, 1.99, 256).repeat(400)
    for signed in (False, True):
        found = from_blocks(*in_blocks(x, (5, 6), signed=signed), signed=signed).view(400, 256).double().mean(0)
        torch.testing.assert_close(found, x[:256].double(), rtol=0.01, atol=0.0)
    x[300] = math.nan
    found = from_blocks(*in_blocks(x, (5, 6), signed=True), signed=True)
    assert found[256:512].isnan().all() and not found[:256].isnan().any()
