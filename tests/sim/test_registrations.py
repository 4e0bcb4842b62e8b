"""Memory is page-locked when a model is attached and in its first step, not in the midst of later ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l import attach_l2l
from hf_l2l.eps.host_memory import HostMemory, SmallTensors
from hf_l2l.eps.masters import Masters
from hf_l2l.runtime import stream
from models import Toy, assert_same_bits, attached, batch_for, bert, gradients, train_once
from runs import attach, config_for
from tiers import more, nightly


@pytest.fixture
def registrations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each registration, in order."""
    found: list[int] = []
    lock = stream.page_lock

    def locking(address: int, num_bytes: int, device: torch.device) -> bool:
        found.append(num_bytes)
        return lock(address, num_bytes, device)

    monkeypatch.setattr(stream, "page_lock", locking)
    return found


def steps(model: nn.Module, batches: list[dict[str, Any]], registrations: list[int], **options: Any) -> list[int]:
    """Train `model` as a program does; how many registrations there were after each step."""
    model, eps, optimizer, _ = attach(model, **options)
    done = []
    for batch in batches:
        model(**batch).loss.backward()
        optimizer.step()
        model.zero_grad()
        done.append(len(registrations))
    eps.synchronize()
    return done


@nightly
@pytest.mark.parametrize("options", [{"cmp": "bf16", "stash": "host"}, *more({}, {"eps_update": "eager"})], ids=str)
def test_nothing_is_registered_after_the_first_steps(options, registrations):
    model = bert(num_hidden_layers=3)
    done = steps(model, [batch_for(model)] * 5, registrations, **options)
    assert done[0] > 0 and done[2:] == [done[1]] * 3


@nightly
def test_the_norms_of_all_layers_take_one_registration(registrations):
    """Beside one for masters and one for gradients: of each layer, and of each parameter that is in none."""
    model = bert(num_hidden_layers=5)
    in_layers = {id(p) for p in model.bert.encoder.layer.parameters()}
    groups = 5 + sum(id(p) not in in_layers for p in model.parameters())
    attached(model, device="sim")
    assert len(registrations) == groups
    for _ in range(3):
        train_once(model, batch_for(model))
        assert len(registrations) == 2 * groups + 1


@nightly
def test_batches_that_slowly_become_longer_seldom_register(registrations):
    """In four steps each time that the length doubles, with the bits of a stash on the device."""
    lengths = range(4, 13)
    models = [Toy(2) for _ in range(2)]
    batch = batch_for(models[0], masked=False)
    batches = [{name: value.repeat(1, 3)[:, :tokens] for name, value in batch.items()} for tokens in lengths]
    done = steps(models[0], batches, registrations, stash="host")
    registering = sum(now > before for before, now in zip(done, done[1:], strict=False))
    assert 0 < registering <= 4 * math.log2(lengths[-1] / lengths[0])
    steps(models[1], batches, registrations, stash="device")
    assert_same_bits(dict(models[0].named_parameters()), dict(models[1].named_parameters()))


@nightly
def test_gradients_have_the_same_bits_when_norms_need_more_memory():
    """A layer that is called several times sends norms each time."""
    plain, model = Toy(1, dropout=0.0, calls=24), Toy(1, dropout=0.0, calls=24)
    attach_l2l(model, config_for(model, device="sim"))
    for _ in range(2):
        for each in (plain, model):
            each.zero_grad()
            train_once(each, batch_for(each, masked=False))
        assert_same_bits(gradients(model), gradients(plain))


# ---- memory of small tensors


@pytest.fixture
def small() -> SmallTensors:
    return SmallTensors(HostMemory(torch.device("sim", 0), Masters(nn.Linear(1, 1))), "numbers")


def test_small_tensors_lie_apart_and_keep_their_kind(small):
    shapes = {torch.float32: (3,), torch.bfloat16: (5,), torch.float64: (2, 2), torch.uint8: (1,), torch.int64: ()}
    kinds = list(shapes.items())
    for _ in range(3):
        made = [small.tensor_like(torch.empty(shape, dtype=dtype), 64) for dtype, shape in kinds * 20]
        for number, tensor in enumerate(made):
            tensor.fill_(number)
        assert [(t.dtype, tuple(t.shape)) for t in made] == kinds * 20
        assert all(bool((tensor == number).all()) and tensor.is_pinned() for number, tensor in enumerate(made))
        del made, tensor
        small.drop()


def test_small_tensors_register_at_doubling_sizes_and_keep_their_memory_while_they_are_used(small, registrations):
    for turn in range(3):
        made = [small.tensor_like(torch.empty(1, dtype=torch.float64), 16) for _ in range(1000)]
        assert len({tensor.data_ptr() for tensor in made}) == 1000
        assert [-(-size // 16) for size in registrations] == [1, 2, 4, 8, 16, 32, 64, 128, 256], f"turn {turn}"
        del made
        small.drop()
    first = small.tensor_like(torch.empty(4), 16)
    for value in range(3):  # a program that always keeps the last one
        first.fill_(7)
        small.drop()
        second = small.tensor_like(torch.empty(4), 16).fill_(value)
        assert first.tolist() == [7] * 4 and second.tolist() == [value] * 4
        first = second
        del second
