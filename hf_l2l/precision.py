"""Cross mixed precision (CMP, arXiv:2002.05645, 2.3): what travels and computes in 16 bits, and what stays in 32.

The device sees 16-bit weights and activations; masters, sums of gradients, moments and clipping are fp32 on the host.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from hf_l2l.config import Cmp

_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def computing_dtype(cmp: Cmp | None, device: torch.device) -> torch.dtype | None:
    """The 16-bit dtype in which layers compute on `device`; None where they compute as their masters are.

    Raises:
        ValueError: for a device that lacks the dtype, or only emulates it.
    """
    if cmp is None:
        return None
    has_bf16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if cmp == "auto":
        return torch.bfloat16 if has_bf16 else torch.float16
    if cmp == "bf16" and not has_bf16:
        raise ValueError(
            f"cmp='bf16' needs a device that computes in bfloat16 (got {torch.cuda.get_device_name(device)}, which "
            "only emulates it); use cmp='fp16'"
        )
    return _DTYPES[cmp]


class Precision:
    """In which dtype each weight and buffer of one model is on the device."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None) -> None:
        """With floating point computed in `dtype`; None leaves all as it is on the host."""
        self.dtype = dtype
        self._kept: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Parameters and buffers of modules that are to stay as they are."""
        if dtype is not None:
            self._kept.update(dict.fromkeys(_kept_in_fp32(model, dtype), True))

    @property
    def is_mixed(self) -> bool:
        """Whether the device computes in other numbers than the host."""
        return self.dtype is not None

    def of(self, tensor: torch.Tensor) -> torch.dtype:
        """The dtype on the device of a weight, or of a buffer that a checkpoint has."""
        if self.dtype is None or not tensor.is_floating_point() or tensor in self._kept:
            return tensor.dtype
        return self.dtype


_HEADS = ("classifier", "score", "qa_outputs", "lm_head", "cls")
"""What transformers calls the modules from which logits come, beside those that `get_output_embeddings` tells."""


def let_heads_return_fp32(model: nn.Module) -> list[RemovableHandle]:
    """Let the losses be computed in fp32: the outputs of heads are, however they were computed."""
    heads = [module for name, module in model.named_children() if name in _HEADS]
    ask: Any = getattr(model, "get_output_embeddings", None)
    outputs = None if ask is None else ask()
    if isinstance(outputs, nn.Module) and outputs not in heads:
        heads.append(outputs)
    return [head.register_forward_hook(_in_fp32) for head in heads]


def _in_fp32(module: nn.Module, args: Any, output: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.float() if t.dtype in _DTYPES.values() else t, output)


def _kept_in_fp32(model: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    """Those of modules that say so: `_keep_in_fp32_modules` for fp16, `_keep_in_fp32_modules_strict` for both."""
    found: list[torch.Tensor] = []
    for module in model.modules():
        names = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
        if dtype == torch.float16:
            names |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
        if names:
            pattern = re.compile("|".join(rf"(^|\.){re.escape(name)}($|\.)" for name in sorted(names)))
            tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
            found += [tensor for name, tensor in tensors if pattern.search(name)]
    return found
