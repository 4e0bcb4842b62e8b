"""Cross mixed precision: 16 bits on the device, fp32 in the EPS, against plain torch that does the same by hand."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.func import functional_call
from transformers.utils import ModelOutput

import models
from devices import DEVICE
from hf_l2l import EagerParamServer, L2LConfig, attach_l2l, copy_as, detach_l2l
from hf_l2l.model.precision import let_heads_return_fp32
from models import FAMILIES, batch_for
from runs import assert_same_tensors
from tiers import cpu_suffices, more, nightly, times

CASES = [(cmp, mode) for cmp in ("bf16", "fp16") for mode in ("serial", "deferred", "eager")]
CASES.remove(("fp16", "eager"))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
VOCAB, WIDTH, LAYERS, ROWS = 11, 8, 3, 8


class Block(models.Block):
    def __init__(self) -> None:
        super().__init__(WIDTH, 0.0, buffers=False)


class Classifying(nn.Module):
    """Embedding, layers, and a head whose logits are to be fp32."""

    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.embed, self.classifier = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(kind() for _ in range(LAYERS))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> ModelOutput:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return ModelOutput(loss=nn.functional.cross_entropy(self.classifier(x).flatten(0, 1), labels.flatten()))


def made(kind: type[Block] = Block) -> Classifying:
    torch.manual_seed(0)
    return Classifying(kind)


def under(model: nn.Module, **options: Any) -> tuple[EagerParamServer, torch.optim.Optimizer]:
    """The EPS of a model, and an optimizer."""
    eps = attach_l2l(model, L2LConfig(device=DEVICE, layer_classes=("Block",), **options))
    return eps, eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(VOCAB, (ROWS, 6), generator=generator) for _ in range(2))
    return {"input_ids": ids, "labels": labels}


def by_hand(
    dtype: torch.dtype, rows: int, max_norm: float, steps: int, grad_dtype: str = "fp32"
) -> tuple[list[float], nn.Module]:
    """Fp32 masters; a 16-bit model computes, layer by layer, and its gradients are summed over ubatches in fp32."""
    scale = 2.0**16 if dtype == torch.float16 else 1.0
    masters = made()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        ids, labels = (tensor.to(DEVICE) for tensor in batch(step).values())
        short = copy.deepcopy(masters).to(dtype).to(DEVICE)
        x = short.embed(ids)
        used: list[list[dict[str, torch.Tensor]]] = []  # layer, ubatch: leaves of their own
        for block in short.blocks:
            parts = [x] if rows == ROWS else x.split(rows)
            used.append([{n: p.detach().clone().requires_grad_() for n, p in block.named_parameters()} for _ in parts])
            x = torch.cat(
                [functional_call(block, leaves, (part,)) for leaves, part in zip(used[-1], parts, strict=True)]
            )
        loss = nn.functional.cross_entropy(short.classifier(x).float().flatten(0, 1), labels.flatten())
        (loss * scale).backward()
        for master, p in zip(masters.parameters(), short.parameters(), strict=True):
            master.grad = None if p.grad is None else p.grad.float().cpu()
        for block, leaves in zip(masters.blocks, used, strict=True):
            for name, master in block.named_parameters():
                total = leaves[0][name].grad.float()
                for ubatch in leaves[1:]:
                    total += ubatch[name].grad.float()
                master.grad = total.cpu()
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

    def __init__(self) -> None:
        super().__init__()
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
        ("bf16", "eager", 2, {}),
        ("fp16", "serial", 2, SHORT),
        ("fp16", "deferred", ROWS, {}),
        *more(*((*case, rows, options) for case in CASES for rows in (ROWS, 2) for options in ({}, SHORT))),
    ],
)
def test_losses_and_masters_are_those_of_plain_torch(cmp, mode, rows, options):
    """Gradients in 16 bits are rounded once, and used in fp32. The scale of fp16 begins so large that steps are
    skipped. Norms of a device are summed in another order."""
    max_norm = 0.5 if mode != "eager" and DEVICE == "cpu" else 0.0
    steps = times(4, 30)
    expected, masters = by_hand(DTYPES[cmp], rows, max_norm, steps, options.get("grad_dtype", "fp32"))
    model, losses = made(), []
    eps, optimizer = under(model, cmp=cmp, eps_update=mode, ubatch_size=rows, **options)
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
    model = made()
    eps = attach_l2l(model, L2LConfig(device=DEVICE, eps_update=mode, cmp="bf16", layer_classes=("Block",)))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused))

    def assert_current() -> None:
        with torch.no_grad():
            found = model(**batch(0)).loss
            eps.synchronize()
            short = copy_as(model, torch.bfloat16).to(DEVICE)
            let_heads_return_fp32(short)
            assert torch.equal(found, short(**{name: each.to(DEVICE) for name, each in batch(0).items()}).loss)

    for step in range(3):
        model(**batch(step)).loss.backward()
        optimizer.step()
        assert_current()
    with torch.no_grad():
        # Two writes that no version counter tells of, and one that it does.
        model.embed.weight.data.mul_(2.0)
        assert_current()
        model.blocks[1].up.bias.numpy()[0] = 3.0
        assert_current()
        model.blocks[0].norm.weight.add_(1.0)
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


class Overflowing(Block):
    """Its gradient is infinite in one ubatch of the backward, as often as it is asked for."""

    ubatch: int | None = None
    turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            if self.turn == self.ubatch:
                x.register_hook(lambda gradient: gradient * float("inf"))
            self.turn += 1
        return super().forward(x)


@pytest.mark.parametrize(("layer", "ubatch", "mode"), [(0, 3, "serial"), (LAYERS - 1, 0, "deferred")])
def test_one_overflow_anywhere_vetoes_the_step(layer, ubatch, mode):
    model = made(Overflowing)
    eps, optimizer = under(model, cmp="fp16", eps_update=mode, ubatch_size=2, loss_scale_init=2.0**10)

    def step(number: int) -> None:
        model(**batch(number)).loss.backward()
        eps.clip_grad_norm_(1.0)
        optimizer.step()

    step(0)
    before = copy.deepcopy((dict(model.named_parameters()), optimizer.state_dict()["state"]))
    broken = model.blocks[layer]
    broken.turn, broken.ubatch = 0, ubatch
    step(1)
    after = dict(model.named_parameters()), optimizer.state_dict()["state"]
    assert (eps.loss_scale.value, eps.loss_scale.skipped) == (2.0**9, 1)
    assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    broken.ubatch = None
    step(2)
    assert (eps.loss_scale.value, eps.loss_scale.skipped) == (2.0**9, 1)
    assert not torch.equal(model.embed.weight, before[0]["embed.weight"])


@nightly
@cpu_suffices
def test_any_loop_with_accelerate_skips_and_its_scheduler_waits():
    accelerator = Accelerator(cpu=DEVICE == "cpu")
    model = made()
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
    model = made()
    _, optimizer = under(model, cmp="bf16", grad_dtype="16bit")
    model(**batch(0)).loss.backward()
    optimizer.param_groups[0]["params"][0].grad = torch.ones(VOCAB, WIDTH)  # any code may assign another one
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
    model = made()
    attach_l2l(model, L2LConfig(device=DEVICE, layer_classes=("Block",), **option))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(RuntimeError, match=r"call eps\.wrap\(optimizer\) before backward"):
        model(**batch(0)).loss.backward()
        model(**batch(0))
    assert optimizer is not None


@pytest.mark.parametrize("mode", ["deferred", "eager"])
def test_buffers_that_layers_write_to_have_one_dtype_in_all_calls(mode):
    """Results are those of a model in 16 bits."""
    model = made(Moving)
    plain = copy.deepcopy(model).bfloat16().to(DEVICE)
    plain.classifier.register_forward_hook(lambda module, args, output: output.float())
    eps = attach_l2l(model, L2LConfig(device=DEVICE, cmp="bf16", eps_update=mode, layer_classes=("Block",)))
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
        expected = plain(**{name: each.to(DEVICE) for name, each in batch(step).items()}).loss
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
