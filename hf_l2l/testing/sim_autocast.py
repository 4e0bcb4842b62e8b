"""Registers the casts of `torch.autocast("sim", dtype=...)`: for the same operations as on CUDA.

torch has lists of casts for the devices it knows; on another device every operation fails until casts are registered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from hf_l2l.testing.sim_devices import NAME
from hf_l2l.testing.sim_tensor import operation

_LOWER = """addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d
conv_transpose2d.input conv_transpose3d.input convolution einsum linalg_multi_dot linalg_vecdot linear matmul mm mv
prelu scaled_dot_product_attention""".split()
_FLOAT32 = """acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity dist erfinv
exp expm1 group_norm hinge_embedding_loss huber_loss kl_div l1_loss layer_norm log log10 log1p log2 logsumexp
margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss native_layer_norm nll_loss nll_loss2d pdist
poisson_nll_loss pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal renorm rsqrt sinh smooth_l1_loss
soft_margin_loss softplus tan triplet_margin_loss""".split()
# These compute in float32 by their `dtype`, which costs no cast copy.
_FLOAT32_BY_DTYPE = "cumprod cumsum log_softmax.int prod prod.dim_int softmax.int sum sum.dim_IntList".split()
_WIDEST = """addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot""".split()

_AUTOCAST = DispatchKeySet(DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]  # missing from the stubs

# Cast weights, as torch keeps them for CUDA: by the identity of the leaf, until the outermost autocast ends. The leaf
# is kept too, so that no other tensor can take its identity meanwhile.
_cast_weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def register(library: torch.library.Library, anything: torch.library.Library) -> None:
    """Register the casts with torch."""
    anything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for names, policy in ((_LOWER, _lower), (_FLOAT32, _float32), (_FLOAT32_BY_DTYPE, _by_dtype), (_WIDEST, _widest)):
        for short in names:
            library.impl(short, functools.partial(policy, operation(short)), "AutocastPrivateUse1")
    _clear_with_torch()


def _clear_with_torch() -> None:
    original = torch.clear_autocast_cache

    @functools.wraps(original)
    def clear() -> None:
        original()
        _cast_weights.clear()

    torch.clear_autocast_cache = clear


def _lower(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype(NAME)
    return _call(op, args, kwargs, lambda t: _cached(t, dtype))


def _float32(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    return _call(op, args, kwargs, lambda t: t.to(torch.float32))


def _by_dtype(op: torch._ops.OpOverload, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        given = kwargs.get("dtype") or any(isinstance(a, torch.dtype) for a in args)
        if not given and _castable(x):
            kwargs["dtype"] = torch.float32
        return op(x, *args, **kwargs)


def _widest(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    dtypes = [t.dtype for t in torch.utils._pytree.tree_leaves((args, kwargs)) if _castable(t)]
    widest = functools.reduce(torch.promote_types, dtypes, torch.get_autocast_dtype(NAME))
    return _call(op, args, kwargs, lambda t: t.to(widest))


def _call(op: torch._ops.OpOverload, args: Any, kwargs: Any, cast: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return op(*(_cast(a, cast) for a in args), **{name: _cast(a, cast) for name, a in kwargs.items()})


def _cast(x: Any, cast: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(x, (list, tuple)):
        return [_cast(y, cast) for y in x]
    return cast(x) if _castable(x) else x


def _castable(x: Any) -> bool:
    return (
        isinstance(x, torch.Tensor)
        and x.is_floating_point()
        and x.dtype is not torch.float64
        and x.device.type == NAME
    )


def _cached(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype is dtype:
        return tensor
    is_weight = tensor.dtype is torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
    if not (is_weight and torch.is_autocast_cache_enabled()):
        return tensor.to(dtype)
    known = _cast_weights.get(id(tensor))
    if known is None:
        known = _cast_weights[id(tensor)] = (tensor, tensor.to(dtype))
    return known[1]
