"""What one layer of the model reaches: its FLOP/s, and what a micro-batch of it costs besides its operations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_l2l.model.stacks import find_stacks
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.plan.step_time import Rates
from hf_l2l.probe.rates import median, timed
from hf_l2l.runtime import stream
from hf_l2l.runtime.tensors import leaves_of
from hf_l2l.shapes.pieces import Given, TracedLayer

Measure = Callable[[Callable[[], object]], float]
"""The seconds that work takes."""


def with_layer_rates(
    rates: Rates, run: RunShapes, device: torch.device, measure: Measure = lambda work: median(timed(work), 0.25)
) -> Rates:
    """`rates` with the FLOP/s and the seconds per micro-batch of the first layer, which runs forward and backward on
    `device`, with one row and with all rows of a batch: of two sizes, the operations are told from what comes besides.

    Its weights are random: nothing of the model is moved. With one row alone, all of its time is operations.
    """
    layers = [layer for stack in find_stacks(run.model, run.config.layer_classes) for layer in stack.layers]
    layer = _on_device(layers[0], run, device)
    found = []
    for rows in sorted({1, run.most_rows}):
        call = next(call for call in run.traced(rows).calls if call.number == 0)
        seconds = measure(partial(_run, layer, call.layer, device, run.autocast))
        found.append((call.layer.forward_flops + call.layer.backward_flops, seconds))
    (few, quick), (many, slow) = found[0], found[-1]
    if many <= few or slow <= quick:  # one size, or one that the device does not feel
        return replace(rates, flops=many / slow)
    flops = (many - few) / (slow - quick)
    # In the forward and in the backward of each micro-batch.
    return replace(rates, flops=flops, per_call=max(0.0, quick - few / flops) / 2)


def _on_device(layer: nn.Module, run: RunShapes, device: torch.device) -> nn.Module:
    made = copy.deepcopy(layer).to("meta").to_empty(device=device)
    for tensor in (*made.parameters(), *made.buffers()):
        if tensor.is_floating_point():
            nn.init.normal_(tensor.detach(), std=0.02)
        else:
            tensor.detach().zero_()
    return made if run.dtype is None else made.to(run.dtype)


def _run(layer: nn.Module, traced: TracedLayer, device: torch.device, autocast: torch.dtype | None) -> None:
    """As the engine runs it: the forward, and later forward and backward."""
    args, kwargs = pytree.tree_unflatten([_made(leaf, device) for leaf in traced.leaves], traced.spec)
    with torch.autocast(device.type, autocast, enabled=autocast is not None, cache_enabled=False):
        with torch.no_grad():
            layer(*args, **kwargs)
        outputs = [leaf for leaf in leaves_of(layer(*args, **kwargs)) if _needs_gradient(leaf)]
    torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])
    last = next(p.grad for p in layer.parameters() if p.grad is not None)
    stream.download(last.flatten()[:1])  # returns once the backward is done
    layer.zero_grad()


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _made(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, Given):
        return leaf
    if not leaf.dtype.is_floating_point:
        return torch.ones(leaf.shape, dtype=leaf.dtype, device=device)
    return torch.randn(leaf.shape, device=device).to(leaf.dtype).requires_grad_(leaf.needs_gradient)
