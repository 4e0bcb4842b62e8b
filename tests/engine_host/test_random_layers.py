"""Layers that draw random numbers: the forward asks torch the same questions as the recompute, so both draw alike."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_l2l import EagerParamServer, L2LConfig, attach_l2l, copy_as
from kernel_cases import WIDTH, Attentive, Stack, dropped
from memory_switches import forced_copies, poisoned_releases
from models import TOLERANCE, Gradients, gradients, relative_error

FLOAT64 = TOLERANCE[torch.float64]


def attached(model: nn.Module, **options: Any) -> EagerParamServer:
    classes = {type(layer).__name__ for layer in model.layers}
    return attach_l2l(model, L2LConfig(device="cpu", layer_classes=tuple(classes), **options))


def plain_gradients(model: nn.Module, batch: torch.Tensor, seed: int, ubatch: int | None = None) -> Gradients:
    """Those of plain training with the same draws: layer by layer, and in each ubatch by ubatch."""
    torch.manual_seed(seed)
    hidden = batch
    for layer in model.layers:
        hidden = torch.cat([layer(part) for part in hidden.split(ubatch or len(batch))])
    model.zero_grad()
    hidden.pow(2).mean().backward()
    return gradients(model)


def assert_same_gradients(model: nn.Module, expected: Gradients) -> None:
    for name, gradient in gradients(model).items():
        theirs = expected[name]
        assert (gradient is None) == (theirs is None), name
        assert gradient is None or torch.equal(gradient, theirs), name


def step(model: nn.Module, batch: torch.Tensor, seed: int) -> None:
    model.zero_grad()
    torch.manual_seed(seed)
    model(batch).backward()


@pytest.mark.parametrize("copies", [False, True])
def test_the_masks_of_the_recompute_are_those_of_the_forward(copies):
    model, batch = Stack(), torch.randn(6, WIDTH)
    plain = copy.deepcopy(model)
    if copies:
        with forced_copies(), poisoned_releases():
            attached(model)
            for seed in range(3):  # the first step finds out that the layers draw
                step(model, batch, seed)
                assert_same_gradients(model, plain_gradients(plain, batch, seed))
        return
    attached(model)
    for seed in range(3):
        step(model, batch, seed)
        assert_same_gradients(model, plain_gradients(plain, batch, seed))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))


def test_the_program_draws_the_same_after_the_first_call():
    model, batch = Stack(), torch.randn(6, WIDTH)
    torch.manual_seed(3)
    copy.deepcopy(model)(batch)
    expected = torch.rand(2)
    attached(model)
    for _ in range(2):
        torch.manual_seed(3)
        model(batch)
        assert torch.equal(torch.rand(2), expected)


def test_each_ubatch_is_recomputed_with_its_own_mask():
    model, batch = Stack().double(), torch.randn(7, WIDTH, dtype=torch.float64)
    plain = copy.deepcopy(model)
    attached(model, ubatch_size=3)
    for seed in range(3):
        step(model, batch, seed)
        expected = plain_gradients(plain, batch, seed, ubatch=3)
        assert relative_error(gradients(model), expected) <= FLOAT64


def test_frozen_weights_need_no_gradient_in_the_forward_either():
    """As with adapters: in the lowest layer nothing before the dropout needs a gradient, so that it takes the kernel
    that it takes in plain training."""
    model, batch = Stack(), torch.randn(6, WIDTH)
    for layer in model.layers:
        layer.inner.requires_grad_(False)
    plain = copy.deepcopy(model)
    attached(model)
    for seed in range(2):
        step(model, batch, seed)
        assert_same_gradients(model, plain_gradients(plain, batch, seed))


def test_gradients_of_the_input_are_those_of_the_same_mask():
    model = Stack()
    batch = torch.randn(6, WIDTH, requires_grad=True)
    plain = copy.deepcopy(model)
    attached(model)
    for seed in range(2):
        torch.manual_seed(seed)
        (expected,) = torch.autograd.grad(plain(batch), batch)
        torch.manual_seed(seed)
        (found,) = torch.autograd.grad(model(batch), batch)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_with_cmp_the_16_bit_weights_need_gradients(dtype):
    model, batch = Stack(), torch.randn(6, WIDTH).to(dtype).float()
    short = copy_as(model, dtype)
    cmp = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    scale: dict[str, Any] = {"loss_scale_init": 1.0} if cmp == "fp16" else {}
    optimizer = attached(model, cmp=cmp, **scale).wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    for seed in range(2):
        step(model, batch, seed)
        expected = plain_gradients(short, batch.to(dtype), seed)
        assert_same_gradients(model, {name: None if g is None else g.float() for name, g in expected.items()})
    assert optimizer is not None


def test_a_layer_that_begins_to_draw_later_is_noticed():
    model, batch = Stack(p=0.0), torch.randn(6, WIDTH)
    plain = copy.deepcopy(model)
    attached(model)
    for seed, p in enumerate((0.0, 0.0, 0.5, 0.1)):
        for each in (*model.layers, *plain.layers):
            each.p = p
        step(model, batch, seed)
        assert_same_gradients(model, plain_gradients(plain, batch, seed))


def modes(model: nn.Module) -> list[bool]:
    """The grad modes of the last layer since they were asked for last."""
    found, model.layers[-1].grad_modes = model.layers[-1].grad_modes, []
    return found


@pytest.mark.parametrize("check", ["raise", "off"])
def test_grad_mode_is_for_layers_that_draw_and_for_calls_that_are_compared(check):
    model, batch = Stack(), torch.randn(6, WIDTH)
    attached(model, check_recompute=check)
    step(model, batch, 0)
    # Not compared: the forward, the forward again, the recompute.
    assert modes(model) == ([True, True] if check == "raise" else [False, True, True])
    step(model, batch, 1)
    assert modes(model) == [True, True]
    with torch.no_grad():
        model(batch)
    assert modes(model) == [False]
    model.eval()  # in which it draws nothing
    for number in (1, 2):
        step(model, batch, number)
        assert modes(model) == [check == "raise" and number == 1, True]
    model.train()
    step(model, batch, 3)
    assert modes(model) == [True, True]
    quiet = Stack(p=0.0)
    attached(quiet, check_recompute=check)
    for seed in range(2):
        step(quiet, batch, seed)
        assert modes(quiet) == [check == "raise" and seed == 0, True]


def test_the_first_call_writes_buffers_once():
    model, batch = Stack(), torch.randn(6, WIDTH)
    attached(model)
    for number in range(1, 4):
        step(model, batch, number)
        assert [int(layer.calls) for layer in model.layers] == [number] * 3


class Overwriting(Attentive):
    """Writes into its argument, which a forward can do once only."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.add_(1.0))


def test_a_layer_that_has_written_into_its_argument_is_not_run_again():
    model, batch = Stack(Overwriting), torch.randn(6, WIDTH)
    plain = copy.deepcopy(model)
    attached(model, check_recompute="off")
    torch.manual_seed(0)
    with torch.no_grad():
        expected = plain(batch.clone())
    torch.manual_seed(0)
    assert torch.equal(model(batch.clone()), expected)


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


def test_all_kinds_of_outputs_leave_a_layer_that_draws():
    model, batch = Wide(Returning), torch.randn(6, WIDTH, requires_grad=True)
    plain = copy.deepcopy(model)
    attached(model)
    for seed in range(2):
        for each in (model, plain):
            each.zero_grad()
            torch.manual_seed(seed)
            loss = each(batch)
            loss.backward()
        assert_same_gradients(model, gradients(plain))


class Keeping(Attentive):
    """Leaves what it computes to its owner."""

    inside: Any = None
    watched: Any = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = self.inner(hidden).tanh()
        self.watched = StorageWeakRef(inner.untyped_storage())  # which the node of an ordinary graph would keep
        self.inside = dropped(inner, self.p)
        return hidden + self.outer(self.inside)


@pytest.mark.filterwarnings("ignore:a Keeping keeps:UserWarning")
def test_the_graph_of_a_forward_keeps_no_tensors():
    model, batch = Stack(Keeping), torch.randn(6, WIDTH)
    attached(model)
    step(model, batch, 0)
    gc.disable()
    try:
        loss = model(batch)
        assert all(layer.inside.requires_grad for layer in model.layers)
        assert all(layer.watched.expired() for layer in model.layers)
    finally:
        gc.enable()
    loss.backward()


class Mark:
    """What a graph holds."""


class Marked(torch.autograd.Function):
    """The identity, whose node holds an object of the layer."""

    @staticmethod
    def forward(ctx: Any, mark: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.mark = mark
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient


class Marking(Attentive):
    """Looks at the graph of its last call or ubatch."""

    def __init__(self) -> None:
        super().__init__()
        self.mark: Any = lambda: None
        self.graphs = 0
        """How many were alive when the next call or ubatch began."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.graphs += self.mark() is not None
        mark = Mark()
        self.mark = weakref.ref(mark)
        return Marked.apply(mark, super().forward(hidden))


@pytest.mark.parametrize("ubatch_size", [None, 2])
def test_no_graph_outlives_its_ubatch(ubatch_size):
    model, batch = Stack(Marking), torch.randn(6, WIDTH)
    attached(model, ubatch_size=ubatch_size)
    step(model, batch, 0)
    gc.disable()
    try:
        loss = model(batch)
        assert [layer.mark() for layer in model.layers] == [None] * 3
        loss.backward()
    finally:
        gc.enable()
    assert [layer.graphs for layer in model.layers] == [0] * 3


@pytest.mark.filterwarnings("ignore:a Keeping keeps:UserWarning")
def test_a_backward_into_the_forward_of_a_layer_is_refused():
    model, batch = Stack(Keeping), torch.randn(6, WIDTH)
    attached(model)
    step(model, batch, 0)
    model(batch)
    with pytest.raises(RuntimeError, match=r"must go through the outputs of a layer.*make the layer return it"):
        model.layers[-1].inside.sum().backward()
