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
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from hf_l2l.eps.host_memory import HostMemory
from hf_l2l.eps.pending import Pending, can_hold, hold, let_go, pending_of, settle
from hf_l2l.runtime import stream, wait_reasons
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
        self.trained: list[torch.Tensor] = []
        """Masters that a backward of the last forward may reach."""
        self._task: int | None = None
        """The backward that `_held` is of."""
        self._held: list[torch.Tensor] = []
        """Gradients that this backward may add to."""
        self._of_losses: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Masters that a loss uses itself, and the gradients that autograd makes of that."""
        self._handles: list[RemovableHandle] = []
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
        task = self.backwards.join()
        if task != self._task:
            self._hold_gradients(task)
        complete = stream.record(self.device)
        with self.lane.entered():
            stream.wait(complete, wait_reasons.GRADIENTS_COMPUTED)
            with stream.span(self.device, "download", of):
                totals = [(master, gradient) for master, gradient in gradients if self._receive(master, gradient)]
            with stream.span(self.device, "norm", of):
                self._send_norms(totals)

    def _hold_gradients(self, task: int) -> None:
        """Hold every gradient that the backward `task` may add to, until it is over: a program that goes on after a
        failure uses none of them before the device's thread has left the backward, too."""
        self._task = task
        with untouched():
            gradients = [p.grad for p in self.trained if p.grad is not None]
        for gradient in gradients:
            self._hold(gradient)

    def _hold(self, gradient: torch.Tensor) -> None:
        if can_hold(gradient) and not isinstance(pending_of(gradient), _Arriving):
            settle(gradient)  # it may still have to be scaled
            hold(gradient, _Arriving(self))
            self._held.append(gradient)

    def keep_apart(self, nodes: Iterable[torch.autograd.graph.Node]) -> None:
        """Let autograd itself add nothing to gradients that sums are on their way to: it would not wait for those.

        What it makes of a loss that uses a master itself is added when the backward is over.

        Args:
            nodes: those that would add to the gradients of masters, none of which has run in this backward.
        """
        if not self.lane.is_stream:
            return
        for node in nodes:
            master: torch.Tensor = node.variable  # type: ignore[attr-defined]
            with untouched():
                has_gradient = master.grad is not None
            if has_gradient:
                self._handles.append(node.register_prehook(partial(self._take_from_autograd, master)))

    def _take_from_autograd(
        self, master: torch.Tensor, gradients: tuple[torch.Tensor | None, ...]
    ) -> tuple[None] | None:
        if gradients[0] is None:
            return None
        self._of_losses.append((master, gradients[0]))
        return (None,)

    def _receive(self, master: torch.Tensor, gradient: torch.Tensor) -> bool:
        """Start to download one gradient, on the lane; where there is a sum already, it is added to that first.

        False if it did not go that way, and is in `master.grad` already.
        """
        grad = master.grad
        total = self._arriving.get(master, grad)
        like, dtype = (master, gradient.dtype) if total is None else (total, self._dtype(master))
        # Sparse ones, and a gradient of another kind that the user put there, are added on the host.
        if like.dtype != dtype or not _alike(gradient, like) or not (total is None or can_hold(total)):
            self._publish()
            self._add_to_grad(master, gradient.to(stream.HOST))
            return False
        stream.keep_until_done(gradient)
        is_new = total is None
        if total is None:
            total = self.memory.gradient_like(master)
        elif total is grad:
            self._hold(total)  # it may have come to its place since the backward began
        self._arriving[master] = total
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
                pending = pending_of(total)
                if isinstance(pending, _Arriving):
                    let_go(total, pending)
                taken[master], master.grad = total, None
        for alike, landing in self._norms:
            norms.update((m, norm) for m, norm in zip(alike, landing.unbind(), strict=True) if m in taken)
        return taken, norms, self.lane.record()

    @torch.no_grad()
    def _publish(self) -> None:
        """Wait for what has been received, and add it to `p.grad`."""
        norms, self._norms = self._norms, []
        if self._arriving or norms:
            stream.wait(self.lane.record(), wait_reasons.ALL_GRADIENTS_DOWNLOADED, host=True)
        arrived, of_losses = self._arriving, self._of_losses
        self._arriving, self._of_losses = {}, []
        self._let_go()
        shared = {master for master, total in arrived.items() if master.grad is not None and master.grad is not total}
        shared |= {master for master, _ in of_losses}
        for master, total in (*arrived.items(), *of_losses):
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
        """Forget what a backward that failed had received. This is called in any thread, after the program went on:
        nothing is written to `p.grad`."""
        stream.wait(self.lane.record(), wait_reasons.FAILED_DOWNLOADS_FINISHED, host=True)
        self._let_go()
        self._arriving.clear()
        self._of_losses.clear()
        self._norms.clear()

    def wait(self) -> None:
        """Wait for what has been sent."""
        stream.wait(self.lane.record(), wait_reasons.GRADIENT_DOWNLOADED, host=True)

    def wait_for_failed(self) -> None:
        """Wait for a backward that has failed, and for what it has sent; all gradients may be used then."""
        self.backwards.wait_until_over()
        self.wait()
        self._let_go()

    def _let_go(self) -> None:
        """The backward is over: its gradients may be used."""
        held, handles = self._held, self._handles
        self._task, self._held, self._handles = None, [], []
        for handle in handles:
            handle.remove()
        for gradient in held:
            pending = pending_of(gradient)
            if isinstance(pending, _Arriving):
                let_go(gradient, pending)

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
        self.trained = []

    def forget(self, masters: Iterable[torch.Tensor]) -> None:
        """The step of `masters` is over: what was taken for it does not count any more."""
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
    """A gradient that a backward may add to, on its way from the device."""

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = gradients

    def before_values(self, tensor: torch.Tensor) -> None:
        if torch._C._current_graph_task_id() == -1:  # the backward has failed, and the program goes on
            self.gradients.wait_for_failed()
            let_go(tensor, self)
        else:
            self.gradients.wait()


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
