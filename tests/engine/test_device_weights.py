"""Device copies of weights and buffers stand in the modules for the time of a call, and only then."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.device.device_weights import DeviceWeights, uploaded
from hf_l2l.eps.host_memory import HostMemory
from hf_l2l.eps.masters import Masters
from hf_l2l.eps.weight_copies import Copies
from hf_l2l.runtime.stream import HOST
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
    reference,
    relative_error,
    train_once,
)
from tiers import cpu_suffices


@pytest.fixture(params=["views", "copies"])
def copies(request):
    with forced_copies() if request.param == "copies" else nullcontext():
        yield


def device_weights(module: nn.Module, *, requires_grad: bool) -> DeviceWeights:
    masters = Masters(module)
    copies = Copies(masters, HostMemory(HOST, masters))
    return uploaded(masters.unit(module), HOST, copies, requires_grad=requires_grad)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


class Counter(nn.Module):
    """Writes one buffer in place, assigns another, empties a third."""

    def __init__(self):
        super().__init__()
        self.register_buffer("written", torch.zeros(2))
        self.register_buffer("assigned", torch.zeros(2))
        self.register_buffer("emptied", torch.zeros(2))
        self.register_buffer("never", None)

    def forward(self):
        self.written += 1
        self.assigned = self.assigned + 1
        self.emptied = None


@cpu_suffices
def test_tied_parameters_share_one_leaf_and_frozen_ones_have_none_of_the_gradients(copies):
    module, x = Tied(), torch.randn(4, 3)
    module.second.bias.requires_grad_(False)
    module(x).sum().backward()
    expected = gradients(module)
    module.zero_grad()
    weights = device_weights(module, requires_grad=True)
    assert len(weights.leaves) == 2
    with weights.placed():
        assert module.first.weight is module.second.weight is weights.leaves[0]
        assert not module.second.bias.requires_grad
        module(x).sum().backward()
    found = {master.name: gradient for master, gradient in weights.take_gradients()}
    assert [*found] == ["first.weight"]
    assert_same_bits(found, {"first.weight": expected["first.weight"]})
    assert all(p.grad is None for p in module.parameters())


@cpu_suffices
def test_kept_buffers_go_back_to_the_host(copies):
    """One buffer of two modules stays one; also after a call that failed, as in plain torch."""
    module, other = Counter(), Counter()
    other.written = written = module.written
    for count in (1.0, 2.0):
        fails = pytest.raises(KeyError) if count == 2.0 else nullcontext()
        with fails, device_weights(nn.ModuleList([module, other]), requires_grad=False).placed():
            assert module.written is other.written
            module()
            if count == 2.0:
                raise KeyError
        assert module.written is other.written is written
        assert module.written.tolist() == module.assigned.tolist() == [count, count]
        assert module.emptied is None and module.never is None


@cpu_suffices
def test_with_keep_buffers_false_nothing_is_kept(copies):
    module = Counter()
    before = dict(module._buffers)
    with device_weights(module, requires_grad=False).placed(keep_buffers=False):
        module()
        assert module.written.tolist() == [1.0, 1.0]
    assert all(module._buffers[name] is buffer for name, buffer in before.items())
    assert all(b.tolist() == [0.0, 0.0] for b in module.buffers())


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


def test_running_statistics_move_once_per_forward(copies):
    plain = Normed()
    ours = copy.deepcopy(plain)
    attach_l2l(ours, L2LConfig(layer_classes=("Block",)))
    buffers = dict(ours.named_buffers())
    for model in (plain, ours):
        torch.manual_seed(1)
        for _ in range(2):
            model(torch.randn(6, 4)).backward()
    assert_bits_of_plain(gradients(ours), gradients(plain))
    for name, buffer in plain.named_buffers():
        assert has_bits_of_plain(buffers[name], buffer), name
        assert dict(ours.named_buffers())[name] is buffers[name], name
    assert ours.blocks[1].norm.num_batches_tracked.item() == 2
    plain.eval(), ours.eval()
    x = torch.randn(6, 4)
    with torch.no_grad():
        assert has_bits_of_plain(ours(x), plain(x))


def test_running_statistics_stay_fp32_in_16_bits(copies):
    torch.manual_seed(2)
    plain = Normed()
    ours = copy.deepcopy(plain)
    attach_l2l(ours, L2LConfig(layer_classes=("Block",), cmp="bf16"))
    x = torch.randn(64, 4)
    for model in (plain, ours):
        for _ in range(2):
            model(x).backward()
    assert relative_error(gradients(ours), gradients(plain)) < 0.1
    for name, buffer in plain.named_buffers():
        found = dict(ours.named_buffers())[name]
        assert found.dtype == buffer.dtype, name
        torch.testing.assert_close(found, buffer, rtol=0.02, atol=0.02)


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


class ParamWrapper(nn.Module):
    """Adds to a weight while it runs, by a parametrization: PEFT's class of that name."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.delta = nn.Parameter(torch.full_like(self.base.weight, 0.5))

    def forward(self, x):
        nn.utils.parametrize.register_parametrization(self.base, "weight", _Sum(self.delta))
        try:
            return x + self.base(x).tanh()
        finally:
            nn.utils.parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


class _Sum(nn.Module):
    def __init__(self, delta: torch.Tensor):
        super().__init__()
        self.delta = [delta]  # no parameter of this module

    def forward(self, weight):
        return weight + self.delta[0]


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
