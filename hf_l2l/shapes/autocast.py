"""Autocast in a model that runs without values: it casts what the autocast of an accelerator casts.

Tensors without values are on the host, whose own autocast multiplies matrices in 16 bits as that of an accelerator
does, and keeps cast weights until its region ends; models that turn autocast off turn that one off. It leaves in 16
bits what others compute in fp32, such as norms: `AutocastAsOnDevice` casts that. The lists are those of
ATen/autocast_mode.h (torch 2.11 to 2.13), by the names that functions have in Python.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hf_l2l.compat import FakeTensor
from hf_l2l.runtime.stream import HOST

_LOWER = {"addmv", "addr", "einsum", "mv", "scaled_dot_product_attention"}
"""In 16 bits elsewhere, and not, or in other steps, on the host."""
_FLOAT32 = {
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"),
    *("sinh", "tan", "pow", "__pow__", "__rpow__", "__rdiv__", "softplus", "layer_norm", "native_layer_norm"),
    *("rms_norm", "group_norm", "cosine_similarity", "nll_loss", "kl_div", "l1_loss"),
    *("smooth_l1_loss", "huber_loss", "mse_loss", "poisson_nll_loss", "cosine_embedding_loss", "dist", "pdist"),
    *("hinge_embedding_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "cdist", "renorm"),
    *("triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "logsumexp", "interpolate"),
    # They take a dtype, and make the same cast copy of what they are given.
    *("softmax", "softmin", "log_softmax"),
}
_FLOAT32_BY_DTYPE = {"prod", "cumprod", "cumsum", "sum", "norm", "linalg_vector_norm", "linalg_matrix_norm"}
"""These read 16 bits, and make no cast copy of them."""
_WIDEST = {
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "linalg_cross", "dot", "vdot", "grid_sample", "index_put"),
    *("tensordot", "scatter_add"),
}
"""In the widest dtype of their arguments."""


def autocast_region(dtype: torch.dtype | None) -> torch.autocast:
    """A region in which fakes are computed with under autocast in `dtype`; with None, one without autocast."""
    return torch.autocast(HOST.type, dtype, enabled=dtype is not None)


class AutocastAsOnDevice(TorchFunctionMode):
    """In regions of autocast, casts what accelerators cast and the host does not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if not torch.is_autocast_enabled(HOST.type):
            return func(*args, **kwargs)
        if func is functional.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        if func is functional.normalize:
            return _normalize(*args, **kwargs)
        if name in _FLOAT32_BY_DTYPE:
            given = kwargs.get("dtype") or any(isinstance(a, torch.dtype) for a in args)
            more = {} if given or not _castable([*args, *kwargs.values()][0]) else {"dtype": torch.float32}
            return func(*args, **{**kwargs, **more})
        dtype = _dtype_of(name, args, kwargs)
        if dtype is None:
            return func(*args, **kwargs)
        args, kwargs = pytree.tree_map(partial(_cast, dtype), (args, kwargs))
        # What the function is composed of is not cast once more.
        with autocast_region(None):
            return func(*args, **kwargs)


def _cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """As composed elsewhere: it asks for `log_softmax` in the dtype of the logits, which autocast leaves so, and what
    follows is in fp32. On the host, all of it is. Smoothing of labels adds a number per row."""
    # Of deferred logits, it is computed for a chunk at a time.
    if not isinstance(input, FakeTensor) or target.is_floating_point():
        return functional.cross_entropy(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    with autocast_region(None):
        logs = functional.log_softmax(input, min(1, input.dim() - 1))
    return functional.nll_loss(logs, target, weight, size_average, ignore_index, reduce, reduction)


def _normalize(
    input: torch.Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As composed elsewhere: the norm is in fp32, and so is what is divided by it. On the host, both are as given."""
    dtype = torch.float32 if _castable(input) else input.dtype
    norm = input.norm(p, dim, keepdim=True, dtype=dtype).clamp_min(eps).expand_as(input)
    return torch.div(input, norm, out=out)


def _dtype_of(name: str, args: Any, kwargs: Any) -> torch.dtype | None:
    """The dtype of the arguments of a function; None leaves them as they are."""
    if name in _FLOAT32:
        return torch.float32
    short = torch.get_autocast_dtype(HOST.type)
    if name in _WIDEST:
        dtypes = [leaf.dtype for leaf in pytree.tree_leaves((args, kwargs)) if _castable(leaf)]
        return reduce(torch.promote_types, dtypes, short)
    return short if name in _LOWER else None


def _castable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _cast(dtype: torch.dtype, value: Any) -> Any:
    return value.to(dtype) if _castable(value) else value
