"""Lazily synchronised tensors: reading the values of a held tensor waits until its update is done.

While work is pending for a tensor, the tensor is held: its class is one of two subclasses here, whose
`__torch_function__` torch calls for every operation on it, in every thread. When no work is pending any more, the
tensor gets its ordinary class back, so that its use costs nothing. Reading a shape, a dtype or `p.grad` is no use of
values. Uses of views and NumPy arrays that were made before are not detected. A master with a 16-bit copy is also held
until its values are used, since that use may be a write (see `weight_copies`).

The package itself knows from its records what is pending, and reads held tensors under `without_interception`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_l2l.compat import current_backward, without_interception, written_by
from hf_l2l.report.timeline import Timeline
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.runtime.worker import Task


class Pending:
    """Callbacks that run when a held tensor is used."""

    guards_grad = True
    """If False, `before_grad` is never called."""

    def before_values(self, tensor: torch.Tensor) -> None:
        """Called before an operation uses the values. It may `let_go` of the tensor, which ends the calls."""

    def before_look(self, tensor: torch.Tensor) -> None:
        """Called before the version is read, which an update changes."""
        self.before_values(tensor)

    def before_grad(self, tensor: torch.Tensor) -> None:
        """Called before `tensor.grad` is read or written."""

    def before_write(self, tensor: torch.Tensor) -> None:
        """Called before an operation writes to the tensor."""


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
        # First accesses to one tensor, which are frequent: an optimizer reads the gradient of every parameter.
        kind = _KINDS.get(func)
        if kind is not None:
            pending = args[0].__dict__.get("_l2l_pending")  # None if another thread has let go of the tensor
            if pending is not None:
                if kind == _GRAD and pending.guards_grad:
                    pending.before_grad(args[0])
                elif kind == _VERSION:
                    pending.before_look(args[0])
            with without_interception():
                return func(*args, **kwargs)
        held = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, _Held)]
        for tensor in written_by(func, args, kwargs):
            if isinstance(tensor, _Held) and (pending := pending_of(tensor)) is not None:
                pending.before_write(tensor)
        for tensor in held:
            settle(tensor)
        if not any(isinstance(tensor, _Held) for tensor in held):
            return func(*args, **kwargs)
        with without_interception():
            return func(*args, **kwargs)

    def _plain(self) -> Any:
        """An ordinary tensor with the values of this one; possibly this tensor itself, if it is held no longer."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)


class _HeldParameter(_Held, nn.Parameter):
    def _plain(self) -> Any:
        values = self.detach()  # this may have made the parameter itself an ordinary one
        return self if type(self) is nn.Parameter else nn.Parameter(values, self.requires_grad)


class _HeldTensor(_Held):
    def _plain(self) -> Any:
        values = self.detach()
        return self if type(self) is torch.Tensor else values


_HELD: dict[type, type] = {nn.Parameter: _HeldParameter, torch.Tensor: _HeldTensor}
_ORDINARY = {held: ordinary for ordinary, held in _HELD.items()}


def can_hold(tensor: torch.Tensor) -> bool:
    """Whether the tensor can be held: it must be a plain tensor or parameter, or be held already."""
    return type(tensor) in _HELD or type(tensor) in _ORDINARY


def hold(tensor: torch.Tensor, pending: Pending) -> None:
    """Hold `tensor`: call `pending` before every use, instead of what was pending before."""
    held: Any = tensor
    held._l2l_pending = pending  # first: after the next line, other threads may read it
    held.__class__ = _HELD.get(type(tensor), type(tensor))


def hold_all(pairs: Iterable[tuple[torch.Tensor, Pending]]) -> None:
    """`hold` each tensor, except those that cannot be held."""
    for held, pending in pairs:
        kind = type(held)
        if kind in _HELD:
            held.__dict__["_l2l_pending"] = pending
            held.__class__ = _HELD[kind]
        elif kind in _ORDINARY:
            held.__dict__["_l2l_pending"] = pending


def let_go(tensor: torch.Tensor, pending: Pending | None = None) -> None:
    """Make `tensor` an ordinary one again; with `pending`, only if it is held for that."""
    held: Any = tensor
    kind = type(tensor)  # once: another thread may let go of it meanwhile
    if kind in _ORDINARY and (pending is None or pending_of(tensor) is pending):
        held.__dict__.pop("_l2l_pending", None)
        held.__class__ = _ORDINARY[kind]


def let_go_all(pairs: Iterable[tuple[torch.Tensor, Pending]]) -> None:
    """`let_go` of each tensor that is held for the given `Pending`."""
    for held, pending in pairs:
        kind = type(held)
        if kind in _ORDINARY and held.__dict__.get("_l2l_pending") is pending:
            held.__dict__.pop("_l2l_pending", None)
            held.__class__ = _ORDINARY[kind]


def pending_of(tensor: torch.Tensor) -> Pending | None:
    """The `Pending` that `tensor` is held for; None for an ordinary tensor."""
    return getattr(tensor, "_l2l_pending", None)  # which torch.compile can trace; a look into `__dict__` it cannot


def settle(tensor: torch.Tensor) -> None:
    """Finish the work that is pending for `tensor`, as a use of its values would."""
    pending = pending_of(tensor)
    if pending is not None:
        pending.before_values(tensor)


class Arrivals(Protocol):
    """Downloads of gradient sums that a backward has submitted."""

    def wait(self) -> None:
        """Wait for all of them."""

    def wait_for_failed(self) -> None:
        """Wait for a backward that has failed, and for them."""


class Saving(Protocol):
    """Values of masters and of optimizer state that are written to files in the background."""

    def begin(self) -> None:
        """Begin, if that was put off: updates of another step follow."""

    def secure(self, masters: Iterable[Any], *, rows: bool = False) -> None:
        """Wait until the values and the state of `masters`, their records, may change; with `rows`, this rank's."""

    def wait_for_values(self) -> None:
        """Wait until all values may change."""

    @property
    def copied_bytes(self) -> int:
        """Bytes of host memory that copies of values take now."""


class Saved(Protocol):
    """The record of a master, in so far as it may be saved."""

    saving: Saving | None


def secure(masters: Sequence[Saved], *, rows: bool = False) -> None:
    """Wait until values and state of these masters, updated together, may change; with `rows`, this rank's."""
    saving = next((master.saving for master in masters if master.saving is not None), None)
    if saving is not None:
        saving.secure(masters, rows=rows)


def _nothing() -> None:
    """Do nothing."""


class Landed(NamedTuple):
    """When a gradient that is being downloaded is on the host."""

    point: stream.Point
    pieces: tuple[stream.Point, ...] = ()
    """When each of the `Master.pieces` is, if it has any."""

    def wait(self) -> None:
        """Wait for it."""
        stream.wait(self.point, wait_reasons.GRADIENT_DOWNLOADED, host=True)


class Update:
    """An update of some masters on a thread of the worker."""

    def __init__(self, task: Task, timeline: Timeline, *, in_step: bool, pieces: Sequence[int] = ()) -> None:
        """
        Args:
            task: the work, which has as many pieces.
            timeline: is told how long somebody waits for it.
            in_step: True for an eager update, until `optimizer.step()` is called.
            pieces: the ends of the pieces of the only master, in elements, of which each is uploaded when it is made.
        """
        self.task = task
        self.timeline = timeline
        self.pieces = pieces
        self._in_step, self._is_made = in_step, False
        self._lock = threading.Lock()
        self.when_made: Callable[[], None] = _nothing
        """Called after the update has succeeded, first."""

    def is_made(self) -> bool:
        """The update has succeeded. Returns whether its step is over: then the caller makes the masters ordinary
        parameters again, and else whoever calls `end_step`, which of the two comes last."""
        with self._lock:
            self._is_made = True
            return not self._in_step

    def end_step(self) -> bool:
        """The step of an eager update is over. Returns whether the update has succeeded; see `is_made`."""
        with self._lock:
            self._in_step = False
            return self._is_made

    def wait_for_piece(self, number: int) -> None:
        """Wait until a piece of the master, and of its 16-bit copy, is made; raises what `Task.wait` raises."""
        with nullcontext() if self.task.has_piece(number) else self.timeline.waiting_for_eps(self.task.what):
            self.task.wait_for_piece(number, wait_reasons.WEIGHTS_UPDATED)

    def wait(self) -> None:
        """Wait until the update has finished or failed; raises what `Task.wait` raises."""
        with nullcontext() if self.task.done else self.timeline.waiting_for_eps(self.task.what):
            self.task.wait(wait_reasons.WEIGHTS_UPDATED)


SCALING = threading.Lock()


class PendingSum(Pending):
    """For a sum in `p.grad`: a norm, valid until the sum is used, a factor for its first use, or a download or a
    backward that has not ended."""

    guards_grad = False
    norm_decides = False  # whether the sum is finite if its norm is, since some ranks have no other values

    def __init__(
        self,
        norm: torch.Tensor | None = None,
        version: int | None = None,
        *,
        factor: torch.Tensor | None = None,
        arrives_at: Arrivals | None = None,
    ) -> None:
        self.norm = norm
        self.version = version
        """Version of the sum when its norm was computed: writes by autograd itself are not intercepted."""
        self.factor = factor
        self.arrives_at = arrives_at
        self.landed: Landed | None = None
        """When the sum is on the host; None if it is, or if a backward will tell."""
        self.may_be_scaled = factor is None and arrives_at is None

    def before_values(self, tensor: torch.Tensor) -> None:
        if self.arrives_at is not None:
            if current_backward() != -1:
                self.arrives_at.wait()
                return
            self.arrives_at.wait_for_failed()  # the backward has failed, and the program continues
        if self.landed is not None:
            self.landed.wait()
        with SCALING:  # another thread may use the gradient at the same time
            factor, self.factor = self.factor, None
            if factor is not None:
                with without_interception(), torch.no_grad():
                    tensor.mul_(factor)
        let_go(tensor, self)


def norm_of(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The current norm of one gradient, computed in `dtype`: a 0-dim tensor where the gradient is."""
    pending = pending_of(gradient)
    if isinstance(pending, PendingSum) and (pending.norm is None or pending.landed is not None):
        settle(gradient)
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    norm: torch.Tensor = torch.linalg.vector_norm(values, dtype=None if values.dtype == dtype else dtype)
    return norm


def is_like(total: torch.Tensor, like: torch.Tensor, device: torch.device) -> bool:
    """Whether a gradient with the layout of `like` can be added to `total` element by element, in memory order."""
    return (
        total.layout is torch.strided
        and total.dtype == like.dtype
        and total.stride() == like.stride()
        and total.device == device
        and can_hold(total)
    )


def current_norm(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The norm that is known of a gradient that has not changed since (0-dim, on the host); else `norm_of` it."""
    pending = gradient.__dict__.get("_l2l_pending")
    if isinstance(pending, PendingSum) and pending.norm is not None and pending.version == gradient._version:
        return pending.norm
    return norm_of(gradient, dtype)


def by_device(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """`tensors` by their devices, in the order in which these come first."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return list(found.values())


def current_norms(gradients: list[tuple[torch.Tensor, torch.dtype]]) -> list[torch.Tensor]:
    """`current_norm` of each gradient; those that nothing is pending for are computed at once, on an accelerator."""
    there = [
        g
        for g, dtype in gradients
        if g.device != stream.HOST and g.dtype == dtype and g.layout is torch.strided and pending_of(g) is None
    ]
    # Of the tensors of several devices in one call, kernels of another kind would compute other bits.
    at_once = {g: norm for part in by_device(there) for g, norm in zip(part, torch._foreach_norm(part), strict=True)}
    return [
        at_once[g]
        if g in at_once
        else current_norm(g, dtype)
        if "_l2l_pending" in g.__dict__ or g.layout is not torch.strided
        else torch.linalg.vector_norm(g, dtype=None if g.dtype == dtype else dtype)
        for g, dtype in gradients
    ]


def downloaded(norms: list[torch.Tensor]) -> list[torch.Tensor]:
    """`norms` (0-dim) on the host; the host waits for those that are on devices."""
    parts = by_device(norm for norm in norms if norm.device != stream.HOST)
    stacked = [torch.stack(part) for part in parts]  # all devices have begun before the host waits for the first
    copies: dict[torch.device, Iterator[torch.Tensor]] = {}
    for each in stacked:
        stream.wait(stream.record(each.device), wait_reasons.NORMS_COMPUTED, host=True)
        copies[each.device] = iter(each.to(stream.HOST).unbind())
    return [norm if norm.device == stream.HOST else next(copies[norm.device]) for norm in norms]


class Taken(NamedTuple):
    """What was pending for gradients, and whoever has taken them must do."""

    factors: dict[torch.Tensor, torch.Tensor]
    """Parameter -> what its gradient must be multiplied by (0-dim, on the host)."""
    landed: list[Landed]
    """When the gradients are on the host, if they are not yet."""


def taken(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Taken:
    """What is pending for gradients, for pairs of parameter and gradient. The gradients are let go."""
    factors: dict[torch.Tensor, torch.Tensor] = {}
    landed: dict[Landed, None] = {}
    held = []
    for parameter, gradient in pairs:
        if (pending := gradient.__dict__.get("_l2l_pending")) is not None:
            held.append((gradient, pending))
        if isinstance(pending, PendingSum):
            if pending.factor is not None:
                factors[parameter] = pending.factor
            if pending.landed is not None:
                landed[pending.landed] = None
    let_go_all(held)
    return Taken(factors, list(landed))


_GRAD, _VERSION, _METADATA = "grad", "version", "metadata"
_NAMES = {
    _GRAD: "grad",
    _VERSION: "_version",
    _METADATA: """shape dtype device layout requires_grad is_leaf ndim itemsize nbytes grad_fn output_nr retains_grad
    is_cpu is_cuda is_meta is_sparse is_sparse_csr is_quantized is_mps is_xpu _backward_hooks
    _post_accumulate_grad_hooks numel nelement size dim ndimension stride element_size is_floating_point is_complex
    is_contiguous is_inference is_shared storage_offset get_device __len__""",
}


def _accessors(name: str) -> set[Any]:
    """The functions that `__torch_function__` gets for this attribute or method of tensors."""
    attribute = getattr(torch.Tensor, name)
    return {attribute} if callable(attribute) else {attribute.__get__, attribute.__set__, attribute.__delete__}


_KINDS = {func: kind for kind, names in _NAMES.items() for name in names.split() for func in _accessors(name)}
"""Functions that do not use values -> what they read or write instead: the gradient, the version, or metadata."""


def total_norm(masters: Iterable[Any]) -> torch.Tensor:
    """The norm of all gradients of `masters`, records of the module of that name, as one vector, computed like
    `torch.nn.utils` does: a 0-dim host tensor.

    It is the norm of the norms of the single gradients, stacked in the order of the model. Gradients that eager
    updates have already used are included.
    """
    with without_interception():
        known = [m for m in masters if m.taken_norm is not None or m.parameter.grad is not None]
        given = [(m.parameter.grad, m.dtype) for m in known if m.taken_norm is None]
        current = iter(current_norms([(grad, dtype) for grad, dtype in given if grad is not None]))
        norms = [next(current) if m.taken_norm is None else m.taken_norm for m in known]
    return torch.linalg.vector_norm(torch.stack(downloaded(norms))) if norms else torch.tensor(0.0)


def clip(parameters: Iterable[torch.Tensor], total_norm: torch.Tensor, max_norm: float, *, later: bool) -> None:
    """Scale the gradients of `parameters`, whose norm is `total_norm` (0-dim, on the host), so that it is at most
    `max_norm`.

    With `later`, each gradient is scaled when its values are used next.
    """
    factor = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    if factor == 1.0:
        return  # nan does not return here
    there: list[torch.Tensor] = []
    with without_interception(), torch.no_grad():
        for grad in [p.grad for p in parameters if p.grad is not None]:
            pending = grad.__dict__.get("_l2l_pending")
            if later and isinstance(pending, PendingSum) and pending.may_be_scaled:
                pending.norm, pending.factor, pending.may_be_scaled = None, factor, False
                continue
            settle(grad)
            if later and can_hold(grad):
                hold(grad, PendingSum(factor=factor))
            elif grad.device != stream.HOST:
                there.append(grad)
            else:
                grad.mul_(factor)
        for part in by_device(there):  # one kernel for all of a device
            torch._foreach_mul_(part, factor.item())
