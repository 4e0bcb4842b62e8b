"""A model that is wholly resident and keeps all its graphs runs as in plain torch: its bits, and its operations."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.engine.relay import Relay
from hf_l2l.eps.nonfinite import NonFiniteError
from hf_l2l.model.stacks import find_stacks
from models import FAMILIES, attached, batch_for, gradients, train_once
from training import l2l_trainer, logs, settled_memory, tiny_bert
from update_cases import toy, toy_under

PLAIN: dict[str, Any] = {"resident": "all", "kept_graphs": 3, "ubatch_size": None}


def in_plain_torch(model: nn.Module, batch: dict[str, torch.Tensor], steps: int, accumulation: int) -> list[Any]:
    """Losses, norms and weights of training on the device without L2L."""
    model.to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[Any] = []
    torch.sim.manual_seed(5)
    for _ in range(steps):
        for _ in range(accumulation):
            loss = model(**{name: value.to("sim") for name, value in batch.items()}).loss
            loss.backward()
            found.append(loss.item())
        found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach().cpu() for p in model.parameters())]


def under_l2l(
    model: nn.Module, batch: dict[str, torch.Tensor], steps: int, accumulation: int, **options: Any
) -> list[Any]:
    """The same by L2L."""
    eps = attach_l2l(model, L2LConfig(**{"device": "sim", "layer_classes": ("Block",), **PLAIN, **options}))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    found: list[Any] = []
    torch.sim.manual_seed(5)
    for _ in range(steps):
        for _ in range(accumulation):
            loss = model(**batch).loss
            loss.backward()
            found.append(loss.item())
        found.append(eps.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach().cpu() for p in model.parameters())]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b)), number


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("mode", ["serial", "deferred"])
def test_it_trains_as_plain_torch_on_the_device(mode, accumulation):
    batch = batch_for(toy(), masked=False)
    expected = in_plain_torch(toy().train(), batch, 4, accumulation)
    assert_same(under_l2l(toy().train(), batch, 4, accumulation, eps_update=mode), expected)


@pytest.mark.slow
def test_a_hundred_steps():
    batch = batch_for(toy(), masked=False)
    assert_same(under_l2l(toy().train(), batch, 100, 1), in_plain_torch(toy().train(), batch, 100, 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_gradients_of_plain_torch_on_the_device(family):
    torch.manual_seed(0)
    model = FAMILIES[family]()
    plain, batch = copy.deepcopy(model).to("sim"), batch_for(model)
    count = sum(len(stack.layers) for stack in find_stacks(model))
    attached(model, device="sim", resident="all", kept_graphs=count)
    expected = train_once(plain, {name: value.to("sim") for name, value in batch.items()})
    assert torch.equal(train_once(model, batch), expected)
    found = gradients(model)
    for name, gradient in gradients(plain).items():
        assert (found[name] is None) == (gradient is None), name
        assert gradient is None or torch.equal(found[name], gradient), name


class Operations(TorchDispatchMode):
    """Counts the operations that are dispatched inside."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operations(*, plain: bool) -> int:
    model = tiny_bert(layers=12, dropout=0.0).train()
    batch = batch_for(model)
    if plain:
        model.to("sim")
        batch = {name: value.to("sim") for name, value in batch.items()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        eps = attach_l2l(model, L2LConfig(device="sim", resident="all", kept_graphs=12))
        optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(3):
        with Operations() as counted:
            model(**batch).loss.backward()
            if plain:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            else:
                eps.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    return sum(counted.found.values())


def test_a_step_has_the_operations_of_plain_torch():
    """And a few more: inputs that go to the device, and the vote on the norm."""
    expected = operations(plain=True)
    assert expected < operations(plain=False) <= 1.03 * expected


@pytest.fixture
def relayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calls of layers that the relay runs, ubatch by ubatch."""
    runs: list[int] = []
    execute = Relay._execute
    monkeypatch.setattr(Relay, "_execute", lambda *args: (runs.append(1), execute(*args))[1])
    return runs


def test_a_batch_of_several_micro_batches_runs_in_the_relay(relayed):
    found, batches = [], [batch_for(toy(), masked=False, rows=rows) for rows in (3, 7, 2, 5)]
    for options in ({}, {"resident": "all", "kept_graphs": 3}):
        model, eps, optimizer, _ = toy_under("sim", "deferred", **options)
        relayed.clear()
        logged = []
        for batch in batches:
            loss = model(**batch).loss
            loss.backward()
            logged += [loss.item(), eps.clip_grad_norm_(0.5).item()]
            optimizer.step()
        eps.synchronize()
        found.append([*logged, *(p.detach().cpu() for p in model.parameters())])
    assert len(relayed) == 2 * 3  # those of 7 and 5 rows, through 3 layers
    assert_same(found[1], found[0])


def test_both_add_to_the_same_gradient(relayed):
    model, eps, optimizer, batch = toy_under("sim", "deferred", resident="all", kept_graphs=3)
    small = batch_for(model, masked=False, rows=3)
    model.eval()
    sums = []
    for order in ((batch, small), (small, batch)):
        for each in order:
            model(**each).loss.backward()
        sums.append([p.grad.clone() for p in model.parameters()])
        norm = torch.nn.utils.get_total_norm(sums[-1])
        assert torch.equal(eps.grad_norm(), norm.cpu())
        optimizer.zero_grad()
    assert len(relayed) == 2 * 3
    for a, b in zip(*sums, strict=True):
        assert torch.equal(a, b)


def test_clipping_between_backwards():
    norms = []
    for options in ({"ubatch_size": 5}, {}):
        model = toy()
        eps = attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), **{**PLAIN, **options}))
        optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            model(**batch_for(model, masked=False)).loss.backward()
            norms.append(eps.clip_grad_norm_(0.01).item())
        optimizer.step()
    assert norms[2:] == pytest.approx(norms[:2], rel=1e-5)


def test_gradients_of_parameters_and_several_graphs():
    """What L2L cannot do with copies of the weights, plain torch can."""
    model = toy().eval()
    attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), **PLAIN))
    batch = batch_for(model, masked=False)
    first, second = model(**batch).loss, model(**batch).loss
    (by_name,) = torch.autograd.grad(first, [model.blocks[0].up.weight], create_graph=True)
    assert by_name.requires_grad
    second.backward(retain_graph=True)
    second.backward()
    torch.testing.assert_close(model.blocks[0].up.weight.grad, 2 * by_name)


def test_the_last_vote_does_not_count_for_new_gradients():
    model = toy()
    eps = attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), **PLAIN))
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    batch = batch_for(model, masked=False)
    model(**batch).loss.backward()
    eps.clip_grad_norm_(1.0)
    optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    (model(**batch).loss * torch.inf).backward()
    with pytest.raises(NonFiniteError):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.linear(x) * self.scale


def test_layers_find_their_buffers_on_the_device():
    model = toy()
    model.blocks = nn.ModuleList(WithBuffer() for _ in range(2))
    eps = attach_l2l(model, L2LConfig(device="sim", layer_classes=("WithBuffer",), resident="all", kept_graphs=2))
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        model(**batch_for(model, masked=False)).loss.backward()
        optimizer.step()
    assert [block.calls.item() for block in model.blocks] == [2.0, 2.0]
    assert {b.device.type for b in model.buffers()} == {"cpu"}


def test_an_evaluation_and_a_call_of_a_layer(relayed):
    model = toy().eval()
    batch = batch_for(model, masked=False)
    with torch.no_grad():
        expected = copy.deepcopy(model).to("sim")(**{k: v.to("sim") for k, v in batch.items()}).loss
    attach_l2l(model, L2LConfig(device="sim", layer_classes=("Block",), **PLAIN))
    held = settled_memory()
    with torch.no_grad():
        assert torch.equal(model(**batch).loss, expected)
    model.blocks[1](torch.ones(2, 3, 8)).sum().backward()
    assert model.blocks[1].up.weight.grad is not None and not relayed
    for p in model.parameters():
        p.grad = None
    assert settled_memory() == held


def test_the_trainer_runs_it(tmp_path, relayed):
    expected = l2l_trainer(tmp_path / "streamed", max_steps=3)
    expected.train()
    relayed.clear()
    found = l2l_trainer(tmp_path / "plain", max_steps=3, l2l_resident="all", l2l_kept_graphs=4)
    found.train()
    assert logs(found) == logs(expected) and not relayed
