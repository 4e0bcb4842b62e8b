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
    train_once,
)
from tiers import more


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


class SetsItself(nn.Module):
    """Sets a weight to itself when its graph needs another one, as PEFT's adapters of experts do."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        x = x @ self.first
        with torch.no_grad():
            self.second.copy_(self.second.clone())
        return torch.tanh(x @ self.second)


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(SetsItself() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_weight_that_is_set_to_itself_changes_no_other():
    model = Sequence()
    plain, x = copy.deepcopy(model), torch.randn(4, 3)
    plain(x).sum().backward()
    with forced_copies():
        attach_l2l(model, L2LConfig(layer_classes=("SetsItself",)))
        model(x).sum().backward()
    assert_bits_of_plain(gradients(model), gradients(plain))


def test_tied_parameters_share_one_leaf(copies):
    module, x = Tied(), torch.randn(4, 3)
    module(x).sum().backward()
    expected = gradients(module)
    module.zero_grad()
    weights = device_weights(module, requires_grad=True)
    assert len(weights.leaves) == 2
    with weights.placed():
        assert module.first.weight is module.second.weight is weights.leaves[0]
        module(x).sum().backward()
    found = {master.name: gradient for master, gradient in weights.take_gradients()}
    assert_same_bits(found, expected)
    assert all(p.grad is None for p in module.parameters())


def test_frozen_masters_have_frozen_leaves(copies):
    module = Tied()
    module.second.bias.requires_grad_(False)
    weights = device_weights(module, requires_grad=True)
    with weights.placed():
        assert module.first.weight.requires_grad and not module.second.bias.requires_grad
        module(torch.randn(4, 3)).sum().backward()
    assert [master.parameter for master, _ in weights.take_gradients()] == [module.first.weight]


def test_without_requires_grad_no_leaf_has_it(copies):
    weights = device_weights(Tied(), requires_grad=False)
    assert not any(leaf.requires_grad for leaf in weights.leaves)


def test_leaves_made_in_inference_mode_can_be_trained_with(copies):
    module, x = Tied(), torch.randn(4, 3)
    with torch.inference_mode():
        weights = device_weights(module, requires_grad=True)
    with weights.placed():
        module(x).sum().backward()
    assert len(weights.take_gradients()) == 2


def test_masters_and_buffers_are_back_after_an_error(copies):
    module = nn.BatchNorm1d(3)
    before = {**module._parameters, **module._buffers}
    weights = device_weights(module, requires_grad=True)
    with pytest.raises(KeyError), weights.placed(keep_buffers=False):
        assert module.weight is not before["weight"] and module.running_mean is not before["running_mean"]
        raise KeyError
    after = {**module._parameters, **module._buffers}
    assert all(after[name] is tensor for name, tensor in before.items())


def test_kept_buffers_go_back_to_the_host(copies):
    module = Counter()
    written = module.written
    for count in (1.0, 2.0):
        with device_weights(module, requires_grad=False).placed():
            module()
        assert module.written is written
        assert module.written.tolist() == module.assigned.tolist() == [count, count]
        assert module.emptied is None and module.never is None


def test_what_a_call_wrote_before_it_failed_goes_back_as_in_plain_torch(copies):
    module = Counter()
    with pytest.raises(KeyError), device_weights(module, requires_grad=False).placed():
        module()
        raise KeyError
    assert module.written.tolist() == module.assigned.tolist() == [1.0, 1.0]


def test_with_keep_buffers_false_nothing_is_kept(copies):
    module = Counter()
    before = dict(module._buffers)
    with device_weights(module, requires_grad=False).placed(keep_buffers=False):
        module()
        assert module.written.tolist() == [1.0, 1.0]
    assert all(module._buffers[name] is buffer for name, buffer in before.items())
    assert all(b.tolist() == [0.0, 0.0] for b in module.buffers())


def test_one_buffer_in_two_modules_stays_one(copies):
    first, second = Counter(), Counter()
    second.written = first.written
    with device_weights(nn.ModuleList([first, second]), requires_grad=False).placed():
        assert first.written is second.written
        first()
        second()
    assert first.written is second.written and first.written.tolist() == [2.0, 2.0]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return x + torch.tanh(self.norm(self.linear(x)))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.BatchNorm1d(4)  # one of the shell, too
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).square().mean()


def test_running_statistics_move_once_per_forward(copies):
    plain = Normed()
    ours = copy.deepcopy(plain)
    attach_l2l(ours, L2LConfig(layer_classes=("Block",)))
    buffers = dict(ours.named_buffers())
    for model in (plain, ours):
        torch.manual_seed(1)
        for _ in range(2):
            model(torch.randn(6, 3)).backward()
    assert_bits_of_plain(gradients(ours), gradients(plain))
    for name, buffer in plain.named_buffers():
        assert has_bits_of_plain(buffers[name], buffer), name
        assert dict(ours.named_buffers())[name] is buffers[name], name
    assert ours.blocks[1].norm.num_batches_tracked.item() == 2
    plain.eval(), ours.eval()
    x = torch.randn(6, 3)
    with torch.no_grad():
        assert has_bits_of_plain(ours(x), plain(x))


@pytest.mark.parametrize("options", [{"ubatch_size": 3, "stash": "host"}, *more({})], ids=str)
def test_training_after_evaluation_in_inference_mode(options, copies):
    model = bert().double()
    batch = batch_for(model)
    _, expected = reference(model, batch)
    attached(model, **options)
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


class ParamWrapper(nn.Module):
    """Adds to a weight while it runs, by a parametrization, as PEFT's adapters of experts do."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.delta = nn.Parameter(torch.full_like(base.weight, 0.5))

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


def test_a_weight_is_parametrized_while_its_layer_runs(copies):
    torch.manual_seed(0)
    blocks = nn.Sequential(*[ParamWrapper(nn.Linear(4, 4)) for _ in range(2)]).double()
    model = nn.ModuleDict({"blocks": blocks})
    for wrapper in blocks:
        wrapper.base.requires_grad_(False)
    plain = copy.deepcopy(blocks)
    x = torch.randn(6, 4, dtype=torch.float64)
    plain(x).sum().backward()
    attach_l2l(model, L2LConfig(layer_classes=("ParamWrapper",)))
    for _ in range(2):
        blocks.zero_grad()
        blocks(x).sum().backward()
        assert_bits_of_plain(gradients(blocks), gradients(plain))
        assert all(isinstance(wrapper._modules["base"].weight, nn.Parameter) for wrapper in blocks)
        assert all("weight" not in vars(wrapper.base) for wrapper in blocks)
