"""A copy of a model that has shapes and dtypes, and no values."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from hf_l2l.model.precision import Precision


def like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor with shape and strides of `tensor`, on the host; inside a mode of fake tensors, one without values."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)


def shadow(model: nn.Module, precision: Precision) -> nn.Module:
    """A copy of `model` without values, in the dtypes in which it computes; made inside a mode of fake tensors."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        made = like(p, precision.of(p))
        memo[id(p)] = nn.Parameter(made, p.requires_grad)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in memo:
                dtype = precision.of_buffer(module, name, buffer)
                memo[id(buffer)] = like(buffer, dtype)
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = like(value, value.dtype)
    return copy.deepcopy(model, memo)
