"""Floating-point operations of a kernel, by torch's own formulas; 0 for kernels without a formula."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


def flops_of(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the floating-point operations of `op`, called with these arguments and with this result."""
    formula = _formula(op)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


@functools.cache
def _formula(op: torch._ops.OpOverload) -> Callable[..., int] | None:
    packet = op.overloadpacket
    if packet in _ATTENTION:
        return _ATTENTION[packet]
    # An operation in place computes what the one it is named after computes.
    original = getattr(aten, packet.__name__.removesuffix("_"), packet)
    formula: Callable[..., int] | None = flop_registry.get(packet) or flop_registry.get(original)
    return formula


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query.shape, _of_each_head(key, query), _of_each_head(value, query)))


def _attention_backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> int:
    shapes = _of_each_head(key, query), _of_each_head(value, query)
    return int(sdpa_backward_flop_count(grad_out.shape, query.shape, *shapes))


def _of_each_head(shared: torch.Tensor, query: torch.Tensor) -> torch.Size:
    """The shape of keys or values that several heads of queries may share, as if each had its own: the operations are
    the same, and torch 2.11 counts no others."""
    return torch.Size([*query.shape[:2], *shared.shape[2:]])


# The host's fused attention, which runs on "sim"; torch's registry has those of other devices.
_ATTENTION: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
