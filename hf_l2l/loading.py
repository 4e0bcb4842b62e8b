"""`load_once`: one rank of a host loads a model, and the others make the same without values."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

_MARK = "_l2l_loaded_by_rank_0"
"""Attribute of a model without values; those of rank 0 are given to it when it is attached."""


@contextmanager
def load_once() -> Iterator[None]:
    """Inside, `from_pretrained` loads values in the first rank of a host only; the others get them by `attach_l2l`.

    For `torchrun` and `accelerate launch`: without this, each rank loads the model, and drops it when it is attached,
    so that the host holds it once per rank for a while. In a single process nothing changes. Random numbers that a
    model draws while it is loaded (a new head) are drawn in the first rank alone: set a seed afterwards, as
    transformers' Trainer does, for equal dropout in all ranks.

    Raises:
        ValueError: inside, for a `device_map`, in ranks after the first one.
    """
    if int(os.environ.get("LOCAL_RANK", "0")) == 0 or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    original: Any = PreTrainedModel.__dict__["from_pretrained"]

    def without_values(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device_map") is not None:
            raise ValueError(
                "a model under L2L must be on the host, without a device_map (got "
                f"device_map={kwargs['device_map']!r} in load_once); leave it out"
            )
        made = original.__func__(cls, *args, **{**kwargs, "device_map": "meta"})
        setattr(made[0] if isinstance(made, tuple) else made, _MARK, True)
        return made

    PreTrainedModel.from_pretrained = classmethod(without_values)
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = original


def is_without_values(model: nn.Module) -> bool:
    """Whether `load_once` has made the model without values, in which rank 0 has them."""
    return any(getattr(module, _MARK, False) for module in model.modules())


def give_memory(model: nn.Module) -> None:
    """Give the parameters and buffers of a model that `load_once` has made host memory, which is not written yet, and
    so takes no bytes. They get the values of rank 0 when the model is attached."""
    if not is_without_values(model):
        return
    for parameter in [p for p in model.parameters() if p.is_meta]:
        empty = torch.empty_like(parameter, device="cpu")
        torch.utils.swap_tensors(parameter, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    for module in model.modules():
        vars(module).pop(_MARK, None)
