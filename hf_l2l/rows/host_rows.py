"""`HostRows`: a tensor of the device whose rows are in host memory until something needs all of them.

The output of a layer, and the gradient that flows back to it, pass between layers one micro-batch at a time (boundary;
arXiv:2002.05645, 2.2). For the code of a model they are tensors of the device: any operation on one uploads its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hf_l2l.compat import without_torch_function, wrapper_tensor

_aten = torch.ops.aten


class _Rows:
    """The values of a `HostRows` and its aliases."""

    def __init__(
        self, host: torch.Tensor, upload: Callable[[torch.Tensor], torch.Tensor], made_real: Callable[[], None]
    ) -> None:
        self.host = host
        self.upload = upload
        self.made_real = made_real
        self.values: torch.Tensor | None = None
        """All rows on the device, once something needed them; they may have changed since."""


class HostRows(torch.Tensor):
    """A tensor of a device, whose values are in host memory, with all rows along the first dimension."""

    rows: _Rows
    __torch_function__ = without_torch_function

    @classmethod
    def of(
        cls,
        host: torch.Tensor,
        device: torch.device,
        upload: Callable[[torch.Tensor], torch.Tensor],
        made_real: Callable[[], None],
    ) -> HostRows:
        """A tensor that says that it is on `device`; `upload` makes the device tensor of some rows of `host`, when
        they have arrived there, and `made_real` is called before it makes that of all."""
        return cls._with(_Rows(host, upload, made_real), device)

    @classmethod
    def _with(cls, rows: _Rows, device: torch.device) -> HostRows:
        made: HostRows = wrapper_tensor(cls, rows.host.shape, rows.host.dtype, device)
        made.rows = rows
        return made

    @property
    def is_waiting(self) -> bool:
        """Whether the values are those in host memory."""
        return self.rows.values is None

    def on_device(self) -> torch.Tensor:
        """All rows on the device, uploaded once."""
        if self.rows.values is None:
            self.rows.made_real()
            self.rows.values = self.rows.upload(self.rows.host)
        return self.rows.values

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first = args[0] if args else None
        if not isinstance(first, HostRows):
            return op(*pytree.tree_map(_on_device, args), **pytree.tree_map(_on_device, kwargs))
        if op in (_aten.detach.default, _aten.alias.default):
            return cls._with(first.rows, first.device)
        values = first.on_device()
        result = op(values, *pytree.tree_map(_on_device, args[1:]), **pytree.tree_map(_on_device, kwargs))
        return first if result is values else result  # an operation in place returns what it has written to


def _on_device(leaf: Any) -> Any:
    return leaf.on_device() if isinstance(leaf, HostRows) else leaf


def host_of(tensor: torch.Tensor) -> torch.Tensor:
    """The host tensor with the rows of `tensor` if it is one that waits; else `tensor` itself."""
    return tensor.rows.host if isinstance(tensor, HostRows) and tensor.is_waiting else tensor


def made_real(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """Those of `tensors` whose values are on the device, without the `HostRows` around them."""
    values = [each.rows.values if isinstance(each, HostRows) else each for each in tensors]
    return [each for each in values if each is not None]


def uploaded_rows(rows: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """`rows`, a view of `host_of(of)`, on the device."""
    return of.rows.upload(rows) if isinstance(of, HostRows) and of.is_waiting else rows
