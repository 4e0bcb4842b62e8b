"""`HostRows`: a tensor of the device whose rows are in host memory, or on another device, until something needs all of
them.

The output of a layer, and the gradient that flows back to it, pass between layers one micro-batch at a time (boundary;
arXiv:2002.05645, 2.2). For the code of a model they are tensors of the device: an operation on one uploads its rows,
unless it computes each row from itself alone (`BY_ROWS`), or is a view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils import _pytree as pytree

from hf_l2l.compat import without_torch_function, wrapper_tensor
from hf_l2l.rows.functions import BY_ROWS

_aten = torch.ops.aten


class Keeper(Protocol):
    """Keeps rows in host memory and moves them; `Stash` is one."""

    def fetch(self, kept: torch.Tensor) -> torch.Tensor:
        """`kept`, which it has or a view of that, on the device."""

    def fetch_ahead(self, kept: Sequence[torch.Tensor]) -> None:
        """Start to upload what will be fetched next."""

    def send(self, part: torch.Tensor, host: torch.Tensor) -> None:
        """Download `part` to `host`, a view of rows of `rows_like`."""

    def rows_like(self, part: torch.Tensor, rows: int, passing: Passing | None = None) -> HostRows:
        """So many uninitialised rows like those of `part`."""

    def rewrite(self, host: torch.Tensor) -> None:
        """Others will be sent to the memory of `host`, all rows of one tensor; what is sent to a row has been computed
        from what was fetched of it, or from nothing of it."""


class Passing(NamedTuple):
    """How an output passes through host memory to what comes next in the model."""

    fewest_bytes: int
    """An output of fewer bytes stays on the device."""
    made_real: Callable[[int], None]
    """Called with its bytes when it is needed on the device after all."""
    by_rows: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None
    """Computes a function of torch, given its arguments, a micro-batch at a time; NotImplemented if it cannot. None if
    the model computes with all rows at once."""


class _Rows:
    """The values of a `HostRows` and its aliases."""

    def __init__(
        self,
        host: torch.Tensor,
        keeper: Keeper,
        step: int,
        passing: Passing | None,
        base: _Rows | None = None,
        view: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Of `host`, or a `view` of what `base` has, which is `host`, too."""
        self.host = host
        self.keeper = keeper
        self.step = step
        """How many entries of the first dimension are moved at once."""
        self.passing = passing
        self.made_on: torch.device | None = None
        """The device of the layer that returns them, which needs their gradient; None if that is not known."""
        self._base = base
        self._view = view
        self._values: torch.Tensor | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether the values are those in host memory."""
        return (self if self._base is None else self._base)._values is None

    def values(self) -> torch.Tensor:
        """All rows on the device, uploaded once; they may have changed since."""
        if self._base is not None and self._view is not None:
            return self._view(self._base.values())
        if self._values is None:
            if self.passing is not None:
                self.passing.made_real(self.host.nbytes)
            self._values = self.keeper.fetch(self.host)
        return self._values

    def seen_as(self, view: Callable[[torch.Tensor], torch.Tensor]) -> _Rows:
        """A view of them."""
        host, inner = view(self.host), self._view
        step = max(1, self.step * len(host) // max(1, len(self.host))) if host.dim() else 1
        whole = view if inner is None else lambda values: view(inner(values))
        seen = _Rows(host, self.keeper, step, self.passing, self._base or self, whole)
        seen.made_on = self.made_on
        return seen


class HostRows(torch.Tensor):
    """A tensor of a device, whose values are in host memory, or on another of several devices: all rows along the
    first dimension, or a view of them."""

    rows: _Rows

    @classmethod
    def of(
        cls, host: torch.Tensor, device: torch.device, keeper: Keeper, step: int, passing: Passing | None = None
    ) -> HostRows:
        """A tensor that says that it is on `device`; `keeper` moves rows of `host`, `step` of them at a time."""
        return cls._with(_Rows(host, keeper, step, passing), device)

    @classmethod
    def _with(cls, rows: _Rows, device: torch.device) -> HostRows:
        made: HostRows = wrapper_tensor(cls, rows.host, device)
        made.rows = rows
        return made

    @property
    def is_waiting(self) -> bool:
        """Whether the values are those in host memory."""
        return self.rows.is_waiting

    def on_device(self) -> torch.Tensor:
        """All rows on the device, uploaded once."""
        return self.rows.values()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in BY_ROWS:
            waiting = (t.rows.passing for t in (*args, *kwargs.values()) if isinstance(t, HostRows) and t.is_waiting)
            by_rows = next((each.by_rows for each in waiting if each is not None and each.by_rows is not None), None)
            result = NotImplemented if by_rows is None else by_rows(func, args, kwargs)
            if result is not NotImplemented:
                return result
        if func in _OF_MEMORY:
            return func(*pytree.tree_map(_on_device, args), **kwargs)
        if not all(kind is torch.Tensor or issubclass(kind, HostRows) for kind in types):
            return NotImplemented  # other tensors have their say: a weight that is held waits for its upload
        return without_torch_function(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, HostRows):
            if op in (_aten.detach.default, _aten.alias.default):
                return cls._with(first.rows, first.device)
            if op in _VIEWS and first.is_waiting:
                return cls._with(first.rows.seen_as(lambda t: op(t, *args[1:], **kwargs)), first.device)
            if op in _FACTORIES:
                one = torch.empty((), dtype=first.dtype, device=first.device)
                return op(one.expand(first.shape), *args[1:], **kwargs)
        by_parts = _BY_PARTS.get(op)
        if by_parts is not None:
            found = by_parts(op, *args, **kwargs)
            if found is not NotImplemented:
                return found
        result = op(*pytree.tree_map(_on_device, args), **pytree.tree_map(_on_device, kwargs))
        if not (isinstance(first, HostRows) and result is first.on_device()):
            return result
        if (result.shape, result.stride()) != (first.shape, first.stride()):
            raise RuntimeError(
                "with boundary='host' (l2l_boundary), what passes between layers must keep its shape (got "
                f"{op.overloadpacket.__name__}, which changes it in place); use "
                f"{op.overloadpacket.__name__.rstrip('_')}, which returns a view"
            )
        return first  # an operation in place returns what it has written to


def _on_device(leaf: Any) -> Any:
    return leaf.on_device() if isinstance(leaf, HostRows) else leaf


def host_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of the host, or of another device, with the rows of `tensor` if it is one that waits; else `tensor`
    itself."""
    return tensor.rows.host if isinstance(tensor, HostRows) and tensor.is_waiting else tensor


def made_real(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """Those of `tensors` whose values are on the device, without the `HostRows` around them."""
    there = [t for t in tensors if t is not None]
    if HostRows not in map(type, there):
        return there
    there = [t for t in there if not (isinstance(t, HostRows) and t.is_waiting)]
    return [t.on_device() if isinstance(t, HostRows) else t for t in there]


def memory_behind(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """The tensors that have the values of `tensors`, of those whose rows wait, too."""
    there = [t for t in tensors if t is not None]
    if HostRows not in map(type, there):
        return there
    return [*made_real(there), *(host_of(t) for t in there if host_of(t) is not t)]


def uploaded_rows(rows: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """`rows`, a view of `host_of(of)`, on the device."""
    return of.rows.keeper.fetch(rows) if isinstance(of, HostRows) and of.is_waiting else rows


def rows_on_device(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    """These rows of `tensor`, on the device."""
    return uploaded_rows(host_of(tensor)[rows], tensor)


def fetch_rows_ahead(tensor: torch.Tensor, rows: slice) -> None:
    """Start to upload these rows of `tensor`, if they wait in host memory and there are any."""
    if isinstance(tensor, HostRows) and tensor.is_waiting and rows.start < len(tensor):
        tensor.rows.keeper.fetch_ahead([tensor.rows.host[rows]])


def waits_on_host(tensor: Any) -> bool:
    """Whether `tensor` is one whose rows wait in host memory."""
    return isinstance(tensor, HostRows) and tensor.is_waiting and tensor.rows.host.device.type == "cpu"


def runs_by_rows(tensor: Any) -> bool:
    """Whether `tensor` waits in host memory, for a model that computes with it a micro-batch at a time."""
    passing = tensor.rows.passing if waits_on_host(tensor) else None
    return passing is not None and passing.by_rows is not None


def room_like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Uninitialised rows like those of `part`, as many as `tensor` has, where those are."""
    if isinstance(tensor, HostRows) and waits_on_host(tensor):
        return tensor.rows.keeper.rows_like(part, len(tensor))
    return part.new_empty(len(tensor), *part.shape[1:])


def room_over(tensor: torch.Tensor) -> torch.Tensor | None:
    """`tensor`, whose rows may be overwritten each by what is computed from it; None if it has waited in host memory
    and is on the device now, too."""
    if not isinstance(tensor, HostRows):
        return tensor
    if not tensor.is_waiting:
        return None
    tensor.rows.keeper.rewrite(tensor.rows.host)
    return tensor


def put_rows(part: torch.Tensor, whole: torch.Tensor, rows: slice) -> None:
    """Copy `part`, on the device, to these rows of `whole`, which was made for them."""
    if isinstance(whole, HostRows):
        whole.rows.keeper.send(part, whole.rows.host[rows])
    else:
        whole[rows].copy_(part)


# ---- what is computed below autograd a few rows at a time: gradients, and copies


def _is_gradient(tensor: Any) -> bool:
    """Whether `tensor` waits in host memory, and no code of a model sees it."""
    return waits_on_host(tensor) and tensor.rows.passing is None


def _joined(rows: _Rows, part: Callable[[slice], torch.Tensor]) -> HostRows:
    """As many rows in host memory, of the parts that `part` computes on the device."""
    made: Any = None
    count = len(rows.host)
    for start in range(0, count, rows.step):
        taken = slice(start, min(start + rows.step, count))
        found = part(taken)
        made = rows.keeper.rows_like(found, count, rows.passing) if made is None else made
        put_rows(found, made, taken)
    result: HostRows = made
    return result


def _sum(op: Any, one: Any, other: Any, **kwargs: Any) -> Any:
    """Of the gradients that flow back to one tensor from two places."""
    source = one if _is_gradient(one) else other
    if not (_is_gradient(source) and isinstance(other, torch.Tensor) and one.shape == other.shape):
        return NotImplemented

    def part(r: slice) -> torch.Tensor:
        added: torch.Tensor = op(rows_on_device(one, r), rows_on_device(other, r), **kwargs)
        return added

    return _joined(source.rows, part)


def _sliced(op: Any, gradient: Any, sizes: Any, dim: int, *rest: Any) -> Any:
    """The gradient of a tensor of which a slice was taken."""
    if not _is_gradient(gradient) or dim % len(sizes) == 0:
        return NotImplemented

    def part(r: slice) -> torch.Tensor:
        found: torch.Tensor = op(rows_on_device(gradient, r), [r.stop - r.start, *sizes[1:]], dim, *rest)
        return found

    return _joined(gradient.rows, part)


def _copied(op: Any, source: Any, *, memory_format: Any = torch.preserve_format) -> Any:
    """A copy in the usual order, as when rows of which a part was taken are flattened."""
    if not (
        waits_on_host(source) and source.dim() and (memory_format == torch.contiguous_format or source.is_contiguous())
    ):
        return NotImplemented
    return _joined(source.rows, lambda r: rows_on_device(source, r).contiguous())


_BY_PARTS: dict[Any, Callable[..., Any]] = {
    _aten.clone.default: _copied,
    _aten.add.Tensor: _sum,
    _aten.slice_backward.default: _sliced,
}
"""Operation -> what computes it a few rows at a time; NotImplemented if it cannot."""

_OF_MEMORY = {
    *(torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.data_ptr, torch.Tensor.__repr__),
    *(torch.Tensor.__deepcopy__, torch.Tensor.__reduce_ex__, torch.Tensor.untyped_storage, torch.Tensor.share_memory_),
}
"""Functions that read memory, which a tensor of a subclass has none of."""

_VIEWS = {
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.slice.Tensor,
    _aten.select.int,
    _aten.unsqueeze.default,
    _aten.squeeze.dim,
    _aten.transpose.int,
    _aten.permute.default,
}
"""Operations whose result is a view of what waits, and waits, too."""

_FACTORIES = {
    *(_aten.new_empty.default, _aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default),
    *(_aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default),
}
"""Operations that make a new tensor of the device, and read shape and dtype alone."""
