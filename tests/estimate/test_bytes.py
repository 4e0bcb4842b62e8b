"""`estimate` without a batch: bytes by name from shapes, and the state of optimizers."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers.optimization import Adafactor

from hf_l2l import L2LConfig, attach_l2l, estimate
from models import VOCAB, batch_for, bert, gpt2, train_once
from tiers import nightly

WIDTH, INNER, POSITIONS = 16, 24, 20
SHELL = (VOCAB + POSITIONS + 2) * WIDTH + 2 * WIDTH + (WIDTH * WIDTH + WIDTH) + (2 * WIDTH + 2)
"""Embeddings of words, positions and types, their norm, pooler, classifier."""
LAYER = 4 * (WIDTH * WIDTH + WIDTH) + (2 * WIDTH * INNER + INNER + WIDTH) + 2 * 2 * WIDTH
"""Query, key, value and output, the two dense layers, two norms."""
ALL = SHELL + 2 * LAYER
SLOT = sum(-(-4 * n // 256) * 256 for n in [WIDTH * WIDTH] * 4 + [2 * WIDTH * INNER // 2] * 2 + [INNER] + [WIDTH] * 9)
"""Bytes of a layer in a slot, where every parameter starts at a multiple of 256."""
BUFFERS = 2 * 8 * POSITIONS
"""Position and type ids."""


def small_bert() -> nn.Module:
    return bert(max_position_embeddings=POSITIONS)


def moments(optimizer: torch.optim.Optimizer, model: nn.Module, **options: Any) -> int:
    return estimate(model, L2LConfig(**options), optimizer).moments


def test_bytes_of_a_model():
    with torch.device("meta"):
        model = small_bert()
    need = estimate(model)
    assert need.masters == need.gradients == 4 * ALL and need.moments == 2 * need.masters
    assert need.shell == 2 * 4 * SHELL + BUFFERS
    assert need.slots == 4 * SLOT, "weights of two layers, gradients of two"
    assert estimate(model, L2LConfig(gradient_slots=1)).slots == 3 * SLOT
    assert need.host_bytes == 4 * need.masters and need.device_peak == need.shell + need.slots
    assert estimate(small_bert().double()).masters == 8 * ALL
    assert estimate(small_bert().bfloat16()).gradients == 2 * ALL
    tied = gpt2()
    assert estimate(tied).masters == 4 * sum(p.numel() for p in tied.parameters())


def test_frozen_parts_need_no_gradients_and_no_moments():
    model = small_bert()
    for name, p in model.named_parameters():
        p.requires_grad_(".layer.1." in name or "classifier" in name)
    head = 2 * WIDTH + 2
    need = estimate(model)
    assert (need.masters, need.gradients, need.moments) == (4 * ALL, 4 * (LAYER + head), 8 * (LAYER + head))
    assert need.shell == 4 * (SHELL + head) + BUFFERS
    assert need.slots == 4 * SLOT, "of the largest layer, whose gradients are all needed"


def test_a_model_without_layers_is_all_shell():
    need = estimate(nn.Linear(3, 2))
    assert (need.masters, need.gradients, need.moments, need.shell, need.slots) == (32, 32, 64, 64, 0)


# ---- the state of the optimizer

OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "adamw amsgrad": lambda groups: torch.optim.AdamW(groups, lr=0.1, amsgrad=True, fused=True),
    "sgd momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adafactor": lambda groups: Adafactor(groups, lr=0.1, relative_step=False, scale_parameter=False),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
}


@nightly
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_are_those_of_the_real_optimizer_after_a_step(name):
    model = small_bert()
    for key, p in model.named_parameters():
        p.requires_grad_(".layer.0." not in key)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = OPTIMIZERS[name]([{"params": decayed, "weight_decay": 0.1}, {"params": others}])
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # which patches the step
    step, optimizer.step = optimizer.step, lambda *args: pytest.fail("the user's step ran")
    found = moments(optimizer, model)
    assert all(torch.equal(p, before[key]) and p.grad is None for key, p in model.named_parameters())
    assert name == "adagrad" or not optimizer.state
    train_once(model, batch_for(model))
    optimizer.step = step
    optimizer.step()
    kept = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    trained = {p for p in model.parameters() if p.requires_grad}
    of_frozen = [t for p, state in optimizer.state.items() if p not in trained for t in state.values()]
    assert found == sum(t.nbytes for t in kept) - sum(t.nbytes for t in of_frozen)


def test_each_shape_of_a_group_is_tried_once():
    """Layers have the same shapes, and the groups they are in may have other state."""
    tried = []

    class Noted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            tried.extend((g["momentum"], p.shape) for g in self.param_groups for p in g["params"])
            return super().step(closure)

    model = small_bert()
    later = list(model.bert.encoder.layer[1].parameters())
    others = [p for p in model.parameters() if all(p is not each for each in later)]
    groups = [{"params": others, "momentum": 0.0}, {"params": later, "momentum": 0.9}]
    optimizer = Noted(groups, lr=0.1)
    assert estimate(model, optimizer=optimizer).moments == 4 * LAYER
    expected = {(group["momentum"], p.shape) for group in groups for p in group["params"]}
    assert len(tried) == len(expected) and {*tried} == expected
    tried.clear()
    on_device = estimate(model, L2LConfig(device="cuda", resident="all"), optimizer, device="cuda")
    assert on_device.moments == 0 and len(tried) == len(expected) and {*tried} == expected


class Strange(torch.optim.Optimizer):
    """Reads values, which meta tensors do not have."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["norm"] = p.grad.norm().item()


class Careless(torch.optim.SGD):
    """Keeps a map that it moves to where the parameters are, as some 8-bit optimizers do, and then gives up."""

    def __init__(self, params: Any, *, makes_state: bool = False) -> None:
        super().__init__(params, lr=0.1)
        self.map, self.makes_state = {"signed": torch.linspace(-1, 1, 256)}, makes_state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.map["signed"] = self.map["signed"].to(p.device)
            torch.rand(3)
            random.random()
            if self.makes_state:
                self.state[p]["moment"] = torch.zeros_like(p, dtype=torch.uint8)
        raise Exception("the step needs a GPU")


def test_an_optimizer_that_cannot_be_tried_is_taken_for_adam_and_left_as_it_is():
    """Unless it has made its state before it gave up. No generator moves."""
    model = nn.Linear(3, 2)
    before = torch.get_rng_state(), random.getstate()
    assert moments(Strange(model.parameters()), model) == 2 * 4 * 8
    assert moments(Strange(model.parameters()), model, moment_dtype="bf16") == 2 * 2 * 8
    for makes_state, expected in ((False, 2 * 4 * 8), (True, 8)):
        optimizer = Careless(model.parameters(), makes_state=makes_state)
        assert moments(optimizer, model) == expected
        assert optimizer.map["signed"].device.type == "cpu" and not optimizer.state
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_an_optimizer_that_trains_and_that_accelerate_has_wrapped_is_left_alone():
    model = small_bert()
    optimizer = Accelerator(cpu=True).prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    eps = attach_l2l(model)
    eps.wrap(optimizer)
    train_once(model, batch_for(model))
    optimizer.step()
    eps.synchronize()
    weights = {name: p.clone() for name, p in model.state_dict().items()}
    state, steps = copy.deepcopy(optimizer.state_dict()), []
    optimizer.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    train_once(model, batch_for(model))
    assert moments(optimizer, model) == moments(optimizer.optimizer, model) == 8 * ALL + 4 * len(state["state"])
    assert all(p.grad is not None for p in model.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert optimizer.state_dict()["param_groups"] == state["param_groups"]
    for index, kept in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, state["state"][index][key]) for key, value in kept.items())
    assert steps == []
