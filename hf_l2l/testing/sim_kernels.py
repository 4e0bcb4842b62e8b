"""The operations of "sim" that the general `run` cannot handle, and the registration of all operations.

An operation with a host kernel of its own runs that kernel, so results have the same bits as on the host. torch
composes the other operations out of these.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.nn.attention import SDPBackend

from hf_l2l.testing import sim_copies
from hf_l2l.testing.sim_devices import GENERATORS, NAME, index_of
from hf_l2l.testing.sim_memory import ACCOUNTS
from hf_l2l.testing.sim_pages import made_pinned
from hf_l2l.testing.sim_race import ORDER, Touch
from hf_l2l.testing.sim_tensor import (
    HOST,
    HOST_KERNELS,
    host_view,
    is_sim,
    on_sim,
    operation,
    point_at,
    run,
)

aten = torch.ops.aten

# Composed by torch where a device has no kernel; run whole, they cost one call instead of several. A convolution must
# be: torch would look for a kernel that only such a device may have.
_RUN_WHOLE = ("clone", "convolution", "convolution_backward", "embedding", "masked_fill.Scalar", "repeat", "stack")


def register(library: torch.library.Library, anything: torch.library.Library) -> None:
    """Register every operation of "sim" with torch."""
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
            short = name.removeprefix("aten::")
            if short not in _KERNELS:
                library.impl(short, _host_kernel(operation(short)), "PrivateUse1")
    for short in _RUN_WHOLE:
        library.impl(short, functools.partial(run, operation(short)), "PrivateUse1")
    for short, kernel in _KERNELS.items():
        library.impl(short, kernel, "PrivateUse1")
    # Differentiable pieces make it up, so it stands above autograd; in inference mode that level is not reached.
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl("scaled_dot_product_attention", _attention, key)
    anything.fallback(_run_without_host_kernel, "PrivateUse1")


def _host_kernel(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Return a function that runs `op` by its host kernel: on the tensor itself for a view, else on host tensors."""
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)
    return functools.partial(op.redispatch, HOST_KERNELS) if is_view else functools.partial(run, op)


def _run_without_host_kernel(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run an operation that torch composes out of others; raise NotImplementedError if torch cannot."""
    try:
        return run(op, *args, **kwargs)
    except NotImplementedError as error:
        raise NotImplementedError(f"{op} is not available on {NAME}: the host has no kernel for it") from error


def _checked(size: Sequence[int], dtype: torch.dtype | None, device: torch.device | None) -> tuple[torch.dtype, int]:
    """Return the dtype and the device of a tensor to be made, which exists and has memory for it."""
    try:
        index = index_of(device)
    except ValueError as error:
        raise RuntimeError(f"invalid device {device}: {error}") from None
    dtype = dtype or torch.get_default_dtype()
    ACCOUNTS[index].refuse_past_capacity(math.prod(size) * dtype.itemsize)
    return dtype, index


def _empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    dtype, index = _checked(size, dtype, device)
    memory_format = memory_format or torch.contiguous_format
    return on_sim(torch.empty(size, dtype=dtype, device=HOST, memory_format=memory_format), index)


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    dtype, index = _checked(size, dtype, device)
    return on_sim(torch.empty_strided(size, stride, dtype=dtype, device=HOST), index)


def _resize_(
    tensor: torch.Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None
) -> torch.Tensor:
    """Give `tensor` another shape, and keep as many of its elements as fit."""
    old = host_view(tensor)
    room = old.untyped_storage().nbytes() // old.itemsize - old.storage_offset()
    if math.prod(size) <= room:
        strides = torch.empty(size, device="meta").stride()
        return point_at(tensor, old.as_strided(size, strides))
    ACCOUNTS[tensor.device.index].refuse_past_capacity(math.prod(size) * old.itemsize)
    grown = torch.empty(size, dtype=old.dtype, device=HOST)
    with _reading(tensor, "aten::resize_"):
        grown.view(-1)[:room].copy_(old.as_strided((room,), (1,)))
        return point_at(tensor, grown)


def _reading(tensor: torch.Tensor, name: str) -> contextlib.AbstractContextManager[None]:
    """Return a context that runs a kernel that reads `tensor` on the current stream."""
    if not ORDER.active:
        return contextlib.nullcontext()
    return sim_copies.in_order(name, [Touch(tensor, True, False)], tensor.device.index)


def _set_from_storage(tensor: torch.Tensor, source: torch.UntypedStorage, *place: Any) -> torch.Tensor:
    if source.device.type != NAME:
        raise RuntimeError(f"aten::set_: cannot give a tensor on {NAME} a storage on {source.device}")
    op = aten.set_.source_Storage_storage_offset if place else aten.set_.source_Storage
    result: torch.Tensor = op.redispatch(HOST_KERNELS, tensor, source, *place)
    return result


def _set_from_tensor(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if tensor.device != source.device:
        raise RuntimeError(f"aten::set_: cannot give a tensor on {NAME} the storage of one on {source.device}")
    return point_at(tensor, host_view(source))


def _set_empty(tensor: torch.Tensor) -> torch.Tensor:
    return point_at(tensor, torch.empty(0, dtype=tensor.dtype, device=HOST))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy to, from or inside "sim"; the one operation that crosses devices."""
    views = tuple(host_view(t) if is_sim(t) else t for t in (source, target))
    if not ORDER.active and not (non_blocking and not is_sim(target)):
        views[1].copy_(views[0])
    else:
        # Copies may land where autograd looks on, so they write to the host through a tensor that it does not know.
        to, like = views[1], (target.storage_offset(), target.size(), target.stride())
        bare = to if is_sim(target) else torch.empty(0, dtype=to.dtype).set_(to.untyped_storage(), *like)
        sim_copies.copy(source, target, (views[0].detach(), bare), non_blocking)
    return target


def _copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return _copy_from(source, target.resize_(source.size()))


def _to_copy(
    x: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
    **options: Any,
) -> torch.Tensor:
    """Copy to another device or dtype; torch's own kernel would pin a download's target, which the host cannot."""
    result: torch.Tensor
    if not (ORDER.active or non_blocking or memory_format is not None):
        if not x.is_cpu and device == HOST:
            return host_view(x).to(dtype or x.dtype, copy=True)
        if not x.is_cpu and (device is None or device == x.device):
            return on_sim(host_view(x).to(dtype or x.dtype, copy=True), x.device.index)
        if x.is_cpu and x.layout is torch.strided and not (x.is_conj() or x.is_neg()):
            dtype, index = _checked(x.size(), dtype or x.dtype, device)
            return on_sim(x.to(dtype, copy=True), index)
    elif non_blocking and device == HOST:
        result = made_pinned(torch.empty_like(x, dtype=dtype, device=device, memory_format=memory_format))
        return result.copy_(x, non_blocking=True)
    options.update(dtype=dtype, device=device, non_blocking=non_blocking, memory_format=memory_format)
    result = aten._to_copy.default.redispatch(HOST_KERNELS, x, **options)
    return result


def _record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Make the memory of `tensor`, when it is freed, wait for the copies that are then queued on `stream`."""
    block = getattr(tensor.untyped_storage(), "_block", None)
    if block is not None:
        sim_copies.record(block, stream.stream_id)


def _native_dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply dropout as the host does, but with the device's generator, which this host operation cannot take."""
    host, device = host_view(x), x.device.index
    with _reading(x, "aten::native_dropout"):
        if train is False:
            return on_sim(host.clone(), device), on_sim(torch.ones_like(host, dtype=torch.bool), device)
        kept = torch.empty_like(host, dtype=torch.bool).bernoulli_(1.0 - p, generator=GENERATORS[device])
        return on_sim(host.mul(kept).mul_(0.0 if p == 1.0 else 1.0 / (1.0 - p)), device), on_sim(kept, device)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Run the host's fused attention if the host would, instead of the composed one that torch chooses for "sim".

    Raises:
        RuntimeError: if the inputs have several dtypes, which the composed one alone would take.
    """
    dtypes = [query.dtype, key.dtype, value.dtype]
    if len(set(dtypes)) > 1:
        raise RuntimeError(f"Expected query, key, and value to have the same dtype, but got {dtypes} instead")
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(
            f"Expected attn_mask to be bool or float, or to have the dtype of query ({query.dtype}), but got "
            f"{attn_mask.dtype} instead"
        )
    choose = aten._fused_sdp_choice.default
    choice = choose(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    # The fused kernel has no gradient for its mask.
    if choice != SDPBackend.FLASH_ATTENTION.value or (attn_mask is not None and attn_mask.requires_grad):
        composed = aten._scaled_dot_product_attention_math.default
        out, _ = composed(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return cast(torch.Tensor, out)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -math.inf)
    fused = aten._scaled_dot_product_flash_attention_for_cpu.default
    out, _ = fused(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    return cast(torch.Tensor, out)


def _histc(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """Count integers as accelerators do; the host counts numbers with a fraction only."""
    counts: torch.Tensor = run(aten.histc.default, x if x.is_floating_point() else x.float(), bins, min, max)
    return counts.to(x.dtype)


# torch runs recurrent layers of an accelerator by cells that it has no kernels of the host for.

_Optional = torch.Tensor | None


def _gates(*summands: _Optional) -> torch.Tensor:
    first, *others = (each for each in summands if each is not None)
    return sum(others, start=first)


def _lstm_cell(
    from_input: torch.Tensor, from_hidden: torch.Tensor, cell: torch.Tensor, *biases: _Optional
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The new hidden state and cell (rows, width), and the gates (rows, 4 x width) for the backward."""
    entering, forgetting, new, leaving = _gates(from_input, from_hidden, *biases).chunk(4, 1)
    entering, forgetting, leaving = entering.sigmoid(), forgetting.sigmoid(), leaving.sigmoid()
    new = new.tanh()
    after = forgetting * cell + entering * new
    return leaving * after.tanh(), after, torch.cat([entering, forgetting, new, leaving], 1)


def _lstm_cell_backward(
    of_hidden: _Optional,
    of_cell: _Optional,
    cell: torch.Tensor,
    after: torch.Tensor,
    gates: torch.Tensor,
    biased: bool,
) -> tuple[_Optional, _Optional, _Optional]:
    """The gradients of the sums of the gates, of the cell, and of each bias."""
    if of_hidden is None and of_cell is None:
        return None, None, None
    entering, forgetting, new, leaving = gates.chunk(4, 1)
    squashed = after.tanh()
    of_hidden = torch.zeros_like(after) if of_hidden is None else of_hidden
    of_after = of_hidden * leaving * (1 - squashed * squashed) + (0 if of_cell is None else of_cell)
    of_gates = torch.cat(
        [
            of_after * new * entering * (1 - entering),
            of_after * cell * forgetting * (1 - forgetting),
            of_after * entering * (1 - new * new),
            of_hidden * squashed * leaving * (1 - leaving),
        ],
        1,
    )
    return of_gates, of_after * forgetting, of_gates.sum(0) if biased else None


def _gru_cell(
    from_input: torch.Tensor,
    from_hidden: torch.Tensor,
    hidden: torch.Tensor,
    input_bias: _Optional = None,
    hidden_bias: _Optional = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new hidden state (rows, width), and what the backward needs (rows, 5 x width)."""
    inner, outer = _gates(from_input, input_bias).chunk(3, 1), _gates(from_hidden, hidden_bias).chunk(3, 1)
    reset, update = (inner[0] + outer[0]).sigmoid(), (inner[1] + outer[1]).sigmoid()
    new = (inner[2] + reset * outer[2]).tanh()
    return new + update * (hidden - new), torch.cat([reset, update, new, hidden, outer[2]], 1)


def _gru_cell_backward(of_after: torch.Tensor, kept: torch.Tensor, biased: bool) -> tuple[_Optional, ...]:
    """The gradients of both sums, of the hidden state, and of both biases."""
    reset, update, new, hidden, outer = kept.chunk(5, 1)
    of_new = of_after * (1 - update) * (1 - new * new)
    of_reset = of_new * outer * reset * (1 - reset)
    of_update = of_after * (hidden - new) * update * (1 - update)
    of_input = torch.cat([of_reset, of_update, of_new], 1)
    of_hidden_sums = torch.cat([of_reset, of_update, of_new * reset], 1)
    of_biases = (of_input.sum(0), of_hidden_sums.sum(0)) if biased else (None, None)
    return of_input, of_hidden_sums, of_after * update, *of_biases


_KERNELS: dict[str, Callable[..., Any]] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "resize_": _resize_,
    "set_": _set_empty,
    "set_.source_Storage": _set_from_storage,
    "set_.source_Storage_storage_offset": _set_from_storage,
    "set_.source_Tensor": _set_from_tensor,
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from_and_resize,
    "_to_copy": _to_copy,
    "record_stream": _record_stream,
    "native_dropout": _native_dropout,
    "histc": _histc,
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}
