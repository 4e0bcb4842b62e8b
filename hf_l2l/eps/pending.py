"""Tensors whose values are still to come: whoever uses them waits, whoever does not never does.

As long as something is pending for a tensor, its class is one of two here, to which torch hands every operation that
gets the tensor (`__torch_function__`). So a use is noticed in whatever thread and by whatever code, and when nothing
is pending the tensor is an ordinary one again, at no cost. Reading a shape, a dtype or `p.grad` is no use of values.
A view or NumPy array that somebody made before knows nothing of this. In the same way a master that has a 16-bit copy
is held until somebody uses it, since he might write to it (`copies`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_l2l.runtime.tensors import untouched


class Pending:
    """What must happen before the values of a tensor are used, or what does not hold any more when they have been."""

    def before_values(self, tensor: torch.Tensor) -> None:
        """Called before an operation uses the values; may `let_go` of the tensor, for which it then is not called."""

    def before_look(self, tensor: torch.Tensor) -> None:
        """Called before the values are only looked at by somebody who knows of this, or the version is read."""
        self.before_values(tensor)

    def before_grad(self, tensor: torch.Tensor) -> None:
        """Called before `tensor.grad` is read or written."""


class _Held(torch.Tensor):
    _l2l_pending: Pending

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # First what concerns one tensor: an optimizer that finds nothing to do asks every parameter for its gradient.
        if func in _OF_GRAD or func in _WITHOUT_VALUES or func in _OF_VERSION:
            pending = pending_of(args[0])
            if pending is not None and func in _OF_GRAD:
                pending.before_grad(args[0])
            if pending is not None and func in _OF_VERSION:
                pending.before_look(args[0])
            with untouched():
                return func(*args, **kwargs)
        held = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, _Held)]
        for tensor in held:
            pending = pending_of(tensor)  # none if another thread has let go of it
            if pending is not None:
                pending.before_values(tensor)
        if not any(isinstance(tensor, _Held) for tensor in held):
            return func(*args, **kwargs)
        with untouched():
            return func(*args, **kwargs)

    def _plain(self) -> Any:
        """This tensor as an ordinary one, with its values."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)


class _HeldParameter(_Held, nn.Parameter):
    def _plain(self) -> Any:
        values = self.detach()  # which may have made this one ordinary
        return self if type(self) is nn.Parameter else nn.Parameter(values, self.requires_grad)


class _HeldTensor(_Held):
    def _plain(self) -> Any:
        values = self.detach()
        return self if type(self) is torch.Tensor else values


_HELD: dict[type, type] = {nn.Parameter: _HeldParameter, torch.Tensor: _HeldTensor}
_ORDINARY = {held: ordinary for ordinary, held in _HELD.items()}


def can_hold(tensor: torch.Tensor) -> bool:
    """Whether uses of the tensor can be noticed: not those of other classes of tensors."""
    return type(tensor) in _HELD or type(tensor) in _ORDINARY


def hold(tensor: torch.Tensor, pending: Pending) -> None:
    """Let every use of `tensor` be announced to `pending`, in the place of what was pending before."""
    held: Any = tensor
    held._l2l_pending = pending  # first: from the next line on it is looked for
    held.__class__ = _HELD.get(type(tensor), type(tensor))


def let_go(tensor: torch.Tensor, pending: Pending | None = None) -> None:
    """Make `tensor` an ordinary one again; with `pending`, only if that is what it is held for."""
    held: Any = tensor
    if type(tensor) in _ORDINARY and (pending is None or pending_of(tensor) is pending):
        held.__dict__.pop("_l2l_pending", None)
        held.__class__ = _ORDINARY[type(tensor)]


def pending_of(tensor: torch.Tensor) -> Pending | None:
    """What `tensor` is held for; None for an ordinary one."""
    return tensor.__dict__.get("_l2l_pending")


def settle(tensor: torch.Tensor) -> None:
    """Do what is pending for `tensor` now."""
    pending = pending_of(tensor)
    if pending is not None:
        pending.before_values(tensor)


def _accessors(names: Iterable[str]) -> set[Any]:
    """What `__torch_function__` is given for these attributes and methods of tensors."""
    found = set()
    for name in names:
        attribute = getattr(torch.Tensor, name)
        is_method = callable(attribute)
        found |= {attribute} if is_method else {attribute.__get__, attribute.__set__, attribute.__delete__}
    return found


_OF_GRAD = _accessors(["grad"])
_OF_VERSION = _accessors(["_version"])
_WITHOUT_VALUES = _accessors(
    """shape dtype device layout requires_grad is_leaf ndim itemsize nbytes grad_fn output_nr retains_grad
    is_cpu is_cuda is_meta is_sparse is_sparse_csr is_quantized is_mps is_xpu _backward_hooks
    _post_accumulate_grad_hooks numel nelement size dim ndimension stride element_size is_floating_point is_complex
    is_contiguous is_inference is_shared storage_offset get_device __len__""".split()
)
