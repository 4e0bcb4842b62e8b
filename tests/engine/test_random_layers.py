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
from hf_l2l import EagerParamServer, L2LConfig, attach_l2l, copy_as
from models import TOLERANCE, Gradients, assert_same_bits, gradients, relative_error
from runs import on_host
from tiers import cpu_suffices

WIDTH = 8


def dropped(x: torch.Tensor, p: float) -> torch.Tensor:
    """Dropout by one of two kernels, which make other masks of the same state of the generator.

    Like `scaled_dot_product_attention` on some devices, it asks whether a gradient is needed.
    """
    if p == 0:
        return x
    mask = F.dropout(torch.ones_like(x), p)
    return x * (mask if torch.is_grad_enabled() and x.requires_grad else mask.flip(-1))


class Attentive(nn.Module):
    """A layer with dropout inside, and a buffer that counts its calls."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return hidden + self.outer(dropped(self.inner(hidden), self.p if self.training else 0.0).tanh())


class Stack(nn.Module):
    """Layers, and nothing else that draws random numbers."""

    def __init__(self, layer: type[nn.Module] = Attentive, depth: int = 3, **options: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([layer(**options) for _ in range(depth)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.pow(2).mean()


def attached(model: nn.Module, **options: Any) -> EagerParamServer:
    classes = {type(layer).__name__ for layer in model.layers}
    return attach_l2l(model, L2LConfig(**{"device": DEVICE, "layer_classes": tuple(classes), **options}))


def batch(rows: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def plain_gradients(model: nn.Module, x: torch.Tensor, seed: int, ubatch: int | None = None) -> Gradients:
    """Those of plain training on the device with the same draws: layer by layer, and in each ubatch by ubatch."""
    on_device, hidden = copy.deepcopy(model).to(DEVICE), x.to(DEVICE)
    torch.manual_seed(seed)
    for layer in on_device.layers:
        hidden = torch.cat([layer(part) for part in hidden.split(ubatch or len(x))])
    hidden.pow(2).mean().backward()
    return on_host(gradients(on_device))


def step(model: nn.Module, x: torch.Tensor, seed: int) -> None:
    model.zero_grad()
    torch.manual_seed(seed)
    model(x).backward()


def test_the_masks_of_the_recompute_are_those_of_the_forward():
    """Buffers are written once in each call, the first one included, and then the program draws what it would."""
    model = Stack()
    plain = copy.deepcopy(model)
    attached(model)
    for seed in range(3):  # the first step finds out that the layers draw
        expected = plain_gradients(plain, batch(), seed)
        after = torch.rand(2, device=DEVICE)
        torch.manual_seed(seed)
        loss = model(batch())
        assert torch.equal(torch.rand(2, device=DEVICE), after)
        model.zero_grad()
        loss.backward()
        assert_same_bits(gradients(model), expected)
        assert [int(layer.calls) for layer in model.layers] == [seed + 1] * 3


@cpu_suffices
def test_each_ubatch_is_recomputed_with_its_own_mask():
    model, x = Stack().double(), batch(7, torch.float64)
    plain = copy.deepcopy(model)
    attached(model, ubatch_size=3, stash="host")
    for seed in range(2):
        expected = plain_gradients(plain, x, seed, ubatch=3)
        step(model, x, seed)
        assert relative_error(gradients(model), expected) <= TOLERANCE[torch.float64]
        assert [int(layer.calls) for layer in model.layers] == [3 * (seed + 1)] * 3


def test_frozen_weights_need_no_gradient_in_the_forward_either():
    """As with adapters: in the lowest layer nothing before the dropout needs a gradient, so that it takes the kernel
    that it takes in plain training. And the input may be all that does."""
    model, x = Stack(), batch()
    for layer in model.layers:
        layer.inner.requires_grad_(False)
    plain = copy.deepcopy(model)
    attached(model)
    for seed in range(2):
        expected = plain_gradients(plain, x, seed)
        step(model, x, seed)
        assert_same_bits(gradients(model), expected)
    given = batch().requires_grad_()
    torch.manual_seed(0)
    (expected,) = torch.autograd.grad(copy.deepcopy(plain).to(DEVICE)(given.to(DEVICE)), given)
    torch.manual_seed(0)
    (found,) = torch.autograd.grad(model(given), given)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_with_cmp_the_16_bit_weights_need_gradients(dtype):
    model, x = Stack(), batch().to(dtype)
    short = copy_as(model, dtype)
    options = {torch.bfloat16: {"cmp": "bf16"}, torch.float16: {"cmp": "fp16", "loss_scale_init": 1.0}}[dtype]
    optimizer = attached(model, **options).wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    for seed in range(2):
        expected = plain_gradients(short, x, seed)
        step(model, x.float(), seed)
        assert_same_bits(gradients(model), {name: None if g is None else g.float() for name, g in expected.items()})
    assert optimizer is not None


def test_a_layer_that_begins_to_draw_later_is_noticed():
    model, x = Stack(p=0.0), batch()
    plain = copy.deepcopy(model)
    attached(model)
    for seed, p in enumerate((0.0, 0.0, 0.5, 0.1)):
        for each in (*model.layers, *plain.layers):
            each.p = p
        expected = plain_gradients(plain, x, seed)
        step(model, x, seed)
        assert_same_bits(gradients(model), expected)


class Overwriting(Attentive):
    """Writes into its argument, which a forward can do once only."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.add_(1.0))


def test_a_layer_that_has_written_into_its_argument_is_not_run_again():
    model, plain = Stack(Overwriting), Stack(Overwriting).to(DEVICE)
    attached(model, check_recompute="off")
    torch.manual_seed(0)
    with torch.no_grad():
        expected = plain(batch().to(DEVICE))
    torch.manual_seed(0)
    assert torch.equal(model(batch()), expected)


class Returning(Attentive):
    """Returns its input, a tensor that needs no gradient, and a whole number, too."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super().forward(hidden), hidden, hidden.detach(), hidden.argmax(-1)


class Wide(Stack):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden, given, fixed, places = layer(hidden)
            hidden = hidden + given * fixed + places[..., None]
        return hidden.pow(2).mean()


@cpu_suffices
def test_all_kinds_of_outputs_leave_a_layer_that_draws():
    model, plain = Wide(Returning), Wide(Returning).to(DEVICE)
    attached(model)
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
        inner = self.inner(hidden).tanh()
        self.watched = StorageWeakRef(inner.untyped_storage())
        self.inside = dropped(inner, self.p)
        return hidden + self.outer(self.inside)


@pytest.mark.filterwarnings("ignore:a Keeping keeps:UserWarning")
def test_the_graph_of_a_forward_keeps_no_tensors_and_no_backward_goes_into_it():
    model = Stack(Keeping)
    attached(model)
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
