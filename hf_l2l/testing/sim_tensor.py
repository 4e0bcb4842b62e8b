"""Tensors on "sim", and the execution of operations on them by the host.

A tensor on "sim" is a plain `torch.Tensor` whose storage has the device "sim" and points at host memory of a `Block`.
torch calls `run` for an operation; it views the same memory as host tensors, runs the host's kernel on them, and gives
the results a storage on "sim".
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._C import DispatchKey, DispatchKeySet

from hf_l2l.testing.sim_copies import free, in_order
from hf_l2l.testing.sim_devices import GENERATORS, NAME, empty_on, index_of
from hf_l2l.testing.sim_flops import flops_of
from hf_l2l.testing.sim_memory import Block, storage_at
from hf_l2l.testing.sim_race import CURRENT, ORDER, Touch, creation
from hf_l2l.testing.sim_recorder import Running

HOST = torch.device("cpu")
HOST_KERNELS = DispatchKeySet(DispatchKey.CPU)
# A kernel runs below the autocast of "sim"; the host's own autocast must not cast inside it either.
_HOST_AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU)
_set_storage = torch.ops.aten.set_.source_Storage_storage_offset

# Operations that CUDA also lets take an index or a mask from the host.
_TAKE_HOST_INDICES = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
# The host multiplies 16-bit matrices 17 to 30 times slower than 32-bit ones. Computing in 32 bits and rounding once
# is also what an accelerator's matrix units do.
_ROUND_ONCE = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "convolution_backward"}
_OVERWRITE = {"aten::fill_", "aten::zero_"}  # of the operations in place, beside those that draw random numbers
_HALVES = (torch.bfloat16, torch.float16)

Place = int | str  # where an argument stands in a call: a position or a keyword


class Facts(NamedTuple):
    """Properties of an operation that `run` needs, read once from its schema."""

    name: str
    indexes: bool  # may take indices from the host
    rounds_once: bool
    generator: Place | None  # where a random generator may be given
    writes: tuple[Place, ...]  # arguments that are written to
    resizes: bool  # written arguments may come back in another shape
    returns: tuple[Place | None, ...]  # per result: the argument it is, or None where it is new
    tensors: tuple[int, ...]  # positions that take one tensor
    overwrites: bool  # what is written is not read before
    tells_host: bool  # returns a value that the host has waited for


@functools.cache
def facts_of(op: torch._ops.OpOverload) -> Facts:
    """Read `Facts` from the schema of `op`."""
    schema = op._schema
    places: dict[str, Place] = {a.name: a.name if a.kwarg_only else i for i, a in enumerate(schema.arguments)}
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    by_alias = {frozenset(a.alias_info.before_set): places[a.name] for a in written if a.alias_info is not None}
    returns = tuple(
        by_alias.get(frozenset(r.alias_info.before_set)) if r.alias_info is not None else None for r in schema.returns
    )
    return Facts(
        name=schema.name,
        indexes=schema.name in _TAKE_HOST_INDICES,
        rounds_once=op._overloadname in ("default", "") and schema.name.removeprefix("aten::") in _ROUND_ONCE,
        generator=places.get("generator"),
        writes=tuple(places[a.name] for a in written),
        resizes=any(a.kwarg_only for a in written),
        returns=returns,
        tensors=tuple(i for i, a in enumerate(schema.arguments) if not a.kwarg_only and str(a.type) == "Tensor"),
        overwrites="generator" in places or schema.name in _OVERWRITE,
        tells_host=torch.Tag.data_dependent_output in op.tags,
    )


def operation(short: str) -> torch._ops.OpOverload:
    """Return the operation that torch calls "aten::" + `short`."""
    packet, _, overload = short.partition(".")
    op: torch._ops.OpOverload = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return op


def is_sim(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is on "sim"."""
    return tensor.device.type == NAME


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a host tensor over the memory of `tensor`, which is on "sim"."""
    storage = tensor.untyped_storage()
    block: Block | None = getattr(storage, "_block", None)
    # torch's own C++ code makes a storage over the same memory now and then, while it holds the one with the block.
    host = block.host if block is not None else storage_at(storage.data_ptr(), storage.nbytes(), HOST)
    view = torch.empty(0, dtype=tensor.dtype, device=HOST)
    view.set_(host, tensor.storage_offset(), tensor.size(), tensor.stride())
    # A conjugate and a negative may be views that say so, over memory with the values themselves.
    view = view.conj() if tensor.is_conj() else view
    return torch._neg_view(view) if tensor.is_neg() else view


def sim_storage(host: torch.UntypedStorage, device: int) -> torch.UntypedStorage:
    """Return the storage on a device over the memory of `host`; the same one as long as it lives."""
    known: weakref.ref[torch.UntypedStorage] | None = getattr(host, "_sim", None)
    storage = known() if known is not None else None
    if storage is None:
        block = Block(host, device)
        if ORDER.active:
            block.on_free = free
            block.stream, block.history = creation(host.data_ptr(), host.nbytes(), device)
        storage = block.storage_on(torch.device(NAME, device))
        # The storage keeps its Python object, and with it the block, for as long as any tensor uses it.
        storage._block = block  # type: ignore[attr-defined]  # storages take attributes
        block.host._sim = weakref.ref(storage)  # type: ignore[attr-defined]  # found again when an output is a view
    return storage


def on_sim(host: torch.Tensor, device: int) -> torch.Tensor:
    """Return a tensor on a device over the memory of the host tensor `host`."""
    host = host.resolve_conj().resolve_neg()
    return point_at(empty_on(device, host.dtype), host)


def point_at(tensor: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """Give `tensor`, which is on "sim", the memory and the shape of `host`."""
    storage = sim_storage(host.untyped_storage(), tensor.device.index)
    place = (host.storage_offset(), host.size(), host.stride())
    result: torch.Tensor = _set_storage.redispatch(HOST_KERNELS, tensor, storage, *place)
    return result


def run(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run `op`, which has tensors on "sim", by the host's kernel, on the current stream of their device."""
    facts = facts_of(op)
    touches = list(_touches(facts, args, kwargs))
    device = _device_of(facts, touches, kwargs)
    if not ORDER.active:
        return _run(op, facts, args, kwargs, device)
    with in_order(facts.name, touches, device, facts.tells_host):
        out = _run(op, facts, args, kwargs, device)
        if Running.recorder is not None:
            Running.recorder.kernel(CURRENT.lines[device], facts.name, flops_of(op, args, kwargs, out))
        return out


def _device_of(facts: Facts, touches: Sequence[Touch], kwargs: dict[str, Any]) -> int:
    """Return the index of the device of all tensors, or of the one that is asked for."""
    if not touches:
        return index_of(kwargs.get("device"))
    device: int = touches[0].tensor.device.index
    for touch in touches:
        if touch.tensor.device.index != device:
            raise RuntimeError(
                f"{facts.name}: expected all tensors to be on the same device, but found {NAME}:{device} and "
                f"{touch.tensor.device}; move one of them first"
            )
    return device


def _touches(facts: Facts, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Touch]:
    """Yield the tensors on "sim" that the operation reads or writes."""
    for place, value in (*enumerate(args), *kwargs.items()):
        if not isinstance(value, (torch.Tensor, list, tuple)):
            continue
        writes = place in facts.writes
        # Of what is written, an output is only written; an operation in place mostly reads as well.
        reads = not writes or (isinstance(place, int) and not facts.overwrites)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor) and is_sim(tensor):
                yield Touch(tensor, reads, writes)


def _run(op: torch._ops.OpOverload, facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any], device: int) -> Any:
    host_args = [_to_host(a, facts) for a in args]
    host_kwargs = {name: _to_host(a, facts) for name, a in kwargs.items()}
    for place in facts.writes:
        _refuse_host_target(_argument(place, args, kwargs), facts)
    if facts.resizes:
        host_kwargs.update({k: torch.empty(0, dtype=t.dtype, device=HOST) for k, t in _unshaped(facts, kwargs)})
    with torch._C._ExcludeDispatchKeyGuard(_HOST_AUTOCAST):
        out = _call(op, facts, host_args, host_kwargs, device)
    if facts.resizes:
        for place in facts.writes:
            _follow_resize(_argument(place, args, kwargs), _argument(place, host_args, host_kwargs))
    if len(facts.returns) == 1:
        place_of_result = facts.returns[0]
        if place_of_result is None and isinstance(out, torch.Tensor):
            return on_sim(out, device)
        return _from_host(out, device) if place_of_result is None else _argument(place_of_result, args, kwargs)
    if not facts.returns:
        return None
    return tuple(
        _from_host(x, device) if place is None else _argument(place, args, kwargs)
        for x, place in zip(out, facts.returns, strict=True)
    )


def _call(op: torch._ops.OpOverload, facts: Facts, args: list[Any], kwargs: dict[str, Any], device: int) -> Any:
    if facts.generator is not None:
        _give_generator(facts, args, kwargs, GENERATORS[device])
    elif facts.rounds_once and (dtype := _half_of(args)) is not None:
        wide = [a.float() if isinstance(a, torch.Tensor) else a for a in args]
        return _each_tensor(lambda t: t.to(dtype), op(*wide, **kwargs))
    if any(i < len(args) and isinstance(args[i], bool | int | float | complex) for i in facts.tensors):
        # Dispatched from an overload that takes a number (x % 2): let the host choose that one again.
        return op.overloadpacket(*args, **kwargs)
    return op(*args, **kwargs)


def _half_of(args: Sequence[Any]) -> torch.dtype | None:
    """The 16-bit dtype of all tensors among `args`. None for another one, and for several, which the host's kernel
    refuses as that of an accelerator does."""
    found = {arg.dtype for arg in args if isinstance(arg, torch.Tensor)}
    return found.pop() if len(found) == 1 and not found.isdisjoint(_HALVES) else None


def _give_generator(facts: Facts, args: list[Any], kwargs: dict[str, Any], generator: torch.Generator) -> None:
    place = facts.generator
    given = _argument(place, args, kwargs)
    if given is not None:
        raise RuntimeError(
            f"{facts.name}: a generator on {given.device} was given for a tensor on {NAME}; leave it out and seed "
            f"torch.{NAME}, or draw on the host and move the result"
        )
    if isinstance(place, int) and place < len(args):
        args[place] = generator
    else:
        kwargs["generator"] = generator


def _argument(place: Place | None, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if isinstance(place, int):
        return args[place] if place < len(args) else None
    return kwargs.get(place) if place is not None else None


def _to_host(x: Any, facts: Facts, host_allowed: bool = False) -> Any:
    """Return `x` as the host's kernel takes it; host tensors are accepted if they have no dimension or are allowed."""
    if isinstance(x, torch.Tensor):
        if is_sim(x):
            return host_view(x)
        if x.dim() > 0 and not host_allowed:
            raise RuntimeError(
                f"{facts.name}: expected all tensors to be on {NAME}, but found one on {x.device} of shape "
                f"{tuple(x.shape)}; move it with .to('{NAME}') first"
            )
        return x
    if isinstance(x, (list, tuple)):
        return [_to_host(y, facts, host_allowed=facts.indexes) for y in x]
    return HOST if isinstance(x, torch.device) else x


def _refuse_host_target(target: Any, facts: Facts) -> None:
    for tensor in target if isinstance(target, (list, tuple)) else (target,):
        if isinstance(tensor, torch.Tensor) and not is_sim(tensor):
            raise RuntimeError(
                f"{facts.name}: cannot write into a tensor on {tensor.device} from tensors on {NAME}; use copy_"
            )


def _unshaped(facts: Facts, kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the outputs that are still empty: the operation sets their shape, and so their memory."""
    for place in facts.writes:
        target = kwargs.get(place) if isinstance(place, str) else None
        if isinstance(target, torch.Tensor) and target.numel() == 0:
            yield str(place), target


def _follow_resize(target: Any, host: Any) -> None:
    if isinstance(target, (list, tuple)):
        for t, h in zip(target, host, strict=True):
            _follow_resize(t, h)
    elif target is not None and (target.size() != host.size() or target.stride() != host.stride()):
        point_at(target, host)


def _from_host(x: Any, device: int) -> Any:
    return _each_tensor(functools.partial(on_sim, device=device), x)


def _each_tensor(fn: Callable[[torch.Tensor], torch.Tensor], x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return fn(x)
    if isinstance(x, (list, tuple)):
        return type(x)(_each_tensor(fn, y) for y in x)
    return x
