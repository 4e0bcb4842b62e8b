"""Quantized weights of a frozen base: which of them can travel, and whether a layer can be trained through them.

They are uploaded as they are packed (see `parts_of`), and computed with by the kernels of the library that made them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_l2l.compat import without_interception
from hf_l2l.runtime.tensors import ADAPTERS, is_quantized, parts_of, rebuilt

DEQUANTIZED = ("gguf",)
"""Methods whose weights transformers makes ordinary parameters of when it loads them."""


def refuse_quantized(model: nn.Module) -> None:
    """Raise ValueError for quantized weights that cannot be taken apart, or that require a gradient."""
    found = False
    for name, p in model.named_parameters():
        kind = type(p).__name__
        if is_quantized(p):
            found = True
            if p.requires_grad:
                raise ValueError(
                    f"quantized weights under L2L must be frozen (got {name}, a {kind} that requires a gradient); "
                    "call requires_grad_(False) on it, and train adapters, as those of PEFT"
                )
        elif type(p) not in (nn.Parameter, torch.Tensor) and _is_packed(p):
            raise ValueError(
                "a quantized weight under L2L must have __tensor_flatten__ and __tensor_unflatten__, as those of "
                f"torchao, or be a {' or a '.join(ADAPTERS)} of bitsandbytes (got {name}, a {kind}); quantize the "
                "model with torchao, or to 4 bits with bitsandbytes"
            )
    if getattr(model, "is_quantized", False) and not found:
        config: Any = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
        method: Any = getattr(config, "quant_method", None)
        method = getattr(method, "value", method) or "an unknown method"
        if method in DEQUANTIZED:
            return
        raise ValueError(
            "the quantized weights of a model under L2L must be its parameters (got none in a model quantized with "
            f"{method}); load it without a quantization_config, or quantize it with torchao, or to 4 bits with "
            "bitsandbytes"
        )


def _is_packed(parameter: torch.Tensor) -> bool:
    """Whether a parameter of a class of its own holds no floating point numbers, or none in memory of its own."""
    return not parameter.is_floating_point() or (parameter.numel() > 0 and parameter.data_ptr() == 0)


class _Sample(NamedTuple):
    """A module with a quantized weight under `key` in its table of parameters."""

    path: str
    module: nn.Module
    key: str


def _samples(model: nn.Module) -> Iterator[_Sample]:
    """One linear module for each kind of quantized weight: the class of both, and the dtypes of the parts."""
    seen = set()
    for path, module in model.named_modules():
        for key, p in module._parameters.items():
            if p is not None and is_quantized(p) and isinstance(getattr(module, "in_features", None), int):
                kind = type(module), type(p), p.dtype, *(part.dtype for part in parts_of(p))
                if kind not in seen:
                    seen.add(kind)
                    yield _Sample(path, module, key)


def refuse_untrainable(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Raise ValueError if gradients cannot be computed through the quantized weights of `model` on `device`.

    One linear module of each kind runs forward and backward on two rows of ones, with a device copy of its weight; the
    module itself does not change. `dtype` is that of `cmp`, or None.
    """
    ordinary = (p.dtype for p in model.parameters() if p.is_floating_point() and not is_quantized(p))
    usual = next(ordinary, torch.get_default_dtype())
    for path, module, key in _samples(model):
        weight = module._parameters[key]
        assert weight is not None, "samples have weights"
        rows_dtype = dtype or (weight.dtype if weight.is_floating_point() else usual)
        rows = torch.ones(2, int(module.in_features), dtype=rows_dtype, device=device)  # type: ignore[arg-type]
        cause: Exception | None = None
        try:
            why = _tried(module, rows)
        except torch.OutOfMemoryError:
            raise
        except (
            RuntimeError,
            ValueError,
            TypeError,
            AttributeError,
            LookupError,
            AssertionError,
            ImportError,
        ) as error:
            why, cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", error
        if why:
            raise ValueError(
                f"layers are trained through quantized weights, whose library must compute the gradient of an input "
                f"of {rows_dtype} on {device} (got {why}, for {path}, a {type(module).__name__} with a "
                f"{type(weight).__name__}); quantize in another way, or load the model without a quantization_config"
            ) from cause


def _tried(module: nn.Module, rows: torch.Tensor) -> str:
    """What is wrong with the output of `module` or the gradient of its input; empty if nothing is."""
    with torch.inference_mode(False), torch.enable_grad():
        rows = rows.clone().requires_grad_()
        trial = copy.copy(module)  # with tables of its own: forwards may set attributes, and dtypes of weights
        there = {name: None if p is None else _on_device(p, rows) for name, p in module._parameters.items()}
        vars(trial)["_parameters"] = there
        output: Any = type(module).forward(trial, rows)
        if output.dtype != rows.dtype:
            return f"an output of {output.dtype}"
        output.sum().backward()
        return "none" if rows.grad is None else ""


def _on_device(parameter: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A copy of `parameter` on the device of `rows`, and in their dtype, unless it is quantized."""
    with torch.no_grad(), without_interception():
        if not is_quantized(parameter):
            return nn.Parameter(parameter.detach().to(rows.device, rows.dtype, copy=True), requires_grad=False)
        copies = [part.detach().to(rows.device, copy=True) for part in parts_of(parameter)]
        made = rebuilt(parameter, iter(copies))
        return made if isinstance(made, nn.Parameter) else nn.Parameter(made.detach(), requires_grad=False)
