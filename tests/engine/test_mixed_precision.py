"""Cross mixed precision: 16 bits on the device, fp32 in the EPS, against plain torch that does the same by hand; and
moments in 16 bits, whose rounding is right on average, with the same bits in every mode, and in checkpoints."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.func import functional_call

from devices import DEVICE
from hf_l2l import EagerParamServer, L2LConfig, attach_l2l, copy_as, detach_l2l
from hf_l2l.model.precision import let_heads_return_fp32
from hf_l2l.optim.rounded_state import GROUP_KEY, Rounding, stochastically_rounded, widened
from models import FAMILIES, ROWS, Block, Toy, batch_for, train_once
from runs import OPTIMIZERS, Run, assert_same_run, assert_same_tensors, attach, config_for, run_of, seed_all
from tiers import combinations, cpu_suffices, more, nightly, times

MODES = ("serial", "deferred", "eager")
CASES = [(cmp, mode) for cmp in ("bf16", "fp16") for mode in MODES if (cmp, mode) != ("fp16", "eager")]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WIDTH, LAYERS = 8, 3
TOO_LARGE = 2.0**21
"""A scale of fp16 with which the first steps are skipped."""
SEED = 11
"""The one that `attach` sets."""


class Classifying(Toy):
    """A `Toy` with layers of some kind, whose head is known for one: its logits are to be fp32."""

    def __init__(self, kind: type[Block] = Block) -> None:
        super().__init__(LAYERS, WIDTH, tied=False, dropout=0.0)
        if kind is not Block:
            self.blocks = nn.ModuleList(kind(WIDTH, 0.0, buffers=False) for _ in range(LAYERS))

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def under(model: nn.Module, **options: Any) -> tuple[EagerParamServer, torch.optim.Optimizer]:
    """The EPS of a model, and an optimizer."""
    eps = attach_l2l(model, config_for(model, device=DEVICE, **options))
    return eps, eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))


def batch(step: int) -> dict[str, torch.Tensor]:
    return batch_for(Classifying(), masked=False, seed=step)


def sent(step: int) -> dict[str, torch.Tensor]:
    """The batch on the device."""
    return {name: each.to(DEVICE) for name, each in batch(step).items()}


def by_hand(
    dtype: torch.dtype, rows: int, max_norm: float, steps: int, grad_dtype: str = "fp32"
) -> tuple[list[float], nn.Module]:
    """Fp32 masters; a 16-bit model computes, layer by layer, and its gradients are summed over ubatches in fp32."""
    scale = TOO_LARGE if dtype == torch.float16 else 1.0
    masters = Classifying()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        ids, labels = sent(step).values()
        short = copy.deepcopy(masters).to(dtype).to(DEVICE)
        x = short.embed(ids)
        used: list[list[dict[str, torch.Tensor]]] = []  # layer, ubatch: leaves of their own
        for block in short.blocks:
            parts = [x] if rows == ROWS else x.split(rows)
            used.append([{n: p.detach().clone().requires_grad_() for n, p in block.named_parameters()} for _ in parts])
            x = torch.cat(
                [functional_call(block, leaves, (part,)) for leaves, part in zip(used[-1], parts, strict=True)]
            )
        loss = nn.functional.cross_entropy(short.head(x).float().flatten(0, 1), labels.flatten())
        (loss * scale).backward()
        for master, p in zip(masters.parameters(), short.parameters(), strict=True):
            master.grad = None if p.grad is None else p.grad.float().cpu()
        for block, leaves in zip(masters.blocks, used, strict=True):
            for name, master in block.named_parameters():
                master.grad = sum(ubatch[name].grad.float() for ubatch in leaves).cpu()
        for master in masters.parameters():
            master.grad *= 1 / scale
            if grad_dtype == "16bit":
                master.grad = master.grad.bfloat16().float()
        losses.append(loss.item())
        if not all(p.grad.isfinite().all() for p in masters.parameters()):
            scale *= 0.5
            continue
        if max_norm:
            torch.nn.utils.clip_grad_norm_(masters.parameters(), max_norm)
        optimizer.step()
    return losses, masters


class Moving(Block):
    """Computes with buffers that it writes to in one way or the other."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("level", torch.full((WIDTH,), 0.3))
        self.register_buffer("turn", torch.full((WIDTH,), 0.3))
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dtypes += [self.level.dtype, self.turn.dtype]
        with torch.no_grad():
            self.level.mul_(0.9).add_(0.07)
            self.turn = self.turn * 0.9 + 0.07
        return super().forward(x + self.level) + self.turn


SCALE = 2.0**10
SHORT = {"grad_dtype": "16bit", "host_copies": "per_sweep"}


@pytest.mark.parametrize(
    ("cmp", "mode", "rows", "options"),
    [
        ("bf16", "serial", ROWS, {}),
        ("bf16", "deferred", 2, SHORT),
        ("bf16", "eager", 2, SHORT),
        ("fp16", "serial", 2, SHORT),
        ("fp16", "deferred", ROWS, {}),
        *more(*((*case, rows, options) for case in CASES for rows in (ROWS, 2) for options in ({}, SHORT))),
    ],
)
def test_losses_and_masters_are_those_of_plain_torch(cmp, mode, rows, options):
    """Gradients in 16 bits are rounded once, and used in fp32; an overflow anywhere vetoes a step of fp16. Norms of a
    device are summed in another order."""
    max_norm = 0.5 if mode != "eager" and DEVICE == "cpu" else 0.0
    steps = times(4, 30)
    expected, masters = by_hand(DTYPES[cmp], rows, max_norm, steps, options.get("grad_dtype", "fp32"))
    model, losses = Classifying(), []
    scaled = {"loss_scale_init": TOO_LARGE} if cmp == "fp16" else {}
    eps, optimizer = under(model, cmp=cmp, eps_update=mode, ubatch_size=rows, **options, **scaled)
    for step in range(steps):
        loss = model(**batch(step)).loss
        assert loss.dtype == torch.float32
        loss.backward()
        if max_norm:
            eps.clip_grad_norm_(max_norm)
        losses.append(loss.item())
        optimizer.step()
    eps.synchronize()
    assert losses == expected
    assert_same_tensors(dict(model.named_parameters()), dict(masters.named_parameters()))
    assert cmp == "bf16" or 0 < eps.loss_scale.skipped < steps


@cpu_suffices
@pytest.mark.parametrize(
    ("family", "cmp"),
    [("bert", "bf16"), ("t5", "fp16"), *more(*((family, cmp) for family in FAMILIES for cmp in DTYPES))],
)
def test_gradients_are_those_of_a_16_bit_model(family, cmp):
    torch.manual_seed(0)
    model = FAMILIES[family]()
    given = batch_for(model)
    short = copy_as(model, DTYPES[cmp]).to(DEVICE)
    let_heads_return_fp32(short)
    cast = {k: v.to(DEVICE, DTYPES[cmp]) if v.is_floating_point() else v.to(DEVICE) for k, v in given.items()}
    loss = short(**cast).loss
    (loss * SCALE).backward()
    options: dict[str, Any] = {"loss_scale_init": SCALE} if cmp == "fp16" else {}
    eps = attach_l2l(model, L2LConfig(device=DEVICE, cmp=cmp, **options))
    optimizer = eps.wrap(torch.optim.SGD(model.parameters()))
    found = model(**given).loss
    found.backward()
    assert found.dtype == torch.float32
    assert optimizer is not None
    # T5's attention takes another kernel where its mask needs a gradient, as it does in a whole graph.
    assert found.item() == (pytest.approx(loss.item(), rel=1e-3) if family == "t5" else loss.item())
    for (name, p), q in zip(model.named_parameters(), short.parameters(), strict=True):
        assert p.dtype == p.grad.dtype == torch.float32
        expected = q.grad.float().cpu() / SCALE
        if family in ("t5", "deberta_v2"):  # sums of what layers share; the kernel
            assert (p.grad - expected).norm() <= 0.1 * expected.norm() + 1e-3, name
        else:
            assert torch.equal(p.grad, expected), name


@pytest.mark.parametrize(("mode", "fused"), [("deferred", False), ("eager", True), *more(("serial", True))])
def test_copies_are_made_once_per_update_and_never_stale(mode, fused, monkeypatch):
    model = Classifying()
    eps = attach_l2l(model, config_for(model, device=DEVICE, eps_update=mode, cmp="bf16"))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused))

    def assert_current() -> None:
        with torch.no_grad():
            found = model(**batch(0)).loss
            eps.synchronize()
            short = copy_as(model, torch.bfloat16).to(DEVICE)
            let_heads_return_fp32(short)
            assert torch.equal(found, short(**sent(0)).loss)

    for step in range(3):
        model(**batch(step)).loss.backward()
        optimizer.step()
        assert_current()
    with torch.no_grad():
        for write in (
            lambda: model.embed.weight.data.mul_(2.0),  # this one, and the next, no version counter tells of
            lambda: model.blocks[1].up.bias.numpy().fill(3.0),
            lambda: model.blocks[0].norm.weight.add_(1.0),
        ):
            write()
            assert_current()
    masters, copy_ = list(model.parameters()), torch.Tensor.copy_
    copied: list[torch.Tensor] = []

    def noted(to: torch.Tensor, other: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copied.append(other)
        return copy_(to, other, *args, **kwargs)

    with torch.no_grad():
        model(**batch(1))
        monkeypatch.setattr(torch.Tensor, "copy_", noted)
        for _ in range(2):  # of what has not been written to, none is made again
            model(**batch(1))
    assert not any(any(each is master for master in masters) for each in copied)


def test_a_write_after_the_first_forward_is_uploaded():
    """In that forward, the model's own code ran with the masters, too, so that the dimension of rows was found."""
    model = Classifying()
    attach_l2l(model, config_for(model, device=DEVICE, ubatch_size=2, cmp="bf16"))
    assert model(**batch(0)).loss.requires_grad
    for p in model.parameters():
        p.data.mul_(2.0)  # moves no version counter
    found = model(**batch(0)).loss.item()
    short = copy_as(model, torch.bfloat16).to(DEVICE)
    let_heads_return_fp32(short)
    assert found == pytest.approx(short(**sent(0)).loss.item(), rel=1e-3)


@nightly
@cpu_suffices
def test_any_loop_with_accelerate_skips_and_its_scheduler_waits():
    accelerator = Accelerator(cpu=DEVICE == "cpu")
    model = Classifying()
    eps, optimizer = under(model, cmp="fp16", loss_scale_init=2.0**24)
    accelerator.scaler = eps.scaler
    optimizer = accelerator.prepare_optimizer(optimizer, device_placement=False)
    scheduler = accelerator.prepare_scheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    rates, skipped = [], []
    for step in range(12):
        accelerator.backward(model(**batch(step)).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
        rates.append(scheduler.get_last_lr()[0])
    assert skipped[0] and not skipped[-1]
    assert eps.loss_scale.skipped == sum(skipped)
    assert rates[-1] == pytest.approx(1e-2 * 0.5 ** (12 - sum(skipped)))


def test_a_model_that_is_detached_has_fp32_gradients_again():
    model = Classifying()
    _, optimizer = under(model, cmp="bf16", grad_dtype="16bit")
    model(**batch(0)).loss.backward()
    optimizer.param_groups[0]["params"][0].grad = torch.ones(60, WIDTH)  # any code may assign another one
    optimizer.step()
    model(**batch(0)).loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
    before = {name: p.grad.float() for name, p in model.named_parameters()}
    detach_l2l(model)
    torch.testing.assert_close({n: p.grad for n, p in model.named_parameters()}, before, rtol=0, atol=0)
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    model.zero_grad()
    model(**batch(0)).loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@cpu_suffices
@pytest.mark.parametrize(
    "option", [{"grad_dtype": "16bit"}, {"moment_dtype": "bf16"}, {"cmp": "fp16"}, {"nonfinite": "skip"}], ids=str
)
def test_an_optimizer_that_is_not_wrapped_is_refused(option):
    model = Classifying()
    attach_l2l(model, config_for(model, device=DEVICE, **option))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(RuntimeError, match=r"call eps\.wrap\(optimizer\) before backward"):
        model(**batch(0)).loss.backward()
        model(**batch(0))
    assert optimizer is not None


@pytest.mark.parametrize("mode", ["deferred", "eager"])
def test_buffers_that_layers_write_to_have_one_dtype_in_all_calls(mode):
    """Results are those of a model in 16 bits."""
    model = Classifying(Moving)
    plain = copy.deepcopy(model).bfloat16().to(DEVICE)
    plain.head.register_forward_hook(lambda module, args, output: output.float())
    eps = attach_l2l(model, config_for(model, device=DEVICE, cmp="bf16", eps_update=mode))
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.0))
    for step in range(3):
        told = pytest.warns(UserWarning, match=r"_keep_in_fp32_modules_strict") if step == 0 else nullcontext()
        with told as warned:
            loss = model(**batch(step)).loss
        if warned is not None:
            texts = [str(each.message) for each in warned]
            assert all(
                sum(f"{name} of blocks.{n}" in text for text in texts) == 1
                for name in ("level", "turn")
                for n in range(LAYERS)
            )
        expected = plain(**sent(step)).loss
        for each in (loss, expected):
            each.backward()
        assert loss.item() == expected.item()
        if mode != "eager":
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad.float().cpu()), name
        optimizer.step()
        optimizer.zero_grad()
        plain.zero_grad()
        for (name, b), c in zip(model.named_buffers(), plain.buffers(), strict=True):
            assert b.dtype == torch.float32 and torch.equal(b, c.float().cpu()), name
    assert {dtype for block in model.blocks for dtype in block.dtypes} == {torch.bfloat16}


# ---- moments in 16 bits


@cpu_suffices
def test_rounding_is_unbiased_over_ten_thousand_draws():
    """To the two numbers of bfloat16 around a value; one of bfloat16 stays."""
    for value in (1.001, -0.3333, 7.7e-12, 3.0e-39, 12345.678):
        exact = torch.tensor(value)
        down = (exact.view(torch.int32) & -(2**16)).view(torch.float32)
        up = (down.view(torch.int32) + 2**16).view(torch.float32)
        rounded = stochastically_rounded(exact.repeat(10_000), (3, 0)).double()
        assert set(rounded.tolist()) == {down.item(), up.item()}
        share = ((exact.double() - down.double()) / (up.double() - down.double())).item()
        deviation = (share * (1 - share) / 10_000) ** 0.5
        assert abs((rounded == up).double().mean().item() - share) < 4 * deviation
    assert set(stochastically_rounded(torch.full((100,), -1.5), (3, 0)).tolist()) == {-1.5}


@cpu_suffices
def test_the_seed_alone_decides_and_what_is_not_finite_stays_so():
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000, 0x7F800001], dtype=torch.int32)
    for seed in range(8):
        rounded = stochastically_rounded(bits.clone().view(torch.float32), (seed, 0))
        assert rounded[:3].isnan().all() and not rounded.isfinite().any()
    values = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    first = stochastically_rounded(values.clone(), (7, 0))
    torch.manual_seed(2)
    assert torch.equal(stochastically_rounded(values.clone(), (7, 0)), first)
    assert not torch.equal(stochastically_rounded(values.clone(), (8, 0)), first)
    transposed = values.t().clone(memory_format=torch.preserve_format)
    assert stochastically_rounded(transposed.clone(memory_format=torch.preserve_format), (7, 0)).stride() == (1, 5)
    gaps, alone = values[:, ::2], values[:, ::2].contiguous()
    assert torch.equal(stochastically_rounded(gaps, (7, 0)), stochastically_rounded(alone, (7, 0))), "memory with gaps"


def short_moments(mode: str, name: str = "AdamW") -> Any:
    made = OPTIMIZERS[name]
    options = {"eps_update": mode, "moment_dtype": "bf16", "ubatch_size": None}
    return attach(Toy(2, dropout=0.0), lambda ps: made(list(ps)), **options)


def trained(mode: str, name: str = "AdamW", steps: int = 3) -> Run:
    model, eps, optimizer, _ = short_moments(mode, name)
    for step in range(steps):
        train_once(model, batch_for(model, masked=False, seed=step))
        optimizer.step()
    eps.synchronize()
    return run_of(model, optimizer, [])


def rounded_by_hand(name: str, steps: int = 3) -> Run:
    """The optimizer steps as a whole, in fp32, and fused, as our own steps are; what it keeps is rounded between."""
    model = Toy(2, dropout=0.0)
    eps = attach_l2l(model, config_for(model, device=DEVICE, eps_update="serial"))
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    if name != "LAMB":
        optimizer.param_groups[0]["fused"] = True
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
    if name != "LAMB":
        optimizer.param_groups[0]["fused"] = None
    return run_of(model, optimizer, [])


@cpu_suffices
@pytest.mark.parametrize(("mode", "name"), combinations(MODES, OPTIMIZERS, together=1))
def test_bits_are_those_of_a_whole_step_in_fp32_that_is_rounded(mode, name):
    found, expected = trained(mode, name), rounded_by_hand(name)
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
    model, eps, optimizer, _ = short_moments(mode)
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
    model, _, optimizer, _ = short_moments("deferred")
    seen = []
    for step in range(3):
        if step == 1:
            optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["params"][0].grad.dtype))
        train_once(model, batch_for(model, masked=False, seed=step))
        optimizer.step()
    assert seen == [torch.float32, torch.float32]
    assert_same_run(run_of(model, optimizer, []), expected)


# ---- moments in 8 bits


def eight_bits(mode: str, name: str = "AdamW") -> Any:
    made, options = OPTIMIZERS[name], {"eps_update": mode, "moment_dtype": "8bit", "ubatch_size": None}
    return attach(Toy(2, dropout=0.0), lambda ps: made(list(ps)), **options)


def steps_of(made: Any, first: int, last: int) -> Run:
    model, eps, optimizer, _ = made
    for step in range(first, last):
        train_once(model, batch_for(model, masked=False, seed=step))
        optimizer.step()
    eps.synchronize()
    return run_of(model, optimizer, [])


@cpu_suffices
@pytest.mark.parametrize(("mode", "name"), combinations(MODES, OPTIMIZERS, together=1))
def test_moments_in_8_bits_go_on_from_a_checkpoint_bit_for_bit(mode, name):
    """Which has fp32 tensors, as a plain optimizer can read them."""
    whole, half = steps_of(eight_bits(mode, name), 0, 4), steps_of(eight_bits(mode, name), 0, 2)
    file = io.BytesIO()
    torch.save(half._asdict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    tensors = [t for state in saved["state"]["state"].values() for t in state.values() if torch.is_tensor(t)]
    assert {t.dtype for t in tensors} == {torch.float32}
    made = eight_bits(mode, name)
    made[0].load_state_dict(saved["weights"])
    made[2].load_state_dict(saved["state"])
    kept = [t for state in made[2].state.values() for t in state.values() if torch.is_tensor(t) and t.dim()]
    assert {t.dtype for t in kept} == {torch.uint8}
    assert_same_run(steps_of(made, 2, 4), whole)
    plain = Toy(2, dropout=0.0)
    optimizer = OPTIMIZERS[name](list(plain.parameters()))
    optimizer.load_state_dict(saved["state"])
    train_once(plain, batch_for(plain, masked=False))
    optimizer.step()


def test_moments_in_8_bits_take_a_byte_each_and_are_fp32_again_without_l2l():
    model, eps, optimizer, _ = made = eight_bits("serial")
    steps_of(made, 0, 2)
    expected = sum(2 * (p.numel() + -(-p.numel() // 256)) + 4 for p in model.parameters())
    assert eps.memory_report()["host"]["moments"]["now"] == expected
    detach_l2l(model)
    assert {t.dtype for state in optimizer.state.values() for t in state.values()} == {torch.float32}
    train_once(model, batch_for(model, masked=False))
    optimizer.step()


@cpu_suffices
def test_optimizers_whose_moments_are_not_kept_in_8_bits_are_refused():
    model = Toy()
    eps = attach_l2l(model, config_for(model, moment_dtype="8bit"))
    for optimizer in (torch.optim.RMSprop(model.parameters()), torch.optim.AdamW(model.parameters(), amsgrad=True)):
        with pytest.raises(ValueError, match=r"moment_dtype='8bit' keeps moments of torch's Adam.*use one of them"):
            eps.wrap(optimizer)
        assert not eps.updates.optimizers
