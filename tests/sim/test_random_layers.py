"""Layers that draw random numbers on a device that is not the host: masks, device memory, the stash on the host."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.runtime import compute_state
from kernel_cases import WIDTH, Stack
from models import Gradients, attached, batch_for, gradients, relative_error
from training import settled_memory, tiny_bert

OPTIONS: list[dict[str, Any]] = [
    {},
    {"ubatch_size": 3},
    {"ubatch_size": 3, "stash": "host"},
    {"stash": "host", "prefetch": False, "gradient_slots": 1},
]


def same_draws(model: torch.nn.Module, batch: torch.Tensor, ubatch_size: int | None = None) -> Gradients:
    """Gradients of plain training with the draws of the engine: layer by layer, and in each ubatch by ubatch."""
    on_device = copy.deepcopy(model).to("sim")
    hidden = batch.to("sim")
    for layer in on_device.layers:
        hidden = torch.cat([layer(part) for part in hidden.split(ubatch_size or len(batch))])
    hidden.pow(2).mean().backward()
    return {name: None if p.grad is None else p.grad.cpu() for name, p in on_device.named_parameters()}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_masks_of_the_recompute_are_those_of_the_forward(options):
    model, batch = Stack().double(), torch.randn(7, WIDTH, dtype=torch.float64)
    plain = copy.deepcopy(model)
    attach_l2l(model, L2LConfig(device="sim", layer_classes=("Attentive",), **options))
    for seed in range(3):
        torch.manual_seed(seed)
        expected = same_draws(plain, batch, options.get("ubatch_size"))
        torch.manual_seed(seed)
        model.zero_grad()
        model(batch).backward()
        assert relative_error(gradients(model), expected) <= 1e-12
        calls = (seed + 1) * (3 if "ubatch_size" in options else 1)
        assert [int(layer.calls) for layer in model.layers] == [calls] * 3


def forward_bytes(**options: Any) -> list[tuple[int, int]]:
    """Device bytes of three forwards: the peak, and what is left, both more than before."""
    model = attached(tiny_bert(width=32), device="sim", **options).train()
    batch, found = batch_for(model, rows=24), []
    for _ in range(3):
        before = settled_memory()
        torch.sim.reset_peak_memory_stats()
        loss = model(**batch).loss
        torch.sim.synchronize()
        found.append((torch.sim.max_memory_allocated() - before, torch.sim.memory_allocated() - before))
        loss.backward()
        model.zero_grad()
        del loss
    return found


@pytest.mark.parametrize(
    "options",
    [*(pytest.param(o, marks=pytest.mark.slow) for o in ({}, {"ubatch_size": 12})), {"stash": "host", "cmp": "bf16"}],
    ids=str,
)
def test_grad_mode_takes_no_device_memory(options, monkeypatch):
    found = forward_bytes(**options)
    with monkeypatch.context() as patch:
        patch.setattr(compute_state, "graph_without_tensors", torch.no_grad)
        assert found == forward_bytes(**options)
    with monkeypatch.context() as patch:  # a graph that keeps its tensors is seen
        patch.setattr(compute_state, "graph_without_tensors", torch.enable_grad)
        kept = forward_bytes(**options)
    assert all(least < most for (least, _), (most, _) in zip(found, kept, strict=True))
