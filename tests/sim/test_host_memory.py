"""Masters and gradients in page-locked memory: the same objects, the same bits, freed when unused."""

from __future__ import annotations

import copy
import gc
import pickle
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.testing import page_lock_limit, page_locked_bytes
from models import Toy, assert_same_bits, batch_for, gpt2, gradients, reference, relative_error, train_once
from runs import OPTIMIZERS, Run, assert_same_run, attach, config_for, train
from tiers import combinations, more


@pytest.fixture(autouse=True)
def _nothing_stays_locked() -> Iterator[None]:
    """After every test here nothing is registered that was not before it."""
    before = settled(0)
    yield
    assert settled(before) <= before


def settled(expected: int) -> int:
    """The bytes locked once models that are gone are collected and the device's thread has let go of them."""
    for turn in range(20):
        if page_locked_bytes() <= expected:
            break
        if turn == 3:
            gc.unfreeze()  # of a model that another module of tests has left
        gc.collect()
        time.sleep(0.02)
    return page_locked_bytes()


def copies_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def on_sim(model: nn.Module | None = None, **options: Any) -> nn.Module:
    model = Toy(2, dropout=0.0) if model is None else model
    attach_l2l(model, config_for(model, device="sim", **options))
    return model


def trains_as_plain(model: nn.Module) -> None:
    """Gradients and updates, also of weights that were just loaded."""
    batch = batch_for(model, masked=False)
    for _ in range(2):
        model.zero_grad()
        _, expected = reference(model, batch)
        train_once(model, batch)
        assert relative_error(gradients(model), expected) <= 1e-6
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_masters_stay_the_same_objects_in_memory_of_exact_size():
    """With the same bits and a storage each. Torch's own allocator would take 1.5 times as much for these shapes."""
    model = Toy(2, width=192)
    objects, values = list(model.parameters()), copies_of(model)
    on_sim(model)
    assert all(a is b for a, b in zip(model.parameters(), objects, strict=True))
    assert_same_bits(copies_of(model), values)
    assert len({p.untyped_storage().data_ptr() for p in objects}) == len(objects), "tied ones moved once"
    assert model.head.weight is model.embed.weight
    assert all(p.is_leaf and p.requires_grad and p.is_pinned() for p in objects)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in objects)
    needed = sum(p.nbytes for p in objects)
    assert needed <= page_locked_bytes() <= 1.1 * needed
    train_once(model, batch_for(model, masked=False))
    assert 2 * needed <= page_locked_bytes() <= 1.1 * 2 * needed
    assert len(grads(model)) == len(objects) and all(g.is_pinned() for g in grads(model))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert not any(p.is_pinned() for p in other.parameters()), "a copy is in ordinary memory"
        assert_same_bits(copies_of(other), values)


class Odd(nn.Module):
    """A layer with parameters of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(4, 3).T)
        self.short = nn.Parameter(torch.randn(3, 3).half(), requires_grad=False)
        self.switch = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.gaps = nn.Parameter(torch.randn(3, 6)[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.transposed[:, :3].float() * self.scalar + self.gaps + self.empty.sum()


def test_masters_of_every_kind_keep_dtype_shape_and_strides():
    model = nn.Sequential(nn.Linear(3, 3), Odd(), Odd())
    before = {n: (p.dtype, p.requires_grad, p.stride(), p.detach().clone()) for n, p in model.named_parameters()}
    attach_l2l(model, L2LConfig(device="sim", layer_classes=("Odd",)))
    for name, p in model.named_parameters():
        dtype, trains, stride, value = before[name]
        assert (p.dtype, p.requires_grad) == (dtype, trains) and torch.equal(p, value)
        assert p.stride() == ((3, 1) if "gaps" in name else stride)
    model(torch.randn(3, 3)).square().mean().backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    assert all(p.grad.stride() == p.stride() for p in model.parameters() if p.requires_grad)


def test_files_are_as_large_as_before_and_hold_the_same(tmp_path):
    model, sizes = gpt2(), []
    for name in ("before", "after"):
        folder = tmp_path / name
        model.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "state.pt")
        torch.save(next(model.parameters()).detach(), folder / "one.pt")
        sizes.append([(folder / file).stat().st_size for file in ("model.safetensors", "state.pt", "one.pt")])
        if name == "before":
            train_once(on_sim(model), batch_for(model))
    assert sizes[0] == sizes[1]
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in load_file(folder / "model.safetensors").items())
    state = torch.load(folder / "state.pt", weights_only=True)
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()


@pytest.mark.parametrize("is_buffer", [False, True])
def test_parameters_that_share_memory_stay_where_they_are_and_share(is_buffer):
    """Two views of one tensor, or two that are the same and a buffer that is a view."""
    model, both = Toy(2, dropout=0.0), torch.randn(20, 8)
    first, second = model.blocks[0].up, model.blocks[1].up
    if is_buffer:
        second.register_buffer("first_row", first.weight.data[0])
        second.weight = nn.Parameter(first.weight.data)
    else:
        first.weight, second.weight = nn.Parameter(both[:16]), nn.Parameter(both[4:])
    shared = one, other = first.weight, second.weight
    before = [each.data_ptr() for each in shared]
    on_sim(model)
    assert [each.data_ptr() for each in shared] == before and not any(each.is_pinned() for each in shared)
    assert first.bias.is_pinned() and model.blocks[1].down.weight.is_pinned()
    with torch.no_grad():
        one.fill_(2.0)
    assert (other == 2.0).any()
    train_once(model, batch_for(model, masked=False))
    assert one.grad.data_ptr() != other.grad.data_ptr()


def test_shared_memory_is_not_locked_and_a_model_that_is_shared_after_attach_trains():
    model = Toy(2, dropout=0.0)
    model.blocks[0].share_memory()
    before = [p.data_ptr() for p in model.blocks[0].parameters()]
    on_sim(model)
    assert [p.data_ptr() for p in model.blocks[0].parameters()] == before
    assert all(p.is_shared() for p in model.blocks[0].parameters())
    assert all(p.is_pinned() for p in model.blocks[1].parameters())
    model.share_memory()
    assert all(p.is_shared() for p in model.parameters())
    assert page_locked_bytes() == 0
    trains_as_plain(model)


@pytest.mark.parametrize("disk", [False, True])
def test_views_that_modules_keep_have_the_values_of_their_weight(disk, tmp_path):
    """Also after training, and in a module that is no layer."""
    model = Toy(2, dropout=0.0)
    owners = {model: model.embed.weight, model.blocks[1]: model.blocks[1].up.weight}
    for module, weight in owners.items():
        module.flat, module.rows, module.container = weight.view(-1), weight.detach()[1:], [{"first": weight.data}]

    def check_views() -> None:
        for module, weight in owners.items():
            for kept in (module.flat, module.rows, module.container[0]["first"]):
                assert torch.equal(kept.flatten(), weight.flatten()[-kept.numel() :])

    options = {"state_tier": "disk", "state_dir": str(tmp_path)} if disk else {}
    model, eps, optimizer, batch = attach(model, OPTIMIZERS["SGD"], eps_update="deferred", **options)
    before = model.blocks[1].up.weight.detach().clone()
    for _ in range(2):
        train_once(model, batch)
        optimizer.step()
        eps.synchronize()
        check_views()
    assert not torch.equal(before, model.blocks[1].up.weight)
    detach_l2l(model)
    check_views()
    with pytest.raises(ValueError, match=r"blocks\.1\.up\.weight: it shares memory"):
        on_sim(model, resident_layers=2)


@pytest.mark.parametrize("assign", [True, *more(False)])
def test_weights_loaded_after_attach_are_trained_with(assign):
    """With `assign`, parameters that are gone from the model are not kept, nor is the memory of their gradients."""
    model, other = on_sim(), {name: torch.randn_like(p) for name, p in Toy(2).state_dict().items()}
    other["head.weight"] = other["embed.weight"]
    train_once(model, batch_for(model, masked=False))
    model.zero_grad()
    locked = page_locked_bytes()
    model.load_state_dict({name: value.clone() for name, value in other.items()}, assign=assign)
    assert_same_bits(model.state_dict(), other)
    trains_as_plain(model)
    assert all(p.is_pinned() and p.grad.is_pinned() for p in model.parameters())
    assert assign or settled(locked) == locked


def test_detach_makes_it_ordinary_memory_and_attach_locks_it_again():
    model = on_sim(stash="host", ubatch_size=3)
    batch = batch_for(model, masked=False)
    train_once(model, batch)
    locked, values, sums = page_locked_bytes(), copies_of(model), gradients(model)
    detach_l2l(model)
    assert page_locked_bytes() == 0 and not any(t.is_pinned() for t in [*model.parameters(), *grads(model)])
    assert_same_bits(copies_of(model), values)
    assert_same_bits(gradients(model), sums)
    model.zero_grad()
    train_once(on_sim(model, stash="host", ubatch_size=3), batch)
    assert page_locked_bytes() == locked
    assert_same_bits(gradients(model), sums)
    kept = model.head.bias.grad
    del model
    of_one = -(-kept.nbytes // 256) * 256  # a parameter of the shell has a piece of its own
    assert settled(of_one) == of_one, "what the user holds is still there"


@pytest.fixture(scope="module")
def unlimited() -> Run:
    found = train()
    gc.collect()  # the model, before what is locked is counted
    torch.sim.synchronize()
    return found


@pytest.mark.parametrize(
    ("limit", "options"), combinations((0, 2000, 10_000), ({}, {"stash": "host", "prefetch": False}), together=1)
)
def test_with_less_page_locked_memory_the_bits_are_the_same_and_one_warning_says_so(limit, options, unlimited):
    with page_lock_limit(limit), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(**options)
    assert_same_run(found, unlimited)
    [warning] = caught
    assert "could be page-locked for sim:0" in str(warning.message)


def test_the_warning_counts_masters_once_and_comes_with_the_gradients_where_masters_fit():
    """Tied masters, too; as much is wanted for their gradients."""
    reference = on_sim()
    masters = page_locked_bytes()
    del reference
    assert settled(0) == 0
    with page_lock_limit(0), pytest.warns(UserWarning, match="could be page-locked") as caught:
        model = on_sim()
    wanted = 2 * sum(p.nbytes for p in model.parameters())
    assert str(caught[0].message).startswith(f"0 bytes of {wanted / 1024:.1f} KiB")
    assert not any(p.is_pinned() for p in model.parameters())
    with page_lock_limit(masters):
        model = on_sim()
        batch = batch_for(model, masked=False)
        with torch.no_grad():
            model(**batch)
        assert all(p.is_pinned() for p in model.parameters())
        with pytest.warns(UserWarning, match="could be page-locked"):
            train_once(model, batch)
        model.zero_grad()
        train_once(model, batch)
        assert not any(g.is_pinned() for g in grads(model))


def test_a_device_without_page_locking_is_not_asked_and_causes_no_warning(monkeypatch):
    monkeypatch.setattr("hf_l2l.runtime.stream.can_page_lock", lambda device: False)
    model = on_sim(stash="host", ubatch_size=3)
    train_once(model, batch_for(model, masked=False))
    assert page_locked_bytes() == 0
