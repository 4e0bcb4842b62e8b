"""Cross mixed precision: 16 bits on the device, fp32 in the EPS, against plain torch that does the same by hand."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from cmp_cases import (
    CASES,
    DTYPES,
    LAYERS,
    ROWS,
    VOCAB,
    WIDTH,
    Block,
    Classifying,
    assert_as_by_hand,
    batch,
    by_hand,
    check_written_buffers,
    layer_to_layer,
    made,
)
from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.optim.loss_scale import LossScale
from memory_switches import forced_copies


@pytest.fixture(params=["views", "copies"])
def _copies(request: pytest.FixtureRequest) -> Iterator[None]:
    with forced_copies() if request.param == "copies" else nullcontext():
        yield


@pytest.mark.one_in(8)
@pytest.mark.usefixtures("_copies")
@pytest.mark.parametrize("rows", [ROWS, 2])
@pytest.mark.parametrize(("cmp", "mode"), CASES)  # the scale of fp16 begins so large that steps are skipped
def test_losses_and_masters_are_those_of_plain_torch(cmp, rows, mode):
    max_norm = 0.0 if mode == "eager" else 0.5
    assert_as_by_hand(by_hand(DTYPES[cmp], rows, max_norm), layer_to_layer(mode, rows, max_norm, cmp=cmp))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [ROWS, 2])
@pytest.mark.parametrize(("cmp", "mode"), CASES)
def test_a_hundred_steps_are_those_of_plain_torch(cmp, rows, mode):
    max_norm = 0.0 if mode == "eager" else 0.5
    expected = by_hand(DTYPES[cmp], rows, max_norm, steps=100)
    assert_as_by_hand(expected, layer_to_layer(mode, rows, max_norm, steps=100, cmp=cmp))


@pytest.mark.one_in(6)
@pytest.mark.usefixtures("_copies")
@pytest.mark.parametrize(("cmp", "mode"), CASES)
def test_gradients_in_16_bits_are_rounded_once_and_used_in_fp32(cmp, mode):
    max_norm = 0.0 if mode == "eager" else 0.5
    expected = by_hand(DTYPES[cmp], 2, max_norm, grad_dtype="16bit")
    found = layer_to_layer(mode, 2, max_norm, cmp=cmp, grad_dtype="16bit", host_copies="per_sweep")
    assert_as_by_hand(expected, found)


@pytest.mark.one_in(4)
@pytest.mark.usefixtures("_copies")
@pytest.mark.parametrize("mode", ["serial", "deferred", "eager"])
@pytest.mark.parametrize("fused", [True, False])
def test_copies_are_made_once_per_update_and_never_stale(mode, fused, monkeypatch):
    made_copies: list[torch.Tensor] = []
    model = made()
    eps = attach_l2l(model, L2LConfig(device="cpu", eps_update=mode, cmp="bf16", layer_classes=("Block",)))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused))

    def bits() -> list[torch.Tensor]:
        model(**batch(0))  # which uploads all of them
        return [copy.clone() for copy in eps.copies.kept]

    def as_they_are() -> list[torch.Tensor]:
        eps.synchronize()
        return [p.detach().bfloat16() for p in masters]

    bits()
    masters = list(model.parameters())  # in the order of their copies
    for step in range(3):
        model(**batch(step)).loss.backward()
        optimizer.step()
        torch.testing.assert_close(bits(), as_they_are(), rtol=0, atol=0)
    with torch.no_grad():
        # Two writes that no version counter tells of, and one that it does.
        model.embed.weight.data.mul_(2.0)
        model.blocks[1].up.bias.numpy()[0] = 3.0
        model.blocks[0].norm.weight.add_(1.0)
    torch.testing.assert_close(bits(), as_they_are(), rtol=0, atol=0)
    bits()
    original = torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor,
        "copy_",
        lambda self, other, *args, **options: made_copies.append(other) or original(self, other, *args, **options),
    )
    with torch.no_grad():
        for _ in range(2):  # of what has not been written to, none is made again
            model(**batch(1))
    assert not any(any(copied is master for master in masters) for copied in made_copies)


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


@pytest.mark.one_in(8)
@pytest.mark.parametrize("mode", ["serial", "deferred"])
@pytest.mark.parametrize("ubatch", range(4))
@pytest.mark.parametrize("layer", range(LAYERS))
def test_one_overflow_anywhere_vetoes_the_step(layer, ubatch, mode):
    torch.manual_seed(0)
    model = Classifying()
    model.blocks = nn.ModuleList(Overflowing() for _ in range(LAYERS))
    options: dict[str, Any] = {"cmp": "fp16", "eps_update": mode, "ubatch_size": 2, "layer_classes": ("Overflowing",)}
    eps = attach_l2l(model, L2LConfig(device="cpu", **options))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    assert eps.loss_scale is not None
    eps.loss_scale.value = 2.0**10

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


def test_the_policy_is_that_of_torch():
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=2)
    ours = LossScale(8.0, 3.0, 0.25, 2)
    p = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], lr=0.1)
    for finite in (True, True, False, True, False, False, True, True, True, True, True):
        theirs.scale(p.sum() * (1.0 if finite else float("inf"))).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        assert ours.vote(finite=finite) is finite
        assert ours.value == theirs.get_scale()
    assert ours.skipped == 3


def test_any_loop_with_accelerate_skips_and_its_scheduler_waits():
    accelerator = Accelerator(cpu=True)
    model = made()
    config = L2LConfig(device="cpu", cmp="fp16", layer_classes=("Block",), loss_scale_init=2.0**24)
    eps = attach_l2l(model, config)
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
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
    eps = attach_l2l(model, L2LConfig(device="cpu", cmp="bf16", grad_dtype="16bit", layer_classes=("Block",)))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
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


@pytest.mark.parametrize(
    "option", [{"grad_dtype": "16bit"}, {"moment_dtype": "bf16"}, {"cmp": "fp16"}, {"nonfinite": "skip"}]
)
def test_an_optimizer_that_is_not_wrapped_is_refused(option):
    model = made()
    attach_l2l(model, L2LConfig(device="cpu", layer_classes=("Block",), **option))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(RuntimeError, match=r"call eps\.wrap\(optimizer\) before backward"):
        model(**batch(0)).loss.backward()
        model(**batch(0))
    assert optimizer is not None


def test_eager_updates_with_fp16_are_refused():
    with pytest.raises(ValueError, match="eps_update='eager'"):
        L2LConfig(cmp="fp16", eps_update="eager")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss_scale_init", 0.0),
        ("loss_scale_init", float("inf")),
        ("loss_scale_growth", 1.0),
        ("loss_scale_backoff", 1.0),
        ("loss_scale_interval", 0),
        ("loss_scale_interval", 2.5),
        ("loss_scale_interval", "2000"),
        ("loss_scale_init", True),
        ("cmp", "int8"),
        ("grad_dtype", "bf16"),
        ("moment_dtype", "16bit"),
        ("host_copies", True),
        ("nonfinite", "ignore"),
    ],
)
def test_options_outside_their_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        L2LConfig(**{"cmp": "fp16", name: value})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss_scale_interval": 5}, "which fp16 alone has"),
        ({"cmp": "bf16", "loss_scale_init": 4.0}, "which fp16 alone has"),
        ({"host_copies": "per_sweep"}, "got host_copies='per_sweep' with cmp=None"),
    ],
)
def test_options_without_what_they_are_about_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        L2LConfig(**options)


@pytest.mark.parametrize("mode", ["serial", "deferred", "eager"])
def test_buffers_that_layers_write_to_have_one_dtype_in_all_calls(mode):
    check_written_buffers(mode, "cpu")
