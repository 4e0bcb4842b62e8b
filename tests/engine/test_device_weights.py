"""Device copies of weights and buffers stand in the modules for the time of a call, and only then."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from devices import DEVICE
from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.runtime.flat_memory import Layout
from hf_l2l.runtime.tensors import parts_of
from hf_l2l.testing import Costs, page_lock_limit, page_locked_bytes, virtual_clock
from memory_switches import forced_copies
from models import (
    EXACT,
    assert_bits_of_plain,
    assert_same_bits,
    attached,
    batch_for,
    bert,
    gradients,
    has_bits_of_plain,
    llama,
    reference,
    relative_error,
    train_once,
)
from tiers import cpu_suffices, on_sim
from toy_quantized import ToyInt8, quantize_linears
from training import tiny_bert


@pytest.fixture(params=["views", "copies"])
def copies(request):
    with forced_copies() if request.param == "copies" else nullcontext():
        yield


class Tied(nn.Module):
    """Has a weight and a buffer in two modules; writes that in place, assigns another one, and empties a third."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.first.register_buffer("written", torch.zeros(2))
        self.second.register_buffer("written", self.first.written)
        self.register_buffer("assigned", torch.zeros(2))
        self.register_buffer("emptied", torch.zeros(2))
        self.register_buffer("never", None)
        self.fails = False

    def forward(self, x):
        assert self.first.weight is self.second.weight and self.first.written is self.second.written
        if not torch.is_grad_enabled():
            self.second.written += 1
            self.assigned = self.assigned + 1
            self.emptied = None
        if self.fails:
            raise KeyError
        return self.second(self.first(x))


@cpu_suffices
def test_tied_parameters_share_one_leaf_and_frozen_ones_have_no_gradient(copies):
    plain, x = nn.Sequential(Tied(), Tied()), torch.randn(4, 3)
    for layer in plain:
        layer.second.bias.requires_grad_(False)
    ours = attached(copy.deepcopy(plain), layer_classes=("Tied",))
    for model in (plain, ours):
        model(x).sum().backward()
    assert_bits_of_plain(gradients(ours), gradients(plain))


@cpu_suffices
def test_buffers_go_back_to_the_host(copies):
    """One buffer of two modules stays one; also after a call that failed, as in plain torch."""
    layer = Tied()
    model = attached(nn.Sequential(Tied(), layer), layer_classes=("Tied",))
    written = layer.first.written
    for count in (1.0, 2.0):
        layer.fails = count == 2.0
        with pytest.raises(KeyError) if layer.fails else nullcontext(), torch.no_grad():
            model(torch.randn(4, 3))
        assert layer.first.written is layer.second.written is written
        assert written.tolist() == layer.assigned.tolist() == [count, count]
        assert layer.emptied is None and layer.never is None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return x + torch.tanh(self.norm(self.linear(x)))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(3)])
        self.norm = nn.BatchNorm1d(4)  # one of the shell, too

    def forward(self, x):
        return self.norm(self.blocks(x)).pow(3).mean()


@pytest.mark.parametrize("cmp", [None, "bf16"])
def test_running_statistics_move_once_per_forward_and_stay_fp32(cmp, copies):
    torch.manual_seed(2)
    plain, x = Normed(), torch.randn(64, 4)
    ours = copy.deepcopy(plain)
    attach_l2l(ours, L2LConfig(layer_classes=("Block",), cmp=cmp))
    buffers = dict(ours.named_buffers())
    for model in (plain, ours):
        for _ in range(2):
            model(x).backward()
    if cmp is None:
        assert_bits_of_plain(gradients(ours), gradients(plain))
    else:
        assert relative_error(gradients(ours), gradients(plain)) < 0.1
    for name, buffer in plain.named_buffers():
        assert dict(ours.named_buffers())[name] is buffers[name], name
        assert has_bits_of_plain(buffers[name], buffer) or cmp is not None, name
        torch.testing.assert_close(buffers[name], buffer, rtol=0.02, atol=0.02)
    assert ours.blocks[1].norm.num_batches_tracked.item() == 2
    plain.eval(), ours.eval()
    with torch.no_grad():
        assert has_bits_of_plain(ours(x), plain(x)) or cmp is not None


@cpu_suffices
def test_training_after_evaluation_in_inference_mode(copies):
    model = bert().double()
    batch = batch_for(model)
    _, expected = reference(model, batch)
    attached(model, ubatch_size=3, stash="host")
    model.eval()
    with torch.inference_mode():
        evaluated = model(**batch).logits
    train_once(model, batch)
    for name, gradient in gradients(model).items():
        assert torch.allclose(gradient, expected[name], rtol=EXACT, atol=EXACT), name
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, evaluated)
    assert not any(t.is_inference() for t in (*model.parameters(), *model.buffers()))


class SetsItself(nn.Module):
    """Sets a weight to itself when its graph needs another one, as PEFT's adapters of experts do."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        x = x @ self.first
        with torch.no_grad():
            self.second.copy_(self.second.clone())
        return torch.tanh(x @ self.second)


class Sum(nn.Module):
    def __init__(self, delta: torch.Tensor):
        super().__init__()
        self.delta = [delta]  # no parameter of this module

    def forward(self, weight):
        return weight + self.delta[0]


class ParamWrapper(nn.Module):
    """Adds to a weight while it runs, by a parametrization: PEFT's class of that name."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.delta = nn.Parameter(torch.full_like(self.base.weight, 0.5))

    def forward(self, x):
        nn.utils.parametrize.register_parametrization(self.base, "weight", Sum(self.delta))
        try:
            return x + self.base(x).tanh()
        finally:
            nn.utils.parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


@pytest.mark.parametrize(("kind", "apart"), [(SetsItself, True), (ParamWrapper, True), (ParamWrapper, False)])
def test_layers_that_change_a_weight_while_they_run(kind, apart):
    blocks = nn.Sequential(kind(), kind()).double()
    plain, x = copy.deepcopy(blocks), torch.randn(6, 4, dtype=torch.float64)
    plain(x).sum().backward()
    with forced_copies() if apart else nullcontext():
        attach_l2l(blocks, L2LConfig(layer_classes=(kind.__name__,)))
        for _ in range(2):
            blocks.zero_grad()
            blocks(x).sum().backward()
            assert_bits_of_plain(gradients(blocks), gradients(plain))
    if kind is ParamWrapper:
        assert all(isinstance(block._modules["base"]._parameters["weight"], nn.Parameter) for block in blocks)
        assert all("weight" not in vars(block.base) for block in blocks)


# ---- a frozen base of quantized weights, which travel as they are packed, is trained through


def int8_bert(layers: int = 2, *, nested: bool = True) -> nn.Module:
    return quantize_linears(tiny_bert(dropout=0.0, layers=layers), nested=nested)


def with_a_quantized_head() -> nn.Module:
    model = llama()
    model.requires_grad_(False)
    quantize_linears(model.lm_head)
    model.model.layers.requires_grad_(True)
    return model


def compare(model: nn.Module, plain: nn.Module, *, tolerance: float = 1e-6) -> None:
    """Parts that are written are uploaded again."""
    for each in (model, plain):
        each.zero_grad()
        for p in each.parameters():
            if isinstance(p, ToyInt8):
                p.values.div_(2, rounding_mode="trunc")
        train_once(each, batch_for(each))
    assert relative_error(gradients(model), gradients(plain)) < tolerance


@pytest.mark.parametrize(
    ("make", "options", "memory"),
    [
        (int8_bert, {}, nullcontext),
        (partial(int8_bert, nested=False), {"ubatch_size": 3, "stash": "host"}, nullcontext),
        (int8_bert, {"ubatch_size": 3, "cmp": "bf16"}, nullcontext),
        (int8_bert, {}, forced_copies),
        (with_a_quantized_head, {}, forced_copies),
    ],
)
def test_gradients_are_those_of_plain_torch(make, options, memory):
    """On the host, to the bit if the batch is whole."""
    plain = make()
    model = copy.deepcopy(plain)
    with memory():
        attached(model, device=DEVICE, **options)
        for _ in range(2):
            compare(model, plain, tolerance=2e-2 if "cmp" in options else 1e-6)
            if DEVICE == "cpu" and make is int8_bert and not options:
                assert_same_bits(gradients(model), gradients(plain))
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_the_detached_model_and_its_copies_are_as_before():
    model = int8_bert()
    before, objects = copy.deepcopy(model), list(model.parameters())
    attached(model, device=DEVICE)
    train_once(model, batch_for(model))
    copied = copy.deepcopy(model)
    detach_l2l(model)
    assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
    for each in (model, copied):
        for p, own in zip(each.parameters(), before.parameters(), strict=True):
            assert type(p) is type(own)
            assert all(torch.equal(a, b) for a, b in zip(parts_of(p), parts_of(own), strict=True))
        assert list(each.state_dict()) == list(before.state_dict())


@on_sim
def test_packed_bytes_are_uploaded_and_gradients_of_trained_weights_downloaded():
    layers = 4
    model = int8_bert(layers)
    eps = attach_l2l(model, L2LConfig(device="sim"))
    optimizer = eps.wrap(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    for _ in range(2):
        train_once(model, batch_for(model))
        optimizer.step()
    eps.synchronize()
    with virtual_clock(Costs(link_bytes_per_s=1.0, flop_per_s=1e9, host_bytes_per_s=1e9)) as clock:
        train_once(model, batch_for(model))
    uploaded, downloaded = (
        [round(t.end - t.start) for t in clock.tasks if t.lane == lane and t.stream != "the default stream"]
        for lane in ("upload", "download")
    )
    unit = eps.masters.layer_units[0]
    packed = [part.nbytes for p in unit.parameters if isinstance(p, ToyInt8) for part in parts_of(p)]
    assert sum(packed) < 0.5 * sum(4 * p.numel() for p in unit.parameters if isinstance(p, ToyInt8))
    # A layer is one copy, whose pieces begin at a multiple of 256 bytes, and two stay in their slots between sweeps.
    assert unit.layout.num_bytes < sum(packed) + 256 * len(unit.parts) + 2 * sum(p.numel() for p in unit.parameters)
    assert uploaded.count(unit.layout.num_bytes) == layers + layers - 2
    sums = Layout([p for p in unit.parameters if p.requires_grad]).num_bytes
    trained = [p for p in model.parameters() if p.requires_grad]
    shell = sum(p.nbytes for p in trained if eps.masters.of(p).layer_number == 0)
    assert downloaded.count(sums) == layers
    assert sum(downloaded) == layers * sums + shell + 4 * len(trained)  # and their norms


@on_sim
def test_parts_are_page_locked_as_long_as_the_model_is_attached():
    model = int8_bert()
    values = model.bert.encoder.layer[0].output.dense.weight.values
    address, content = values.data_ptr(), values.clone()
    attached(model, device="sim")
    moved = values.data_ptr()
    assert page_locked_bytes() > 0 and moved != address and torch.equal(values, content)
    train_once(model, batch_for(model))
    assert model.bert.encoder.layer[0].output.dense.weight.values is values and values.data_ptr() == moved
    detach_l2l(model)
    assert values.data_ptr() != moved and torch.equal(values, content)


@on_sim
@pytest.mark.filterwarnings("ignore:.*could be page-locked")
def test_parts_that_are_not_page_locked_are_uploaded_one_by_one():
    plain = int8_bert()
    with page_lock_limit(0):
        model = attached(copy.deepcopy(plain), device="sim")
        compare(model, plain)
        detach_l2l(model)
