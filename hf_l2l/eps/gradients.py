"""Gradient sums on their way from the device to `p.grad`, their norms, and clipping.

Sums leave the device while it computes the next layer; whoever calls `backward()` waits for the last of them. Their
norms are taken on the device, where memory is fast, and are forgotten when somebody uses a gradient in between: then
they are taken again from what is there. Clipping is to the bit what `torch.nn.utils.clip_grad_norm_` does: the norm
comes first; multiplying the gradients may be left to whoever uses them next, which is the thread that updates the
weights unless somebody looks at them before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hf_l2l.eps.host_memory import HostMemory
from hf_l2l.eps.pending import Pending, can_hold, hold, let_go, pending_of, settle
from hf_l2l.runtime import stream
from hf_l2l.runtime.backward_callbacks import Backwards
from hf_l2l.runtime.flat_memory import Room, elements, is_dense
from hf_l2l.runtime.tensors import untouched

_Sums = dict[torch.Tensor, torch.Tensor]
"""Master -> a host tensor."""

_CHUNK = 2**20  # elements of a host sum that are on the device at once while a new one is added to it


class Gradients:
    """Receives the gradient sums of one model and holds them in `p.grad`."""

    def __init__(self, device: torch.device, memory: HostMemory, backwards: Backwards) -> None:
        self.device = device
        self.memory = memory
        self.lane = stream.Lane(device, "download")
        self.backwards = backwards
        self._arriving: dict[torch.Tensor, torch.Tensor] = {}
        """Master -> the host tensor that will be its `grad` when this backward is over, or be added to it; or that is
        its `grad` already and gets more."""
        self._norms: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        """Masters, and the norms of their sums: host tensors, which are there when this backward is over."""
        self._rooms: list[Room] = []
        """For norms that arrive."""
        self._taken: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Master -> the norm, a host tensor, of a gradient that was taken before anybody could see it."""
        backwards.call(at_end=self._publish, at_failure=self._discard)

    @torch.no_grad()
    def receive(self, gradients: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Add sums to what `master.grad` holds, by the end of this backward; see `EagerParamServer.receive`."""
        of = gradients[0][0] if gradients else ""
        if not self.lane.is_stream:
            with stream.span(self.device, "download", of):
                for master, gradient in gradients:
                    self._add_to_grad(master, stream.download(gradient))
            return
        self.backwards.join()
        complete = stream.record(self.device)
        with self.lane.entered():
            stream.wait(complete, "gradients leave when they are complete")
            with stream.span(self.device, "download", of):
                totals = [(master, gradient) for master, gradient in gradients if self._receive(master, gradient)]
            with stream.span(self.device, "norm", of):
                self._send_norms(totals)

    def _receive(self, master: torch.Tensor, gradient: torch.Tensor) -> bool:
        """Start to download one gradient, on the lane; where there is a sum already, it is added to that first.

        False if it did not go that way, and is in `master.grad` already.
        """
        grad = master.grad
        total = self._arriving.get(master, grad)
        like, dtype = (master, gradient.dtype) if total is None else (total, self._dtype(master))
        # Not so: sparse ones, and a grad that the user put there.
        if like.dtype != dtype or not _alike(gradient, like) or not (total is None or can_hold(total)):
            self._publish()
            self._add_to_grad(master, gradient.to(stream.HOST))
            return False
        stream.keep_until_done(gradient)
        if total is not None and master not in self._arriving:
            settle(total)  # it may still have to be scaled
            if _autograd_adds_to(master):  # in a thread that would not wait: the two are added when both are there
                total = None
        is_new = total is None
        if total is None:
            total = self.memory.gradient_like(master)
        self._arriving[master] = total
        if total is grad:
            hold(total, _Arriving(self.lane))  # a backward that fails leaves it so
        with untouched():
            self._send(gradient, total, add=not is_new)
        return True

    def _send(self, gradient: torch.Tensor, total: torch.Tensor, *, add: bool) -> None:
        """Start to download one gradient, on the lane; `add` it to what `total` holds."""
        if add:
            for new, held in zip(elements(gradient).split(_CHUNK), elements(total).split(_CHUNK), strict=True):
                new.add_(held.to(self.device, non_blocking=True))
        if total.dtype == gradient.dtype:
            total.copy_(gradient, non_blocking=True)
        else:
            rounded = gradient.to(total.dtype)
            total.copy_(rounded, non_blocking=True)
            gradient.copy_(rounded)  # for its norm, which is that of what the host gets

    def _send_norms(self, totals: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Take the norms of the gradients in these pairs and start to download them, on the lane; one copy per dtype.

        At once: what stays on the device until the backward is over grows with depth.
        """
        for dtype in dict.fromkeys(gradient.dtype for _, gradient in totals):
            alike = [(master, gradient) for master, gradient in totals if gradient.dtype == dtype]
            norms = torch.stack(torch._foreach_norm([gradient for _, gradient in alike]))
            room = self._room(norms.numel() * norms.element_size())
            landing = room.tensor_like(norms)
            landing.copy_(norms, non_blocking=True)
            self._norms.append(([master for master, _ in alike], landing))

    def _room(self, num_bytes: int) -> Room:
        """Host memory that nobody uses."""
        for room in self._rooms:
            if room.is_free and room.num_bytes >= num_bytes:
                return room
        self._rooms += self.memory.new_rooms(1, num_bytes)
        return self._rooms[-1]

    def take(self, masters: Iterable[torch.Tensor]) -> tuple[_Sums, _Sums, stream.Point | None]:
        """Take the sums of `masters` before anybody sees them: `master.grad` is None from now on.

        Returns:
            master -> sum, for those that have one; master -> the norm of its sum; and the point at which all of them
            have landed.
        """
        taken: _Sums = {}
        norms: _Sums = {}
        for master in masters:
            on_its_way = master in self._arriving
            if on_its_way and master.grad is not None and master.grad is not self._arriving[master]:
                continue  # what autograd itself put there is added when this one has landed; `step()` finds the sum
            total = self._arriving.pop(master, master.grad)
            if total is not None:
                if not on_its_way:
                    norms[master] = self._taken[master] = norm_of(total, master.dtype)
                _let_go_of_arriving(total)
                taken[master], master.grad = total, None
        for alike, landing in self._norms:
            norms.update((m, norm) for m, norm in zip(alike, landing.unbind(), strict=True) if m in taken)
        return taken, norms, self.lane.record()

    @torch.no_grad()
    def _publish(self) -> None:
        """Wait for what has been received, and add it to `p.grad`."""
        norms, self._norms = self._norms, []
        if self._arriving or norms:
            stream.wait(self.lane.record(), "every gradient is there when backward returns", host=True)
        arrived, self._arriving = self._arriving, {}
        shared = {master for master, total in arrived.items() if master.grad is not None and master.grad is not total}
        for master, total in arrived.items():
            _let_go_of_arriving(total)
            if master.grad is not total:
                self._add_to_grad(master, total)
        with untouched():  # of a master that has been updated in this backward, nobody else may ask for the gradient
            for masters, landing in norms:
                for master, norm in zip(masters, landing.clone().unbind(), strict=True):
                    if master.grad is None:
                        self._taken[master] = norm
                    elif can_hold(master.grad) and master not in shared:
                        hold(master.grad, _NormKnown(master.grad, norm))

    def _dtype(self, master: torch.Tensor) -> torch.dtype:
        return self.memory.precision.of_gradient(master)

    def _add_to_grad(self, master: torch.Tensor, gradient: torch.Tensor) -> None:
        if master.grad is not None and master.grad.is_sparse and not gradient.is_sparse:
            gradient, master.grad = gradient + master.grad, None  # dense from now on, as autograd has it
        if master.grad is not None:
            master.grad += gradient  # in the longer dtype of the two, and rounded once
            return
        dtype = gradient.dtype if gradient.is_sparse else self._dtype(master)
        if dtype != master.dtype:
            with untouched():
                master.grad_dtype = None  # any: torch takes this one, and what others make of it
        master.grad = gradient.to(dtype) if gradient.dtype == master.dtype else gradient

    def _discard(self) -> None:
        """Forget what a backward that failed had received. It was given up, at any time after its caller went on, and
        in any thread: `p.grad` is the caller's."""
        stream.wait(self.lane.record(), "what a failed backward has sent lands before anything else", host=True)
        for total in self._arriving.values():
            _let_go_of_arriving(total)
        self._arriving.clear()
        self._norms.clear()

    def total_norm(self, masters: Iterable[torch.Tensor]) -> torch.Tensor:
        """The norm of all gradients of `masters` as if they were one vector, as `torch.nn.utils` takes it.

        Of the norms of the single gradients, stacked in the order of `masters`; a 0-dim host tensor. Those that were
        taken count.
        """
        norms: list[torch.Tensor] = []
        for master in masters:
            taken = self._taken.get(master)
            if taken is not None:
                norms.append(taken)
            elif master.grad is not None:
                norms.append(norm_of(master.grad, master.dtype))
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)

    def release(self) -> None:
        """Forget all masters."""
        self._taken.clear()

    def forget(self, masters: Iterable[torch.Tensor]) -> None:
        """The step of `masters` begins: what was taken for it does not count any more, and nothing is on its way."""
        for total in list(self._arriving.values()):  # of a backward that failed and has not been given up
            settle(total)
        for master in masters:
            self._taken.pop(master, None)


class _NormKnown(Pending):
    """A gradient whose norm is known as long as nobody has used it."""

    def __init__(self, gradient: torch.Tensor, norm: torch.Tensor) -> None:
        self.norm = norm
        self.version = gradient._version  # autograd itself writes to gradients without a word

    def before_values(self, tensor: torch.Tensor) -> None:
        let_go(tensor, self)


class _Arriving(Pending):
    """A gradient that more is being added to, on its way from the device."""

    def __init__(self, lane: stream.Lane) -> None:
        self.lane = lane

    def before_values(self, tensor: torch.Tensor) -> None:
        stream.wait(self.lane.record(), "a gradient is used when it is there", host=True)
        let_go(tensor, self)


def _let_go_of_arriving(gradient: torch.Tensor) -> None:
    pending = pending_of(gradient)
    if isinstance(pending, _Arriving):
        let_go(gradient, pending)


def _autograd_adds_to(master: torch.Tensor) -> bool:
    """Whether the backward that this is called in adds to `master.grad` itself, as for a loss made of a master."""
    with untouched(), torch.enable_grad():
        made_of = master.view_as(master).grad_fn
    node = None if made_of is None else made_of.next_functions[0][0]
    return node is not None and torch._C._will_engine_execute_node(node)


def norm_of(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The norm of one gradient, as it is now, computed in `dtype`: a 0-dim host tensor."""
    pending = pending_of(gradient)
    with untouched():
        version = gradient._version
    if isinstance(pending, _NormKnown) and pending.version == version:
        return pending.norm
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    norm: torch.Tensor = torch.linalg.vector_norm(values, dtype=None if values.dtype == dtype else dtype)
    return norm


def _alike(gradient: torch.Tensor, total: torch.Tensor) -> bool:
    """Whether a gradient can be written over a host tensor element by element, in the order of memory."""
    return (
        gradient.layout is total.layout is torch.strided
        and gradient.stride() == total.stride()
        and total.device == stream.HOST
        and is_dense(total)
    )


class Scaling(Pending):
    """A gradient that is to be multiplied before its values are used."""

    def __init__(self, factor: torch.Tensor) -> None:
        self.factor = factor
        self._lock = threading.Lock()

    def before_values(self, tensor: torch.Tensor) -> None:
        with self._lock:
            if pending_of(tensor) is self:  # and no other thread was faster
                with untouched(), torch.no_grad():
                    tensor.mul_(self.factor)
                let_go(tensor, self)


def taken_factor(gradient: torch.Tensor) -> torch.Tensor | None:
    """What `gradient` is still to be multiplied by, which the caller sees to from now on."""
    pending = pending_of(gradient)
    let_go(gradient)
    return pending.factor if isinstance(pending, Scaling) else None


@torch.no_grad()
def clip(gradients: Iterable[torch.Tensor], total_norm: torch.Tensor, max_norm: float, *, later: bool) -> None:
    """Scale `gradients`, whose norm is `total_norm` (0-dim, on the host), so that it is at most `max_norm`.

    With `later`, each of them when its values are used next.
    """
    factor = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    if factor == 1.0:
        return  # and not if it is nan
    for gradient in gradients:
        if later and can_hold(gradient):
            settle(gradient)
            hold(gradient, Scaling(factor))
        else:
            gradient.mul_(factor)
