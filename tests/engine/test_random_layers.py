"""Layers that draw random numbers: the forward asks torch the same questions as the recompute, so both draw alike."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from devices import DEVICE
from hf_l2l import copy_as
from impure_layers import Block, Net, attach, batch, made
from models import TOLERANCE, Gradients, assert_same_bits, gradients, relative_error
from runs import on_host
from tiers import cpu_suffices


def dropped(x: torch.Tensor, p: float) -> torch.Tensor:
    """Dropout by one of two kernels, which make other masks of the same state of the generator.

    Like `scaled_dot_product_attention` on some devices, it asks whether a gradient is needed.
    """
    if p == 0:
        return x
    mask = F.dropout(torch.ones_like(x), p)
    return x * (mask if torch.is_grad_enabled() and x.requires_grad else mask.flip(-1))


class Attentive(Block):
    """A layer with dropout inside, and a buffer that counts its calls."""

    p = 0.5

    def prepare(self) -> None:
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return hidden + self.b(dropped(self.a(hidden), self.p if self.training else 0.0).tanh())


def plain_gradients(model: nn.Module, x: torch.Tensor, seed: int, ubatch: int | None = None) -> Gradients:
    """Those of plain training on the device with the same draws: layer by layer, and in each ubatch by ubatch."""
    on_device = copy.deepcopy(model).to(DEVICE)
    torch.manual_seed(seed)
    hidden = on_device.embed(x.to(DEVICE))
    for layer in on_device.layers:
        hidden = torch.cat([layer(part) for part in hidden.split(ubatch or len(x))])
    on_device.head(hidden).square().mean().backward()
    return on_host(gradients(on_device))


def step(model: nn.Module, x: torch.Tensor, seed: int) -> torch.Tensor:
    """Returns what the program draws after the forward."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(x)
    after = torch.rand(2, device=DEVICE)
    loss.backward()
    return after


FP32 = torch.float32


@pytest.mark.parametrize(
    ("ubatch_size", "dtype", "draws", "options"),
    [
        (3, torch.float64, [0.5] * 2, {"stash": "host"}),
        (None, torch.bfloat16, [0.5] * 2, {"cmp": "bf16"}),
        (None, torch.float16, [0.5] * 2, {"cmp": "fp16", "loss_scale_init": 1.0}),
        (None, FP32, [0.5] * 3, {}),  # the first step finds out that the layers draw
        (None, FP32, [0.0, 0.0, 0.5, 0.1], {}),
    ],
    ids=["each micro-batch with its own mask", "bf16", "fp16", "whole batch", "layers that begin to draw later"],
)
def test_the_masks_of_the_recompute_are_those_of_the_forward(ubatch_size, dtype, draws, options):
    """Buffers are written once in each call, the first one included, and then the program draws what it would."""
    master = torch.float64 if dtype is torch.float64 else FP32
    model, x = made(Attentive).to(master), batch().to(dtype)
    plain = copy_as(model, dtype) if "cmp" in options else copy.deepcopy(model)
    eps = attach(model, ubatch_size=ubatch_size, **options)
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    for seed, p in enumerate(draws):
        for each in (*model.layers, *plain.layers):
            each.p = p
        expected = plain_gradients(plain, x, seed, ubatch_size)
        after = torch.rand(2, device=DEVICE)
        assert torch.equal(step(model, x.to(master), seed), after)
        if ubatch_size:
            assert relative_error(gradients(model), expected) <= TOLERANCE[dtype]
        else:
            assert_same_bits(gradients(model), {name: each.to(master) for name, each in expected.items()})
        assert [int(layer.calls) for layer in model.layers] == [(seed + 1) * (3 if ubatch_size else 1)] * 3
    assert optimizer is not None


def test_frozen_weights_need_no_gradient_in_the_forward_either():
    """As with adapters: in the lowest layer nothing before the dropout needs a gradient, so that it takes the kernel
    that it takes in plain training. And the input may be all that does."""
    model, x = made(Attentive), batch()
    for each in (model.embed, *(layer.a for layer in model.layers)):
        each.requires_grad_(False)
    plain = copy.deepcopy(model)
    attach(model)
    for seed in range(2):
        expected = plain_gradients(plain, x, seed)
        step(model, x, seed)
        assert_same_bits(gradients(model), expected)
    given = batch().requires_grad_()
    torch.manual_seed(0)
    (expected,) = torch.autograd.grad(plain.to(DEVICE)(given.to(DEVICE)), given)
    torch.manual_seed(0)
    (found,) = torch.autograd.grad(model(given), given)
    assert torch.equal(found, expected)


class Overwriting(Attentive):
    """Writes into its argument, which a forward can do once only."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.add_(1.0))


def test_a_layer_that_has_written_into_its_argument_is_not_run_again():
    model, plain = made(Overwriting), made(Overwriting).to(DEVICE)
    attach(model, check_recompute="off")
    torch.manual_seed(0)
    with torch.no_grad():
        expected = plain(batch().to(DEVICE))
    torch.manual_seed(0)
    assert torch.equal(model(batch()), expected)


class Returning(Attentive):
    """Returns its input, a tensor that needs no gradient, and a whole number, too."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super().forward(hidden), hidden, hidden.detach(), hidden.argmax(-1)


class Wide(Net):
    def run(self, layer: nn.Module, h: torch.Tensor) -> torch.Tensor:
        h, given, fixed, places = layer(h)
        return h + given * fixed + places[..., None]


@cpu_suffices
def test_all_kinds_of_outputs_leave_a_layer_that_draws():
    model, plain = Wide(*[Returning] * 3), Wide(*[Returning] * 3).to(DEVICE)
    attach(model)
    for seed in range(2):
        for each, x in ((model, batch()), (plain, batch().to(DEVICE))):
            step(each, x.requires_grad_(), seed)
        assert_same_bits(gradients(model), on_host(gradients(plain)))


class Keeping(Attentive):
    """Leaves what it computes to its owner."""

    inside: Any = None
    watched: Any = None
    """What the node of an ordinary graph would keep."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = self.a(hidden).tanh()
        self.watched = StorageWeakRef(inner.untyped_storage())
        self.inside = dropped(inner, self.p)
        return hidden + self.b(self.inside)


@pytest.mark.filterwarnings("ignore:a Keeping keeps:UserWarning")
def test_the_graph_of_a_forward_keeps_no_tensors_and_no_backward_goes_into_it():
    model = made(Keeping)
    attach(model)
    step(model, batch(), 0)
    gc.disable()
    try:
        loss = model(batch())
        assert all(layer.inside.requires_grad for layer in model.layers)
        assert all(layer.watched.expired() for layer in model.layers)
    finally:
        gc.enable()
    loss.backward()
    model(batch())
    with pytest.raises(RuntimeError, match=r"must go through the outputs of a layer.*make the layer return it"):
        model.layers[-1].inside.sum().backward()
